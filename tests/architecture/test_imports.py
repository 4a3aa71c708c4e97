"""Imports point down, never up, never sideways between plug-ins; torch stays where tensors are."""

import importlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.architecture.source import PACKAGES, ROOT, Source, product

MAY_IMPORT = {
    "core": {"core"},
    "tokenization": {"tokenization"},
    "loadtest": {"loadtest"},
    "gateway": {"gateway", "core", "tokenization"},
}

CORE_HEIGHT = {
    "core": 6,
    "core.engine": 5,
    "core.scheduler": 4, "core.execution": 4,
    "core.cache": 3, "core.models": 3, "core.sampling": 3, "core.attention": 3, "core.weights": 3,
    "core.compiled": 3,
    "core.layers": 2,
    "core.quantization": 1,
    "core.request": 0, "core.config": 0, "core.errors": 0,
}  # fmt: skip
"""A part of core imports lower parts only."""

VALUES = {"core.scheduler.plan", "core.execution.worker_info"}
"""Frozen values that cross between loop and worker: any part may name them."""

CROSSINGS = {("core.config", "core.errors")}
"""An option out of range is refused by name."""

PLUG_IN_FOLDERS = (
    "core/models", "core/attention", "core/quantization/kernels", "core/scheduler/policies",
    "gateway/dialects", "gateway/parsers", "gateway/backends",
    "loadtest/dialects", "loadtest/workloads", "loadtest/servers", "loadtest/traces",
)  # fmt: skip

TORCH_FREE = (
    "gateway/", "tokenization/", "loadtest/", "core/cache/", "core/scheduler/", "core/engine/",
    "core/__init__.py", "core/request.py", "core/config.py", "core/errors.py",
    "core/execution/__init__.py", "core/execution/worker_info.py",
    "core/weights/__init__.py", "core/weights/checkpoint.py", "core/weights/gguf",
    "core/weights/json_file.py", "core/weights/mapped_file.py", "core/weights/safetensors",
)  # fmt: skip
TENSOR_PACKAGES = {"torch", "numpy", "safetensors", "transformers"}
STATISTICS = ("loadtest/",)
"""Torch-free, but numbers by the hundred thousand are what it is about."""


def part_of(module: str) -> str:
    """`core.cache.block_pool` -> `core.cache`; the package root counts as a part of its own."""
    return ".".join(module.split(".")[:2])


def package_violations(source: Source) -> Iterator[str]:
    own = source.path.split("/")[0]
    for module, _, line in source.imports():
        root = module.split(".")[0]
        if root in PACKAGES and root not in MAY_IMPORT[own]:
            yield f"{source.path}:{line} imports {module}: {own} may import only {sorted(MAY_IMPORT[own])}"


def root_violations(source: Source) -> Iterator[str]:
    """Packages other than one's own are entered by the front door: the names in their `__all__`."""
    own = source.path.split("/")[0]
    for module, names, line in source.imports():
        root = module.split(".")[0]
        if root == own or root not in PACKAGES:
            continue
        public = set(getattr(importlib.import_module(root), "__all__", ()))
        if module != root:
            yield f"{source.path}:{line} imports {module}: only the package root {root} is public"
        elif unknown := set(names) - public:
            yield f"{source.path}:{line} takes {sorted(unknown)} from {root}, which are not in its __all__"


def height_violations(source: Source) -> Iterator[str]:
    own = part_of(source.module)
    assert own in CORE_HEIGHT, f"{source.path}: give {own} a height"
    for module, names, line in source.imports():
        if module.split(".")[0] != "core":
            continue
        targets = (
            {f"core.{name}" for name in names if f"core.{name}" in CORE_HEIGHT} if module == "core" else {}
        )
        for target in targets or {module}:
            part = part_of(target)
            if part == own or target in VALUES or (own, target) in CROSSINGS:
                continue
            if CORE_HEIGHT[part] < CORE_HEIGHT[own]:
                continue
            yield f"{source.path}:{line} imports {target}: {part} is not below {own}"


