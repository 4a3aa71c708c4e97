"""Which requests may be asked about, by whom, and under which names."""

from collections import OrderedDict

from gateway.telemetry.request_record import RequestRecord

NUM_REMEMBERED = 1024


class KnownRequests:
    """The newest generations by id, with their tenants. A tenant sees its own and no others.

    A request answers to three names: our id, the id of the answer that has it (`chatcmpl-` and the id),
    and the `X-Request-Id` that its client sent; of equal ones the newest is meant.
    """

    def __init__(self, *, num_remembered: int = NUM_REMEMBERED) -> None:
        self._num_remembered = num_remembered
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._named: dict[tuple[str, str], str] = {}
        """(tenant, its own name) -> our id."""

    def remember(self, record: RequestRecord, *, num_live: int) -> None:
        """Called when a generation begins. As many as are live are kept on top: no live one is forgotten."""
        self._records[record.request_id] = record
        if record.client_request_id is not None:
            self._named[record.tenant, record.client_request_id] = record.request_id
        while len(self._records) > self._num_remembered + num_live:
            _, oldest = self._records.popitem(last=False)
            name = oldest.client_request_id
            if name is not None and self._named.get((oldest.tenant, name)) == oldest.request_id:
                del self._named[oldest.tenant, name]

    def find(self, name: str, *, tenant: str) -> str | None:
        """Our id of the request with that name; None if the tenant has none."""
        own = self._named.get((tenant, name))
        request_id = own or name.rpartition("-")[2]
        return request_id if self.belongs(request_id, tenant=tenant) else None

    def belongs(self, request_id: str, *, tenant: str) -> bool:
        record = self._records.get(request_id)
        return record is not None and record.tenant == tenant
