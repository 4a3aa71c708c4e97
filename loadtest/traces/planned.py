"""Our own plans, looked at as traces: starts as if answers took no time, a unit of `at_unit` a second."""

from loadtest.ideal import in_order, start_times
from loadtest.plan import NOTES_START, Plan, parse_plan
from loadtest.traces import Trace, TraceRequest


class Planned:
    name = "planned"

    def fits(self, first_line: str) -> bool:
        return first_line.startswith(NOTES_START) or (
            first_line.startswith("{") and '"segments"' in first_line
        )

    def read(self, text: str, source: str) -> Trace:
        return trace_of(parse_plan(text, source))


def trace_of(plan: Plan) -> Trace:
    """A plan as a trace, for what is known of it before it runs."""
    starts = start_times(plan)
    parts: dict[tuple[str, str, int], tuple[str, int]] = {}
    requests = [
        TraceRequest(
            session=request.session,
            at_s=starts[request.id],
            num_input_tokens=request.num_prompt_tokens,
            num_output_tokens=request.max_tokens,
            parts=tuple(
                parts.setdefault(
                    (segment.role, segment.segment_id, segment.num_tokens),
                    (f"{segment.role} {segment.segment_id}", segment.num_tokens),
                )
                for segment in request.segments
            ),
            pause_s=request.delay_s if request.after else None,
        )
        for request in in_order(plan)
    ]
    waits = any(request.after for request in plan.requests)
    notes = ("requests that wait for others start as if answers took no time",) if waits else ()
    return Trace(
        name=plan.name, format="planned", clock="wall", requests=tuple(requests), notes=(*plan.notes, *notes)
    )


FORMAT = Planned()
