"""`tidegate serve --print-config`: the options in force, as a file that `--config` reads back."""

import json

import msgspec

from gateway.config import ENGINE_FIELDS, FLAG_OF_FIELD, Options, ServerConfig


def config_as_toml(config: ServerConfig, options: Options) -> str:
    """Every option with its value, and in a comment where it was set.

    Invariant: read back as the only source, it gives `config` again.
    """
    top = {"model": config.model, **_values(config)}
    del top["engine"]
    engine = {name: value for name, value in _values(config.engine).items() if name in ENGINE_FIELDS}
    lines = [
        *(_line(name, value, origin=options.origins.get(name)) for name, value in top.items()),
        "",
        "[engine]",
        *(_line(name, value, origin=options.origins.get(name)) for name, value in engine.items()),
    ]
    return "\n".join(lines) + "\n"


def _values(config: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def _line(name: str, value: object, *, origin: str | None) -> str:
    where = "default" if origin is None else "".join(c if c.isprintable() else "?" for c in origin)
    return f"{FLAG_OF_FIELD.get(name, name)} = {_toml(value)}  # {where}"


def _toml(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # JSON's escapes are TOML's too, except that TOML also wants DEL escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple() | list():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
    raise AssertionError(f"{value!r} is no option's value")
