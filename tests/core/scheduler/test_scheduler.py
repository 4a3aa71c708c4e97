from array import array

import pytest

from core.errors import RequestTooLong
from core.request import FinishReason, Request, SamplingParams
from core.scheduler.plan import SampledTokens, StepResult
from tests.fakes.kv_worker import generate_alone
from tests.properties.simulation import VOCAB_SIZE, Simulation, greedy

PROMPT = [1, 2, 3, 4, 5, 6]


def roomy(**options) -> Simulation:
    return Simulation(**{"num_blocks": 64, "block_size": 4, **options})


def alone(prompt_ids: list[int], max_tokens: int) -> list[int]:
    return generate_alone(prompt_ids, greedy(max_tokens), vocab_size=VOCAB_SIZE)


def planned(simulation: Simulation) -> dict[str, int]:
    """Schedule a step: request -> number of its tokens in the plan."""
    plan = simulation.schedule()
    return {item.request_id: len(item.token_ids) for item in plan.items} if plan else {}


def test_an_empty_scheduler_plans_nothing():
    assert roomy().schedule() is None


def test_a_request_gets_the_tokens_the_model_gives_and_ends_with_length():
    simulation = roomy()
    request_id = simulation.add(PROMPT, greedy(5))
    simulation.run()
    assert simulation.output_ids(request_id) == alone(PROMPT, 5)
    assert simulation.reason(request_id) is FinishReason.LENGTH


def test_a_stop_token_ends_the_request_and_is_reported():
    simulation = roomy()
    first = alone(PROMPT, 1)[0]
    request_id = simulation.add(PROMPT, greedy(5, stop_token_ids=(first,)))
    simulation.run()
    assert simulation.output_ids(request_id) == [first]
    assert simulation.reason(request_id) is FinishReason.STOP


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 16, 17])
def test_a_prompt_of_any_length_around_the_chunk_size_works(num_tokens):
    simulation = roomy(max_prefill_tokens=8)
    request_id = simulation.add([1] * num_tokens, greedy(3))
    simulation.finish_up()
    assert len(simulation.output_ids(request_id)) == 3


@pytest.mark.parametrize("max_prefill_tokens", [1, 7, 40])
def test_the_output_does_not_depend_on_the_chunk_size(max_prefill_tokens):
    simulation = roomy(max_prefill_tokens=max_prefill_tokens, max_step_tokens=40)
    request_id = simulation.add(PROMPT * 6, greedy(5))
    simulation.run()
    assert simulation.output_ids(request_id) == alone(PROMPT * 6, 5)


def test_only_the_last_chunk_of_a_prompt_is_sampled():
    simulation = roomy(max_prefill_tokens=4)
    simulation.add(PROMPT)
    plan = simulation.schedule()
    assert plan is not None
    assert [(item.num_samples, item.sampling) for item in plan.items] == [(0, None)]
    assert simulation.update() == []
    plan = simulation.schedule()
    assert plan is not None
    assert [item.num_samples for item in plan.items] == [1]


def test_running_streams_get_their_token_in_every_step_beside_a_long_prompt():
    simulation = roomy(max_step_tokens=10, max_prefill_tokens=8)
    streams = [simulation.add([n]) for n in range(3)]
    simulation.step()
    long_request = simulation.add([1] * 40)
    for _ in range(3):
        assert planned(simulation) == {**dict.fromkeys(streams, 1), long_request: 7}
        simulation.update()


def test_an_older_prompt_in_chunks_does_not_take_a_younger_streams_token():
    simulation = roomy(max_step_tokens=9, max_prefill_tokens=8)
    long_request, stream = simulation.add([1] * 40), simulation.add([2])
    simulation.step()
    assert planned(simulation) == {stream: 1, long_request: 8}


def test_budget_left_over_goes_to_waiting_requests_in_their_order():
    simulation = roomy(max_step_tokens=12, max_prefill_tokens=8)
    first, second, _ = (simulation.add([n] * 10) for n in range(3))
    assert planned(simulation) == {first: 8, second: 4}


def test_no_more_requests_run_than_may():
    simulation = roomy(max_running=2)
    for n in range(3):
        simulation.add([n])
    assert len(planned(simulation)) == 2
    assert simulation.scheduler.stats().num_waiting == 1


def test_what_could_never_fit_the_pool_is_refused_with_the_limit():
    scheduler = roomy(num_blocks=4).scheduler
    scheduler.check_admissible(12, 4)
    with pytest.raises(RequestTooLong, match=r"12 tokens.*up to 5 more.*the size of the KV cache is 16"):
        scheduler.check_admissible(12, 5)
    assert scheduler.max_request_tokens == 16


def test_what_could_never_fit_the_context_is_refused_with_the_limit():
    simulation = roomy(max_model_len=10)
    with pytest.raises(RequestTooLong, match="the context length is 10"):
        simulation.add([1] * 8, greedy(3))
    assert simulation.scheduler.num_unfinished == 0


