"""Async tests on both event loops that people run us on."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def on_each_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test once per kind of event loop, each in a fresh one."""

    @functools.wraps(test)
    def run(*arguments: Any, loop_name: str, **options: Any) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop_name]) as runner:
            runner.run(test(*arguments, **options))

    own = inspect.signature(test)
    loop_name = inspect.Parameter("loop_name", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), loop_name])  # type: ignore[attr-defined]
    parametrized: Callable[..., None] = pytest.mark.parametrize("loop_name", LOOPS)(run)
    return parametrized
