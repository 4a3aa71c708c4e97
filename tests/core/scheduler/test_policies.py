"""The policies one by one, and what holds for each file in their folder."""

from array import array
from collections.abc import Callable

import pytest

from core.errors import ConfigError
from core.request import Request
from core.scheduler.policies import WaitingQueue, find_policy, policy_names
from core.scheduler.policies.fair_tenants import FairTenants
from core.scheduler.policies.first_come import FirstCome
from core.scheduler.policies.least_attained import LeastAttained
from core.scheduler.policies.longest_prefix import MAX_PASSES, NUM_LOOKS, LongestPrefix
from core.scheduler.service import LeastServed
from core.scheduler.waiting import WaitingLine
from tests.properties.simulation import Simulation, greedy


def request_named(name: str, *, tenant: str = "", session_id: str = "", num_tokens: int = 1) -> Request:
    return Request(
        request_id=name,
        token_ids=array("i", [1] * num_tokens),
        num_prompt_tokens=num_tokens,
        sampling=greedy(1),
        tenant=tenant,
        session_id=session_id,
    )


def make(name: str) -> WaitingQueue:
    return find_policy(name)(lambda _: 0)


def names(queue: WaitingQueue | WaitingLine) -> list[str]:
    return [request.request_id for request in queue]


def taken(queue: WaitingQueue, *, cost: int = 0) -> list[str]:
    """Admit until nobody is left, each costing so many prompt tokens; the order it happened in."""
    order: list[str] = []
    while len(queue):
        request = queue.head()
        queue.remove(request, admitted=True)
        queue.charge(request, num_prefill_tokens=cost)
        order.append(request.request_id)
    return order


def test_the_folder_is_the_list_of_policies():
    assert policy_names() == ("fair_tenants", "first_come", "least_attained", "longest_prefix")
    with pytest.raises(ConfigError, match=r"^policy is 'lottery'; it must be one of fair_tenants, f"):
        find_policy("lottery")
    with pytest.raises(ConfigError, match=r"^policy is '__init__'"):
        find_policy("__init__")


@pytest.mark.parametrize("name", policy_names())
def test_newcomers_wait_in_the_order_in_which_they_came(name: str):
    queue = make(name)
    for letter in "abcd":
        queue.push(request_named(letter))
    assert names(queue) == ["a", "b", "c", "d"]
    assert taken(queue) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("name", policy_names())
def test_anybody_can_leave_the_queue(name: str):
    queue = make(name)
    requests = [request_named(letter) for letter in "abc"]
    for request in requests:
        queue.push(request)
    queue.remove(requests[1], admitted=False)
    assert names(queue) == ["a", "c"]
    assert len(queue) == 2
    queue.remove(requests[0], admitted=False)
    assert queue.head() is requests[2]


@pytest.mark.parametrize("name", policy_names())
def test_who_was_preempted_goes_first_under_every_policy_and_the_older_before_the_younger(name: str):
    line = WaitingLine(make(name))
    line.push(request_named("new"))
    line.push_back(younger := request_named("younger"))  # the youngest is preempted first
    line.push_back(request_named("older"))
    assert names(line) == ["older", "younger", "new"]
    assert len(line) == 3
    line.discard(younger)
    line.admit(line.head())
    assert line.head().request_id == "new"


class Cost:
    """A policy that only listens."""

    def __init__(self) -> None:
        self.queue = FirstCome()
        self.charges: list[tuple[str, int, int, int]] = []

    def push(self, request: Request, *, is_follower: bool = False) -> None:
        self.queue.push(request, is_follower=is_follower)

    def head(self) -> Request:
        return self.queue.head()

    def remove(self, request: Request, *, admitted: bool) -> None:
        self.queue.remove(request, admitted=admitted)

    def charge(
        self,
        request: Request,
        *,
        num_prefill_tokens: int = 0,
        num_cached_tokens: int = 0,
        num_output_tokens: int = 0,
    ) -> None:
        self.charges.append((request.request_id, num_prefill_tokens, num_cached_tokens, num_output_tokens))

    def __len__(self) -> int:
        return len(self.queue)

    def __iter__(self):
        return iter(self.queue)


