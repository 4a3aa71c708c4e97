"""Equal shares for tenants that have work waiting: virtual token counters.

Each tenant has a counter of the weighted tokens it was given, and the lowest is next. A tenant that comes
back is lifted to the lowest of those who wait, so that idleness earns no credit; nobody's share is
kept free for it meanwhile. While two tenants wait without a break, their counters stay within

    U = PREFILL_WEIGHT * longest prompt + OUTPUT_WEIGHT * tokens that running requests may generate

of each other: a tenant is the lowest when its request is admitted, and rises by no more than that before
another is. What two get in any such interval differs by at most 2 U.

Source: VTC, "Fairness in Serving Large Language Models" (OSDI'24, arXiv 2401.00588), algorithm 2 and
theorem 4.4, where U is written for a whole batch. Ours charges computed prompt tokens in full and
cached ones by a tenth of that.
"""

from collections.abc import Iterator

from core.request import Request
from core.scheduler.policies import MatchLength
from core.scheduler.service import LeastServed, weigh


class FairTenants:
    """A tenant's own requests go in order of arrival. Nobody starves: whoever is served, rises."""

    def __init__(self) -> None:
        self._tenants: LeastServed[str] = LeastServed()
        self._last_to_wait = ""
        """The tenant whose request was the last to leave the queue."""

    def push(self, request: Request, *, is_follower: bool = False) -> None:
        tenants, tenant = self._tenants, request.tenant
        if not tenants.waits(tenant):
            lowest = tenants.least() if len(tenants) else self._last_to_wait
            tenants.raise_to(tenant, tenants.counter(lowest))
        tenants.push(tenant, request)

    def head(self) -> Request:
        return self._tenants.head()

    def remove(self, request: Request, *, admitted: bool) -> None:
        self._tenants.remove(request.tenant, request)
        if admitted:
            self._last_to_wait = request.tenant

    def charge(
        self,
        request: Request,
        *,
        num_prefill_tokens: int = 0,
        num_cached_tokens: int = 0,
        num_output_tokens: int = 0,
    ) -> None:
        amount = weigh(
            num_prefill_tokens=num_prefill_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=num_output_tokens,
        )
        self._tenants.add(request.tenant, amount)

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._tenants)

    def check(self) -> None:
        self._tenants.check()


def create(_: MatchLength) -> FairTenants:
    return FairTenants()
