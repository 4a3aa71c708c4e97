"""What each waiting order promises, over random workloads: nobody starves, tenants get their shares, and
no order changes anybody's tokens.
"""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.request import Request
from core.scheduler.policies import WaitingQueue, find_policy, policy_names
from core.scheduler.policies.fair_tenants import FairTenants
from core.scheduler.policies.first_come import FirstCome
from core.scheduler.policies.least_attained import MAX_PASSES as LEAST_ATTAINED_PASSES
from core.scheduler.policies.least_attained import LeastAttained
from core.scheduler.policies.longest_prefix import MAX_PASSES as LONGEST_PREFIX_PASSES
from core.scheduler.policies.longest_prefix import LongestPrefix
from core.scheduler.service import OUTPUT_WEIGHT, PREFILL_WEIGHT, LeastServed, weigh
from core.scheduler.sessions import SessionGate
from tests.properties.profiles import budget
from tests.properties.simulation import VOCAB_SIZE, Simulation, greedy

seeds = st.integers(0, 2**32 - 1)

MAX_RUNNING = 2
MAX_PROMPT = 40
MAX_TOKENS = 8
COUNTER_BOUND = PREFILL_WEIGHT * MAX_PROMPT + OUTPUT_WEIGHT * MAX_RUNNING * MAX_TOKENS
"""U of `fair_tenants`."""


def request_of(number: int, *, tenant: str = "", session_id: str = "") -> Request:
    return Request(
        request_id=f"r{number}",
        token_ids=array("i", [1]),
        num_prompt_tokens=1,
        sampling=greedy(1),
        tenant=tenant,
        session_id=session_id,
    )


def most_passes(queue: WaitingQueue, choose: random.Random, *, num_rounds: int) -> int:
    """The most later requests that any request saw admitted before itself, newcomers arriving all along."""
    waiting: dict[str, int] = {}  # id -> arrival
    passes: dict[str, int] = {}
    for number in range(num_rounds):
        for copy in range(choose.choice((1, 1, 2))):
            session_id = choose.choice(("greedy", f"new{number}", f"new{number}"))
            request = request_of(2 * number + copy, session_id=session_id)
            queue.push(request, is_follower=choose.random() < 0.1)
            waiting[request.request_id] = 2 * number + copy
            passes[request.request_id] = 0
        head = queue.head()
        if choose.random() < 0.02:  # somebody gives up
            queue.remove(head, admitted=False)
            del waiting[head.request_id]
            continue
        queue.remove(head, admitted=True)
        queue.charge(head, num_prefill_tokens=choose.randrange(50), num_output_tokens=choose.randrange(50))
        arrival = waiting.pop(head.request_id)
        for request_id, earlier in waiting.items():
            passes[request_id] += earlier < arrival
    assert len(queue) == len(waiting)
    return max(passes.values())


@budget(examples=15)
@given(seed=seeds)
def test_longest_prefix_passes_nobody_over_more_often_than_it_says(seed: int) -> None:
    choose = random.Random(seed)
    queue = LongestPrefix(lambda _: choose.choice((0, 0, 16, 160)))
    assert most_passes(queue, choose, num_rounds=300) <= LONGEST_PREFIX_PASSES


@budget(examples=15)
@given(seed=seeds)
def test_least_attained_passes_nobody_over_more_often_than_it_says(seed: int) -> None:
    queue = LeastAttained()
    assert most_passes(queue, random.Random(seed), num_rounds=300) <= LEAST_ATTAINED_PASSES
    queue.check()


def test_the_bound_is_reached_so_the_two_above_can_fail() -> None:
    assert most_passes(LeastAttained(), random.Random(1), num_rounds=300) == LEAST_ATTAINED_PASSES


class Shares:
    """Listens to what a policy is told, and adds it up per tenant."""

    def __init__(self, queue: WaitingQueue) -> None:
        self.queue = queue
        self.push, self.head, self.remove = queue.push, queue.head, queue.remove
        self.given: dict[str, int] = {}

    def charge(self, request: Request, **tokens: int) -> None:
        self.queue.charge(request, **tokens)
        self.given[request.tenant] = self.given.get(request.tenant, 0) + weigh(**tokens)

    def __len__(self) -> int:
        return len(self.queue)

    def __iter__(self):
        return iter(self.queue)


