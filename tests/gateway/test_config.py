"""Options: three sources in order, each field checked, each refusal naming where and why."""

import math
from pathlib import Path

import msgspec
import pytest

from core import ConfigError, EngineConfig
from gateway.config import (
    ENGINE_FIELDS,
    ENVIRONMENT_PREFIX,
    FLAG_OF_FIELD,
    OTHER_VARIABLES,
    SERVER_FIELDS,
    ServerConfig,
    build_config,
    gather_options,
)

ANOTHER_VALUE: dict[str, tuple[str, object]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "model_id": ("other", "other"),
    "aliases": ("gpt-4o, *", ("gpt-4o", "*")),
    "api_key_file": ("keys.txt", "keys.txt"),
    "cors_origins": (
        "https://a.example, http://localhost:3000",
        ("https://a.example", "http://localhost:3000"),
    ),
    "max_body_bytes": ("4096", 4096),
    "max_json_depth": ("8", 8),
    "max_connections": ("7", 7),
    "max_queued": ("0", 0),
    "keep_alive_s": ("0.5", 0.5),
    "send_timeout_s": ("1", 1.0),
    "send_buffer_bytes": ("2048", 2048),
    "drain_timeout_s": ("0", 0.0),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "access_log": ("false", False),
    "device": ("cpu", "cpu"),
    "numerics": ("reference", "reference"),
    "executor": ("thread", "thread"),
    "block_size": ("64", 64),
    "num_blocks": ("9", 9),
    "kv_bytes": ("1048576", 1 << 20),
    "max_model_len": ("2048", 2048),
    "allow_longer_context": ("true", True),
    "max_step_tokens": ("128", 128),
    "max_prefill_tokens": ("32", 32),
    "max_running": ("4", 4),
    "num_threads": ("1", 1),
    "step_deadline_s": ("2.5", 2.5),
    "load_deadline_s": ("30", 30.0),
    "cache_dir": ("/var/cache/x", "/var/cache/x"),
    "compile": ("off", "off"),
    "prefix_cache": ("0", False),
    "kv_reservation": ("oracle", "oracle"),
    "batching": ("static", "static"),
    "chunked_prefill": ("false", False),
    "trace": ("trace.json", "trace.json"),
    "policy": ("fair_tenants", "fair_tenants"),
    "session_gate": ("false", False),
}
"""Every option, as text from outside and as the value it must become."""

NEEDED: dict[str, dict[str, str]] = {"kv_reservation": {"prefix_cache": "false"}}
"""Flags without which an option's other value is refused."""


def configured(**sources) -> ServerConfig:
    options = gather_options(
        flags=sources.get("flags", {}), environment=sources.get("environment", {}), file=sources.get("file")
    )
    return build_config(options, checkpoint="model.gguf")


def value_of(config: ServerConfig, name: str) -> object:
    return getattr(config if name in SERVER_FIELDS else config.engine, name)


def named(name: str) -> str:
    return "--" + FLAG_OF_FIELD.get(name, name).replace("_", "-")


def test_this_table_knows_every_option():
    assert set(ANOTHER_VALUE) == SERVER_FIELDS | ENGINE_FIELDS


@pytest.mark.parametrize("name", sorted(ANOTHER_VALUE))
def test_every_option_has_one_name_as_flag_and_variable(name):
    text, value = ANOTHER_VALUE[name]
    assert value_of(configured(), name) != value
    flag = FLAG_OF_FIELD.get(name, name)
    needed = NEEDED.get(name, {})
    assert value_of(configured(flags={flag: text, **needed}), name) == value
    for variable in {flag, name}:
        environment = {ENVIRONMENT_PREFIX + variable.upper(): text}
        assert value_of(configured(environment=environment, flags=needed), name) == value


@pytest.mark.parametrize("name", sorted(ANOTHER_VALUE))
def test_every_option_has_its_flags_name_in_a_file_too(tmp_path, name):
    _, value = ANOTHER_VALUE[name]
    written = (
        str(value).lower()
        if isinstance(value, bool)
        else repr(list(value) if isinstance(value, tuple) else value)
    )
    section = "[engine]\n" if name in ENGINE_FIELDS else ""
    for key in {FLAG_OF_FIELD.get(name, name), name}:
        (tmp_path / "tidegate.toml").write_text(f"{section}{key} = {written}\n")
        config = configured(file=tmp_path / "tidegate.toml", flags=NEEDED.get(name, {}))
        assert value_of(config, name) == value


