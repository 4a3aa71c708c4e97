"""Tidegate: everything is on `/metrics`."""

from typing import Any

from loadtest.servers import Answers, Server, ServerState, label_of, whole


class Tidegate:
    name = "tidegate"
    paths: tuple[str, ...] = ()
    state_paths: tuple[str, ...] = ()

    def recognises(self, answers: Answers) -> bool:
        return "tidegate" in answers.owners() or answers.has_metrics_of("tidegate_")

    def version(self, answers: Answers) -> str | None:
        builds = (key for key in answers.metrics if key.startswith("tidegate_build_info{"))
        return next((label_of(key, "version") for key in builds), None)

    def state(self, answers: Answers) -> ServerState:
        """KV bytes of a state are its blocks' share of the pool."""
        blocks = {
            str(label_of(key, "state")): value
            for key, value in answers.metrics.items()
            if key.startswith("tidegate_kv_blocks{")
        }
        pool = answers.metric("tidegate_kv_bytes")
        num_blocks = sum(blocks.values())
        block_bytes = pool / num_blocks if pool is not None and num_blocks else None

        def bytes_of(state: str) -> int | None:
            return int(blocks[state] * block_bytes) if block_bytes is not None and state in blocks else None

        live, waste = bytes_of("held"), answers.metric("tidegate_kv_waste_ratio")
        rss = [
            value
            for key, value in answers.metrics.items()
            if key.startswith("tidegate_worker_memory_bytes{") and label_of(key, "kind") == "rss"
        ]
        return ServerState(
            num_query_tokens=whole(answers.metric("tidegate_prefix_query_tokens")),
            num_hit_tokens=whole(answers.metric("tidegate_prefix_hit_tokens")),
            weights_bytes=whole(answers.metric("tidegate_packed_weight_bytes")),
            kv_pool_bytes=whole(pool),
            kv_live_bytes=live,
            kv_live_token_bytes=int(live * (1 - waste)) if live is not None and waste is not None else None,
            kv_cached_bytes=bytes_of("evictable"),
            server_bytes=int(rss[0]) if rss and rss[0] > 0 else None,
        )

    def tokenize_body(self, model: str, text: str) -> dict[str, Any] | None:
        return {"model": model, "prompt": text, "add_special_tokens": False}


SERVER: Server = Tidegate()
