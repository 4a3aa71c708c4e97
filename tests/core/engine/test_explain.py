"""Where a request's time went: by a clock that the test moves, and by a real engine's own."""

import asyncio
from array import array

import pytest

from core.engine.explain import Explanation
from core.engine.recorder import Recorder
from core.request import FinishReason, Request, RequestStatus, SamplingParams
from core.scheduler.plan import PlannedTokens, StepPlan, StepResult
from core.scheduler.stats import SchedulerStats
from tests.core.engine.running import collect, config, greedy, opened, wait_for

BLOCK_SIZE = 4
NUMBERS = SchedulerStats(
    num_waiting=0,
    num_running=0,
    num_steps_in_flight=0,
    num_free_blocks=9,
    num_evictable_blocks=2,
    num_held_blocks=5,
    num_cached_blocks=4,
    num_query_tokens=0,
    num_hit_tokens=0,
    num_computed_tokens=0,
    num_output_tokens=0,
    num_preemptions=0,
    num_finished={},
    num_live_tokens=15,
    num_allocated_tokens=20,
)


class Bench:
    """A recorder, a clock and requests; turns are told as (request, first position, tokens)."""

    def __init__(self) -> None:
        self.now = 100.0
        self.nearest: tuple[int, int | None] = (0, None)
        self.recorder = Recorder(find_nearest=lambda _request: self.nearest, block_size=BLOCK_SIZE)
        self.step_id = 0

    def submit(self, name: str, *, num_prompt_tokens: int = 8, first_block: int = 0) -> Request:
        request = Request(
            request_id=f"r{len(self.recorder.books) + 1}",
            token_ids=array("i", [7] * num_prompt_tokens),
            num_prompt_tokens=num_prompt_tokens,
            sampling=SamplingParams(max_tokens=99, seed=0),
            block_table=array("i", range(first_block, first_block + 30)),
            num_cached_tokens=0,
        )
        self.recorder.submitted(request, name, at=self.now)
        return request

    def begin(self, *items: tuple[Request, int, int]):
        self.step_id += 1
        planned = tuple(
            PlannedTokens(
                request_id=request.request_id, token_ids=(7,) * count, first_position=first, block_table=b""
            )
            for request, first, count in items
        )
        for request, _, _ in items:
            request.status = RequestStatus.RUNNING
        plan = StepPlan(step_id=self.step_id, items=planned)
        return self.recorder.begin(plan, began_at=self.now, scheduled_at=self.now)

    def turn(self, *items: tuple[Request, int, int], takes: float) -> None:
        turn = self.begin(*items)
        turn.submitted_at = self.now
        self.now += takes
        turn.computed_at = self.now
        result = StepResult(step_id=self.step_id, samples=())
        self.recorder.end(turn, result, outputs=(), scheduler=NUMBERS, at=self.now)

    def explain(self, name: str) -> Explanation:
        (explanation,) = self.recorder.explain(name, at=self.now)
        assert times(explanation)[0] == pytest.approx(sum(times(explanation)[1:]))
        return explanation


def times(explanation: Explanation) -> tuple[float, ...]:
    return (
        explanation.total_s,
        explanation.queued_s,
        explanation.prefilling_s,
        explanation.decoding_s,
        explanation.stalled_s,
    )


def test_a_request_alone_queues_then_prefills_then_decodes():
    bench = Bench()
    request = bench.submit("a")
    bench.now += 2.0
    bench.turn((request, 0, 8), takes=3.0)
    bench.turn((request, 8, 1), takes=0.5)
    bench.turn((request, 9, 1), takes=0.5)
    explanation = bench.explain("a")
    assert times(explanation) == pytest.approx((6.0, 2.0, 3.0, 1.0, 0.0))
    assert (explanation.num_steps, explanation.status) == (3, "running")
    assert (explanation.num_prefilled_tokens, explanation.num_decoded_tokens) == (8, 2)


def test_of_a_shared_step_the_tokens_of_others_prompts_stall():
    bench = Bench()
    stream, newcomer = bench.submit("stream"), bench.submit("newcomer", num_prompt_tokens=12)
    bench.turn((stream, 0, 8), takes=1.0)
    bench.turn((stream, 8, 1), (newcomer, 0, 9), takes=10.0)
    assert times(bench.explain("stream")) == pytest.approx((11.0, 0.0, 1.0, 1.0, 9.0))
    assert times(bench.explain("newcomer")) == pytest.approx((11.0, 1.0, 10.0, 0.0, 0.0))


