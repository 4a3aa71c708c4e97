"""Claude Code: one shared prompt of tools, small steps, rare huge tool results, sub-agents, compaction."""

import random
from collections.abc import Iterator

from loadtest.arrivals import DEFAULT_CV
from loadtest.conversation import Conversation, arrivals, by_p90, scaled
from loadtest.errors import PlanInvalid
from loadtest.plan import Plan, PlannedRequest, Segment, plan_of
from loadtest.workloads import WorkloadOptions

SESSIONS = 4
TURNS = by_p90(43, 147)
TOOL_TOKENS, SYSTEM_TOKENS, FIRST_TOKENS = 12_300, 2_800, 500
NEW_TOKENS, ANSWER_TOKENS = by_p90(750, 6_407), by_p90(216, 898)
MAX_NEW, MAX_ANSWER, MAX_TURNS = 47_018, 3_690, 341

TOOL_SHARE = 0.86
"""Calls that end in a tool's use; after the others a person thinks."""
TOOL_PAUSE_S, PERSON_PAUSE_S, MAX_PAUSE_S = by_p90(8.1, 60.0), by_p90(175.0, 2_636.0), 3_600.0

COMPACTION_RATE, SUMMARY_SHARE = 0.007, 0.1

AGENT_SESSIONS = 0.44
"""Sessions that start sub-agents."""
AGENTS, MAX_AGENTS = by_p90(4, 10), 24
AGENT_WIDTHS, AGENT_WIDTH_COUNTS = (1, 2, 3), (49, 4, 2)
AGENT_CALLS, MIN_AGENT_CALLS, MAX_AGENT_CALLS = by_p90(10, 18), 2, 24
AGENT_SYSTEM_TOKENS, AGENT_TASK_TOKENS = 9_970, 200
"""Of a first prompt of 159 blocks of 64, siblings share 98 %."""


class ClaudeCode:
    name = "claude_code"
    summary = (
        "Claude Code as the AgentX and Weka traces show it: 15.1K of tools and system shared, 43 calls "
        "(median), 750 / 6,407 new tokens a call and 216 / 898 out (p50 / p90), pauses 8.1 s after tools and "
        "175 s after people (median), sub-agents in 44 % of sessions"
    )

    def build(self, options: WorkloadOptions) -> Plan:
        options.validated()
        generator = random.Random(f"claude code {options.seed}")
        starts = arrivals(generator, cv=DEFAULT_CV)
        requests: list[PlannedRequest] = []
        for number in range(options.sessions or SESSIONS):
            requests.extend(_Session(number, generator, options).calls(next(starts)))
        longest = max(request.num_prompt_tokens for request in requests)
        notes = (
            f"{self.summary}; scale {options.scale:g}, pauses x {options.time_scale:g}, seed {options.seed}",
            f"{len(requests)} calls, the longest prompt has {longest} tokens",
            f"a session that would pass {options.max_context} tokens goes on from a summary",
        )
        return plan_of(self.name, requests, notes=notes)


class _Session:
    """One session in the making: the main agent, and those it sends out and waits for."""

    def __init__(self, number: int, generator: random.Random, options: WorkloadOptions) -> None:
        self._session = f"s{number}"
        self._generator = generator
        self._options = options
        self._num_agents = 0

    def calls(self, start: float) -> Iterator[PlannedRequest]:
        scale = self._options.scale
        tools = Segment("claude-tools", scaled(TOOL_TOKENS, scale), "system")
        system = Segment("claude-system", scaled(SYSTEM_TOKENS, scale), "system")
        talk = self._conversation([tools, system], name=self._session)
        turns = self._options.turns or max(1, round(TURNS.draw(self._generator, most=MAX_TURNS)))
        sending = self._sending(turns)
        new, answer = scaled(FIRST_TOKENS, scale), self._answer_tokens()
        self._make_room(talk, new, answer)
        yield talk.ask(new, answer, at_unit=start)
        for turn in range(1, turns):
            waits_for = [talk.last_id]
            if width := sending.get(turn):
                agents = [list(self._agent(talk.last_id)) for _ in range(width)]
                yield from (call for agent in agents for call in agent)
                waits_for = [agent[-1].id for agent in agents]
            new, answer = self._new_tokens(), self._answer_tokens()
            new = self._make_room(talk, new, answer)
            yield talk.ask(new, answer, after=waits_for, delay_s=self._pause())

    def _sending(self, turns: int) -> dict[int, int]:
        """Turn -> how many sub-agents are sent out before it."""
        if turns < 2 or self._generator.random() >= AGENT_SESSIONS:
            return {}
        left = max(1, round(AGENTS.draw(self._generator, most=MAX_AGENTS)))
        sending: dict[int, int] = {}
        for turn in self._generator.sample(range(1, turns), turns - 1):
            if left <= 0:
                break
            (width,) = self._generator.choices(AGENT_WIDTHS, AGENT_WIDTH_COUNTS)
            sending[turn] = min(width, left)
            left -= sending[turn]
        return sending

    def _agent(self, sender: str) -> Iterator[PlannedRequest]:
        scale = self._options.scale
        name = f"{self._session}-agent{self._num_agents}"
        self._num_agents += 1
        system = Segment("claude-agent-system", scaled(AGENT_SYSTEM_TOKENS, scale), "system")
        talk = self._conversation([system], name=name)
        num_calls = round(AGENT_CALLS.draw(self._generator, most=MAX_AGENT_CALLS))
        new, answer = scaled(AGENT_TASK_TOKENS, scale), self._answer_tokens()
        self._make_room(talk, new, answer)
        yield talk.ask(new, answer, after=[sender])
        for _ in range(max(MIN_AGENT_CALLS, num_calls) - 1):
            new, answer = self._new_tokens(), self._answer_tokens()
            new = self._make_room(talk, new, answer)
            pause = TOOL_PAUSE_S.draw(self._generator, most=MAX_PAUSE_S) * self._options.time_scale
            yield talk.ask(new, answer, after=[talk.last_id], delay_s=pause)

    def _conversation(self, prefix: list[Segment], *, name: str) -> Conversation:
        return Conversation(self._session, prefix, name=name, max_context=self._options.max_context)

    def _new_tokens(self) -> int:
        return scaled(NEW_TOKENS.draw(self._generator, most=MAX_NEW), self._options.scale)

    def _answer_tokens(self) -> int:
        return scaled(ANSWER_TOKENS.draw(self._generator, most=MAX_ANSWER), self._options.scale)

    def _pause(self) -> float:
        after = TOOL_PAUSE_S if self._generator.random() < TOOL_SHARE else PERSON_PAUSE_S
        return after.draw(self._generator, most=MAX_PAUSE_S) * self._options.time_scale

    def _make_room(self, talk: Conversation, new: int, answer: int) -> int:
        """Compact where nothing more fits (and, rarely, before); return how many new tokens fit then."""
        by_choice = self._generator.random() < COMPACTION_RATE
        if (by_choice and talk.num_calls) or not talk.fits(new, answer):
            talk.compact(max(1, round(talk.num_tokens * SUMMARY_SHARE)))
        room = self._options.max_context - talk.num_tokens - answer
        if room < 1:
            raise PlanInvalid(
                f"a call and its answer take more than {talk.num_tokens + answer} tokens and "
                f"--max-context is {self._options.max_context}: lower --scale"
            )
        return min(new, room)


WORKLOAD = ClaudeCode()
