"""Which requests of a trace without session ids go on from which, by their prompts.

A request continues the latest earlier one whose prompt, but for its last part (which is seldom whole),
its own prompt begins with. A beginning that many prompts share, such as a system prompt, makes no
session: it must reach past the parts that come first in every tenth request.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from loadtest.traces import Parts, TraceRequest

WIDELY_SHARED = 0.1


def linked(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests, in order of time, with a session that was inferred: a chain of continuations."""
    usual = _usual_length(requests)
    ends: dict[int, int] = {}
    """Node -> the latest request whose prompt, but for its last part, ends there."""
    nodes: dict[tuple[int, tuple[str, int]], int] = {}
    sessions: list[int] = []
    found: list[TraceRequest] = []
    for index, request in enumerate(requests):
        parts = request.parts or ()
        node, earlier, end = 0, None, 0
        for depth, part in enumerate(parts, 1):
            node = nodes.setdefault((node, part), len(nodes) + 1)
            if depth > usual and node in ends:
                earlier = ends[node]
            if depth == len(parts) - 1:
                end = node
        if end and len(parts) - 1 > usual:
            ends[end] = index
        sessions.append(index if earlier is None else sessions[earlier])
        found.append(msgspec.structs.replace(request, session=f"inferred{sessions[index]}"))
    return found


def _usual_length(requests: Sequence[TraceRequest]) -> int:
    """How many parts the widely shared beginnings have."""
    usual = 0
    wide: set[Parts] = {()}
    while True:
        passes = Counter(
            request.parts[: usual + 1]
            for request in requests
            if request.parts and len(request.parts) > usual and request.parts[:usual] in wide
        )
        wide = {path for path, count in passes.items() if count > WIDELY_SHARED * len(requests)}
        if not wide:
            return usual
        usual += 1
