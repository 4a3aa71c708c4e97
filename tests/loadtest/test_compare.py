import io
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from loadtest.compare import Comparison, Ratio, compare, comparison_table
from loadtest.errors import PlanInvalid
from loadtest.metrics import SLO
from loadtest.record import RequestRecord
from loadtest.report import Report
from tests.loadtest.record_factory import answered, failed, report_of

NUM_REQUESTS = 20


def one_pass(
    *, seed: int, ttft: float = 1.0, itl: float = 1.0, broken: tuple[int, ...] = (), cached: int | None = None
) -> list[RequestRecord]:
    """Requests whose lengths differ a lot and whose times differ by 2 % between passes."""
    noise = np.random.default_rng(seed).normal(1.0, 0.02, NUM_REQUESTS)
    records = []
    for i in range(NUM_REQUESTS):
        if i in broken:
            records.append(failed(f"r{i}", status=500))
            continue
        first = 0.1 * (1 + i) * ttft * float(noise[i])
        times = [first + 0.02 * itl * float(noise[i]) * k for k in range(5)]
        records.append(answered(f"r{i}", times=times, num_prompt_tokens=100, num_cached_tokens=cached))
    return records


def report(
    first_seed: int, *, repeats: int = 3, duration_s: float = 10.0, slo: SLO | None = None, **how: Any
) -> Report:
    passes = [one_pass(seed=first_seed + i, **how) for i in range(repeats)]
    return report_of(passes, duration_s=duration_s, slo=slo)


def named(comparison: Comparison, name: str) -> Ratio:
    (found,) = [ratio for ratio in comparison.ratios if ratio.name == name]
    return found


def test_a_report_against_itself_is_the_same_in_every_figure() -> None:
    a = report(1)
    found = compare(a, a)
    assert {ratio.verdict for ratio in found.ratios} <= {"same", "unknown"}
    assert found.exit_code == 0
    assert named(found, "TTFT").ratio == 1.0


def test_noise_alone_is_no_regression() -> None:
    found = compare(report(1), report(50))
    assert found.regressions == ()
    assert named(found, "TTFT").num_pairs == 3 * NUM_REQUESTS
    assert named(found, "TTFT").ratio == pytest.approx(1.0, abs=0.02)


def test_a_slowdown_far_below_the_spread_of_lengths_is_found_by_pairing() -> None:
    """First tokens differ twenty-fold between requests, and B is 15 % slower on each."""
    found = compare(report(1), report(50, ttft=1.15))
    assert named(found, "TTFT").verdict == "worse"
    assert named(found, "TTFT").ratio == pytest.approx(1.15, abs=0.03)
    assert named(found, "TPOT").verdict == "same"
    assert found.exit_code == 1


def test_faster_is_better_for_latency_and_slower_is_worse_for_throughput() -> None:
    found = compare(report(1), report(50, ttft=0.7, itl=0.7, duration_s=20.0))
    assert named(found, "TTFT").verdict == "better"
    assert named(found, "TPOT").verdict == "better"
    assert named(found, "output tok/s").verdict == "worse"


def test_a_lower_hit_is_a_regression_and_a_higher_one_is_not() -> None:
    high, low = report(1, cached=80), report(50, cached=40)
    assert named(compare(high, low), "hit").verdict == "worse"
    assert named(compare(low, high), "hit").verdict == "better"


def test_within_the_bound_is_the_same() -> None:
    a, b = report(1), report(50, ttft=1.15)
    assert named(compare(a, b, bound=0.5), "TTFT").verdict == "same"


def test_a_server_that_fails_more_is_worse_though_the_rest_is_as_fast() -> None:
    found = compare(report(1), report(50, broken=(3, 4)))
    assert named(found, "failures").verdict == "worse"
    assert found.failed_more == 6
    assert found.exit_code == 1


def test_a_server_that_fails_most_is_infinitely_slower() -> None:
    found = named(compare(report(1), report(50, broken=tuple(range(15)))), "TTFT")
    assert found.ratio == float("inf")
    assert found.verdict == "worse"


def test_failures_on_both_sides_are_no_difference() -> None:
    found = compare(report(1, broken=(3,)), report(50, broken=(3,)))
    assert named(found, "failures").verdict == "same"
    assert found.regressions == ()


def test_figures_that_nobody_told_are_unknown_and_no_regression() -> None:
    found = named(compare(report(1), report(50)), "joules per 1,000 tokens")
    assert (found.ratio, found.verdict, found.num_pairs, found.num_unknown) == (None, "unknown", 0, 3)


def test_one_repeat_is_too_few_to_judge_a_whole_pass() -> None:
    found = compare(report(1, repeats=1), report(50, repeats=1, duration_s=30.0))
    assert named(found, "output tok/s").verdict == "unclear"


def test_different_plans_void_runs_and_different_slos_are_refused() -> None:
    a = report(1)
    other = msgspec.structs.replace(a, plan=msgspec.structs.replace(a.plan, sha256="b" * 64))
    with pytest.raises(PlanInvalid, match="same plan"):
        compare(a, other)
    void = msgspec.structs.replace(a, void_reasons=("the client was late",))
    with pytest.raises(PlanInvalid, match=r"B is void.*the client was late"):
        compare(a, void)
    with pytest.raises(PlanInvalid, match="A is void"):
        compare(void, a)
    with pytest.raises(PlanInvalid, match="SLO"):
        compare(a, report(1, slo=SLO(ttft_s=1.0)))
    with pytest.raises(PlanInvalid, match="no repeats"):
        compare(a, msgspec.structs.replace(a, repeats=()))


def test_what_else_differed_is_said() -> None:
    a = report(1)
    b = msgspec.structs.replace(
        report(50, repeats=4),
        options={"concurrency": 8},
        machine=msgspec.structs.replace(a.machine, processor="another"),
    )
    text = " ".join(compare(a, b).warnings)
    assert "concurrency" in text
    assert "different machines" in text
    assert "3 repeats and B 4" in text


def test_the_table_names_the_regression() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(comparison_table(compare(report(1), report(50, ttft=1.5))))
    text = console.export_text()
    assert "regression: TTFT" in text
    assert "unknown server, version unknown at http://127.0.0.1:1" in text
    assert "+0" in text
    console.print(comparison_table(compare(report(1), report(50))))
    assert "no regression" in console.export_text()
