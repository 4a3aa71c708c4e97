"""The one Jinja environment: an immutable sandbox with what Hugging Face gives chat templates.

A template comes with a model file, so it is a stranger's program. It gets no attribute that begins
with an underscore, cannot change what it is given, and cannot make one huge value in one step.

Source: transformers, `utils/chat_template_utils.py`, `_cached_compile_jinja_template`.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_VALUE_ITEMS = 1 << 24
"""Longest string or list that `*` may make, and largest number of bits that `**` may."""


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training. Serving renders what is inside."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja only looks names up in it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    _refuse_above_limit(len(value) * times)
        elif isinstance(left, int) and isinstance(right, int):
            _refuse_above_limit(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)


class _PlainNamespace(Namespace):
    """`namespace()` without names that begin with an underscore: nothing to climb out by."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


def template_environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """A fresh environment; `now` is the clock behind `strftime_now`."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    environment.globals["dict"] = _new_dict
    environment.globals["namespace"] = _PlainNamespace
    return environment


def texts_and_names(environment: jinja2.Environment, source: str) -> tuple[list[str], set[str]]:
    """What a template may write (its plain text, its string constants) and the attributes it reads."""
    tree = environment.parse(source)
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return texts, {node.attr for node in tree.find_all(nodes.Getattr)}


def _new_dict(*args: Any, **entries: Any) -> dict[Any, Any]:
    """In place of the type itself, whose attributes lead elsewhere."""
    return dict(*args, **entries)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt: jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse_above_limit(size: int) -> None:
    if size > MAX_VALUE_ITEMS:
        raise SecurityError(f"a template made a value of size {size}; the limit is {MAX_VALUE_ITEMS}")
