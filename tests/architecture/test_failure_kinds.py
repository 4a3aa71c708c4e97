"""The table of failure kinds names tests that exist, and says of each kind what becomes of it."""

import re

from tests.architecture.source import ROOT, sources

README = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")


def rows() -> list[tuple[str, str]]:
    section = README.partition("## Failure kinds")[2]
    lines = [line for line in section.splitlines() if line.startswith("| ") and "---" not in line]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [(kind, answer) for kind, answer in cells if kind != "kind"]


def test_every_test_that_is_named_exists():
    defined = {function.name for source in sources("tests") for function in source.functions()}
    named = set(re.findall(r"`(test_\w+)`", README))
    assert len(named) > 100
    assert named - defined == set()


def test_every_kind_has_a_test_or_the_reason_why_not():
    assert len(rows()) > 80
    for kind, answer in rows():
        has_reason = answer.startswith(("never", "not applicable yet:", "by figures"))
        assert has_reason or re.search(r"`test_\w+`", answer), kind