def test_two_prompts_in_one_step_stall_each_other_and_decoding_ones_stall_nobody():
    bench = Bench()
    one, two, stream = bench.submit("one"), bench.submit("two"), bench.submit("stream", num_prompt_tokens=1)
    bench.turn((one, 0, 6), (two, 0, 2), (stream, 1, 2), takes=10.0)
    assert times(bench.explain("one")) == pytest.approx((10.0, 0.0, 8.0, 0.0, 2.0))
    assert times(bench.explain("two")) == pytest.approx((10.0, 0.0, 4.0, 0.0, 6.0))
    assert times(bench.explain("stream")) == pytest.approx((10.0, 0.0, 0.0, 2.0, 8.0))


def test_a_running_request_that_a_turn_leaves_out_is_stalled():
    bench = Bench()
    kept, other = bench.submit("kept"), bench.submit("other")
    bench.turn((kept, 0, 8), takes=1.0)
    bench.turn((other, 0, 8), takes=4.0)
    assert times(bench.explain("kept")) == pytest.approx((5.0, 0.0, 1.0, 0.0, 4.0))
    bench.turn((kept, 8, 1), takes=1.0)
    assert times(bench.explain("kept")) == pytest.approx((6.0, 0.0, 1.0, 1.0, 4.0))


def test_after_a_preemption_it_queues_again_and_what_it_lost_is_recomputed():
    bench = Bench()
    victim, other = bench.submit("victim"), bench.submit("other")
    bench.turn((victim, 0, 8), takes=1.0)
    bench.turn((victim, 8, 1), takes=1.0)
    victim.num_preemptions, victim.status = 1, RequestStatus.WAITING
    bench.turn((other, 0, 8), takes=5.0)
    assert bench.explain("victim").status == "waiting"
    bench.turn((victim, 4, 6), takes=2.0)
    explanation = bench.explain("victim")
    assert times(explanation) == pytest.approx((9.0, 5.0, 3.0, 1.0, 0.0))
    assert explanation.num_recomputed_tokens == 5
    assert (explanation.num_prefilled_tokens, explanation.num_decoded_tokens) == (8, 2)
    assert explanation.num_preemptions == 1


def test_an_idle_loop_stalls_nobody_and_a_busy_loops_own_time_counts_with_the_step():
    bench = Bench()
    request = bench.submit("a")
    bench.turn((request, 0, 8), takes=1.0)
    bench.now += 0.25  # the loop writes tokens before it plans again
    bench.turn((request, 8, 1), takes=1.0)
    assert times(bench.explain("a")) == pytest.approx((2.25, 0.0, 1.0, 1.25, 0.0))
    bench.recorder.idle()
    bench.now += 7.0
    late = bench.submit("late")
    bench.turn((late, 0, 8), takes=1.0)
    assert times(bench.explain("late")) == pytest.approx((1.0, 0.0, 1.0, 0.0, 0.0))


def test_decoding_on_and_on_books_every_turn_once_however_often_somebody_asks():
    bench = Bench()
    one, two = bench.submit("one"), bench.submit("two")
    bench.turn((one, 0, 8), (two, 0, 8), takes=2.0)
    for n in range(1, 6):
        bench.turn((one, 7 + n, 1), (two, 7 + n, 1), takes=1.0)
        assert times(bench.explain("one")) == pytest.approx((2.0 + n, 0.0, 1.0, n, 1.0))
    newcomer = bench.submit("newcomer", num_prompt_tokens=20)
    bench.turn((one, 13, 1), (two, 13, 1), (newcomer, 0, 6), takes=4.0)
    assert times(bench.explain("two")) == pytest.approx((11.0, 0.0, 1.0, 6.0, 4.0))
    turn = bench.begin((one, 14, 1), (two, 14, 1), (newcomer, 6, 14))
    bench.now += 8.0
    assert times(bench.explain("one")) == pytest.approx((19.0, 0.0, 1.0, 7.0, 11.0)), (
        "in the middle of a step"
    )
    bench.recorder.ended("r2", FinishReason.ABORT, at=bench.now)
    bench.now += 8.0
    bench.recorder.end(turn, None, outputs=(), scheduler=NUMBERS, at=bench.now)
    assert times(bench.explain("two")) == pytest.approx((19.0, 0.0, 1.0, 7.0, 11.0))
    assert times(bench.explain("one")) == pytest.approx((27.0, 0.0, 1.0, 8.0, 18.0))
    assert (bench.explain("one").num_steps, bench.explain("one").num_decoded_tokens) == (8, 7)
    bench.turn((newcomer, 20, 1), takes=1.0)
    assert times(bench.explain("one")) == pytest.approx((28.0, 0.0, 1.0, 8.0, 19.0))


