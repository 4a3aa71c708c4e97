"""Bodies made to cost more than their length: each is answered within its bound, and others meanwhile.

The bounds are far above what linear work takes on a slow machine and far below what anything quadratic
takes on a fast one (minutes to hours for these sizes).
"""

import asyncio
import json
import time

import pytest

from gateway.errors import InvalidRequest
from gateway.json_fields import read_object
from gateway.json_shape import check_json_shape, find_lone_surrogate
from gateway.message_fields import read_messages
from tests.gateway.serving import ask, chat_body, get, scripted

BOUND_S = 5.0

NESTED = b"[" * 65
DEEP_KEY = json.dumps({"k" * 500_000: ["a"] * 90_000}).encode()
HOSTILE = {
    "an unclosed string of escaped quotes": NESTED + b'"' + b'\\"' * 60_000,
    "an unclosed string that ends in half an escape": NESTED + b'"' + b'\\"' * 60_000 + b"\\",
    "quotes and backslashes by turns": NESTED + b'"\\' * 1_000_000,
    "backslashes outside strings": NESTED + b"\\" * 2_000_000,
    "strings without a comma": NESTED + b'""' * 1_000_000,
    "one long key above many values, and half a surrogate pair": DEEP_KEY[:-1] + rb',"x":"\ud800"}',
    "half surrogate pairs": b'{"x":"' + rb"\ud800" * 160_000 + b'"}',
    "a field name of megabytes": b'{"' + b" - at `$.x" * 200_000 + b'":1}',
    "a message field name of megabytes": chat_body(
        messages=[{"role": "user", "content": "x", " - at `$.x" * 200_000: 1}]
    ),
    "a part's field name of megabytes": chat_body(
        messages=[{"role": "user", "content": [{"type": "text", "text": "x", " - at `$" * 200_000: 1}]}]
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_body_holds_the_server_up(name: str) -> None:
    async with scripted(max_json_depth=64) as (server, _), asyncio.timeout(30):
        began = time.perf_counter()
        refused = await ask(server, HOSTILE[name])
        assert (await get(server, "/livez")).status == 200
        assert time.perf_counter() - began < BOUND_S
    assert refused.status == 400
    assert len(refused.body) < 4096, "what was sent is not sent back"


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b'[["]]]]', 2), (b'[["\\"]]]]"]]', 2), (b'["a\\\\",["b"]]', 2), (b'[[["\\', 3), (b'[["x\\"', 2),
        (b'["[[[[",["{{{"]]', 2),
    ],
)  # fmt: skip
def test_only_brackets_outside_strings_count_and_a_string_without_an_end_reaches_to_the_end(
    body: bytes, depth: int
) -> None:
    check_json_shape(body, max_depth=depth)
    with pytest.raises(InvalidRequest, match=f"deeper than {depth - 1} "):
        check_json_shape(body, max_depth=depth - 1)


def test_a_long_key_is_cut_in_the_path_of_half_a_surrogate_pair() -> None:
    path = find_lone_surrogate(b'{"' + b"k" * 10_000 + rb'":["x",{"y":"\ud800"}]}')
    assert path == "k" * 128 + "[1].y"


def test_a_long_unknown_name_is_cut_in_what_is_said_of_it() -> None:
    body = b'{"role":"user","content":"x","' + b"k" * 1_000_000 + b'":1}'
    with pytest.raises(InvalidRequest) as caught:
        read_object(b'{"messages":' + body + b"}", max_depth=9, read=lambda f: read_messages([f["messages"]]))
    assert len(str(caught.value)) < 2048
