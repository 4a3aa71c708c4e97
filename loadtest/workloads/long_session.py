"""Few sessions that grow, turn by turn, until nothing more fits: what a cache must keep, and for how long."""

import random
from collections.abc import Iterator

from loadtest.conversation import Conversation, arrivals, scaled
from loadtest.errors import PlanInvalid
from loadtest.plan import Plan, PlannedRequest, Segment, plan_of
from loadtest.workloads import WorkloadOptions

SESSIONS, TURNS = 2, 48
SYSTEM_TOKENS, FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 512, 1_536, 1_024, 128
PAUSE_S = 2.0


class LongSession:
    name = "long_session"
    summary = "sessions from 2,048 tokens to 56,192 in 48 turns of 1,024 in and 128 out, 2 s apart"

    def build(self, options: WorkloadOptions) -> Plan:
        options.validated()
        starts = arrivals(random.Random(f"long session {options.seed}"))
        requests = [
            request
            for number in range(options.sessions or SESSIONS)
            for request in self._session(number, next(starts), options)
        ]
        longest = max(request.num_prompt_tokens for request in requests)
        notes = (
            f"{self.summary}; scale {options.scale:g}, pauses x {options.time_scale:g}, seed {options.seed}",
            f"the longest prompt has {longest} tokens",
        )
        return plan_of(self.name, requests, notes=notes)

    @staticmethod
    def _session(number: int, start: float, options: WorkloadOptions) -> Iterator[PlannedRequest]:
        system = Segment("long-session-system", scaled(SYSTEM_TOKENS, options.scale), "system")
        talk = Conversation(f"s{number}", [system], name=f"s{number}", max_context=options.max_context)
        first, turn, answer = (
            scaled(tokens, options.scale) for tokens in (FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS)
        )
        if not talk.fits(first, answer):
            raise PlanInvalid(
                f"the first call takes {talk.num_tokens + first + answer} tokens and --max-context is "
                f"{options.max_context}: lower --scale"
            )
        yield talk.ask(first, answer, at_unit=start)
        for _ in range((options.turns or TURNS) - 1):
            if not talk.fits(turn, answer):
                return
            yield talk.ask(turn, answer, after=[talk.last_id], delay_s=PAUSE_S * options.time_scale)


WORKLOAD = LongSession()