def sideways_violations(source: Source) -> Iterator[str]:
    folder, _, name = source.path.rpartition("/")
    if folder not in PLUG_IN_FOLDERS or name == "__init__.py":
        return
    package = folder.replace("/", ".")
    for module, names, line in source.imports():
        siblings = (
            {module.removeprefix(package + ".").split(".")[0]} if module.startswith(package + ".") else set()
        )
        if module == package:
            siblings = {sibling for sibling in names if (ROOT / folder / f"{sibling}.py").exists()}
        for sibling in siblings - {name.removesuffix(".py")}:
            yield f"{source.path}:{line} imports its sibling {sibling}: plug-ins share only the contract"


def torch_violations(source: Source) -> Iterator[str]:
    if not source.path.startswith(TORCH_FREE):
        return
    for module, _, line in source.imports():
        root = module.split(".")[0]
        if root in TENSOR_PACKAGES and not (root == "numpy" and source.path.startswith(STATISTICS)):
            yield f"{source.path}:{line} imports {module} in a torch-free part"


def late_violations(source: Source) -> Iterator[str]:
    """Inside functions our own packages are imported by the command line alone, to start quickly."""
    if source.path == "gateway/cli.py":
        return
    for module, line in source.late_imports():
        if module.split(".")[0] in PACKAGES:
            yield f"{source.path}:{line} imports {module} inside a function"


def height_violations_in_core(source: Source) -> Iterator[str]:
    return height_violations(source) if source.path.startswith("core/") else iter(())


RULES = (
    package_violations,
    root_violations,
    height_violations_in_core,
    sideways_violations,
    torch_violations,
    late_violations,
)


@pytest.mark.parametrize("source", product(), ids=lambda source: source.path)
def test_a_file_imports_only_what_it_may(source):
    assert [violation for rule in RULES for violation in rule(source)] == []


BROKEN = [
    ("core/request.py", "from gateway.app import build_app", "core may import only"),
    ("loadtest/runner.py", "import core", "loadtest may import only"),
    ("tokenization/tokenizer.py", "def f():\n    from gateway import app", "tokenization may import only"),
    ("gateway/app.py", "from core.engine.engine import Engine", "only the package root core is public"),
    ("gateway/app.py", "from core import config", "not in its __all__"),
    (
        "core/cache/manager.py",
        "from core.scheduler.scheduler import Scheduler",
        "core.scheduler is not below core.cache",
    ),
    ("core/layers/linear.py", "from core import models", "core.models is not below core.layers"),
    ("core/layers/linear.py", "from ..models import llama", "core.models is not below core.layers"),
    ("core/quantization/q4.py", "import core.layers.linear", "core.layers is not below core.quantization"),
    ("core/scheduler/scheduler.py", "from core.execution.batch import build", "core.execution is not below"),
    ("core/engine/engine.py", "from core import Engine", "core is not below core.engine"),
    ("core/models/qwen3.py", "from core.models.llama import Block", "imports its sibling llama"),
    ("core/models/qwen3.py", "from core.models import llama", "imports its sibling llama"),
    ("gateway/dialects/openai.py", "from .anthropic import parse", "imports its sibling anthropic"),
    ("gateway/handler.py", "import torch", "in a torch-free part"),
    ("core/cache/block_pool.py", "def f():\n    from torch import nn", "in a torch-free part"),
    ("core/engine/engine.py", "def f():\n    from core.cache import manager", "inside a function"),
]


@pytest.mark.parametrize(("path", "text", "message"), BROKEN)
def test_each_import_rule_bites(path, text, message):
    found = [violation for rule in RULES for violation in rule(Source(path, text))]
    assert any(message in violation for violation in found), found


def test_the_public_face_of_core_is_small_and_real():
    core = importlib.import_module("core")
    assert len(core.__all__) == len(set(core.__all__)) <= 15
    assert all(hasattr(core, name) for name in core.__all__)


def test_importing_every_torch_free_module_leaves_torch_out():
    modules = [
        source.module
        for source in product()
        if source.path.startswith(TORCH_FREE) and not source.path.endswith("__main__.py")
    ]
    assert len(modules) > 20
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += "sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
