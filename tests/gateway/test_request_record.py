"""What is timed of an answer: to the first token of any choice, then from token to token of the same one."""

from gateway.events import Started, TextDelta
from gateway.telemetry.request_record import RequestRecord


class SeenTimes:
    """Takes the record's observations."""

    def __init__(self) -> None:
        self.firsts = self.nexts = 0

    def saw_first_delta(self, _seconds: float) -> None:
        self.firsts += 1

    def saw_next_delta(self, _seconds: float) -> None:
        self.nexts += 1


async def test_two_choices_of_one_step_are_no_two_tokens_in_a_row() -> None:
    record, seen = RequestRecord(request_id="r", client_request_id=None), SeenTimes()
    events = [Started(num_prompt_tokens=1), *(TextDelta("a", index) for _ in range(5) for index in range(3))]
    for event in events:
        record.saw(event, seen)  # type: ignore[arg-type]  # a stand-in for the metrics' two methods
    assert (seen.firsts, seen.nexts) == (1, 3 * 4)
