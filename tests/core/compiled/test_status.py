"""How far compiling is, in words and as series."""

from core.execution.worker_info import RegionStatus
from gateway.telemetry.engine_gauges import region_gauges


def test_a_worker_without_regions_says_nothing():
    assert RegionStatus().describe() == ""


def test_all_states_are_said_in_one_line():
    status = RegionStatus(
        num_regions=9, num_compiled=4, num_waiting=2, num_refused=1, compiling=True, note="x: too inexact"
    )
    assert status.num_eager == 3
    assert status.describe() == (
        "4 of 9 parts of the model run compiled, 2 are compiled for the next start, "
        "others are being compiled; x: too inexact"
    )


def test_series_tell_states_and_count_compilations():
    regions = {"compiled": 4, "eager": 3, "next_start": 2}
    gauges = {
        (gauge.name, gauge.labels.get("state")): (gauge.value, gauge.counter)
        for gauge in region_gauges(regions, num_compilations=6)
    }
    assert gauges == {
        ("tidegate_regions", "compiled"): (4, False),
        ("tidegate_regions", "eager"): (3, False),
        ("tidegate_regions", "next_start"): (2, False),
        ("tidegate_compilations", None): (6, True),
    }