def test_the_scheduler_charges_a_prompt_once_what_is_cached_apart_and_each_token_as_it_comes():

    policy = Cost()
    simulation = Simulation(num_blocks=16, block_size=4, policy=policy)
    simulation.add([1] * 9, greedy(2))
    simulation.run()
    simulation.add([1] * 9, greedy(1))
    simulation.run()
    assert policy.charges == [
        ("r0", 9, 0, 0), ("r0", 0, 0, 1), ("r0", 0, 0, 1), ("r1", 1, 8, 0), ("r1", 0, 0, 1)
    ]  # fmt: skip


def test_what_is_computed_again_after_a_preemption_is_not_charged():

    policy = Cost()
    simulation = Simulation(num_blocks=8, block_size=2, policy=policy, prefix_cache=False)
    for n in range(3):
        simulation.add([n] * 3, greedy(10))
    simulation.finish_up()
    assert simulation.scheduler.stats().num_preemptions > 0
    assert sum(prefill for _, prefill, _, _ in policy.charges) == 9
    assert sum(output for *_, output in policy.charges) == 30


def test_followers_go_before_newcomers_where_the_order_is_that_of_arrival():
    queue = FirstCome()
    queue.push(request_named("new"))
    queue.push(request_named("follower"), is_follower=True)
    assert names(queue) == ["follower", "new"]


def lengths(**cached: int) -> Callable[[Request], int]:
    return lambda request: cached[request.request_id]


def test_the_longest_cached_prefix_goes_first_and_equals_go_by_age():
    queue = LongestPrefix(lengths(a=0, b=8, c=16, d=8))
    for letter in "abcd":
        queue.push(request_named(letter))
    assert taken(queue) == ["c", "b", "d", "a"]


def test_a_prefix_that_was_evicted_counts_no_more_and_one_that_was_cached_since_does():
    cached = {"a": 8, "b": 4, "c": 0}
    queue = LongestPrefix(lambda request: cached[request.request_id])
    for letter in "abc":
        queue.push(request_named(letter))
    cached.update(a=0, c=2)
    assert taken(queue) == ["b", "c", "a"]
    for letter in "abc":
        queue.push(request_named(letter))
    for cached["b"] in (3, 9, 3, 9, 0):  # the same length twice is one entry's twin
        queue.head()
    assert taken(queue) == ["c", "a", "b"]


