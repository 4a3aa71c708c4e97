"""Arguments that make a command use the default model, with packed weights kept for all of these tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def with_model(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment for a command that loads the model, small and away from the user's own cache."""
    return {
        "TIDEGATE_MODEL": str(default_model_path),
        "TIDEGATE_CACHE": str(tmp_path_factory.mktemp("cache")),
        "TIDEGATE_NUM_BLOCKS": "256",
    }
