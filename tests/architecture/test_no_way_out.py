"""The server opens no connection of its own: no address in a request can make it fetch anything."""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source import Source, product

MAY_ASK = {"gateway/commands/top.py"}
"""A command that is a client itself: of a server that the user names."""

CLIENT_MODULES = {"urllib.request", "http.client", "httpx", "requests", "urllib3", "ftplib", "smtplib"}
CLIENT_NAMES = {"ClientSession", "open_connection", "create_connection", "sock_connect", "urlopen"}


def ways_out(source: Source) -> Iterator[str]:
    for module, names, line in source.imports():
        if module in CLIENT_MODULES or CLIENT_NAMES & set(names):
            yield f"{source.path}:{line} imports a client: {module} {names}"
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        if name in CLIENT_NAMES:
            yield f"{source.path}:{node.lineno} uses {name}"


def served() -> list[Source]:
    """All that may run in a serving process: loadtest is a client by trade."""
    return [source for source in product() if not source.path.startswith("loadtest/")]


@pytest.mark.parametrize("source", served(), ids=lambda source: source.path)
def test_nothing_that_serves_opens_a_connection(source):
    if source.path not in MAY_ASK:
        assert list(ways_out(source)) == []


def test_each_way_out_is_noticed():
    for text in (
        "import httpx",
        "import urllib.request",
        "from aiohttp import ClientSession",
        "import aiohttp\naiohttp.ClientSession()",
        "await asyncio.open_connection(h, p)",
    ):
        assert list(ways_out(Source("gateway/x.py", text)))
