"""llama.cpp's server: its build on `/props`; no hit counter and no memory split.

Source: tools/server/README.md. Cached tokens come with each answer (`timings.cache_n`), which the
dialects read.
"""

from typing import Any

from loadtest.servers import Answers, Server, ServerState


class LlamaCpp:
    name = "llama.cpp"
    paths: tuple[str, ...] = ("/props",)
    state_paths: tuple[str, ...] = ()

    def recognises(self, answers: Answers) -> bool:
        props = answers.json.get("/props")
        return (
            "llamacpp" in answers.owners()
            or answers.has_metrics_of("llamacpp:")
            or (isinstance(props, dict) and "default_generation_settings" in props)
        )

    def version(self, answers: Answers) -> str | None:
        build = answers.field("/props", "build_info")
        return build if isinstance(build, str) else None

    def state(self, answers: Answers) -> ServerState:
        return ServerState()

    def tokenize_body(self, model: str, text: str) -> dict[str, Any] | None:
        return {"content": text, "add_special": False}


SERVER: Server = LlamaCpp()
