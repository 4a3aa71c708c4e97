"""Prometheus metrics: histograms filled per request, gauges read live at each scrape.

A gauge that is kept up to date by events freezes when an event is lost; so whatever has a live
source is asked at the moment of the scrape, and shows zero within one scrape of being zero.
"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway import __version__
from gateway.admission import Admission
from gateway.backends import Backends, Gauge
from gateway.events import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0)
_LAG_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class _LiveCollector(Collector):
    """Asks admission and the backends when it is scraped."""

    def __init__(self, admission: Admission, backends: Backends) -> None:
        self._admission = admission
        self._backends = backends

    def collect(self) -> Iterator[Metric]:
        yield from _families(
            (
                Gauge(
                    "tidegate_requests_admitted", "Generations in the server.", self._admission.num_admitted
                ),
                Gauge(
                    "tidegate_requests_refused",
                    "Generations refused: too many, or draining.",
                    self._admission.num_refused,
                    counter=True,
                ),
                *(gauge for backend in self._backends.all() for gauge in backend.gauges()),
            )
        )


def _families(gauges: Iterable[Gauge]) -> Iterator[Metric]:
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for gauge in gauges:
        family = families.get(gauge.name)
        if family is None:
            kind = CounterMetricFamily if gauge.counter else GaugeMetricFamily
            family = families[gauge.name] = kind(gauge.name, gauge.description, labels=tuple(gauge.labels))
        family.add_metric(tuple(gauge.labels.values()), gauge.value)
    yield from families.values()


class Metrics:
    """One registry per application, so that two servers in one process do not mix."""

    def __init__(self, *, admission: Admission, backends: Backends) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_LiveCollector(admission, backends))
        Info("tidegate_build", "What serves here.", registry=self.registry).info({"version": __version__})
        self._requests = Counter(
            "tidegate_requests", "Generations by how they ended.", ("outcome",), registry=self.registry
        )
        self._request_s = Histogram(
            "tidegate_request_seconds",
            "From the request's arrival to its last byte.",
            buckets=_REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._ttft_s = Histogram(
            "tidegate_time_to_first_token_seconds",
            "From the request's arrival to its first text.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._itl_s = Histogram(
            "tidegate_inter_token_seconds",
            "Between two pieces of text of one answer.",
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self._tokens = Counter(
            "tidegate_tokens", "Tokens of finished generations.", ("kind",), registry=self.registry
        )
        self._lag_s = Histogram(
            "tidegate_loop_lag_seconds",
            "How late the event loop's timer was.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )

    def saw_first_delta(self, after_s: float) -> None:
        self._ttft_s.observe(after_s)

    def saw_next_delta(self, after_s: float) -> None:
        self._itl_s.observe(after_s)

    def saw_lag(self, lag_s: float) -> None:
        self._lag_s.observe(lag_s)

    def saw_usage(self, usage: Usage) -> None:
        self._tokens.labels("prompt").inc(usage.num_prompt_tokens)
        self._tokens.labels("cached").inc(usage.num_cached_tokens)
        self._tokens.labels("output").inc(usage.num_output_tokens)

    def saw_end(self, outcome: str, *, request_s: float) -> None:
        self._requests.labels(outcome).inc()
        self._request_s.observe(request_s)

    def scrape(self) -> bytes:
        return generate_latest(self.registry)
