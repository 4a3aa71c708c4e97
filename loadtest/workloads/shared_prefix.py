"""Single questions of which a chosen part is the same for all of a group."""

import random

from loadtest.conversation import arrivals, scaled
from loadtest.errors import PlanInvalid
from loadtest.plan import Plan, PlannedRequest, Segment, plan_of
from loadtest.workloads import WorkloadOptions

SESSIONS = 64
GROUP = 16
PROMPT_TOKENS, ANSWER_TOKENS = 2_176, 256


class SharedPrefix:
    name = "shared_prefix"
    summary = (
        "the size of SGLang's generated-shared-prefix: 2,176 tokens in, 256 out, groups of 16; "
        "--share says how much of a prompt its group has in common"
    )

    def build(self, options: WorkloadOptions) -> Plan:
        options.validated()
        if options.turns not in (None, 1):
            raise PlanInvalid(f"--turns is {options.turns}; shared_prefix has one call a session")
        generator = random.Random(f"shared prefix {options.seed}")
        number, starts = options.sessions or SESSIONS, arrivals(generator)
        num_groups = -(-number // GROUP)
        # Groups come mixed: a cache that keeps only the last prefix is not enough.
        groups = [index % num_groups for index in range(number)]
        generator.shuffle(groups)
        prompt, answer = scaled(PROMPT_TOKENS, options.scale), scaled(ANSWER_TOKENS, options.scale)
        if prompt + answer > options.max_context:
            raise PlanInvalid(
                f"a call takes {prompt + answer} tokens and --max-context is {options.max_context}: "
                "lower --scale"
            )
        # A prompt ends with a question, of one token at least.
        shared = min(prompt - 1, round(prompt * options.share))
        requests = [
            PlannedRequest(
                id=f"r{index}",
                session=f"s{index}",
                segments=(
                    *((Segment(f"prefix{group}", shared, "system"),) if shared else ()),
                    Segment(f"question{index}", prompt - shared),
                ),
                max_tokens=answer,
                at_unit=next(starts),
            )
            for index, group in enumerate(groups)
        ]
        note = f"{self.summary}; share {options.share:g}, scale {options.scale:g}, seed {options.seed}"
        return plan_of(self.name, requests, notes=[note])


WORKLOAD = SharedPrefix()
