"""In which order waiting requests are admitted, one file per policy. `ls` of this folder is the list.

This file is only the contract and the finder; every other module here exports `create`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Protocol

from core.errors import ConfigError
from core.request import Request

MatchLength = Callable[[Request], int]
"""How many tokens of a request's prompt the prefix cache holds now. Changes nothing; costs a look-up."""


class WaitingQueue(Protocol):
    """The requests that were never admitted, in the order in which they are to be.

    Only the head is ever admitted, and it is waited for until there is room: whoever needs much is not
    overtaken for ever by those who need little. Requests that lost their blocks are not in here: they
    come first under every policy (`core.scheduler.waiting`). Torch-free, clock-free.
    """

    def push(self, request: Request, *, is_follower: bool = False) -> None:
        """Queue a request. A follower's prompt is in the cache by the work of one that was admitted."""
        ...

    def head(self) -> Request:
        """Who is next. Not called on an empty queue; may answer differently each time."""
        ...

    def remove(self, request: Request, *, admitted: bool) -> None:
        """Take a request out: it was admitted, or it has ended."""
        ...

    def charge(
        self,
        request: Request,
        *,
        num_prefill_tokens: int = 0,
        num_cached_tokens: int = 0,
        num_output_tokens: int = 0,
    ) -> None:
        """Learn what a request was given: its prompt, all at once at its first admission, and each token.

        What is computed again after a preemption is not charged: it is our doing.
        """
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class PolicyFactory(Protocol):
    """What each policy's file offers as `create`."""

    def __call__(self, match_length: MatchLength, /) -> WaitingQueue: ...


def policy_names() -> tuple[str, ...]:
    """The modules of this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def find_policy(name: str) -> PolicyFactory:
    """The factory in the file of that name.

    Raises:
        ConfigError: there is none; the message lists what there is.
    """
    names = policy_names()
    if name not in names:
        raise ConfigError(f"policy is {name!r}; it must be one of {', '.join(names)}")
    create: PolicyFactory = importlib.import_module(f"{__name__}.{name}").create
    return create
