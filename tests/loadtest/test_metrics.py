import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.errors import PlanInvalid
from loadtest.metrics import SLO, Measures, measure
from loadtest.record import RequestRecord
from tests.loadtest.record_factory import answered, failed, plan_for


def measured(records: list[RequestRecord], *, duration_s: float = 10.0, **options: Any) -> Measures:
    return measure(records, plan=plan_for(records), duration_s=duration_s, **options)


def even(
    request_id: str, *, ttft: float = 0.5, itl: float = 0.1, num: int = 5, **fields: Any
) -> RequestRecord:
    """One token every `itl` seconds after `ttft`."""
    start = fields.get("scheduled_at", 0.0)
    return answered(request_id, times=[start + ttft + itl * i for i in range(num)], **fields)


def test_a_pass_worked_out_by_hand() -> None:
    found = measured([even("r0"), even("r1", scheduled_at=4.0, num=3)])
    assert (found.num_requests, found.num_succeeded, found.num_failed) == (2, 2, 0)
    assert found.error_share == 0.0
    assert found.ttft.p50 == pytest.approx(0.5)
    assert found.itl.num == 6
    assert found.itl.p50 == pytest.approx(0.1)
    assert found.num_output_tokens == 8
    assert found.output_tokens_per_s == pytest.approx(0.8)
    assert found.active_s == pytest.approx(0.9 + 0.7)
    assert found.active_output_tokens_per_s == pytest.approx(8 / 1.6)
    assert found.requests_per_s == pytest.approx(0.2)
    assert found.tokens_per_event == 1.0


def test_time_in_flight_counts_once_where_requests_overlap() -> None:
    records = [
        even("r0", ended_at=2.0),
        even("r1", scheduled_at=1.0, ended_at=3.0),
        failed("r2", sent_at=None),
    ]
    assert measured(records).active_s == pytest.approx(3.0)


def test_complaint_8_a_server_that_fails_its_slow_half_does_not_look_fast() -> None:
    slow = measured([even(f"r{i}", ttft=0.5 if i % 2 else 9.0) for i in range(10)])
    dropping = measured([even(f"r{i}") if i % 2 else failed(f"r{i}", status=503) for i in range(10)])
    assert dropping.error_share == 0.5
    assert dropping.faults == {"http 503": 5}
    for name in ("ttft", "ttft_sched", "tpot", "e2e", "max_gap", "itl", "job_completion"):
        assert getattr(dropping, name).p90 == math.inf
        assert getattr(dropping, name).p90 > getattr(slow, name).p90
    assert dropping.output_tokens_per_s is not None
    assert slow.output_tokens_per_s is not None
    assert dropping.output_tokens_per_s < slow.output_tokens_per_s


def test_complaint_8_the_tokens_a_cut_answer_still_owed_are_gaps_without_end() -> None:
    cut = answered("r0", times=[0.1, 0.2], fault=failed(kind="cut").fault)
    found = measured([cut])
    assert (found.itl.num, found.itl.num_failed) == (1 + 3, 3)
    assert found.num_output_tokens == 0


def test_all_failed_is_told_as_failed_and_not_as_zero() -> None:
    found = measured([failed("r0", kind="connect"), failed("r1", kind="timeout")])
    assert found.ttft.p50 == math.inf
    assert found.ttft.mean is None
    assert found.error_share == 1.0
    assert found.hits.hit is None
    assert found.drift.share is None
    assert found.tokens_per_event is None


def test_goodput_counts_from_the_intended_start() -> None:
    late = even("r0", ttft=3.0, sent_at=2.9)
    found = measured([late, even("r1")], slo=SLO(ttft_s=1.0))
    assert late.first_token_at is not None
    assert (found.request_goodput.num, found.request_goodput.num_good) == (2, 1)
    assert found.request_goodput.per_s == pytest.approx(0.1)
    assert found.request_goodput.share == 0.5


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        (SLO(), 2),
        (SLO(tpot_s=0.15), 1),
        (SLO(tpot_s=0.05), 0),
        (SLO(e2e_s=1.0), 1),
        (SLO(ttft_s=0.4), 0),
        (SLO(ttft_s=0.6, tpot_s=0.5, e2e_s=5.0), 2),
    ],
)
def test_each_part_of_an_slo_is_a_condition(slo: SLO, num_good: int) -> None:
    found = measured([even("r0"), even("r1", itl=0.2)], slo=slo)
    assert found.request_goodput.num_good == num_good


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", SLO.__struct_fields__)
def test_a_limit_that_no_server_could_meet_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(PlanInvalid, match=f"--slo-{name.removesuffix('_s')} is"):
        SLO(**{name: value}).validated()
    assert SLO(**{name: 1.0}).validated() == SLO(**{name: 1.0})


def test_token_goodput_counts_the_tokens_a_failure_was_asked_for() -> None:
    found = measured([even("r0"), failed("r1")])
    assert found.token_goodput is not None
    assert (found.token_goodput.num, found.token_goodput.num_good) == (10, 5)


def test_a_session_is_good_only_when_all_its_turns_are() -> None:
    records = [
        even("r0", session="good"),
        even("r1", session="good", turn=1, scheduled_at=2.0),
        even("r2", session="bad"),
        even("r3", session="bad", turn=1, scheduled_at=2.0, ttft=5.0),
        even("r4", session="broken"),
        failed("r5", session="broken", turn=1),
    ]
    found = measured(records, slo=SLO(ttft_s=1.0))
    assert (found.session_goodput.num, found.session_goodput.num_good) == (3, 1)
    assert found.job_completion.num == 3
    assert found.job_completion.num_failed == 1
    assert found.job_completion.p50 == pytest.approx(2.0 + 5.4)
    assert measured(records, slo=SLO(session_s=2.0)).session_goodput.num_good == 0


