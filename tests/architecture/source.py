"""Our own source as data: which files there are, what each imports, and the rules that read it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "gateway", "loadtest", "tokenization")


@dataclass(frozen=True)
class Source:
    """One Python file. `path` is relative to the repository, with forward slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """The dotted name it is imported by."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    def imports(self) -> Iterator[tuple[str, tuple[str, ...], int]]:
        """Every import, wherever it stands: module, names taken from it (none for `import x`), line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, (), node.lineno
            elif isinstance(node, ast.ImportFrom):
                yield self._absolute(node), tuple(alias.name for alias in node.names), node.lineno

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def late_imports(self) -> Iterator[tuple[str, int]]:
        """Imports inside functions: module and line."""
        for function in self.functions():
            inner = Source(self.path, "\n")
            inner.__dict__["tree"] = ast.Module(body=function.body, type_ignores=[])
            yield from ((module, line) for module, _, line in inner.imports())

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.path.removesuffix(".py").split("/")[: -node.level]
        return ".".join([*package, *([node.module] if node.module else [])])


def sources(*folders: str) -> list[Source]:
    """Every Python file below the given folders, sorted."""
    files = (file for folder in folders for file in sorted((ROOT / folder).rglob("*.py")))
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def product() -> list[Source]:
    return sources(*PACKAGES)


def num_function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1