def test_a_search_among_a_thousand_looks_at_a_few_and_notices_a_change_in_time():
    cached = {f"r{n}": n % 50 for n in range(1000)}
    num_looks = 0

    def match_length(request: Request) -> int:
        nonlocal num_looks
        num_looks += 1
        return cached[request.request_id]

    queue = LongestPrefix(match_length)
    for n in range(1000):
        queue.push(request_named(f"r{n}"))
    assert num_looks == 1000
    cached["r777"] = 99
    found = []
    for _ in range(1000 // NUM_LOOKS + 1):
        num_looks = 0
        found.append(queue.head().request_id)
        assert num_looks <= 2 * NUM_LOOKS
    assert found[0] != "r777"
    assert found[-1] == "r777"
    for name in cached:  # everything is evicted at once: no search becomes long
        cached[name] = 0
    num_looks = 0
    queue.head()
    assert num_looks <= 2 * NUM_LOOKS


def test_a_request_without_cached_tokens_is_passed_over_so_often_and_no_more():
    queue = LongestPrefix(lambda request: 0 if request.request_id == "poor" else 100)
    queue.push(poor := request_named("poor"))
    num_passes = 0
    while True:
        queue.push(request_named(f"rich{num_passes}"))
        if queue.head() is poor:
            break
        queue.remove(queue.head(), admitted=True)
        num_passes += 1
    assert num_passes == MAX_PASSES


def test_the_session_with_the_least_service_goes_first_and_requests_without_one_stand_alone():
    queue = LeastAttained()
    for n in range(3):
        queue.push(request_named(f"long{n}", session_id="long"))
    queue.push(request_named("short0", session_id="short"))
    queue.push(request_named("single"))
    assert taken(queue, cost=10) == ["long0", "short0", "single", "long1", "long2"]
    queue.push(request_named("long3", session_id="long"))
    queue.push(request_named("short1", session_id="short"))
    assert taken(queue, cost=10) == ["short1", "long3"]
    queue.check()


def test_two_tenants_sessions_of_one_name_are_two():
    queue = LeastAttained()
    queue.push(request_named("a0", tenant="a", session_id="s"))
    queue.push(request_named("a1", tenant="a", session_id="s"))
    queue.push(request_named("b0", tenant="b", session_id="s"))
    assert taken(queue, cost=1) == ["a0", "b0", "a1"]


def test_cached_tokens_cost_a_tenth_and_generated_ones_twice_as_much():
    queue = LeastAttained()
    for name in ("cached", "computed", "generated"):
        queue.push(request_named(name, session_id=name))
    for name in ("cached", "computed"):
        queue.push(request_named(name + "2", session_id=name))
    requests = {request.request_id: request for request in queue}
    for name in ("cached", "computed", "generated"):
        queue.remove(requests[name], admitted=True)
    queue.charge(requests["cached"], num_cached_tokens=19)
    queue.charge(requests["computed"], num_prefill_tokens=2)
    assert queue.head().request_id == "cached2"
    queue.charge(requests["cached"], num_cached_tokens=2)
    assert queue.head().request_id == "computed2"
    queue.charge(requests["computed"], num_output_tokens=1)
    assert queue.head().request_id == "cached2"


def test_tenants_take_turns_by_what_they_were_given():
    queue = FairTenants()
    for n in range(4):
        queue.push(request_named(f"loud{n}", tenant="loud"))
    queue.push(request_named("quiet0", tenant="quiet"))
    queue.push(request_named("quiet1", tenant="quiet"))
    assert taken(queue, cost=5) == ["loud0", "quiet0", "loud1", "quiet1", "loud2", "loud3"]
    queue.check()


def test_a_tenant_that_was_away_has_saved_nothing_up():
    queue = FairTenants()
    for n in range(20):
        queue.push(request_named(f"busy{n}", tenant="busy"))
    for _ in range(10):
        request = queue.head()
        queue.remove(request, admitted=True)
        queue.charge(request, num_prefill_tokens=10)
    for n in range(10):
        queue.push(request_named(f"late{n}", tenant="late"))
    order = taken(queue, cost=10)
    for n in range(1, 10):
        assert abs(sum(name.startswith("late") for name in order[: 2 * n]) - n) <= 1, order


def test_a_tenant_that_comes_to_an_empty_queue_starts_where_the_last_one_left():
    queue = FairTenants()
    queue.push(busy := request_named("busy", tenant="busy"))
    queue.remove(busy, admitted=True)
    queue.charge(busy, num_prefill_tokens=100)
    for n in range(2):
        queue.push(request_named(f"late{n}", tenant="late"))
    queue.push(request_named("busy1", tenant="busy"))
    assert taken(queue, cost=10) == ["late0", "busy1", "late1"]


def test_counters_of_those_who_are_long_gone_are_forgotten_and_of_those_who_wait_are_not():
    served: LeastServed[str] = LeastServed(max_keys=3)
    served.push("waits", request_named("x"))
    served.add("waits", 5)
    for n in range(100):
        served.add(f"gone{n}", 1)
        served.check()
    assert served.counter("waits") == 5
    assert served.counter("gone0") == 0
    assert served.counter("gone99") == 1
