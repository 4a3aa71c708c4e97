"""How fast: one long prompt, one stream, sixteen streams; and the same with a model eight times as large."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from loadtest.plan import Plan
from loadtest.report import Report
from tests.benchmarks.claims.serving import Server
from tests.benchmarks.cpu.contest import Contest, Contestant, Figures, Options, Work, loaded
from tests.benchmarks.cpu.peers import LARGE_MODEL, has_llama, has_openvino
from tests.benchmarks.cpu.plans import one_after_another, side_by_side
from tests.benchmarks.cpu.servers import OpenVINO, llama_server, openvino, tidegate, wait_until_quiet
from tests.benchmarks.cpu.verdict import Goal

PROMPT, SHORT, ANSWER, STREAMS = 512, 127, 64, 16
TEXT = ("--dialect", "completions")
"""Without a chat template: the prompt has exactly the planned tokens."""
SLOT_TOKENS = 1024
OPENVINO = "OpenVINO int8, no HTTP"


def prefill(options: Options) -> list[Work]:
    plan = one_after_another(5, prompt_tokens=PROMPT, answer_tokens=1)
    with contestants(options, plan, read=prompt_speed, ask=openvino_prompt) as all_of_them:
        contest = Contest(all_of_them, options).play("prefill", rounds=options.rounds)
    goals = (Goal(times=1.2), Goal(times=1.5, same_quality=True))
    name = f"prefill, one {PROMPT}-token prompt"
    return [
        contest.work(name, "tok/s", unit="tok/s", better="more", goals=goals),
        contest.work(f"{name}: first token", "ttft_s", unit="s", better="less"),
    ]


def one(options: Options) -> list[Work]:
    plan = one_after_another(4, prompt_tokens=SHORT, answer_tokens=ANSWER)
    with contestants(options, plan, read=answer_speed, ask=partial(openvino_answers, streams=1)) as them:
        contest = Contest(them, options).play("one stream", rounds=options.rounds)
    goals = (Goal(times=1.2, peers=("llama.cpp",)), Goal(times=1.5, same_quality=True))
    return [contest.work("one stream", "tok/s", unit="tok/s", better="more", goals=goals)]


def sixteen(options: Options) -> list[Work]:
    plan = side_by_side(2 * STREAMS, prompt_tokens=SHORT, answer_tokens=ANSWER)
    ask = partial(openvino_answers, streams=STREAMS)
    with contestants(
        options, plan, "--concurrency", str(STREAMS), read=answer_speed, ask=ask, slots=(8, STREAMS)
    ) as them:
        contest = Contest(them, options).play("16 streams", rounds=options.rounds)
    goals = (
        Goal(times=2.0, peers=("llama.cpp",)),
        Goal(times=1.5, peers=("OpenVINO",)),
        Goal(times=2.0, same_quality=True),
    )
    return [contest.work("16 streams", "tok/s", unit="tok/s", better="more", goals=goals)]


def large(options: Options) -> list[Work]:
    """One round of each: what it measures lasts for minutes."""
    alone = one_after_another(2, prompt_tokens=SHORT, answer_tokens=ANSWER)
    together = side_by_side(STREAMS, prompt_tokens=32, answer_tokens=ANSWER)
    works = []
    for name, plan, streams, times in (("one stream", alone, 1, 1.0), ("16 streams", together, STREAMS, 2.0)):
        with large_servers(options, streams=streams) as servers:
            players = [
                Contestant(
                    name=who,
                    play=partial(play, plan, server, *TEXT, "--concurrency", str(streams), read=answer_speed),
                    ours=ours,
                )
                for who, server, ours in servers
            ]
            contest = Contest(players, options).play(f"1.1B, {name}", rounds=1)
        works.append(
            contest.work(
                f"1.1B random Llama, {name}",
                "tok/s",
                unit="tok/s",
                better="more",
                goals=(Goal(times=times),),
                notes=("every contestant reads the same Q4_0 file",),
            )
        )
    return works


@contextmanager
def large_servers(options: Options, *, streams: int) -> Iterator[list[tuple[str, Server, bool]]]:
    with ExitStack() as stack:
        servers = [
            (
                kind,
                stack.enter_context(
                    tidegate(
                        kind,
                        tokens=(streams + 1) * 256,
                        model=LARGE_MODEL,
                        more=("--model-id", "large", "--max-model-len", "1024"),
                    )
                ),
                True,
            )
            for kind in options.numerics
        ]
        if has_llama() and options.forms("Q4_0"):
            peer = llama_server("Q4_0", slots=streams, context=512, model=LARGE_MODEL)
            servers.append(("llama.cpp Q4_0", stack.enter_context(peer), False))
        yield servers


@contextmanager
def contestants(
    options: Options,
    plan: Plan,
    *arguments: str,
    read: Callable[[Report], Figures],
    ask: Callable[[OpenVINO], Figures],
    slots: tuple[int, ...] = (1,),
) -> Iterator[list[Contestant]]:
    """All who were asked for, loaded; llama.cpp's once for each number of slots."""
    with ExitStack() as stack:
        found = []
        for numerics in options.numerics:
            server = stack.enter_context(tidegate(numerics, tokens=STREAMS * SLOT_TOKENS))
            wait_until_quiet(server.pid)
            found.append(
                Contestant(numerics, partial(play, plan, server, *TEXT, *arguments, read=read), True)
            )
        for form in options.forms() if has_llama() else ():
            for number in slots:
                server = stack.enter_context(llama_server(form, slots=number, context=SLOT_TOKENS))
                name = llama_name(form, number if len(slots) > 1 else None)
                found.append(Contestant(name, partial(play, plan, server, *TEXT, *arguments, read=read)))
        if "openvino" in options.peers and has_openvino():
            found.append(Contestant(OPENVINO, partial(ask, stack.enter_context(openvino()))))
        yield found


def llama_name(form: str, slots: int | None) -> str:
    return f"llama.cpp {form}" + (f", {slots} slots" if slots else "")


def play(plan: Plan, server: Server, *arguments: str, read: Callable[[Report], Figures]) -> Figures:
    return read(loaded(plan, server, *arguments))


def prompt_speed(report: Report) -> Figures:
    ttft_s = report.summary["TTFT p50"].median
    assert ttft_s
    return {"tok/s": PROMPT / ttft_s, "ttft_s": ttft_s}


def answer_speed(report: Report) -> Figures:
    speed = report.summary["output tok/s"].median
    assert speed
    return {"tok/s": speed}


def openvino_prompt(peer: OpenVINO) -> Figures:
    took_s = sorted(peer.generate(prompt_tokens=PROMPT, answer_tokens=1, streams=1) for _ in range(5))
    return {"tok/s": PROMPT / took_s[2], "ttft_s": took_s[2]}


def openvino_answers(peer: OpenVINO, *, streams: int) -> Figures:
    took_s = peer.generate(prompt_tokens=SHORT, answer_tokens=ANSWER, streams=streams)
    return {"tok/s": ANSWER * streams / took_s}
