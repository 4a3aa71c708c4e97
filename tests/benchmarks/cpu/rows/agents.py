"""What users of agents feel: whole sessions, their first words, and gaps while others' prompts come in."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median

from loadtest.plan import Plan
from loadtest.report import Report
from tests.benchmarks.claims.serving import Server
from tests.benchmarks.cpu.contest import Contest, Contestant, Figures, Options, Work, loaded
from tests.benchmarks.cpu.peers import has_llama
from tests.benchmarks.cpu.plans import copies, growing_sessions, prompts_into_streams
from tests.benchmarks.cpu.servers import llama_server, tidegate, wait_until_quiet
from tests.benchmarks.cpu.verdict import Goal

HALF = (Goal(times=2.0),)
SLOTS, SLOT_TOKENS = 16, 2048
LONG_CONTEXT = 40_960
FORMS = ("Q4_0", "Q8_0")
"""llama.cpp's fastest, and its fastest of our own quality."""


def agents(options: Options) -> list[Work]:
    return plan_works(options, copies("tool-agent", 2), name="tool-agent, two copies at once")


def chat(options: Options) -> list[Work]:
    return plan_works(options, copies("chat-multiturn", 1), "--rate", "1", name="chat-multiturn")


def plan_works(options: Options, plan: Plan, *arguments: str, name: str) -> list[Work]:
    """Two rounds at most: a pass takes a minute."""
    read = partial(session_figures, plan=plan)
    with servers(options, slots=SLOTS, context=SLOT_TOKENS) as them:
        contestants = [
            Contestant(who, partial(play, plan, server, *arguments, read=read), ours)
            for who, server, ours in them
        ]
        contest = Contest(contestants, options)
        contest.play(name, rounds=min(options.rounds, 2), warm_up=False)
    return session_works(contest, name)


def growth(options: Options) -> list[Work]:
    """One round: two sessions of the Codex twin as they pass 32,000 tokens."""
    plan = growing_sessions(sessions=2, turns=3, answer_tokens=32, longest=LONG_CONTEXT)
    read = partial(session_figures, plan=plan)
    longer = ("--max-model-len", str(LONG_CONTEXT), "--allow-longer-context")
    override = ("--override-kv", f"llama.context_length=int:{LONG_CONTEXT}")
    with servers(options, slots=2, context=LONG_CONTEXT, ours=longer, peers=override) as them:
        contestants = [
            Contestant(who, partial(play, plan, server, "--rate", "1", read=read), ours)
            for who, server, ours in them
        ]
        contest = Contest(contestants, options).play("sessions past 32,000", rounds=1, warm_up=False)
    return session_works(contest, "two sessions growing past 32,000 tokens")


def gaps(options: Options) -> list[Work]:
    """Four streams, and a 512-token prompt every second and a half."""
    plan = prompts_into_streams(streams=4, answer_tokens=192, prompts=6, prompt_tokens=512, every_s=1.5)
    with servers(options, slots=8, context=SLOT_TOKENS) as them:
        contestants = [
            Contestant(who, partial(play, plan, server, read=gap_figures), ours) for who, server, ours in them
        ]
        contest = Contest(contestants, options).play("prompts into streams", rounds=min(options.rounds, 2))
    name = "inter-token gaps while others prefill"
    return [
        contest.work(f"{name}, p99 / p50", "p99/p50", unit="", better="less", goals=(Goal(bound=3.0),)),
        contest.work(f"{name}, p99", "p99_s", unit="s", better="less"),
    ]


def session_works(contest: Contest, name: str) -> list[Work]:
    return [
        contest.work(f"{name}: job completion", "job_s", unit="s", better="less", goals=HALF),
        contest.work(f"{name}: job completion without the plan's pauses", "work_s", unit="s", better="less"),
        contest.work(f"{name}: TTFT_s p99", "ttft_s", unit="s", better="less", goals=HALF),
    ]


@contextmanager
def servers(
    options: Options, *, slots: int, context: int, ours: tuple[str, ...] = (), peers: tuple[str, ...] = ()
) -> Iterator[list[tuple[str, Server, bool]]]:
    """Ours in its first numerics, and llama.cpp's; both may keep as many tokens."""
    with ExitStack() as stack:
        numerics = options.numerics[0]
        server = stack.enter_context(tidegate(numerics, tokens=slots * context, more=ours))
        wait_until_quiet(server.pid)
        found = [(numerics, server, True)]
        for form in options.forms(*FORMS) if has_llama() else ():
            peer = llama_server(form, slots=slots, context=context, more=peers)
            found.append((f"llama.cpp {form}", stack.enter_context(peer), False))
        yield found


def play(plan: Plan, server: Server, *arguments: str, read: Callable[[Report], Figures]) -> Figures:
    return read(loaded(plan, server, *arguments))


def session_figures(report: Report, *, plan: Plan) -> Figures:
    """Medians over sessions, and the first word that was latest but for one in a hundred."""
    found = {
        "job_s": report.summary["job completion p50"].median,
        "work_s": median(work_times(report, plan).values()),
        "ttft_s": report.summary["TTFT_s p99"].median,
        "hit": report.summary["hit"].median,
    }
    return {name: value for name, value in found.items() if value is not None}


def work_times(report: Report, plan: Plan) -> Mapping[str, float]:
    """A session's job completion less the pauses that its plan makes between answers."""
    pauses: dict[str, float] = defaultdict(float)
    for request in plan.requests:
        pauses[request.session] += request.delay_s
    begins: dict[str, float] = {}
    ends: dict[str, float] = {}
    for row in report.repeats[0].rows:
        begins[row.session] = min(row.scheduled_at, begins.get(row.session, row.scheduled_at))
        ends[row.session] = max(row.ended_at, ends.get(row.session, row.ended_at))
    return {session: ends[session] - begins[session] - pauses[session] for session in begins}


def gap_figures(report: Report) -> Figures:
    p99, p50 = (report.summary[f"ITL {part}"].median for part in ("p99", "p50"))
    assert p99
    assert p50
    return {"p99/p50": p99 / p50, "p99_s": p99, "p50_s": p50}
