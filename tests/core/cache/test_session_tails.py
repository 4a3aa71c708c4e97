"""A session's superseded tail goes first; what anybody may still come back to does not."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from core.cache.manager import KVCacheManager
from core.cache.retention import LeastRecentlyUsed
from core.request import Request
from tests.properties.profiles import budget
from tests.properties.simulation import greedy

BLOCK_SIZE = 2
SYSTEM = [1, 1, 1, 1]


class Cache:
    """A manager driven as the scheduler would, everything computed at once."""

    def __init__(self, num_blocks: int = 32, **options) -> None:
        self.manager = KVCacheManager(num_blocks, BLOCK_SIZE, **options)
        self.held: list[Request] = []
        self.num_requests = 0

    def begin(self, prompt: list[int], *, session_id: str = "s", namespace: bytes = b"") -> Request:
        """Give a request its blocks and compute its prompt."""
        self.num_requests += 1
        request = Request(
            request_id=f"r{self.num_requests}",
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            sampling=greedy(1000),
            session_id=session_id,
            namespace=namespace,
        )
        assert self.manager.attach_prefix(request, room_for=len(prompt))
        self.held.append(request)
        self.compute(request, len(prompt) - request.num_computed_tokens)
        return request

    def compute(self, request: Request, num_tokens: int) -> None:
        assert self.manager.try_grow(request, num_tokens)
        self.manager.take_copies([request])
        request.num_computed_tokens += num_tokens
        self.manager.commit(request)
        self.manager.check(self.held)

    def end(self, request: Request, answer: list[int] | None = None) -> None:
        """Generate an answer and give everything back."""
        if answer:
            request.token_ids.extend(answer)
            self.compute(request, len(answer))
        self.held.remove(request)
        self.manager.release(request)
        self.manager.check(self.held)

    def turn(self, prompt: list[int], answer: list[int] | None = None, **whose) -> None:
        self.end(self.begin(prompt, **whose), answer)

    def evict(self, num_blocks: int) -> None:
        """Fill the pool until so many blocks had to go."""
        filler = Request(
            request_id="filler",
            token_ids=array("i", [99] * BLOCK_SIZE * (self.manager.num_free_blocks + num_blocks)),
            num_prompt_tokens=1,
            sampling=greedy(1),
            namespace=b"filler",
        )
        assert self.manager.attach_prefix(filler, room_for=len(filler.token_ids))
        assert self.manager.try_grow(filler, len(filler.token_ids))
        self.manager.release(filler)
        self.manager.check(self.held)

    def cached(self, prompt: list[int], *, namespace: bytes = b"") -> int:
        """How many first tokens of a prompt are in the cache."""
        request = Request(
            request_id="look",
            token_ids=array("i", [*prompt, 0]),
            num_prompt_tokens=len(prompt) + 1,
            sampling=greedy(1),
            namespace=namespace,
        )
        return self.manager.match_length(request)


TURN_1 = [*SYSTEM, 2, 2]
ANSWER_1 = [3, 3, 3, 3]
RESENT_1 = [4, 4, 4, 4]  # as the client sent it back: without its thoughts, say
TURN_2 = [*TURN_1, *RESENT_1, 5, 5]
OTHER = [*SYSTEM, 7, 7, 7, 7]


def test_the_end_of_a_turn_goes_before_older_prefixes_once_the_next_turn_went_another_way():
    cache = Cache()
    cache.turn(OTHER, session_id="other")  # older, and untouched since
    cache.turn(TURN_1, ANSWER_1)
    cache.turn(TURN_2)
    cache.evict(2)
    assert cache.cached([*TURN_1, *ANSWER_1]) == len(TURN_1)
    assert cache.cached(OTHER) == len(OTHER)
    assert cache.cached(TURN_2) == len(TURN_2)


def test_without_that_the_older_prefix_would_have_gone():
    cache = Cache(retention=LeastRecentlyUsed())
    cache.turn(OTHER, session_id="other")
    cache.turn(TURN_1, ANSWER_1)
    cache.turn(TURN_2)
    cache.evict(2)
    assert cache.cached(OTHER) < len(OTHER)
    assert cache.cached([*TURN_1, *ANSWER_1]) == len(TURN_1) + len(ANSWER_1)


def test_a_tail_is_worthless_as_soon_as_the_next_prompt_is_computed_while_its_answer_still_runs():
    cache = Cache()
    cache.turn(OTHER, session_id="other")
    cache.turn(TURN_1, ANSWER_1)
    running = cache.begin(TURN_2)
    cache.evict(2)
    assert cache.cached(OTHER) == len(OTHER)
    assert cache.cached([*TURN_1, *ANSWER_1]) == len(TURN_1)
    cache.end(running)


def test_a_compacted_history_gives_up_all_that_was_left_out():
    cache = Cache()
    cache.turn(OTHER, session_id="other")
    cache.turn([*SYSTEM, *[8] * 12], [9] * 4)
    cache.turn([*SYSTEM, 6, 6])
    cache.evict(8)
    assert cache.cached(OTHER) == len(OTHER)
    assert cache.cached([*SYSTEM, *[8] * 12]) == len(SYSTEM)


def test_a_turn_that_goes_on_where_the_last_one_ended_supersedes_nothing():
    cache = Cache()
    cache.turn(OTHER, session_id="other")
    cache.turn(TURN_1, ANSWER_1)
    cache.turn([*TURN_1, *ANSWER_1, 5, 5])
    cache.evict(2)
    assert cache.cached([*TURN_1, *ANSWER_1, 5, 5]) == 12
    assert cache.cached(OTHER) < len(OTHER)


def test_what_another_session_shares_is_not_given_up():
    cache = Cache()
    cache.turn(OTHER, session_id="other")
    cache.turn(TURN_1, ANSWER_1)
    cache.turn([*TURN_1, *ANSWER_1, 6, 6], session_id="fork")
    cache.turn([*SYSTEM, 9, 9])
    cache.evict(2)
    assert cache.cached([*TURN_1, *ANSWER_1, 6, 6]) == 12
    assert cache.cached(OTHER) < len(OTHER)


def test_what_another_request_still_reads_is_not_given_up():
    cache = Cache()
    cache.turn(TURN_1, ANSWER_1)
    reader = cache.begin([*TURN_1, *ANSWER_1, 6], session_id="")
    cache.turn(TURN_2)
    cache.evict(1)
    assert cache.cached([*TURN_1, *ANSWER_1]) == 10
    cache.end(reader)


def test_turns_side_by_side_are_branches_and_supersede_nothing():
    cache = Cache()
    cache.turn(OTHER, session_id="other")
    one, two = cache.begin([*SYSTEM, 2, 2]), cache.begin([*SYSTEM, 3, 3])
    cache.end(one, [4, 4])
    cache.end(two, [5, 5])
    cache.turn([*SYSTEM, 3, 3, 5, 5, 6, 6])
    cache.evict(2)
    assert cache.cached([*SYSTEM, 2, 2, 4, 4]) == 8
    assert cache.cached(OTHER) < len(OTHER)


def test_who_comes_back_to_a_tail_after_all_finds_it_and_it_counts_again():
    cache = Cache()
    cache.turn(OTHER, session_id="other")
    cache.turn(TURN_1, ANSWER_1)
    cache.turn(TURN_2)
    cache.turn([*TURN_1, *ANSWER_1, 6], session_id="")
    cache.evict(2)
    assert cache.cached([*TURN_1, *ANSWER_1]) == 10
    assert cache.cached(OTHER) < len(OTHER)


def test_sessions_of_one_name_in_two_namespaces_are_two():
    cache = Cache()
    cache.turn(OTHER, session_id="other")
    cache.turn(TURN_1, ANSWER_1, namespace=b"a")
    cache.turn(TURN_2, namespace=b"b")
    cache.evict(2)
    assert cache.cached([*TURN_1, *ANSWER_1], namespace=b"a") == 10
    assert cache.cached(OTHER) < len(OTHER)


def test_a_tail_that_was_evicted_meanwhile_does_no_harm():
    cache = Cache()
    cache.turn(TURN_1, ANSWER_1)
    cache.evict(5)
    assert cache.cached(TURN_1) == 0
    cache.turn(TURN_2)
    assert cache.cached(TURN_2) == len(TURN_2)


token_lists = st.lists(st.integers(1, 3), min_size=1, max_size=10)
turns = st.tuples(st.sampled_from(("a", "b", "")), token_lists, st.lists(st.integers(1, 3), max_size=5))


@budget(examples=60)
@given(history=st.lists(turns, min_size=1, max_size=12), num_evicted=st.integers(1, 6))
def test_any_turns_of_any_sessions_keep_the_books_right(history, num_evicted):
    cache = Cache(num_blocks=24)
    open_turns: list[Request] = []
    for index, (session_id, prompt, answer) in enumerate(history):
        request = cache.begin(prompt, session_id=session_id)
        if index % 3 == 0 and len(open_turns) < 2:
            open_turns.append(request)
        else:
            cache.end(request, answer)
    for request in open_turns:
        cache.end(request)
    if num_evicted <= cache.manager.num_cached_blocks:
        cache.evict(num_evicted)
