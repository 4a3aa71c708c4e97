"""Files and functions that fit into a head, and names that say what is inside."""

from collections.abc import Iterator

import pytest

from tests.architecture.source import Source, num_function_lines, product, sources

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_EXAMPLE_LINES = 60
MAX_CORE_LOOP_LINES = 40

CORE_LOOPS = {
    "core/scheduler/scheduler.py": {"schedule", "update"},
    "core/engine/engine.py": {"_run"},
    "gateway/handler.py": {"handle"},
}
"""File -> the functions that everything hangs on. New features go around them, not into them."""

BANNED_NAMES = {"util", "utils", "helper", "helpers", "misc", "common", "base", "shared", "stuff"}


def size_violations(source: Source) -> Iterator[str]:
    if source.num_lines > MAX_FILE_LINES:
        yield f"{source.path} has {source.num_lines} lines; at most {MAX_FILE_LINES}"
    core_loops = CORE_LOOPS.get(source.path, set())
    for function in source.functions():
        limit = MAX_CORE_LOOP_LINES if function.name in core_loops else MAX_FUNCTION_LINES
        if (length := num_function_lines(function)) > limit:
            yield f"{source.path}:{function.lineno} {function.name} has {length} lines; at most {limit}"


def name_violations(source: Source) -> Iterator[str]:
    for part in source.path.removesuffix(".py").split("/"):
        if part.strip("_") in BANNED_NAMES:
            yield f"{source.path}: name it after what it holds, not {part!r}"


@pytest.mark.parametrize("source", [*product(), *sources("tests", ".ci")], ids=lambda source: source.path)
def test_a_file_keeps_its_size_and_has_a_name(source):
    assert [*size_violations(source), *name_violations(source)] == []


@pytest.mark.parametrize("source", sources("examples"), ids=lambda source: source.path)
def test_an_example_is_short(source):
    assert source.num_lines < MAX_EXAMPLE_LINES


@pytest.mark.parametrize("path", CORE_LOOPS)
def test_the_functions_everything_hangs_on_are_where_this_test_looks(path):
    (source,) = (source for source in product() if source.path == path)
    assert {function.name for function in source.functions()} >= CORE_LOOPS[path]


def test_each_size_rule_bites():
    long = "def schedule():\n" + "    pass\n" * 40
    assert list(size_violations(Source("core/scheduler/scheduler.py", long)))
    assert not list(size_violations(Source("core/scheduler/stats.py", long)))
    assert list(size_violations(Source("core/x.py", "async def f():\n" + "    pass\n" * 60)))
    assert list(size_violations(Source("core/x.py", "x = 1\n" * 601)))
    assert list(name_violations(Source("gateway/utils.py", "")))
    assert list(name_violations(Source("core/common/__init__.py", "")))
