"""What every test may ask for: the real model, and how long to search for counter-examples."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from core import CheckpointError
from gateway.model_store import DEFAULT_MODEL, cached_model

os.environ.setdefault("TIDEGATE_COMPILE", "off")
"""Hundreds of servers start here: none of them starts a compiler, unless a test is about that."""

THOROUGH = os.environ.get("TIDEGATE_THOROUGH", "") not in ("", "0")

# Deadlines per example measure the machine's other work, not ours.
# CI looks where it looked last time, so that a change is judged by its own doing; people roam.
settings.register_profile(
    "usual",
    deadline=None,
    max_examples=100,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "thorough", parent=settings.get_profile("usual"), max_examples=2_000, derandomize=False
)
settings.load_profile("thorough" if THOROUGH else "usual")


@pytest.fixture(scope="session")
def search_factor() -> int:
    """How many times longer a hand-written search runs in the thorough profile."""
    return 10 if THOROUGH else 1


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The real default model. Without it a test is skipped by name, except in CI, where it fails."""
    named = os.environ.get("TIDEGATE_TEST_MODEL")
    try:
        path = Path(named) if named else cached_model(DEFAULT_MODEL)
    except CheckpointError as error:
        path, reason = None, str(error)
    else:
        reason = f"{path} does not exist" if named else "the default model is not in the cache"
    if path is not None and path.is_file():
        return path
    message = f"needs the default model ({reason}): run `make model`, or name a file in TIDEGATE_TEST_MODEL"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
