"""One plan, played by this load tester and by AIPerf against the same running server.

    python -m venv /tmp/aiperf && /tmp/aiperf/bin/pip install aiperf==0.13.0
    python -m tests.benchmarks.bench_agreement --aiperf /tmp/aiperf/bin/aiperf [--target URL]

Without a target, the mock is it, and the truth is known. The tools take turns; each pass has prompts of
its own of the same lengths, so that no prefix cache favours the second. AIPerf is no dependency: it
lives in an environment of its own. GuideLLM would need PyTorch with CUDA there, so it is not asked.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import uvloop
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers

from loadtest.bench import Bench, TargetOptions, open_bench
from loadtest.errors import LoadTestError
from loadtest.filler import messages
from loadtest.metrics import Measures, measure
from loadtest.mock.script import MockOptions
from loadtest.plan import Plan
from loadtest.runner import run_once
from tests.benchmarks.cpu.plans import side_by_side
from tests.loadtest.mock_process import mock_process

AGREES = 0.05
MOCK = MockOptions(ttft_s=0.3, itl_s=0.02)
TOKENIZER = "local/words"

NOTES = {
    "TTFT": "AIPerf's clock starts before it takes a connection and builds the HTTP request; ours when "
    "the first byte is handed to the socket, so AIPerf's is longer by its own work",
    "TPOT": "the same definition: (last - first) / (tokens - 1), one a request; AIPerf calls it ITL",
    "E2E": "AIPerf's ends with the last event that it parsed; ours with the last content read",
    "output tok/s": "AIPerf's time runs from its first send to its last end; between two requests its "
    "timing process issues a credit to a worker process, and the server is idle for so long",
    "a busy machine": "AIPerf is about ten processes, this tool is one; where they share the server's cores, "
    "it is slower while AIPerf measures, and both are right",
}


Figures: TypeAlias = dict[str, float]
"""Of one pass, by name. Times in seconds."""


async def play_ours(bench: Bench, plan: Plan) -> Figures:
    played = await run_once(
        plan,
        starts={request.id: 0.0 for request in plan.requests},
        client=bench.client,
        filler=bench.filler(),
        encode=bench.encode,
        options=bench.options,
        on_progress=lambda _: None,
    )
    found = measure(played.records, plan=plan, duration_s=played.duration_s)
    if found.num_succeeded < len(plan.requests):
        sys.exit(f"requests failed: {found.faults}")
    return _ours(found)


def _ours(found: Measures) -> Figures:
    values: Figures = {}
    for name, part in (("TTFT", found.ttft), ("TPOT", found.tpot), ("E2E", found.e2e)):
        for share in ("mean", "p50", "p90"):
            value = getattr(part, share)
            assert value is not None
            values[f"{name} {share}"] = value
    assert found.output_tokens_per_s is not None
    assert found.num_prompt_tokens is not None
    assert found.num_output_tokens is not None
    values["output tok/s"] = found.output_tokens_per_s
    values["requests/s"] = found.requests_per_s
    values["prompt tokens"] = found.num_prompt_tokens / found.num_requests
    values["output tokens"] = found.num_output_tokens / found.num_requests
    return values


def play_aiperf(bench: Bench, plan: Plan, *, aiperf: str, folder: Path) -> Figures:
    """The same lengths in a text of its own, in plan order, with as many requests at once."""
    folder.mkdir()
    filler = bench.filler()
    with (folder / "input.jsonl").open("w") as file:
        for request in plan.requests:
            (message,) = messages(request, filler)
            file.write(json.dumps({"text": message.text, "output_length": request.max_tokens}) + "\n")
    command = [
        *(aiperf, "profile", "--url", bench.target.url, "--model", bench.target.model),
        *("--endpoint-type", "chat", "--streaming", "--use-legacy-max-tokens"),
        *("--use-server-token-count", "--tokenizer", TOKENIZER),
        *("--input-file", str(folder / "input.jsonl"), "--custom-dataset-type", "single_turn"),
        *("--dataset-sampling-strategy", "sequential", "--request-count", str(len(plan.requests))),
        *("--concurrency", str(bench.options.concurrency), "--workers-max", "1", "--ui", "none"),
        *("--record-processors", "1", "--no-server-metrics", "--no-gpu-telemetry"),
        *("--extra-inputs", json.dumps({"ignore_eos": True, "temperature": 0})),
        *("--artifact-dir", str(folder / "out")),
    ]
    home = _write_tokenizer(folder / "huggingface")
    environment = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HOME": str(folder),
    }
    log = folder / "aiperf.log"
    with log.open("wb") as output:
        code = subprocess.run(
            command, stdout=output, stderr=output, env=environment, timeout=1800, check=False
        ).returncode
    if code != 0:
        sys.exit(f"AIPerf ended with {code}:\n{log.read_text()[-3000:]}")
    return _aiperfs(json.loads((folder / "out" / "profile_export_aiperf.json").read_text()))


def _aiperfs(found: dict[str, Any]) -> Figures:
    names = {"TTFT": "time_to_first_token", "TPOT": "inter_token_latency", "E2E": "request_latency"}
    values = {
        f"{name} {ours}": found[theirs][part] / 1000
        for name, theirs in names.items()
        for ours, part in (("mean", "avg"), ("p50", "p50"), ("p90", "p90"))
    }
    values["output tok/s"] = found["output_token_throughput"]["avg"]
    values["requests/s"] = found["request_throughput"]["avg"]
    values["prompt tokens"] = found["usage_prompt_tokens"]["avg"]
    values["output tokens"] = found["usage_completion_tokens"]["avg"]
    return values


def _write_tokenizer(home: Path) -> Path:
    """AIPerf loads one whatever it counts by. This one splits at spaces, in the hub's cache layout."""
    model = home / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = model / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[END]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(snapshot / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "[END]"}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(settings))
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    return home


