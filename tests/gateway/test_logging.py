"""Logs are lines on stderr; a traceback in them shows code, never the values of variables."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from gateway.telemetry.logging import configure_logging


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def fail_with_a_secret() -> None:
    prompt = "the client's " + "secret"
    raise ValueError(len(prompt))


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_local_variable(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level="info", log_format=log_format)
    try:
        fail_with_a_secret()
    except ValueError:
        structlog.get_logger("t").exception("request_failed", request_id="r1")
    said = capsys.readouterr().err
    assert "request_failed" in said
    assert "fail_with_a_secret" in said
    assert "the client's secret" not in said


def test_json_logs_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level="info", log_format="auto")  # not a terminal: json
    structlog.get_logger("t").info("server_ready", url="http://x", port=1)
    structlog.get_logger("t").debug("not_shown")
    [line] = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert (fields["event"], fields["level"], fields["url"], fields["port"]) == (
        "server_ready",
        "info",
        "http://x",
        1,
    )
    assert fields["timestamp"].endswith("Z")
