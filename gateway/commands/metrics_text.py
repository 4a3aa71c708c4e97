"""A scrape of `/metrics`, read back as numbers: what `top` shows is computed here."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


class Bucket(NamedTuple):
    """Observations of at most `bound_s`, those of smaller buckets included."""

    bound_s: float
    num: float


class Scrape:
    """One scrape at one moment of the poller's clock. Series that the server lacks read as 0."""

    def __init__(self, text: str, *, at_s: float) -> None:
        """Raises ValueError where the text is no exposition."""
        self.at_s = at_s
        self._values: dict[tuple[str, Labels], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    @property
    def is_ours(self) -> bool:
        return any(name.startswith("tidegate_") for name, _ in self._values)

    def value(self, name: str, **labels: str) -> float:
        return self._values.get((f"tidegate_{name}", tuple(sorted(labels.items()))), 0.0)

    def buckets(self, name: str) -> list[Bucket]:
        """A histogram, smallest bound first; empty where there is none."""
        found = [
            Bucket(float(dict(labels)["le"]), value)
            for (series, labels), value in self._values.items()
            if series == f"tidegate_{name}_bucket"
        ]
        return sorted(found)


class Window:
    """What happened between two scrapes. With a server restarted between them, since its start."""

    def __init__(self, older: Scrape, newer: Scrape) -> None:
        self.newer = newer
        restarted = newer.value("steps_total") < older.value("steps_total")
        self._older = None if restarted else older
        self.length_s = newer.at_s - older.at_s

    def growth(self, name: str, **labels: str) -> float:
        before = 0.0 if self._older is None else self._older.value(name, **labels)
        return max(0.0, self.newer.value(name, **labels) - before)

    def rate(self, name: str, **labels: str) -> float:
        """Per second."""
        return self.growth(name, **labels) / self.length_s if self.length_s > 0 else 0.0

    def percentiles(self, name: str, *, ranks: Iterable[float]) -> tuple[list[float | None], bool]:
        """A histogram's percentiles in seconds, and whether they are of this window.

        Where nothing was observed in the window they are of all time; None where nothing ever was.
        """
        newest = self.newer.buckets(name)
        if self._older is not None:
            before = {bucket.bound_s: bucket.num for bucket in self._older.buckets(name)}
            recent = [Bucket(b.bound_s, b.num - before.get(b.bound_s, 0.0)) for b in newest]
            if recent and recent[-1].num > 0:
                return [percentile(recent, rank) for rank in ranks], True
        return [percentile(newest, rank) for rank in ranks], False


def percentile(buckets: Sequence[Bucket], rank: float) -> float | None:
    """The value below which `rank` of the observations lie, assuming an even spread inside a bucket.

    Infinite where it lies beyond the last finite bound; None without observations.
    Source: the Prometheus documentation of `histogram_quantile`.
    """
    if not buckets or buckets[-1].num <= 0:
        return None
    wanted = rank * buckets[-1].num
    low = Bucket(0.0, 0.0)
    for bucket in buckets:
        if bucket.num >= wanted and bucket.num > low.num:
            if math.isinf(bucket.bound_s):
                return math.inf
            share = max(0.0, wanted - low.num) / (bucket.num - low.num)
            return low.bound_s + share * (bucket.bound_s - low.bound_s)
        low = bucket
    return math.inf
