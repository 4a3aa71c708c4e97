"""What can go wrong with a load test.

    LoadTestError
    ├── PlanInvalid         a plan, trace, option or report that cannot be used
    └── TargetUnusable      the server cannot be measured: dead, refusing, another protocol

A request that fails during a run is a result, not an exception: see `record.Fault`.
"""


class LoadTestError(Exception):
    """Somebody else's mistake. The message names the file, field or address and the bound."""

    code = "loadtest_error"


class PlanInvalid(LoadTestError):
    """A plan, a trace, an option or a report file."""

    code = "plan_invalid"


class TargetUnusable(LoadTestError):
    """The server under test, before any load was put on it."""

    code = "target_unusable"
