"""The infinite cache: against a tree that is written out token by token, and against published figures."""

import random
from typing import Any

import pytest

from loadtest.ideal import ideal_hit, in_order, start_times
from loadtest.plan import Plan, PlannedRequest, load_plan
from tests.loadtest.plans import PLANS, plan, request

PUBLISHED = {
    "chat-multiturn": 0.680,
    "random-control": 0.0,
    "shared-fewshot": 0.841,
    "tool-agent": 0.915,
    "tot-fanout": 0.859,
    "rag-long": 0.505,
}
"""Computed when the plans were made, without the rule that a prompt's last token is never cached."""


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name)
def test_the_published_plans_have_the_published_hits(path) -> None:
    read = load_plan(path)
    assert ideal_hit(read).share() == pytest.approx(PUBLISHED[read.name], abs=0.002)


def written_out(asked: PlannedRequest) -> list[tuple[str, str, int]]:
    return [(s.role, s.segment_id, n) for s in asked.segments for n in range(s.num_tokens)]


def by_hand(given: Plan, block_tokens: int) -> dict[str, int]:
    """The same, from all prefixes of all prompts so far."""
    seen: set[tuple[tuple[str, str, int], ...]] = set()
    cached = {}
    for asked in in_order(given):
        prompt = written_out(asked)
        prefixes = [tuple(prompt[:end]) for end in range(1, len(prompt) + 1)]
        found = max((len(prefix) for prefix in prefixes if prefix in seen), default=0)
        cached[asked.id] = min(found, len(prompt) - 1) // block_tokens * block_tokens
        seen.update(prefixes)
    return cached


@pytest.mark.parametrize("seed", range(60))
def test_hits_are_those_of_a_set_of_all_prefixes(seed: int) -> None:
    generator = random.Random(seed)
    requests = []
    for number in range(12):
        waits: dict[str, Any] = (
            {"after": (f"r{generator.randrange(number)}",)} if number and generator.random() < 0.5 else {}
        )
        segments = [
            (generator.choice("abc"), generator.randint(1, 5)) for _ in range(generator.randint(1, 5))
        ]
        requests.append(request(f"r{number}", *segments, **waits or {"at_s": float(generator.randrange(4))}))
    given = plan(*requests)
    for block_tokens in (1, 3):
        assert dict(ideal_hit(given, block_tokens).num_cached_tokens) == by_hand(given, block_tokens)


def test_the_last_token_of_a_prompt_is_never_cached() -> None:
    twice = plan(request("r0", ("a", 10)), request("r1", ("a", 10), after=("r0",)))
    hit = ideal_hit(twice)
    assert dict(hit.num_cached_tokens) == {"r0": 0, "r1": 9}
    assert hit.share() == 9 / 20
    assert hit.share(["r1"]) == 0.9
    assert dict(ideal_hit(twice, 4).num_cached_tokens) == {"r0": 0, "r1": 8}


def test_the_same_words_in_another_role_are_another_prompt() -> None:
    given = plan(request("r0", ("a", 10), ("b", 1)), request("r1", ("a", 10, "system"), ("b", 1)))
    assert ideal_hit(given).share() == 0.0


def test_a_recorded_answer_is_new_where_it_first_stands_and_a_live_one_is_not() -> None:
    first = request("r0", ("q0", 10), max_tokens=4)
    second = request("r1", ("q0", 10), ("a0", 6, "assistant"), ("q1", 5), after=("r0",))
    third = request(
        "r2", ("q0", 10), ("a0", 6, "assistant"), ("q1", 5), ("a1", 8, "assistant"), ("q2", 1), after=("r1",)
    )
    given = plan(first, second, third)
    assert list(ideal_hit(given).num_cached_tokens.values()) == [0, 10, 21]
    # The answer is as long as it was asked for, not as long as the recorded one.
    assert list(ideal_hit(given, live=True).num_cached_tokens.values()) == [0, 14, 29]


def test_whoever_starts_first_pays() -> None:
    given = plan(request("late", ("a", 10), at_s=5.0), request("early", ("a", 10), at_s=1.0))
    assert dict(ideal_hit(given).num_cached_tokens) == {"late": 9, "early": 0}


def test_start_times_follow_the_last_of_those_waited_for() -> None:
    given = plan(
        request("join", after=("b", "a"), delay_s=2.0),
        request("a", at_s=1.0),
        request("b", at_unit=4.0),
        request("at once", after=("join",)),
    )
    assert start_times(given) == {"a": 1.0, "b": 4.0, "join": 6.0, "at once": 6.0}
    assert [request.id for request in in_order(given)] == ["a", "b", "join", "at once"]


def test_no_requests_have_no_hit() -> None:
    assert ideal_hit(plan(request())).share([]) == 0.0
