"""Servers of these tests log into nothing; `structlog.testing.capture_logs` still sees it."""

from collections.abc import Iterator

import pytest
import structlog


def _drop(_logger: object, _name: str, _event: object) -> str:
    raise structlog.DropEvent


@pytest.fixture(autouse=True)
def _quiet_logs() -> Iterator[None]:
    structlog.configure(processors=[_drop])
    yield
    structlog.reset_defaults()
