"""Single questions that have nothing in common: what hits here was warm before, or is not the prompt."""

import random

from loadtest.conversation import arrivals, by_p90, scaled
from loadtest.errors import PlanInvalid
from loadtest.plan import Plan, PlannedRequest, Segment, plan_of
from loadtest.workloads import WorkloadOptions

SESSIONS = 36
PROMPT_TOKENS, ANSWER_TOKENS = by_p90(1_035, 4_075), by_p90(141, 428)
MAX_PROMPT, MAX_ANSWER = 8_192, 1_024
MIN_PROMPT = 16


class Control:
    name = "control"
    summary = (
        "nothing shared: lengths as in Azure's 2023 conversations (1,035 / 4,075 in and 141 / 428 out, "
        "p50 / p90), Poisson arrivals"
    )

    def build(self, options: WorkloadOptions) -> Plan:
        options.validated()
        if options.turns not in (None, 1):
            raise PlanInvalid(f"--turns is {options.turns}; control has one call a session")
        generator = random.Random(f"control {options.seed}")
        starts = arrivals(generator)
        requests = [
            self._request(index, next(starts), generator, options=options)
            for index in range(options.sessions or SESSIONS)
        ]
        note = f"{self.summary}; scale {options.scale:g}, seed {options.seed}"
        return plan_of(self.name, requests, notes=[note])

    @staticmethod
    def _request(
        index: int, start: float, generator: random.Random, *, options: WorkloadOptions
    ) -> PlannedRequest:
        drawn = PROMPT_TOKENS.draw(generator, most=MAX_PROMPT)
        answer = scaled(ANSWER_TOKENS.draw(generator, most=MAX_ANSWER), options.scale)
        answer = min(answer, options.max_context // 2)
        prompt = max(MIN_PROMPT, scaled(drawn, options.scale))
        prompt = max(2, min(prompt, options.max_context - answer))
        # With a system message of its own: a chat template's default one would be shared by all.
        system = prompt // 2
        return PlannedRequest(
            id=f"r{index}",
            session=f"s{index}",
            segments=(Segment(f"system{index}", system, "system"), Segment(f"user{index}", prompt - system)),
            max_tokens=answer,
            at_unit=start,
        )


WORKLOAD = Control()
