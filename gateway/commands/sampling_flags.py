"""How `generate` and `chat` are told to pick tokens: flags, checked in plain words."""

import math

import msgspec

from gateway.commands import CommandFailed

MOST_TOKENS = (1 << 31) - 1
SEED_BOUND = 1 << 63


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """As in `GenerateRequest`. The defaults are for people at a terminal, not those of the API."""

    max_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 1.0
    seed: int | None = None


def read_sampling(
    *, max_tokens: str | None, temperature: str | None, top_p: str | None, seed: str | None
) -> Sampling:
    """Turn the flags' text into numbers; None: not given.

    Raises:
        CommandFailed: naming flag, text and bounds.
    """
    off = Sampling()
    whole, exact = "a whole number", "a number"
    return Sampling(
        max_tokens=int(_number("--max-tokens", max_tokens, off.max_tokens, 1, MOST_TOKENS, whole)),
        temperature=_number("--temperature", temperature, off.temperature, 0, 2, exact),
        top_p=_number("--top-p", top_p, off.top_p, 0.0001, 1, exact),
        seed=None if seed is None else int(_number("--seed", seed, 0, -SEED_BOUND, SEED_BOUND - 1, whole)),
    )


def _number(flag: str, text: str | None, default: float, low: float, high: float, kind: str) -> float:
    if text is None:
        return default
    try:
        value: float = int(text) if kind == "a whole number" else float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:  # NaN fails too
        raise CommandFailed(f"{flag} is {text!r}; it must be {kind} between {low:g} and {high:g}")
    return value
