"""Codex on SWE-bench Pro: long common instructions, a large task, many tool results of one size."""

import random
from collections.abc import Iterator

from loadtest.arrivals import DEFAULT_CV
from loadtest.conversation import Conversation, arrivals, by_p99, scaled
from loadtest.errors import PlanInvalid
from loadtest.plan import Plan, PlannedRequest, Segment, plan_of
from loadtest.workloads import WorkloadOptions

SESSIONS, TURNS = 8, 30
COMMON_TOKENS, FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 20_000, 10_000, 2_048, 900
PAUSE_S = by_p99(5.2, 81.4)


class Codex:
    name = "codex"
    summary = (
        "Codex on SWE-bench Pro as Inferact publishes it: 20K common + 10K first + 2,048 a turn in, 900 out, "
        "30 turns, pauses of 5.2 s (median) to 81.4 s (p99)"
    )

    def build(self, options: WorkloadOptions) -> Plan:
        options.validated()
        generator = random.Random(f"codex {options.seed}")
        starts = arrivals(generator, cv=DEFAULT_CV)
        requests = [
            request
            for number in range(options.sessions or SESSIONS)
            for request in self._session(number, next(starts), generator, options=options)
        ]
        wanted = (options.sessions or SESSIONS) * (options.turns or TURNS)
        notes = [
            f"{self.summary}; scale {options.scale:g}, pauses x {options.time_scale:g}, seed {options.seed}"
        ]
        if len(requests) < wanted:
            notes.append(f"{wanted - len(requests)} calls left out: above {options.max_context} tokens")
        return plan_of(self.name, requests, notes=notes)

    @staticmethod
    def _session(
        number: int, start: float, generator: random.Random, *, options: WorkloadOptions
    ) -> Iterator[PlannedRequest]:
        common = Segment("codex-instructions", scaled(COMMON_TOKENS, options.scale), "system")
        talk = Conversation(f"s{number}", [common], name=f"s{number}", max_context=options.max_context)
        answer = scaled(ANSWER_TOKENS, options.scale)
        first = scaled(FIRST_TOKENS, options.scale)
        if not talk.fits(first, answer):
            raise PlanInvalid(
                f"the first call takes {talk.num_tokens + first + answer} tokens and --max-context is "
                f"{options.max_context}: lower --scale"
            )
        yield talk.ask(first, answer, at_unit=start)
        turn = scaled(TURN_TOKENS, options.scale)
        for _ in range((options.turns or TURNS) - 1):
            pause = PAUSE_S.draw(generator) * options.time_scale
            if not talk.fits(turn, answer):
                return
            yield talk.ask(turn, answer, after=[talk.last_id], delay_s=pause)


WORKLOAD = Codex()
