"""SGLang: counters on `/metrics` where it runs with `--enable-metrics`, memory on its info page.

Source: `/get_server_info` and `/server_info`, whose `memory_usage` counts GiB.
"""

from typing import Any

from loadtest.servers import Answers, Server, ServerState, whole

_PAGES = ("/server_info", "/get_server_info")
_GIB = 1 << 30


class Sglang:
    name = "sglang"
    paths: tuple[str, ...] = _PAGES
    state_paths: tuple[str, ...] = _PAGES

    def recognises(self, answers: Answers) -> bool:
        return "sglang" in answers.owners() or answers.has_metrics_of("sglang:")

    def version(self, answers: Answers) -> str | None:
        found = (answers.field(page, "version") for page in _PAGES)
        return next((version for version in found if isinstance(version, str)), None)

    def state(self, answers: Answers) -> ServerState:
        weights, pool = _gib(answers, "weight"), _gib(answers, "kvcache")
        usage = answers.metric("sglang:token_usage")
        return ServerState(
            num_query_tokens=whole(answers.metric("sglang:prompt_tokens")),
            num_hit_tokens=whole(answers.metric("sglang:cached_tokens")),
            weights_bytes=weights,
            kv_pool_bytes=pool,
            kv_live_bytes=whole(usage * pool) if usage is not None and pool is not None else None,
        )

    def tokenize_body(self, model: str, text: str) -> dict[str, Any] | None:
        return {"model": model, "prompt": text, "add_special_tokens": False}


def _gib(answers: Answers, name: str) -> int | None:
    """One number of `memory_usage`, which stands at the top or in the first of `internal_states`."""
    for page in _PAGES:
        inner = answers.field(page, "internal_states")
        first = inner[0] if isinstance(inner, list) and inner and isinstance(inner[0], dict) else {}
        for usage in (answers.field(page, "memory_usage"), first.get("memory_usage")):
            value = usage.get(name) if isinstance(usage, dict) else None
            if isinstance(value, int | float):
                return int(value * _GIB)
    return None


SERVER: Server = Sglang()