def test_a_request_may_fill_the_whole_pool():
    simulation = roomy(num_blocks=4)
    request_id = simulation.add([1] * 6, greedy(10))
    simulation.finish_up()
    assert len(simulation.output_ids(request_id)) == 10


def test_a_request_without_a_prompt_or_a_seed_is_the_engines_mistake():
    scheduler = roomy().scheduler
    no_prompt = Request(request_id="x", token_ids=array("i"), num_prompt_tokens=0, sampling=greedy(1))
    with pytest.raises(AssertionError, match="needs a prompt"):
        scheduler.add(no_prompt)
    no_seed = Request(
        request_id="x", token_ids=array("i", [1]), num_prompt_tokens=1, sampling=SamplingParams(max_tokens=1)
    )
    with pytest.raises(AssertionError, match="seed"):
        scheduler.add(no_seed)


def test_a_second_request_with_the_same_prompt_reports_its_cached_tokens():
    simulation = roomy()
    simulation.add(PROMPT)
    simulation.run()
    second = simulation.add(PROMPT)
    simulation.finish_up()
    assert {output.num_cached_tokens for output in simulation.outputs[second]} == {5}
    stats = simulation.scheduler.stats()
    assert (stats.num_hit_tokens, stats.num_query_tokens) == (5, 12)


def test_generated_tokens_are_found_by_the_next_turn():
    simulation = roomy()
    first = simulation.add(PROMPT, greedy(7))
    simulation.run()
    history = PROMPT + simulation.output_ids(first)
    second = simulation.add([*history, 1, 1])
    simulation.finish_up()
    assert simulation.requests[second].num_cached_tokens == 12, "the last token's KV was never computed"


def crowded() -> tuple[Simulation, str, str]:
    """Two requests, of which the younger one must make room."""
    simulation = roomy(num_blocks=6)
    return simulation, simulation.add(PROMPT, greedy(16)), simulation.add(PROMPT[::-1], greedy(16))


def test_a_preempted_request_resumes_with_the_same_tokens():
    simulation, older, younger = crowded()
    simulation.finish_up()
    assert simulation.requests[older].num_preemptions == 0
    assert simulation.requests[younger].num_preemptions == 1, "resumed once there is room, not sooner"
    assert simulation.output_ids(younger) == alone(PROMPT[::-1], 16)


def test_a_preempted_request_goes_before_those_that_came_later():
    simulation, _, younger = crowded()
    latest = simulation.add([0] * 8, greedy(16))
    while simulation.reason(younger) is None:
        simulation.step()
        assert not simulation.outputs[latest] or simulation.reason(younger)
    simulation.finish_up()


def test_a_head_that_does_not_fit_is_not_overtaken():
    simulation = roomy(num_blocks=8)
    simulation.add([1] * 17, greedy(4))
    simulation.step()
    big, small = simulation.add([2] * 20), simulation.add([3])
    assert not {big, small} & planned(simulation).keys()
    simulation.update()
    simulation.finish_up()


def test_aborting_a_waiting_request_ends_it_once():
    simulation = roomy(max_running=1)
    simulation.add(PROMPT)
    waiting = simulation.add(PROMPT)
    simulation.step()
    simulation.abort(waiting)
    simulation.abort(waiting)
    assert [output.finish_reason for output in simulation.outputs[waiting]] == [FinishReason.ABORT]
    simulation.finish_up()


def test_aborting_in_mid_step_keeps_the_blocks_until_the_step_has_landed():
    simulation = roomy()
    request_id = simulation.add(PROMPT)
    simulation.schedule()
    simulation.abort(request_id)
    assert simulation.manager.num_held_blocks == 2
    assert simulation.update() == []
    assert simulation.manager.num_held_blocks == 0
    assert simulation.manager.num_cached_blocks == 0, "its step was never confirmed"
    assert simulation.reason(request_id) is FinishReason.ABORT


def test_aborting_everybody_in_mid_step_brings_the_pool_back():
    simulation = roomy(max_running=16)
    request_ids = [simulation.add([n % VOCAB_SIZE] * 5) for n in range(20)]
    simulation.step()
    simulation.schedule()
    for request_id in request_ids:
        simulation.abort(request_id)
    simulation.update()
    assert simulation.manager.num_held_blocks == 0
    simulation.add(PROMPT)
    simulation.finish_up()


def test_aborting_the_unknown_does_nothing():
    assert roomy().scheduler.abort("nobody") is None


def test_finishing_early_keeps_only_the_tokens_that_count():
    simulation = roomy()
    request_id = simulation.add(PROMPT, greedy(30))
    while len(simulation.output_ids(request_id)) < 12:
        simulation.step()
    simulation.finish(request_id, 3)
    assert simulation.reason(request_id) is FinishReason.STOP
    stats = simulation.scheduler.stats()
    assert (stats.num_cached_blocks, stats.num_output_tokens) == (2, 3)
    assert simulation.scheduler.finish(request_id, 2) is None