def widest_difference(policy: WaitingQueue, choose: random.Random, *, num_blocks: int) -> int:
    """Over all intervals in which all tenants wait: by how much one was given more than another.

    One tenant comes first with all it has, as a flood does.
    """
    shares = Shares(policy)
    simulation = Simulation(
        num_blocks=num_blocks, block_size=4, max_running=MAX_RUNNING, max_prefill_tokens=16, policy=shares
    )
    tenants = ("flood", "other", "third")
    for tenant in tenants:
        for _ in range(10):
            prompt = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randint(1, MAX_PROMPT))]
            sampling = greedy(choose.randint(1, MAX_TOKENS))
            simulation.add(prompt, sampling, namespace=tenant.encode(), tenant=tenant)
    differences: dict[tuple[str, str], list[int]] = {(a, b): [0] for a in tenants for b in tenants if a < b}
    while True:
        simulation.step()
        if {request.tenant for request in shares} != set(tenants):
            break
        for (a, b), seen in differences.items():
            seen.append(shares.given.get(a, 0) - shares.given.get(b, 0))
    simulation.finish_up()
    return max(max(seen) - min(seen) for seen in differences.values())


@pytest.mark.parametrize("num_blocks", [64, 14], ids=["roomy", "crowded"])
@budget(examples=5)
@given(seed=seeds)
def test_tenants_that_wait_are_given_the_same_within_twice_the_counters_bound(
    num_blocks: int, seed: int
) -> None:
    difference = widest_difference(FairTenants(), random.Random(seed), num_blocks=num_blocks)
    assert difference <= 2 * COUNTER_BOUND


def test_a_flood_breaks_that_bound_where_who_comes_first_goes_first() -> None:
    assert widest_difference(FirstCome(), random.Random(0), num_blocks=64) > 2 * COUNTER_BOUND


@budget(examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("push", "take", "drop", "charge")), st.sampled_from("abc"), st.integers(0, 50)
        ),
        max_size=60,
    )
)
def test_the_key_that_was_served_least_is_always_the_one_found(
    operations: list[tuple[str, str, int]],
) -> None:
    served: LeastServed[str] = LeastServed(max_keys=4)
    waiting: dict[str, list[Request]] = {key: [] for key in "abc"}
    for number, (what, key, amount) in enumerate(operations):
        if what == "push":
            request = request_of(number)
            served.push(key, request)
            waiting[key].append(request)
        elif what == "drop" and waiting[key]:
            served.remove(key, waiting[key].pop(amount % len(waiting[key])))
        elif what == "take" and len(served):
            least = served.least()
            assert served.head() is waiting[least][0]
            assert served.counter(least) == min(served.counter(k) for k in "abc" if waiting[k])
            served.remove(least, waiting[least].pop(0))
            served.add(least, amount)
        else:
            served.add(key, amount)
        served.check()
        assert len(served) == sum(map(len, waiting.values()))


@pytest.mark.parametrize("gated", [False, True], ids=["without gate", "gated"])
@pytest.mark.parametrize("name", policy_names())
@budget(examples=15)
@given(seed=seeds)
def test_no_order_changes_anybodys_tokens_or_forgets_anybody(name: str, gated: bool, seed: int) -> None:
    choose = random.Random(seed)
    num_blocks, block_size = choose.choice(((16, 4), (40, 2)))
    lengths: dict[str, int] = {}

    def match_length(request: Request) -> int:
        lengths[request.request_id] = simulation.manager.match_length(request)
        return lengths[request.request_id]

    simulation = Simulation(
        num_blocks=num_blocks,
        block_size=block_size,
        max_running=3,
        policy=find_policy(name)(match_length),
        gate=SessionGate(num_blocks * block_size) if gated else None,
    )
    histories = {session: [choose.randrange(VOCAB_SIZE)] * 8 for session in "abcd"}
    for _ in range(60):
        dice = choose.random()
        if dice < 0.35:
            session = choose.choice("abcd")
            histories[session] = [*histories[session], choose.randrange(VOCAB_SIZE)][:50]
            simulation.add(
                histories[session],
                greedy(choose.randint(1, 6)),
                session_id=session,
                tenant=choose.choice("xy"),
            )
        elif dice < 0.6 and len(simulation.in_flight) < 2:
            simulation.schedule()
        elif dice < 0.9 and simulation.in_flight:
            simulation.update()
        elif dice < 0.93:
            simulation.fail_all()
        elif simulation.requests:
            simulation.abort(choose.choice(sorted(simulation.requests)))
    simulation.finish_up()
    assert bool(lengths) == (name == "longest_prefix")
