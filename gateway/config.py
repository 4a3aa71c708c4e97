"""The gateway's options: one frozen value, put together once from file < environment < flags."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
"""Flags whose name is not their field's. Variables and keys of a file are named as the flag is; the field's
own name is taken too."""
FLAG_OF_FIELD = {field: flag for flag, field in FIELD_OF_FLAG.items()}


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

    def explain(self, message: str) -> str:
        """Call the options in a refusal as the user does: by flag, variable or key of a file."""
        return _OPTION_NAME.sub(lambda match: self._as_set(match[0]), message)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Word the refusals of a scope so."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(self.explain(str(error))) from None

    def _as_set(self, word: str) -> str:
        field = FIELD_OF_FLAG.get(word, word)
        if field not in SERVER_FIELDS | ENGINE_FIELDS:
            return word
        return self.origins.get(field, "--" + FLAG_OF_FIELD.get(field, field).replace("_", "-"))


_OPTION_NAME = re.compile(r"^\w+(?= is )|\b[a-z]+(?:_[a-z]+)+\b")
"""What begins a refusal, or can be no word of plain English."""


def gather_options(
    *, flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None = None
) -> Options:
    """Merge the three sources, the later one winning. Flags that are None count as not given.

    Args:
        flags: flag name with underscores -> what was given, mostly still text.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or it or a variable names what is no option.
    """
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    known = SERVER_FIELDS | ENGINE_FIELDS | {"model"}
    sources = (*([read_option_file(file)] if file else []), read_variables(environment, known))
    for source in sources:
        values.update(source.values)
        origins.update(source.origins)
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
    config = ServerConfig(
        **server,  # type: ignore[arg-type]  # each value was converted to its field's type
        model=options.model,
        engine=EngineConfig(checkpoint=checkpoint, **engine),  # type: ignore[arg-type]  # as above
    )
    with options.explaining():
        return config.validated()


def _converted(options: Options, struct: type[msgspec.Struct], *, names: Iterable[str]) -> dict[str, object]:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    result: dict[str, object] = {}
    for name in names:
        if name not in options.values:
            continue
        value = given = options.values[name]
        if get_origin(fields[name]) is tuple and isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        if name.endswith("_bytes") and isinstance(value, str):
            value = _num_bytes(value)
        try:
            # Text from the environment is read leniently ("8000", "true"); a file's types count.
            result[name] = msgspec.convert(value, fields[name], strict=not isinstance(value, str))
        except msgspec.ValidationError:
            kind = "a number of bytes, as 1048576, 512M or 2G" if name.endswith("_bytes") else None
            raise ConfigError(
                f"{options.origins[name]} is {given!r}; it must be {kind or _described(fields[name])}"
            ) from None
    return result


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?B)?", re.IGNORECASE)


def _num_bytes(text: str) -> str | int:
    """`2G` and `2GiB` count in 1024s, `2GB` in 1000s; what has no such unit stays text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return text
    number, unit, suffix = match.groups()
    step = 1000 if (suffix or "").lower() == "b" else 1024
    return int(float(number) * step ** ("KMGT".index(unit.upper()) + 1))


def _described(kind: Any) -> str:
    """Say in words what an option's type accepts."""
    if choices := get_args(kind):
        return "a list of names" if ... in choices else "one of " + ", ".join(choices)
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


OTHER_VARIABLES = frozenset(
    "TIDEGATE_" + name for name in ("CACHE", "CONFIG", "API_KEY", "URL", "TEST_MODEL", "THOROUGH", "SOAK")
)
"""Variables that are no options: where files are kept, the file of options, clients', the tests'."""


_SERVICE_LINK = re.compile(r"TIDEGATE_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP)).*")


def read_variables(environment: Mapping[str, str], known: Iterable[str]) -> Options:
    """The options that variables give. Empty ones count as not set.

    Raises:
        ConfigError: a variable of our prefix is no option, or two mean the same one.
    """
    fields = {ENVIRONMENT_PREFIX + name.upper(): name for name in known}
    fields |= {ENVIRONMENT_PREFIX + flag.upper(): field for flag, field in FIELD_OF_FLAG.items()}
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for variable, text in sorted(environment.items()):
        if not text or not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in fields:
            advice = (
                "Kubernetes sets it for a service of this name: set enableServiceLinks to false"
                if _SERVICE_LINK.fullmatch(variable)
                else _did_you_mean(variable, {*fields, *OTHER_VARIABLES}, prefix=ENVIRONMENT_PREFIX)
            )
            raise ConfigError(f"{variable} is no option; {advice}")
        _put(values, origins, fields[variable], value=text, origin=variable)
    return Options(values=values, origins=origins)


def read_option_file(file: Path) -> Options:
    """The options of a TOML file: the server's at the top, the engine's under `[engine]`.

    Raises:
        ConfigError: it cannot be read, is not TOML, or has a key that is no option there.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read: {error.strerror}; give the path of a TOML file to --config or "
            "TIDEGATE_CONFIG (`tidegate serve --print-config` writes one), or neither"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not a TOML file: {error}") from None
    engine = table.pop("engine", {})
    if not isinstance(engine, dict):
        raise ConfigError(f"{file}: engine is {engine!r}; it must be a table")
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    top, under = _keys(SERVER_FIELDS | {"model"}), _keys(ENGINE_FIELDS)
    for keys, others, found, misplaced in (
        (top, under, table, "put it under [engine]"),
        (under, top, engine, "put it at the top, above [engine]"),
    ):
        for key, value in found.items():
            if key not in keys:
                advice = misplaced if key in others else _did_you_mean(key, {*top, *under})
                where = "at the top" if keys is top else "under [engine]"
                raise ConfigError(f"{file}: {key} is no option {where}; {advice}")
            _put(values, origins, keys[key], value=value, origin=f"{key} in {file}")
    return Options(values=values, origins=origins)


def _keys(fields: Iterable[str]) -> dict[str, str]:
    """Name in a file -> field."""
    names = set(fields)
    return {name: name for name in names} | {
        flag: field for flag, field in FIELD_OF_FLAG.items() if field in names
    }


def _put(
    values: dict[str, object], origins: dict[str, str], name: str, *, value: object, origin: str
) -> None:
    if name in values:
        raise ConfigError(f"{origins[name]} and {origin} are the same option; give one of them")
    values[name], origins[name] = value, origin


def _did_you_mean(word: str, names: Iterable[str], *, prefix: str = "") -> str:
    """Advice after a name that is none. What all names begin with is no likeness."""
    endings = sorted(name.removeprefix(prefix) for name in names)
    if near := difflib.get_close_matches(word.removeprefix(prefix), endings, n=1, cutoff=0.75):
        return f"did you mean {prefix}{near[0]}?"
    return f"there are: {', '.join(prefix + ending for ending in endings)}"
