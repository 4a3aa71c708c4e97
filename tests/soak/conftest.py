"""Servers of these tests log into nothing, as those of `tests/gateway` do."""

from tests.gateway.conftest import _quiet_logs

__all__ = ["_quiet_logs"]
