"""Who may ask about which request, and for how long."""

import pytest

from gateway.telemetry.known_requests import KnownRequests
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.serving import ask, chat_body, get, scripted


def record(request_id: str, *, tenant: str = "", named: str | None = None) -> RequestRecord:
    made = RequestRecord(request_id=request_id, client_request_id=named)
    made.tenant = tenant
    return made


async def test_a_request_answers_to_its_id_its_answers_id_and_its_clients_name() -> None:
    known = KnownRequests()
    known.remember(record("abc", named="my-name"), num_live=1)
    for name in ("abc", "chatcmpl-abc", "cmpl-abc", "my-name"):
        assert known.find(name, tenant="") == "abc"
    for name in ("ab", "name", "", "chatcmpl-", "abc-"):
        assert known.find(name, tenant="") is None


async def test_nobody_finds_anothers_by_any_name() -> None:
    known = KnownRequests()
    known.remember(record("abc", tenant="harbour", named="mine"), num_live=1)
    known.remember(record("def", tenant="lighthouse", named="mine"), num_live=2)
    assert known.find("mine", tenant="harbour") == "abc"
    assert known.find("mine", tenant="lighthouse") == "def"
    for name in ("abc", "chatcmpl-abc", "mine"):
        assert known.find(name, tenant="") is None
    assert known.find("abc", tenant="lighthouse") is None


async def test_of_equal_names_the_newest_is_meant() -> None:
    known = KnownRequests()
    known.remember(record("abc", named="mine"), num_live=1)
    known.remember(record("def", named="mine"), num_live=1)
    assert known.find("mine", tenant="") == "def"


async def test_the_oldest_is_forgotten_with_its_name_but_never_a_live_one() -> None:
    known = KnownRequests(num_remembered=2)
    for n in range(5):
        known.remember(record(f"q{n}", named=f"n{n}"), num_live=1)
    assert [known.find(f"q{n}", tenant="") for n in range(5)] == [None, None, "q2", "q3", "q4"]
    assert [known.find(f"n{n}", tenant="") for n in range(5)] == [None, None, "q2", "q3", "q4"]


async def test_an_older_request_takes_no_newer_ones_name_along() -> None:
    known = KnownRequests(num_remembered=1)
    known.remember(record("q0", named="mine"), num_live=0)
    known.remember(record("q1", named="mine"), num_live=0)
    assert known.find("mine", tenant="") == "q1"


@pytest.mark.parametrize("name", ["nobody", "chatcmpl-0123", "%2e%2e", "x" * 300])
async def test_what_is_not_known_is_404_in_the_servers_own_shape(name: str) -> None:
    async with scripted() as (server, _):
        answer = await get(server, f"/v1/explain/{name}")
        assert answer.status == 404
        assert answer.error["code"] == "request_not_found"


async def test_a_backend_that_knows_no_times_is_404_and_lists_nobody() -> None:
    async with scripted() as (server, _):
        request_id = (await ask(server, chat_body())).json["id"]
        assert (await get(server, f"/v1/explain/{request_id}")).status == 404
        assert (await get(server, "/v1/explain")).json == {"object": "list", "data": []}
