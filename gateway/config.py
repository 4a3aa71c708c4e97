"""The gateway's options: one frozen value, put together once from file < environment < flags."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from core import ConfigError, EngineConfig

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]

ENVIRONMENT_PREFIX = "TIDEGATE_"
DEFAULT_MODEL_ID = "smollm2-135m"
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.\-]*://[a-z0-9.\-_\[\]:]{1,255}")
"""As browsers send it: lower case, without a path, the default port left out."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is told. Sizes in bytes, times in seconds.

    Raises:
        ConfigError: from `validated()`, naming option, value and bound.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    """0: let the system choose one; the log line `server_ready` names it."""
    model: str = ""
    """What the user named; empty: the default model. `engine.checkpoint` is the file it stands for."""
    model_id: str = DEFAULT_MODEL_ID
    """The name clients ask for."""
    aliases: tuple[str, ...] = ()
    """Further names for it; `*` stands for any name."""
    api_key_file: str = ""
    """File of the keys that may ask; empty: everybody may."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may ask, as `https://name:port`; `*` stands for any."""
    max_body_bytes: int = 4 * 1024 * 1024
    max_json_depth: int = 64
    """Deepest nesting of a request body."""
    max_connections: int = 1024
    max_queued: int = 256
    """Requests that may wait for the engine; the next one gets 429."""
    keep_alive_s: float = 15.0
    """Silence on a stream before an SSE comment is sent."""
    send_timeout_s: float = 30.0
    """How long a client may refuse to read before its stream ends."""
    send_buffer_bytes: int = 64 * 1024
    """Bytes that may wait for one slow reader."""
    drain_timeout_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "auto"
    """auto: console on a terminal, json elsewhere."""
    access_log: bool = True
    """One line per request."""

    def validated(self) -> "ServerConfig":
        """Return self, or raise `ConfigError` for the first option out of its bounds."""
        bounds: tuple[tuple[str, float, float, float], ...] = (
            ("port", self.port, 0, 65535),
            ("max_body_bytes", self.max_body_bytes, 1024, 1 << 30),
            ("max_json_depth", self.max_json_depth, 4, 512),
            ("max_connections", self.max_connections, 1, 1 << 20),
            ("max_queued", self.max_queued, 0, 1 << 20),
            ("keep_alive_s", self.keep_alive_s, 0.01, 3600.0),
            ("send_timeout_s", self.send_timeout_s, 0.01, 3600.0),
            ("send_buffer_bytes", self.send_buffer_bytes, 1024, 1 << 26),
            ("drain_timeout_s", self.drain_timeout_s, 0.0, 3600.0),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:  # NaN fails too
                raise ConfigError(f"{name} is {value}; it must be between {low:g} and {high:g}")
        for name, text in (
            ("host", self.host),
            ("model_id", self.model_id),
            *(("alias", a) for a in self.aliases),
        ):
            if not text or len(text) > 256 or not text.isprintable():
                raise ConfigError(f"{name} is {text!r}; it must be 1 to 256 printable characters")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin is {origin!r}; it must be '*', or a scheme and a host as in https://app.example:8443"
                )
        self.engine.validated()
        return self


SERVER_FIELDS = frozenset(ServerConfig.__struct_fields__) - {"engine", "model"}
ENGINE_FIELDS = frozenset(EngineConfig.__struct_fields__) - {"checkpoint"}
assert not SERVER_FIELDS & ENGINE_FIELDS, "one flat name space serves flags and environment"


FIELD_OF_FLAG = {
    "alias": "aliases",
    "cors_origin": "cors_origins",
    "threads": "num_threads",
    "step_deadline": "step_deadline_s",
    "load_deadline": "load_deadline_s",
    "keep_alive": "keep_alive_s",
    "send_timeout": "send_timeout_s",
    "drain_timeout": "drain_timeout_s",
}
"""Flags whose name is shorter than their option's."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What one source (or several, merged) says, before a checkpoint is known. Values may still be text."""

    values: dict[str, object]
    origins: dict[str, str]
    """Option -> where it was set, for error messages."""

    @property
    def model(self) -> str:
        """The model that was asked for; empty: the default one."""
        model = self.values.get("model", "")
        if not isinstance(model, str):
            raise ConfigError(f"{self.origins['model']} is {model!r}; it must be a path of a .gguf file")
        return model


def gather_options(
    *, flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None
) -> Options:
    """Merge the three sources, the later one winning. Flags that are None count as not given.

    Args:
        flags: flag name with underscores -> what was given, mostly still text.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a key that is no option.
    """
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    known = SERVER_FIELDS | ENGINE_FIELDS | {"model"}
    if file is not None:
        for name, value in _read_file(file).items():
            values[name], origins[name] = value, f"{name} in {file}"
    for name in sorted(known):
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environment.get(variable):
            values[name], origins[name] = environment[variable], variable
    for flag, value in flags.items():
        name = FIELD_OF_FLAG.get(flag, flag)
        assert name in known, f"{flag} is a flag but no option"
        if value is not None:
            values[name], origins[name] = value, f"--{flag.replace('_', '-')}"
    return Options(values=values, origins=origins)


def build_config(
    options: Options, *, checkpoint: str, default_model_id: str = DEFAULT_MODEL_ID
) -> ServerConfig:
    """Turn merged options into a checked `ServerConfig` for `checkpoint`.

    Raises:
        ConfigError: naming the option, where it was set, its value and what it must be.
    """
    server = _converted(options, ServerConfig, names=SERVER_FIELDS)
    engine = _converted(options, EngineConfig, names=ENGINE_FIELDS)
    server.setdefault("model_id", default_model_id)
    return ServerConfig(
        **server,  # type: ignore[arg-type]  # each value was converted to its field's type
        model=options.model,
        engine=EngineConfig(checkpoint=checkpoint, **engine),  # type: ignore[arg-type]  # as above
    ).validated()


def _converted(options: Options, struct: type[msgspec.Struct], *, names: Iterable[str]) -> dict[str, object]:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    result: dict[str, object] = {}
    for name in names:
        if name not in options.values:
            continue
        value = options.values[name]
        if get_origin(fields[name]) is tuple and isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        try:
            # Text from the environment is read leniently ("8000", "true"); a file's types count.
            result[name] = msgspec.convert(value, fields[name], strict=not isinstance(value, str))
        except msgspec.ValidationError:
            raise ConfigError(
                f"{options.origins[name]} is {value!r}; it must be {_described(fields[name])}"
            ) from None
    return result


def _described(kind: Any) -> str:
    """Say in words what an option's type accepts."""
    if choices := get_args(kind):
        return "a list of names" if ... in choices else "one of " + ", ".join(choices)
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def _read_file(file: Path) -> dict[str, object]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not a TOML file: {error}") from None
    engine = table.pop("engine", {})
    if not isinstance(engine, dict):
        raise ConfigError(f"{file}: engine is {engine!r}; it must be a table")
    for names, found, where in (
        (SERVER_FIELDS | {"model"}, table, "at the top"),
        (ENGINE_FIELDS, engine, "[engine]"),
    ):
        unknown = sorted(set(found) - names)
        if unknown:
            raise ConfigError(
                f"{file}: {unknown[0]} is no option {where}; there are: {', '.join(sorted(names))}"
            )
    return {**table, **engine}