@pytest.mark.parametrize("kind", ["max", "power_of_two", "oracle"])
def test_reserved_kv_and_reuse_of_prefixes_are_refused_together_by_name(kind):
    with pytest.raises(
        ConfigError, match=rf"^TIDEGATE_KV_RESERVATION is {kind}; .* set --prefix-cache to false"
    ):
        configured(environment={"TIDEGATE_KV_RESERVATION": kind})


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("TIDEGATE_PROT", "did you mean TIDEGATE_PORT?"),
        ("TIDEGATE_DRAIN_TIME_OUT", "did you mean TIDEGATE_DRAIN_TIMEOUT?"),
        ("TIDEGATE_CACHES", "did you mean TIDEGATE_CACHE?"),
        ("TIDEGATE_CHECKPOINT", "there are: "),
        ("TIDEGATE_SERVICE_HOST", "Kubernetes sets it"),
        ("TIDEGATE_PORT_8000_TCP_ADDR", "Kubernetes sets it"),
        ("TIDEGATE_XYZZY", "there are: TIDEGATE_ACCESS_LOG, TIDEGATE_ALIAS, "),
    ],
)
def test_a_variable_that_is_no_option_is_refused(variable, advice):
    with pytest.raises(ConfigError) as caught:
        configured(environment={variable: "1"})
    assert str(caught.value).startswith(f"{variable} is no option; {advice}")
    assert configured(environment={variable: ""}) == configured(), "empty: not set"


@pytest.mark.parametrize("name", sorted(OTHER_VARIABLES))
def test_variables_with_another_use_are_let_be(name):
    assert configured(environment={name: "x"}) == configured()


def test_one_option_under_two_names_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^TIDEGATE_ALIAS and TIDEGATE_ALIASES are the same option"):
        configured(environment={"TIDEGATE_ALIAS": "a", "TIDEGATE_ALIASES": "b"})
    (tmp_path / "tidegate.toml").write_text("[engine]\nthreads = 1\nnum_threads = 2\n")
    with pytest.raises(ConfigError, match="are the same option; give one of them"):
        configured(file=tmp_path / "tidegate.toml")


def test_one_name_where_a_list_may_stand_is_one_name(tmp_path):
    (tmp_path / "tidegate.toml").write_text('aliases = "gpt-4o"\n')
    assert configured(file=tmp_path / "tidegate.toml").aliases == ("gpt-4o",)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2G", 2 << 30), ("2GiB", 2 << 30), ("512M", 512 << 20), ("512m", 512 << 20), ("1.5 GiB", 3 << 29),
     ("2GB", 2_000_000_000), ("64KiB", 65536), ("1T", 1 << 40), ("1048576", 1 << 20)],
)  # fmt: skip
def test_a_size_may_have_a_unit(tmp_path, text, size):
    assert configured(flags={"kv_bytes": text}).engine.kv_bytes == size
    (tmp_path / "tidegate.toml").write_text(f'[engine]\nkv_bytes = "{text}"\n')
    assert configured(file=tmp_path / "tidegate.toml").engine.kv_bytes == size


@pytest.mark.parametrize("text", ["2X", "G", "1.5", "-1G", "2 G iB"])
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"^--kv-bytes is '.*'; it must be a number of bytes, as 1048576"):
        configured(flags={"kv_bytes": text})


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path):
    file = tmp_path / "tidegate.toml"
    file.write_text('port = 1\nhost = "1.1.1.1"\nmodel_id = "file"\n[engine]\nblock_size = 1\n')
    config = configured(
        file=file,
        environment={"TIDEGATE_PORT": "2", "TIDEGATE_HOST": "2.2.2.2", "TIDEGATE_BLOCK_SIZE": "2"},
        flags={"port": "3", "host": None, "block_size": None},
    )
    assert (config.port, config.host, config.model_id, config.engine.block_size) == (3, "2.2.2.2", "file", 2)


def test_the_checkpoint_and_the_models_own_name_come_from_the_caller():
    options = gather_options(flags={"model": "/m/Tiny.gguf"}, environment={})
    config = build_config(options, checkpoint="/m/Tiny.gguf", default_model_id="tiny")
    assert (config.model, config.engine.checkpoint, config.model_id) == (
        "/m/Tiny.gguf",
        "/m/Tiny.gguf",
        "tiny",
    )
    assert configured().model_id == "smollm2-135m"


