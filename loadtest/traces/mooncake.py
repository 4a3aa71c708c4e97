"""Mooncake's traces: a line a request, with hashes of blocks of 512 tokens.

Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from typing import Annotated

import msgspec

from loadtest.text_files import json_lines
from loadtest.traces import Parts, Trace, TraceRequest

BLOCK_TOKENS = 512


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds."""
    input_length: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
    hash_ids: tuple[int, ...]


class Mooncake:
    name = "mooncake"

    def fits(self, first_line: str) -> bool:
        return first_line.startswith("{") and '"hash_ids"' in first_line and '"timestamp"' in first_line

    def read(self, text: str, source: str) -> Trace:
        blocks: dict[int, tuple[str, int]] = {}
        requests = []
        for _, told in json_lines(text, _Line, source):
            requests.append(
                TraceRequest(
                    session=None,
                    at_s=told.timestamp / 1000.0,
                    num_input_tokens=told.input_length,
                    num_output_tokens=told.output_length,
                    parts=_parts(told, blocks),
                )
            )
        return Trace(name=source, format=self.name, clock="wall", requests=tuple(requests))


def _parts(line: _Line, blocks: dict[int, tuple[str, int]]) -> Parts:
    """Whole blocks, then what is left: of the last block, or behind it without a hash."""
    num_whole = min(line.input_length // BLOCK_TOKENS, len(line.hash_ids))
    whole = tuple(blocks.setdefault(name, (f"b{name}", BLOCK_TOKENS)) for name in line.hash_ids[:num_whole])
    rest = line.input_length - num_whole * BLOCK_TOKENS
    if not rest:
        return whole
    last = (
        f"b{line.hash_ids[num_whole]}"
        if num_whole < len(line.hash_ids)
        else f"t{line.timestamp}-{line.hash_ids}"
    )
    return (*whole, (last, rest))


FORMAT = Mooncake()
