"""vLLM: counters and the pool on `/metrics`, its version on `/version`; weights are in its log alone.

Source: vLLM's metrics and `cache_config_info`, as in its documentation of 2026-08.
"""

from typing import Any

from loadtest.servers import Answers, Server, ServerState, whole


class Vllm:
    name = "vllm"
    paths: tuple[str, ...] = ("/version",)
    state_paths: tuple[str, ...] = ()

    def recognises(self, answers: Answers) -> bool:
        return "vllm" in answers.owners() or answers.has_metrics_of("vllm:")

    def version(self, answers: Answers) -> str | None:
        version = answers.field("/version", "version")
        return version if isinstance(version, str) else None

    def state(self, answers: Answers) -> ServerState:
        """It tells blocks, not bytes, so what they take is unknown."""
        return ServerState(
            num_query_tokens=whole(answers.metric("vllm:prefix_cache_queries")),
            num_hit_tokens=whole(answers.metric("vllm:prefix_cache_hits")),
        )

    def tokenize_body(self, model: str, text: str) -> dict[str, Any] | None:
        return {"model": model, "prompt": text, "add_special_tokens": False}


SERVER: Server = Vllm()