OUT_OF_BOUNDS = [
    ("port", "-1"), ("port", "65536"), ("max_body_bytes", "0"), ("max_json_depth", "3"),
    ("max_json_depth", "513"), ("max_connections", "0"), ("max_queued", "-1"), ("keep_alive_s", "0"),
    ("keep_alive_s", "nan"), ("send_timeout_s", "0"), ("send_buffer_bytes", "10"), ("drain_timeout_s", "-1"),
    ("drain_timeout_s", "inf"), ("block_size", "0"), ("block_size", "257"), ("max_step_tokens", "0"),
    ("max_running", "0"), ("num_threads", "-2"), ("step_deadline_s", "0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), OUT_OF_BOUNDS)
def test_a_value_out_of_bounds_is_refused_with_option_value_and_bound(name, text):
    with pytest.raises(ConfigError, match=rf"^{named(name)} is {text}.*; it must be between \S+ and \S+$"):
        configured(flags={FLAG_OF_FIELD.get(name, name): text})


WRONG_TYPES = [
    ("port", "abc", "--port is 'abc'; it must be a whole number"),
    ("port", "1.5", "--port is '1.5'; it must be a whole number"),
    ("keep_alive", "soon", "--keep-alive is 'soon'; it must be a number"),
    ("access_log", "maybe", "--access-log is 'maybe'; it must be true or false"),
    ("device", "tpu", "--device is 'tpu'; it must be one of auto, cpu, cuda"),
    ("log_level", "loud", "--log-level is 'loud'; it must be one of debug, info, warning, error"),
]


@pytest.mark.parametrize(("flag", "text", "message"), WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused_in_plain_words(flag, text, message):
    with pytest.raises(ConfigError) as caught:
        configured(flags={flag: text})
    assert str(caught.value) == message


def test_a_refusal_names_the_source_the_value_came_from(tmp_path):
    with pytest.raises(
        ConfigError, match=r"^TIDEGATE_PORT is 'tcp://10\.0\.0\.1'; it must be a whole number$"
    ):
        configured(environment={"TIDEGATE_PORT": "tcp://10.0.0.1"})
    file = tmp_path / "tidegate.toml"
    file.write_text("port = true\n")
    with pytest.raises(ConfigError, match=r"^port in .*tidegate\.toml is True; it must be a whole number$"):
        configured(file=file)
    file.write_text("[engine]\nmax_running = 0\n")
    with pytest.raises(ConfigError, match=r"^max_running in .*tidegate\.toml is 0; it must be between 1 and"):
        configured(file=file)
    with pytest.raises(ConfigError, match=r"^TIDEGATE_DRAIN_TIMEOUT is -1\.0; it must be between 0 and"):
        configured(environment={"TIDEGATE_DRAIN_TIMEOUT": "-1"})
    with pytest.raises(ConfigError, match=r"^--max-running is 64; it must be at most TIDEGATE_MAX_STEP_TOK"):
        configured(environment={"TIDEGATE_MAX_STEP_TOKENS": "10"})
    file.write_text("model = 3\n")
    with pytest.raises(ConfigError, match=r"^model in .*tidegate\.toml is 3; it must be a path"):
        configured(file=file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", r"prot is no option at the top; did you mean port\?"),
        ("xyzzy = 1", r"xyzzy is no option at the top; there are: access_log,"),
        ("block_size = 1", r"block_size is no option at the top; put it under \[engine\]"),
        ("threads = 1", r"threads is no option at the top; put it under \[engine\]"),
        ("[engine]\nport = 1", r"port is no option under \[engine\]; put it at the top"),
        ("[engine]\nmax_runing = 1", r"max_runing is no option under \[engine\]; did you mean max_running\?"),
        ("[engine]\ncheckpoint = 'x'", r"checkpoint is no option under \[engine\]"),
        ("[server]\nport = 1", "server is no option at the top"),
        ("engine = 3", "engine is 3; it must be a table"),
        ("port = ", "is not a TOML file"),
    ],
)
def test_a_file_with_a_mistake_is_refused_by_name(tmp_path, text, message):
    file = tmp_path / "tidegate.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        configured(file=file)
    assert str(file) in str(caught.value)


def test_a_refusal_of_the_engine_is_worded_by_where_the_option_was_set():
    options = gather_options(flags={"kv_bytes": "1G"}, environment={"TIDEGATE_MAX_MODEL_LEN": "9"})
    said = options.explain("max_model_len is 9; set allow_longer_context too, or see kv_bytes")
    assert said == "TIDEGATE_MAX_MODEL_LEN is 9; set --allow-longer-context too, or see --kv-bytes"
    assert options.explain("/my_models/x: the port is missing") == "/my_models/x: the port is missing"


def test_a_file_that_is_missing_or_binary_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        configured(file=tmp_path / "nope.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        configured(file=tmp_path / "binary.toml")


@pytest.mark.parametrize("name", ["host", "model_id", "aliases"])
def test_a_name_is_short_and_printable(name):
    for bad in ("a\nb", "x" * 257):
        with pytest.raises(ConfigError, match="it must be 1 to 256 printable characters"):
            configured(flags={name: bad})
    with pytest.raises(ConfigError, match="it must be 1 to 256 printable characters"):
        configured(flags={name: ["a", ""] if name == "aliases" else ""})


def test_a_configuration_cannot_be_changed_afterwards():
    config = configured()
    with pytest.raises(AttributeError):
        config.port = 1  # type: ignore[misc]  # that is the point
    assert msgspec.structs.replace(config, port=1).port == 1


def test_the_defaults_pass_their_own_checks():
    config = ServerConfig(engine=EngineConfig(checkpoint="x"))
    assert config.validated() is config
    assert math.isfinite(config.keep_alive_s)
    assert Path(config.engine.checkpoint).name == "x"