def truth(plan: Plan, *, concurrency: int) -> Figures:
    """What the mock does by its options, with a client that takes no time at all."""
    (max_tokens,) = {request.max_tokens for request in plan.requests}
    e2e_s = MOCK.ttft_s + MOCK.itl_s * (max_tokens - 1)
    return {
        **{f"TTFT {share}": MOCK.ttft_s for share in ("mean", "p50", "p90")},
        **{f"TPOT {share}": MOCK.itl_s for share in ("mean", "p50", "p90")},
        **{f"E2E {share}": e2e_s for share in ("mean", "p50", "p90")},
        "output tok/s": concurrency * max_tokens / e2e_s,
        "requests/s": concurrency / e2e_s,
        "prompt tokens": plan.requests[0].num_prompt_tokens,
        "output tokens": max_tokens,
    }


def table_of(ours: Sequence[Figures], theirs: Sequence[Figures], *, known: Figures) -> Table:
    """Medians over the repeats. The difference is AIPerf's against ours."""
    table = Table(title="medians over the repeats (least to most)", title_justify="left")
    for column in ("figure", "truth", "ours", "AIPerf", "difference", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for name in ours[0]:
        a = [figures[name] for figures in ours]
        b = [figures[name] for figures in theirs]
        difference = statistics.median(b) / statistics.median(a) - 1
        table.add_row(
            name,
            _written(name, known[name]) if name in known else "unknown",
            f"{_written(name, statistics.median(a))} ({_written(name, min(a))} to {_written(name, max(a))})",
            f"{_written(name, statistics.median(b))} ({_written(name, min(b))} to {_written(name, max(b))})",
            f"{difference:+.1%}",
            "agree" if abs(difference) <= AGREES else "[bold]differ[/bold]",
        )
    return table


def _written(name: str, value: float) -> str:
    return f"{value * 1000:.1f} ms" if name.partition(" ")[0] in NOTES else f"{value:.2f}"


async def main(options: argparse.Namespace) -> None:
    plan = side_by_side(
        options.requests, prompt_tokens=options.prompt_tokens, answer_tokens=options.max_tokens
    )
    with ExitStack() as scope:
        url = options.target or scope.enter_context(mock_process(MOCK))
        folder = Path(scope.enter_context(tempfile.TemporaryDirectory()))
        target = TargetOptions(url=url, concurrency=options.concurrency, calibrate=False)
        console = Console(width=130)
        ours, theirs = [], []
        async with open_bench(target, plans=[plan], say=console.print) as bench:
            for number in range(options.repeats):
                ours.append(await play_ours(bench, plan))
                where = folder / str(number)
                theirs.append(
                    await asyncio.to_thread(play_aiperf, bench, plan, aiperf=options.aiperf, folder=where)
                )
        known = {} if options.target else truth(plan, concurrency=options.concurrency)
        console.print(
            f"{options.requests} requests, {options.concurrency} at once, {options.prompt_tokens} prompt and "
            f"{options.max_tokens} output tokens each, {options.repeats} repeats"
        )
        console.print(table_of(ours, theirs, known=known))
        for name, note in NOTES.items():
            console.print(f"{name}: {note}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--aiperf", required=True, help="the aiperf command")
    parser.add_argument("--target", help="a running server [the mock]")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    try:
        uvloop.run(main(parser.parse_args()))
    except LoadTestError as error:
        sys.exit(str(error))