def test_after_a_pause_of_the_loop_the_running_ones_were_stalled():
    bench = Bench()
    request = bench.submit("a")
    bench.turn((request, 0, 8), takes=1.0)
    bench.turn((request, 8, 1), takes=1.0)
    bench.recorder.idle()
    bench.now += 5.0
    bench.turn((request, 9, 1), takes=1.0)
    assert times(bench.explain("a")) == pytest.approx((8.0, 0.0, 1.0, 2.0, 5.0))


def test_one_that_leaves_in_the_middle_of_a_step_is_booked_until_then():
    bench = Bench()
    leaver, other = bench.submit("leaver"), bench.submit("other")
    turn = bench.begin((leaver, 0, 4), (other, 0, 4))
    bench.now += 2.0
    bench.recorder.ended("r1", FinishReason.ABORT, at=bench.now)
    bench.now += 3.0
    bench.recorder.end(turn, None, outputs=(), scheduler=NUMBERS, at=bench.now)
    explanation = bench.explain("leaver")
    assert times(explanation) == pytest.approx((2.0, 0.0, 1.0, 0.0, 1.0))
    assert (explanation.status, explanation.finish_reason) == ("finished", "abort")
    assert times(bench.explain("other")) == pytest.approx((5.0, 0.0, 2.5, 0.0, 2.5))


def test_one_that_never_ran_was_only_queued():
    bench = Bench()
    bench.submit("a")
    bench.now += 3.0
    bench.recorder.ended("r1", FinishReason.ABORT, at=bench.now)
    assert times(bench.explain("a")) == pytest.approx((3.0, 3.0, 0.0, 0.0, 0.0))
    assert bench.explain("a").cache == "miss"
    assert bench.recorder.books.seconds == pytest.approx([3.0, 0.0, 0.0, 0.0])


def test_a_steps_numbers_are_by_kind_and_add_up():
    bench = Bench()
    old, new = bench.submit("old"), bench.submit("new")
    bench.turn((old, 0, 8), takes=1.0)
    bench.turn((old, 8, 1), (new, 0, 8), takes=1.0)
    old.num_preemptions = 1
    bench.turn((old, 0, 10), takes=1.0)
    kinds = [
        (step.num_prefill_tokens, step.num_recomputed_tokens, step.num_decode_tokens)
        for step in bench.recorder.log.after(0)
    ]
    assert kinds == [(8, 0, 0), (8, 0, 1), (0, 9, 1)]
    stats = bench.recorder.snapshot(NUMBERS, num_restarts=0)
    assert (stats.num_steps, stats.num_batched_requests) == (3, 4)
    assert (stats.num_prefill_tokens, stats.num_recomputed_tokens, stats.num_decode_tokens) == (16, 9, 2)
    assert bench.recorder.log.after(2)[0].waste == pytest.approx(0.25)


def test_the_nearest_sequence_is_named_by_who_computed_it():
    bench = Bench()
    first = bench.submit("first", first_block=10)
    bench.turn((first, 0, 8), takes=1.0)
    bench.nearest = (6, 11)  # two tokens into the second block of the first one's
    second = bench.submit("second", first_block=50)
    bench.turn((second, 4, 4), takes=1.0)
    explanation = bench.explain("second")
    assert (explanation.diverged_at, explanation.nearest_request_id) == (6, "first")
    bench.nearest = (0, None)
    third = bench.submit("third", first_block=90)
    bench.turn((third, 0, 8), takes=1.0)
    assert (bench.explain("third").diverged_at, bench.explain("third").nearest_request_id) == (0, None)


