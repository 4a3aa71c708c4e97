"""How much work these tests do: little by default, ten times more in the profile called thorough."""

from hypothesis import HealthCheck, settings

FACTOR = 10 if settings.get_current_profile_name() == "thorough" else 1


def budget(*, examples: int, steps: int = 50) -> settings:
    """Settings of one property test; also its decorator. Slow machines are no failure here."""
    return settings(
        max_examples=examples * FACTOR,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
