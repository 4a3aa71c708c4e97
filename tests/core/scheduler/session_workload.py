"""Agents in a closed loop: each sends its next turn some steps after it has read the answer to the last.

The scheduler and its pool are real; the model is not there: every sampled token is the same.
"""

import random
from array import array
from dataclasses import dataclass, field

from core.cache.manager import KVCacheManager
from core.request import Request
from core.scheduler.plan import SampledTokens, StepPlan, StepResult
from core.scheduler.policies import WaitingQueue
from core.scheduler.scheduler import Scheduler
from core.scheduler.sessions import SessionGate
from tests.properties.simulation import greedy

BLOCK_SIZE = 4
SYSTEM_TOKENS = 16
FIRST_TOKENS = 64
TURN_TOKENS = 16
ANSWER_TOKENS = 8
STEP_S, TOKEN_S = 0.03, 0.005


@dataclass
class Agent:
    """One session. `history` is what its next prompt begins with."""

    name: str
    num_turns_left: int
    history: list[int] = field(default_factory=list)
    wakes_at: int = 0
    turn: Request | None = None
    num_turns_done: int = 0
    waited_since: int = 0
    longest_wait: int = 0
    """Turns that others began between a prompt of this agent and its first step."""
    asked_at: float = 0.0
    longest_wait_s: float = 0.0


class SessionWorkload:
    """Runs agents over one scheduler, and adds up what the cache gave them."""

    def __init__(
        self,
        *,
        num_agents: int,
        num_turns: int,
        num_pool_tokens: int,
        gated: bool,
        policy: WaitingQueue | None = None,
        seed: int = 0,
        max_pause: int = 12,
    ) -> None:
        manager = KVCacheManager(num_pool_tokens // BLOCK_SIZE, BLOCK_SIZE)
        self.gate = SessionGate(num_pool_tokens) if gated else None
        self.scheduler = Scheduler(
            manager,
            max_step_tokens=96,
            max_prefill_tokens=64,
            max_running=8,
            max_model_len=1 << 20,
            policy=policy,
            gate=self.gate,
        )
        self.choose = random.Random(seed)
        self.max_pause = max_pause
        self.agents = [Agent(f"agent-{n}", num_turns, wakes_at=n) for n in range(num_agents)]
        self.num_known_tokens = 0
        self.num_found_tokens = 0
        self.num_turns_begun = 0
        self.num_steps = 0
        self.was_shut = False
        self.now = 0.0

    @property
    def hit_rate(self) -> float:
        """Of what agents had computed in earlier turns: how much their prompts found in the cache."""
        return self.num_found_tokens / self.num_known_tokens

    def run(self, *, max_steps: int = 60_000) -> "SessionWorkload":
        """Until every agent has had all its turns."""
        while any(agent.num_turns_left or agent.turn for agent in self.agents):
            self.num_steps += 1
            assert self.num_steps < max_steps, "somebody is not served"
            for agent in self.agents:
                if agent.turn is None and agent.num_turns_left and agent.wakes_at <= self.num_steps:
                    self._ask(agent)
            self._tick()
            plan = self.scheduler.schedule()
            self._check()
            if plan is not None:
                self._note_begun(plan)
                took_s = STEP_S + TOKEN_S * plan.num_tokens
                self.now += took_s
                self._tick()
                self.scheduler.update(plan, _result_of(plan), took_s=took_s)
                self._check()
            else:
                self.now += STEP_S
            self._read_answers()
        return self

    def _tick(self) -> None:
        self.scheduler.advance(self.now)

    def _ask(self, agent: Agent) -> None:
        number = int(agent.name.rpartition("-")[2])
        if not agent.history:
            agent.history = [1] * SYSTEM_TOKENS + [10 + number] * FIRST_TOKENS
        prompt = [*agent.history, *([10 + number, 2 + agent.num_turns_done] * (TURN_TOKENS // 2))]
        agent.num_turns_left -= 1
        agent.turn = Request(
            request_id=f"{agent.name}.{agent.num_turns_done}",
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            sampling=greedy(ANSWER_TOKENS),
            session_id=agent.name,
        )
        agent.waited_since, agent.asked_at = self.num_turns_begun, self.now
        self._tick()
        self.scheduler.add(agent.turn)
        self._check()

    def _note_begun(self, plan: StepPlan) -> None:
        planned = {item.request_id for item in plan.items}
        for agent in self.agents:
            turn = agent.turn
            if turn is None or turn.request_id not in planned or agent.waited_since < 0:
                continue
            agent.longest_wait = max(agent.longest_wait, self.num_turns_begun - agent.waited_since)
            agent.longest_wait_s = max(agent.longest_wait_s, self.now - agent.asked_at)
            agent.waited_since = -1
            self.num_turns_begun += 1
            if agent.num_turns_done:
                self.num_known_tokens += len(agent.history) - 1  # the last token was never an input
                self.num_found_tokens += turn.num_cached_tokens or 0

    def _read_answers(self) -> None:
        for agent in self.agents:
            if agent.turn is not None and agent.turn.finish_reason is not None:
                agent.history = list(agent.turn.token_ids)
                agent.turn = None
                agent.num_turns_done += 1
                agent.wakes_at = self.num_steps + self.choose.randint(1, self.max_pause)

    def _check(self) -> None:
        if self.num_steps % 7 == 0:  # often enough to be near what broke it
            self.scheduler.check()
        if self.gate is not None:
            self.gate.check()
            self.was_shut = self.was_shut or len(self.gate) > 0


def _result_of(plan: StepPlan) -> StepResult:
    samples = tuple(
        SampledTokens(request_id=item.request_id, token_ids=(7,)) for item in plan.items if item.num_samples
    )
    return StepResult(step_id=plan.step_id, samples=samples)