def test_generated_tokens_are_somebodys_too():
    bench = Bench()
    first = bench.submit("first", first_block=10)
    bench.turn((first, 0, 8), takes=1.0)
    bench.turn((first, 8, 1), takes=1.0)  # the first slot of its third block
    bench.nearest = (9, 12)
    second = bench.submit("second", num_prompt_tokens=12, first_block=50)
    bench.turn((second, 8, 4), takes=1.0)
    assert bench.explain("second").nearest_request_id == "first"


def test_finished_ones_are_remembered_up_to_a_number():
    bench = Bench()
    bench.recorder.books = type(bench.recorder.books)(num_remembered=2)
    for n in range(3):
        request = bench.submit(f"q{n}")
        bench.recorder.ended(request.request_id, FinishReason.ABORT, at=bench.now)
    assert [len(bench.recorder.explain(f"q{n}", at=bench.now)) for n in range(3)] == [0, 1, 1]


async def test_a_real_engine_explains_a_miss_a_hit_and_a_divergence():
    prompt = tuple(range(1, 21))
    async with opened(config()) as engine:
        await collect(engine, prompt, greedy(4), request_id="first")
        await collect(engine, prompt, greedy(4), request_id="again")
        await collect(engine, (*prompt[:10], 90, *prompt[11:]), greedy(4), request_id="other")
        await collect(engine, prompt, greedy(4), request_id="stranger", namespace=b"else")
        found = {name: engine.explain(name)[0] for name in ("first", "again", "other", "stranger")}
        assert engine.explain("nobody") == ()
        assert engine.live_requests() == ()
    assert [each.cache for each in found.values()] == ["miss", "hit", "hit", "miss"]
    assert [each.diverged_at for each in found.values()] == [0, 20, 10, 0]
    assert [each.nearest_request_id for each in found.values()] == [None, "first", "first", None]
    for each in found.values():
        assert times(each)[0] == pytest.approx(sum(times(each)[1:]))
        assert each.num_cached_tokens + each.num_prefilled_tokens == 20
        assert (each.num_decoded_tokens, each.num_output_tokens) == (3, 4)
        assert (each.status, each.finish_reason) == ("finished", "length")


async def test_choices_of_one_name_are_explained_one_by_one_and_live_ones_are_listed():
    async with opened(config()) as engine:
        async with (
            engine.generate("both", (1, 2, 3), greedy(60)) as one,
            engine.generate("both", (4, 5, 6), greedy(60)) as two,
        ):
            await anext(one)
            await anext(two)
            await wait_for(lambda: all(each.num_steps > 2 for each in engine.live_requests()))
            live = engine.live_requests()
        assert [(each.request_id, each.status) for each in live] == [("both", "running")] * 2
        assert live[0].engine_id != live[1].engine_id
        ended = engine.explain("both")
        assert [each.engine_id for each in ended] == [each.engine_id for each in live]
        assert {each.finish_reason for each in ended} <= {"abort", "length"}


async def test_under_preemption_every_requests_states_add_up_to_its_life():
    options = config(num_blocks=24, max_running=8)
    async with opened(options) as engine:
        streams = [engine.generate(f"q{n}", tuple(range(n, n + 12)), greedy(40)) for n in range(1, 9)]

        async def read(stream):
            async with stream:
                return [output async for output in stream]

        await asyncio.gather(*(read(stream) for stream in streams))
        found = [engine.explain(f"q{n}")[0] for n in range(1, 9)]
        stats = engine.stats()
    assert stats.scheduler.num_preemptions > 0, "the pool was too large to test anything"
    assert stats.num_recomputed_tokens > 0
    assert sum(each.num_recomputed_tokens for each in found) == stats.num_recomputed_tokens
    assert sum(each.num_prefilled_tokens for each in found) == stats.num_prefill_tokens
    assert sum(each.num_decoded_tokens for each in found) == stats.num_decode_tokens
    assert sum(each.num_steps for each in found) == stats.num_batched_requests
    for each in found:
        assert times(each)[0] == pytest.approx(sum(times(each)[1:]))
        assert min(times(each)) >= 0.0
    assert sum(stats.request_s.values()) == pytest.approx(sum(each.total_s for each in found))
