from array import array

from core.request import Request
from core.scheduler.policies import FirstComeFirstServed
from tests.properties.simulation import greedy


def request_named(name: str) -> Request:
    return Request(request_id=name, token_ids=array("i", [1]), num_prompt_tokens=1, sampling=greedy(1))


def test_newcomers_wait_in_the_order_in_which_they_came():
    queue = FirstComeFirstServed()
    for name in "abc":
        queue.push(request_named(name))
    assert [request.request_id for request in queue] == ["a", "b", "c"]
    assert queue.head().request_id == "a"


def test_preempted_requests_go_first_and_the_older_one_before_the_younger():
    queue = FirstComeFirstServed()
    queue.push(request_named("new"))
    queue.push_back(request_named("younger"))  # the youngest is preempted first
    queue.push_back(request_named("older"))
    assert [request.request_id for request in queue] == ["older", "younger", "new"]


def test_anybody_can_leave_the_queue():
    queue = FirstComeFirstServed()
    requests = [request_named(name) for name in "abc"]
    for request in requests:
        queue.push(request)
    queue.remove(requests[1])
    assert [request.request_id for request in queue] == ["a", "c"]
    assert len(queue) == 2
