"""How much work property tests do: small by default, HYPOTHESIS_PROFILE=thorough for twenty times more."""

import os

from hypothesis import HealthCheck, settings

FACTOR = 20 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 1


def budget(*, examples: int, steps: int = 50) -> settings:
    """Settings of one property test; also its decorator. Slow machines are no failure here."""
    return settings(
        max_examples=examples * FACTOR,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