def test_finishing_early_in_mid_step_keeps_only_the_tokens_that_count():
    simulation = roomy()
    request_id = simulation.add(PROMPT, greedy(30))
    while len(simulation.output_ids(request_id)) < 12:
        simulation.step()
    simulation.schedule()
    simulation.finish(request_id, 3)
    assert simulation.update() == []
    assert simulation.scheduler.stats().num_cached_blocks == 2


def test_a_failed_step_ends_its_requests_and_nobody_else():
    simulation = roomy(max_running=1)
    first, second = simulation.add(PROMPT), simulation.add(PROMPT)
    simulation.schedule()
    outputs = simulation.fail()
    assert [(output.request_id, output.finish_reason, output.error) for output in outputs] == [
        (first, FinishReason.ERROR, "the step raised")
    ]
    assert simulation.manager.num_cached_blocks == 0
    simulation.finish_up()
    assert simulation.requests[second].num_cached_tokens == 0, "what the failed step wrote is not reused"


def test_a_row_that_cannot_be_sampled_ends_alone():
    simulation = roomy()
    bad, good = simulation.add(PROMPT), simulation.add(PROMPT[::-1])
    plan = simulation.schedule()
    assert plan is not None
    good_sample = simulation.worker.execute(plan).samples[1]
    samples = (SampledTokens(request_id=bad, error="no finite logit"), good_sample)
    simulation.update(StepResult(step_id=plan.step_id, samples=samples))
    assert simulation.outputs[bad][-1].error == "no finite logit"
    simulation.finish_up()
    assert simulation.reason(bad) is FinishReason.ERROR
    assert simulation.reason(good) is FinishReason.LENGTH


def test_a_sample_of_several_tokens_is_cut_at_the_end_of_the_request():
    simulation = roomy()
    request_id = simulation.add(PROMPT, greedy(5, stop_token_ids=(6,)))
    plan = simulation.schedule()
    assert plan is not None
    samples = (SampledTokens(request_id=request_id, token_ids=(3, 6, 4)),)
    simulation.update(StepResult(step_id=plan.step_id, samples=samples))
    assert simulation.output_ids(request_id) == [3, 6]
    assert simulation.reason(request_id) is FinishReason.STOP


def test_a_dead_worker_ends_everybody_and_empties_the_cache():
    simulation = roomy(max_running=2)
    simulation.add(PROMPT)
    simulation.run()
    request_ids = [simulation.add(PROMPT) for _ in range(3)]
    simulation.schedule()
    simulation.abort(request_ids[0])
    simulation.fail_all()
    assert [simulation.reason(request_id) for request_id in request_ids] == ["abort", "error", "error"]
    assert simulation.manager.num_free_blocks == simulation.manager.num_blocks
    simulation.add(PROMPT)
    simulation.finish_up()


def test_two_plans_in_flight_carry_two_chunks_of_one_prompt():
    simulation = roomy(max_prefill_tokens=4)
    request_id = simulation.add(PROMPT * 2)
    assert planned(simulation) == {request_id: 4}
    assert planned(simulation) == {request_id: 4}
    simulation.abort(request_id)
    simulation.update()
    assert simulation.manager.num_held_blocks == 3, "the second plan still names them"
    simulation.update()
    assert simulation.manager.num_held_blocks == 0


def test_a_request_whose_next_token_is_not_known_yet_is_not_planned():
    simulation = roomy()
    simulation.add(PROMPT)
    simulation.schedule()
    assert simulation.schedule() is None
    simulation.update()
    simulation.finish_up()


def test_a_request_without_room_waits_while_its_only_possible_victim_is_in_flight():
    simulation = roomy(num_blocks=12, max_prefill_tokens=2)
    stream, prompt = simulation.add([1] * 3, greedy(12)), simulation.add([2] * 40, greedy(1))
    simulation.schedule()
    while simulation.scheduler.num_unfinished:
        simulation.schedule()
        simulation.update()
    assert simulation.requests[stream].num_preemptions == 0
    assert simulation.output_ids(stream) == alone([1] * 3, 12)
    assert simulation.output_ids(prompt) == alone([2] * 40, 1)


def test_counts_of_how_requests_ended_add_up():
    simulation = roomy()
    simulation.abort(simulation.add(PROMPT))
    simulation.add(PROMPT)
    simulation.finish_up()
    stats = simulation.scheduler.stats()
    assert stats.num_finished == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    assert stats.num_free_blocks + stats.num_evictable_blocks + stats.num_held_blocks == 64
    assert stats.num_computed_tokens == len(PROMPT) + 3