def test_complaint_4_an_unknown_token_count_is_not_taken_for_none() -> None:
    silent = answered("r0", times=[0.5], tokens=[0.0], token_source="unknown", num_output_tokens=None)
    found = measured([silent, even("r1")])
    assert found.num_output_tokens is None
    assert found.output_tokens_per_s is None
    assert found.token_goodput is None
    assert found.token_sources == {"unknown": 1, "continuous usage": 1}


def test_a_cancelled_request_is_neither_a_success_nor_a_failure() -> None:
    left = even("r0", cancelled=True, num_output_tokens=None, num=2)
    found = measured([left, even("r1")], slo=SLO(ttft_s=1.0))
    assert (found.num_cancelled, found.num_succeeded, found.num_failed) == (1, 1, 0)
    assert found.error_share == 0.0
    assert found.request_goodput.num == 1
    assert found.num_output_tokens == 2 + 5
    assert found.e2e.num == 1


def test_a_request_cancelled_after_its_slo_had_passed_missed_it() -> None:
    left = answered("r0", times=[], ended_at=5.0, cancelled=True, num_output_tokens=None)
    found = measured([left, even("r1")], slo=SLO(ttft_s=1.0))
    assert (found.request_goodput.num, found.request_goodput.num_good) == (2, 1)


def test_complaint_10_capture_is_hit_over_ideal_and_turns_stand_apart() -> None:
    first = even("r0", num_prompt_tokens=100, num_cached_tokens=0)
    later = even("r1", session="r0", turn=1, num_prompt_tokens=200, num_cached_tokens=90)
    found = measured([first, later], ideal={"r0": 0, "r1": 60})
    assert found.hits.hit == pytest.approx(90 / 300)
    assert found.hits.ideal == pytest.approx(60 / 200)
    assert found.hits.capture == pytest.approx(1.0)
    assert found.first_turn_hits.hit == 0.0
    assert found.first_turn_hits.capture is None
    assert found.later_turn_hits.hit == pytest.approx(0.45)
    assert found.later_turn_hits.ideal == pytest.approx(0.6)


def test_cached_tokens_that_a_server_does_not_tell_are_unknown_and_not_zero() -> None:
    records = [even("r0", num_prompt_tokens=100), even("r1", num_prompt_tokens=100)]
    found = measured(records, ideal={"r0": 0, "r1": 50})
    assert found.hits.num_requests == 0
    assert (found.hits.hit, found.hits.ideal, found.hits.capture) == (None, None, None)


def test_complaint_7_drift_of_prompt_tokens_leaves_out_what_the_template_adds() -> None:
    records = [even("r0", num_prompt_tokens=131), even("r1", num_prompt_tokens=129)]
    assert measured(records).drift.share == pytest.approx(0.30)
    known = measured(records, overhead={"r0": 28, "r1": 28}).drift
    assert known.share == pytest.approx(4 / 200)
    assert (known.num_planned, known.num_counted, known.num_overhead) == (200, 260, 56)


def test_complaint_2_several_tokens_an_event_are_flagged() -> None:
    found = measured([answered("r0", times=[0.1, 0.2], tokens=[2.0, 2.0])])
    assert found.tokens_per_event == 2.0


def test_complaint_14_holding_tokens_back_does_not_improve_fluidity() -> None:
    slo = SLO(ttft_s=1.0, tpot_s=0.1)
    bursty = measured([answered("r0", times=[0.5, 0.5, 0.5, 0.5, 1.3])], slo=slo)
    held = measured([answered("r0", times=[0.9, 1.0, 1.1, 1.2, 1.3])], slo=slo)
    late = measured([answered("r0", times=[1.5, 1.6, 1.7, 1.8, 1.9])], slo=slo)
    assert bursty.fluidity == held.fluidity == 1.0
    assert late.fluidity is not None
    assert late.fluidity < 1.0
    assert measured([even("r0")]).fluidity is None


def test_nothing_done_in_no_time_divides_by_nothing() -> None:
    found = measured([failed("r0", kind="unsent", sent_at=None)], duration_s=0.0)
    assert found.requests_per_s == 0.0
    assert found.active_s == 0.0


RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["answered", "failed", "cancelled"]),
        st.floats(min_value=0.01, max_value=5.0),
        st.integers(min_value=1, max_value=8),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(kinds=RECORDS)
def test_every_request_is_counted_exactly_once_and_shares_are_shares(
    kinds: list[tuple[str, float, int]],
) -> None:
    records = [
        failed(f"r{i}", session=f"s{i % 3}")
        if kind == "failed"
        else even(f"r{i}", ttft=ttft, num=num, session=f"s{i % 3}", cancelled=kind == "cancelled")
        for i, (kind, ttft, num) in enumerate(kinds)
    ]
    found = measured(records, slo=SLO(ttft_s=1.0, tpot_s=0.2))
    assert found.num_succeeded + found.num_failed + found.num_cancelled == len(records)
    assert sum(found.faults.values()) == found.num_failed == found.ttft.num_failed
    assert found.ttft.num == len(records)
    for goodput in (found.request_goodput, found.token_goodput, found.session_goodput):
        assert goodput is not None
        assert 0 <= goodput.num_good <= goodput.num
    assert found.fluidity is not None
    assert 0.0 <= found.fluidity <= 1.0
    assert found.session_goodput.num <= 3
