"""Which conversation a request belongs to, and who may share its cached prompt: in every dialect."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects import Dialect, find_dialects
from gateway.errors import InvalidRequest
from gateway.request import GenerateRequest
from tests.gateway.serving import ask, scripted

DIALECTS = find_dialects()
every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)


def body_of(dialect: Dialect, fields: dict[str, Any]) -> bytes:
    return json.dumps({**json.loads(dialect.example(model="scripted", stream=False)), **fields}).encode()


def parse(dialect: Dialect, fields: dict[str, Any]) -> GenerateRequest:
    return dialect.parse(body_of(dialect, fields), max_depth=64)


@every_dialect
@pytest.mark.parametrize(
    ("fields", "session_id"),
    [
        ({}, ""),
        ({"session_id": "s"}, "s"),
        ({"prompt_cache_key": "k"}, "k"),
        ({"metadata": {"user_id": "u"}}, "u"),
        ({"metadata": {"conversation": "c"}}, "c"),
        ({"metadata": {"other": "x"}}, ""),
        ({"conversation": "c"}, "c"),
        ({"conversation": {"id": "c"}}, "c"),
        ({"session_id": None, "prompt_cache_key": "", "metadata": None, "conversation": "c"}, "c"),
        ({"session_id": "s" * 512}, "s" * 512),
    ],
)
def test_a_session_is_named_by_any_of_the_fields_clients_have_for_it(dialect, fields, session_id) -> None:
    assert parse(dialect, fields).session_id == session_id


@every_dialect
def test_the_plainest_name_of_a_session_wins(dialect: Dialect) -> None:
    fields: dict[str, Any] = {
        "session_id": "1",
        "prompt_cache_key": "2",
        "metadata": {"user_id": "3", "conversation": "4"},
        "conversation": "5",
    }
    for expected, name in (("1", "session_id"), ("2", "prompt_cache_key"), ("3", "metadata")):
        assert parse(dialect, fields).session_id == expected
        del fields[name]
    assert parse(dialect, fields).session_id == "5"
    assert parse(dialect, {"metadata": {"conversation": "4"}, "conversation": "5"}).session_id == "4"


@every_dialect
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": "s" * 513}, "session_id"),
        ({"session_id": 5}, "session_id"),
        ({"prompt_cache_key": "s" * 513}, "prompt_cache_key"),
        ({"prompt_cache_key": ["s"]}, "prompt_cache_key"),
        ({"metadata": {"user_id": "s" * 513}}, "metadata.user_id"),
        ({"metadata": {"conversation": "s" * 513}}, "metadata.conversation"),
        ({"metadata": {"user_id": 5}}, "metadata[...]"),
        ({"metadata": "x"}, "metadata"),
        ({"conversation": "s" * 513}, "conversation"),
        ({"conversation": {"id": "s" * 513}}, "conversation.id"),
        ({"conversation": {"name": "c"}}, "conversation.name"),
        ({"conversation": 5}, "conversation"),
        ({"cache_salt": "s" * 513}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
def test_a_name_that_is_none_or_too_long_is_refused_by_its_field(dialect, fields, param) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(dialect, fields)
    assert refused.value.param == param


texts = st.text(max_size=6)


@given(one=st.tuples(texts, texts), other=st.tuples(texts, texts))
def test_two_tenants_or_two_salts_never_share_a_namespace(one, other) -> None:
    namespaces = [
        GenerateRequest(model="m", tenant=tenant, cache_salt=salt).cache_namespace
        for tenant, salt in (one, other)
    ]
    assert (namespaces[0] == namespaces[1]) == (one == other)


def test_a_boundary_between_tenant_and_salt_cannot_be_moved() -> None:
    pairs = [("a", "b"), ("ab", ""), ("", "ab"), ("1:a", ""), ("", "1:a"), ("0", ":"), ("", "0:")]
    namespaces = {
        GenerateRequest(model="m", tenant=tenant, cache_salt=salt).cache_namespace for tenant, salt in pairs
    }
    assert len(namespaces) == len(pairs)


@every_dialect
async def test_through_a_socket_the_key_says_the_tenant_and_the_body_the_session(dialect, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("harbour: key-of-the-harbour\n")
    keys.chmod(0o600)
    fields = {"session_id": "s-1", "cache_salt": "pepper"}
    async with scripted(api_key_file=str(keys)) as (server, backend):
        header = "Authorization: Bearer key-of-the-harbour\r\n"
        answer = await ask(server, body_of(dialect, fields), path=dialect.path, headers=header)
        refused = await ask(
            server, body_of(dialect, {"session_id": "s" * 600}), path=dialect.path, headers=header
        )
    assert answer.status == 200
    [request] = backend.requests
    assert (request.tenant, request.session_id, request.cache_salt) == ("harbour", "s-1", "pepper")
    assert (refused.status, refused.error["param"]) == (400, "session_id")


def test_the_tenant_is_not_for_a_body_to_say() -> None:
    for dialect in DIALECTS:
        with pytest.raises(InvalidRequest, match="unknown field 'tenant'"):
            parse(dialect, {"tenant": "harbour"})
