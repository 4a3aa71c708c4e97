"""`make serve` passes on what it was given, as one word."""

import shlex
import shutil
import subprocess

import pytest

from tests.gateway.test_serve import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    "model", ["/path with space/my model.gguf", 'it\'s "one" file.gguf', "a;b&c.gguf", ""]
)
def test_make_serve_takes_any_model_path(model: str) -> None:
    command = ["make", "--dry-run", "--silent", "serve", f"MODEL={model}", "ARGS=--port 0 --alias 'a b'"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout.splitlines()[-1])
    given = [model] if model else []
    assert words == ["exec", ".venv/bin/tidegate", "serve", *given, "--port", "0", "--alias", "a b"]
