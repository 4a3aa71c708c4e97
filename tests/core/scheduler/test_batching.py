"""Who joins when: continuous and static batches, chunked and whole prompts."""

from core.request import FinishReason
from tests.core.scheduler.test_scheduler import PROMPT, alone, planned, roomy
from tests.properties.simulation import greedy


def test_a_static_batch_lets_nobody_in_before_the_last_of_it_has_ended():
    simulation = roomy(batching="static")
    short, long = simulation.add([1], greedy(2)), simulation.add([2], greedy(6))
    assert set(planned(simulation)) == {short, long}
    simulation.update()
    late = simulation.add([3], greedy(2))
    while simulation.reason(long) is None:
        assert late not in planned(simulation)
        simulation.update()
    assert simulation.reason(short) is FinishReason.LENGTH
    assert set(planned(simulation)) == {late}
    simulation.update()
    simulation.finish_up()


def test_a_continuous_batch_lets_a_newcomer_in_at_the_next_step():
    simulation = roomy()
    first = simulation.add([1], greedy(6))
    simulation.step()
    late = simulation.add([3], greedy(2))
    assert set(planned(simulation)) == {first, late}
    simulation.update()
    simulation.finish_up()


def test_a_static_batch_is_filled_at_once_even_past_the_budget_of_its_first_step():
    simulation = roomy(batching="static", max_step_tokens=8, max_prefill_tokens=8, max_running=3)
    for n in range(4):
        simulation.add([n] * 6, greedy(3))
    simulation.step()
    stats = simulation.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (3, 1)
    simulation.finish_up()


def test_a_static_batch_whose_requests_are_all_aborted_makes_way():
    simulation = roomy(batching="static")
    first = simulation.add([1], greedy(20))
    simulation.step()
    late = simulation.add([2], greedy(2))
    simulation.abort(first)
    simulation.finish_up()
    assert simulation.output_ids(late) == alone([2], 2)


def test_a_whole_prompt_goes_in_one_step_past_budget_and_share():
    simulation = roomy(whole_prompts=True, max_step_tokens=8, max_prefill_tokens=4)
    stream = simulation.add([1], greedy(9))
    simulation.step()
    prompt = simulation.add(PROMPT * 5, greedy(2))
    assert planned(simulation) == {stream: 1, prompt: 30}
    simulation.update()
    simulation.finish_up()


def test_a_second_whole_prompt_waits_for_a_step_in_which_it_fits():
    simulation = roomy(whole_prompts=True, max_step_tokens=8)
    first, second, third = (simulation.add([n] * 5, greedy(2)) for n in range(3))
    assert planned(simulation) == {first: 5}
    simulation.update()
    assert planned(simulation) == {first: 1, second: 5}, "nobody behind it goes before"
    simulation.update()
    assert third in planned(simulation)
    simulation.update()
    simulation.finish_up()
