"""What must not be written, or only at the places named here."""

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.architecture.source import ROOT, Source, product, sources

MAY_CATCH_EXCEPTION = {
    "core/engine/worker_host.py": 1,  # the step
    "core/compiled/compiler.py": 1,  # a region that does not compile leaves the others
    "core/sampling/sampler.py": 2,  # the batched sampler, and its row-by-row retry
    "gateway/middleware/errors.py": 1,  # the error middleware
}
MAY_KEEP_BASE_EXCEPTION = {
    "core/engine/engine.py": 1,  # raised again outside the task group, which would wrap it
    "gateway/answer.py": 1,  # raised again outside the task group, which would wrap it
    "core/engine/thread.py": 1,  # the worker thread's end is reported to the loop
}
JINJA_HOMES = {"tokenization/chat_template.py", "tokenization/template_environment.py"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.load", "eval", "exec", "numpy.load", "np.load", "yaml.load"}
LOOSE_TASKS = {"asyncio.create_task", "asyncio.ensure_future", "loop.create_task"}


def caught_names(handler: ast.ExceptHandler) -> set[str]:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind) if kind else "everything" for kind in kinds}


def broad_handlers(source: Source) -> Iterator[tuple[str, int]]:
    """Yield `exception` or `base` and the line of each handler that catches too much and goes on."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = caught_names(node)
            raises_again = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            if "Exception" in caught:
                yield "exception", node.lineno
            elif caught & {"BaseException", "everything"} and not raises_again:
                yield "base", node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            suppressed = {ast.unparse(argument) for argument in node.args}
            yield from (("exception", node.lineno) for _ in suppressed & {"Exception", "BaseException"})


def unsafe_uses(source: Source) -> Iterator[str]:
    for module, _, line in source.imports():
        if module.split(".")[0] in UNSAFE_MODULES:
            yield f"{source.path}:{line} imports {module}, which runs what it reads"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in UNSAFE_CALLS:
            yield f"{source.path}:{node.lineno} calls {name}, which runs what it reads"


def jinja_uses(source: Source) -> Iterator[str]:
    for module, _, line in source.imports():
        if module.split(".")[0] == "jinja2" and source.path not in JINJA_HOMES:
            yield f"{source.path}:{line} imports {module}: templates are rendered in one sandbox only"


def loose_tasks(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in LOOSE_TASKS or name.endswith("_loop().create_task"):
            yield f"{source.path}:{node.lineno} calls {name}: tasks live in a TaskGroup"


def unfinished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if any(mark in line for mark in ("TO" + "DO", "FIX" + "ME", "XX" + "X")):
            yield f"{source.path}:{number} is unfinished: {line.strip()}"


PRODUCT_RULES = (unsafe_uses, jinja_uses, loose_tasks, unfinished)


@pytest.mark.parametrize("source", product(), ids=lambda source: source.path)
def test_a_file_has_nothing_that_is_banned(source):
    assert [violation for rule in PRODUCT_RULES for violation in rule(source)] == []


@pytest.mark.parametrize("source", product(), ids=lambda source: source.path)
def test_everything_is_caught_only_where_it_is_allowed(source):
    found = Counter(kind for kind, _ in broad_handlers(source))
    assert found["exception"] <= MAY_CATCH_EXCEPTION.get(source.path, 0), list(broad_handlers(source))
    assert found["base"] <= MAY_KEEP_BASE_EXCEPTION.get(source.path, 0), list(broad_handlers(source))


def test_the_named_places_exist():
    for path in (*MAY_CATCH_EXCEPTION, *MAY_KEEP_BASE_EXCEPTION, *JINJA_HOMES):
        assert (ROOT / path).is_file(), f"{path} is named here and is not there"


@pytest.mark.parametrize("source", sources("tests", "examples", ".ci"), ids=lambda source: source.path)
def test_tests_and_examples_are_finished(source):
    assert list(unfinished(source)) == []


@pytest.mark.parametrize(
    "text",
    [
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept (ValueError, Exception) as error: raise",
        "try: f()\nexcept: pass",
        "try: f()\nexcept BaseException: pass",
        "with contextlib.suppress(Exception): f()",
    ],
)
def test_the_rule_on_catching_bites(text):
    assert list(broad_handlers(Source("core/x.py", text)))


def test_catching_everything_to_raise_it_again_is_fine():
    text = "try: f()\nexcept BaseException:\n    g()\n    raise"
    assert not list(broad_handlers(Source("core/x.py", text)))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "import torch\ntorch.load(path)",
        "eval(text)",
        "from jinja2 import Environment",
        "asyncio.create_task(f())",
        "asyncio.get_running_loop().create_task(f())",
        "# TO" + "DO: later",
    ],
)
def test_each_ban_bites(text):
    assert [violation for rule in PRODUCT_RULES for violation in rule(Source("gateway/x.py", text))]
