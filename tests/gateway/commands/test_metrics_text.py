"""Scrapes read back as numbers: rates, windows and percentiles."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from gateway.commands.metrics_text import Bucket, Scrape, Window, percentile

BOUNDS = (0.1, 0.5, 1.0, 5.0)


def scrape_of(*, at_s: float = 0.0, observed: tuple[float, ...] = (), **counters: float) -> Scrape:
    registry = CollectorRegistry()
    histogram = Histogram("tidegate_wait_seconds", "Waits.", buckets=BOUNDS, registry=registry)
    for value in observed:
        histogram.observe(value)
    lines = "".join(f"# TYPE tidegate_{name} gauge\ntidegate_{name} {n}\n" for name, n in counters.items())
    return Scrape(generate_latest(registry).decode() + lines, at_s=at_s)


def test_rates_are_growth_over_time():
    window = Window(scrape_of(at_s=10.0, steps_total=5), scrape_of(at_s=14.0, steps_total=25))
    assert window.growth("steps_total") == 20
    assert window.rate("steps_total") == 5
    assert window.rate("of_a_series_that_is_not_there") == 0


def test_after_a_restart_of_the_server_everything_counts_from_its_start():
    window = Window(
        scrape_of(at_s=0.0, steps_total=1000, generated_tokens_total=7, observed=(4.0,) * 9),
        scrape_of(at_s=2.0, steps_total=10, generated_tokens_total=4, observed=(0.3,)),
    )
    assert window.rate("generated_tokens_total") == 2
    (median,), recent = window.percentiles("wait_seconds", ranks=(0.5,))
    assert not recent
    assert median is not None
    assert 0.1 < median <= 0.5


def test_percentiles_are_of_the_window_where_something_happened_in_it():
    old, new = (4.0,) * 50, (0.2,) * 3
    window = Window(
        scrape_of(observed=old, steps_total=1), scrape_of(at_s=1.0, observed=old + new, steps_total=2)
    )
    (median,), recent = window.percentiles("wait_seconds", ranks=(0.5,))
    assert recent
    assert median is not None
    assert 0.1 < median <= 0.5
    quiet = Window(scrape_of(observed=old), scrape_of(at_s=1.0, observed=old))
    (median,), recent = quiet.percentiles("wait_seconds", ranks=(0.5,))
    assert not recent
    assert median is not None
    assert 1.0 < median <= 5.0


def test_without_observations_there_is_no_percentile():
    window = Window(scrape_of(), scrape_of(at_s=1.0))
    assert window.percentiles("wait_seconds", ranks=(0.5, 0.99)) == ([None, None], False)
    assert window.percentiles("nothing", ranks=(0.5,)) == ([None], False)
    assert percentile([], 0.5) is None


@given(st.lists(st.floats(0.001, 9.0), min_size=1, max_size=40), st.sampled_from((0.01, 0.5, 0.95, 0.99)))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values, rank):
    buckets = [Bucket(bound, sum(value <= bound for value in values)) for bound in (*BOUNDS, math.inf)]
    true = sorted(values)[max(0, math.ceil(rank * len(values)) - 1)]
    found = percentile(buckets, rank)
    assert found is not None
    low = max((bound for bound in BOUNDS if bound < true), default=0.0)
    high = min((bound for bound in BOUNDS if bound >= true), default=math.inf)
    assert low <= found <= high


@pytest.mark.parametrize("text", ["<html>", "tidegate_x{", "tidegate_x one"])
def test_a_text_that_is_no_exposition_is_refused(text):
    with pytest.raises(ValueError):
        Scrape(text, at_s=0.0)


def test_somebody_elses_metrics_are_told_apart():
    assert scrape_of().is_ours
    assert not Scrape("# TYPE up gauge\nup 1\n", at_s=0.0).is_ours
