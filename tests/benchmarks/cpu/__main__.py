"""Tidegate beside its peers on this machine's processor: a table, and JSON with date, machine and versions.

    make bench-cpu                                      every row, after `make peers`
    make bench-cpu ARGS="--rows prefill,one"            some of them
    make bench-cpu ARGS="--rows one --rounds 1"         quickly
    make bench-cpu ARGS="--peers Q4_0 --numerics stable"

About 40 minutes on two cores, otherwise idle. Contestants take turns in every round; a ratio is the median
of the rounds' ratios.
"""

import argparse
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

import gateway
from tests.benchmarks.cpu import quality
from tests.benchmarks.cpu.contest import Options, Work
from tests.benchmarks.cpu.peers import BUILT, PYTHON, QUANTISED, has_llama, has_openvino
from tests.benchmarks.cpu.rows import ROWS
from tests.benchmarks.cpu.verdict import Verdict

SCHEMA = "tidegate-bench-cpu/1"
KL_FILE = "quality.json"
PEERS = ("Q4_0", "Q8_0", "openvino")
"""Those that may be best in some row. Q4_1 and BF16 are slower on every machine seen."""


def main() -> None:
    options = parsed()
    console = Console(width=170)
    say = partial(console.print, style="dim", highlight=False, markup=False)
    options.out.mkdir(parents=True, exist_ok=True)
    judged = qualities(options, say)
    asked = Options(
        rounds=options.rounds,
        numerics=options.numerics,
        peers=options.peers,
        kl=quality.kl_by_contestant(judged),
        say=say,
    )
    began_at, seconds = datetime.now(UTC), {}
    works: list[Work] = []
    for name in options.rows:
        if name == "quality":
            continue
        started = time.monotonic()
        works += ROWS[name](asked)
        seconds[name] = time.monotonic() - started
        say(f"{name}: {seconds[name]:.0f} s")
    console.print(quality_table(judged))
    console.print(table(works))
    file = options.out / f"cpu-{began_at:%Y%m%d-%H%M%S}.json"
    document = {
        "schema": SCHEMA,
        "began_at": began_at.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "options": {"rounds": options.rounds, "numerics": options.numerics, "peers": options.peers},
        "seconds": seconds,
        "quality": [msgspec.to_builtins(each) for each in judged],
        "works": [
            {**msgspec.to_builtins(work), "verdicts": msgspec.to_builtins(work.verdicts())} for work in works
        ],
    }
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    console.print(f"{sum(seconds.values()):.0f} s; {file}")


def parsed() -> argparse.Namespace:
    names = ("quality", *ROWS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=listed, default=names, help=f"any of {','.join(names)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--numerics", type=listed, default=("stable", "fast"), help="the first is what goals count for"
    )
    parser.add_argument("--peers", type=listed, default=PEERS, help=f"any of {','.join(QUANTISED)},openvino")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    options = parser.parse_args()
    known_peers, known_numerics = (*QUANTISED, "openvino"), ("stable", "fast", "reference")
    for given, known in (
        (options.rows, names), (options.peers, known_peers), (options.numerics, known_numerics)
    ):  # fmt: skip
        if unknown := set(given) - set(known):
            parser.error(f"no such thing: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.rounds < 1 or not options.numerics:
        parser.error("--rounds must be 1 or more, and --numerics name one at least")
    return options


def listed(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def qualities(options: argparse.Namespace, say: Callable[[str], None]) -> list[quality.Quality]:
    """Measured anew where the row was asked for, else those of the last time, else none."""
    file = options.out / KL_FILE
    if "quality" in options.rows:
        found = quality.measure(options.numerics, options.peers, say=say)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        return found
    return msgspec.json.decode(file.read_bytes(), type=list[quality.Quality]) if file.exists() else []


def table(works: list[Work]) -> Table:
    shown = Table(title="Tidegate beside its peers on this processor: medians, [best of the rounds]")
    for heading in ("work", "unit", "goal", "best peer", "KL", "ours", "KL", "ratio", "holds"):
        shown.add_column(heading, overflow="fold")
    for work in works:
        kl = {series.name: series.kl for series in (*work.ours, *work.peers)}
        best = {series.name: series.best(work.better) for series in (*work.ours, *work.peers)}
        for verdict in work.verdicts():
            shown.add_row(
                work.name,
                work.unit,
                verdict.goal,
                cell(verdict.peer, verdict.peer_value, best),
                number(kl.get(verdict.peer or "")),
                cell(verdict.ours, verdict.our_value, best),
                number(kl.get(verdict.ours)),
                number(verdict.ratio),
                holds(verdict),
            )
        shown.add_section()
    return shown


def cell(name: str | None, value: float | None, best: dict[str, float]) -> str:
    return "-" if name is None else f"{name}: {number(value)} \\[{number(best[name])}]"


def holds(verdict: Verdict) -> str:
    return {None: "-", True: "yes", False: "[red]no[/red]"}[verdict.holds]


def quality_table(found: list[quality.Quality]) -> Table:
    shown = Table(title="Against the shipped weights in float32")
    for heading in ("form", "of what", "mean KL", "same top token", "perplexity", "reference"):
        shown.add_column(heading)
    for each in found:
        shown.add_row(
            each.name,
            each.what,
            f"{each.mean_kl:.4f}",
            f"{100 * each.same_top_token:.1f} %",
            f"{each.perplexity:.3f}",
            f"{each.reference_perplexity:.3f}",
        )
    return shown


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = said.get("flags", "").split()
    return {
        "processor": said.get("model name", platform.processor()),
        "vector_units": [
            each
            for each in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")
            if each in flags
        ],
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    found = {"tidegate": gateway.__version__, "torch": importlib.metadata.version("torch")}
    if has_llama():
        told = subprocess.run(
            [BUILT / "llama-server", "--version"], capture_output=True, text=True, check=False
        )
        found["llama.cpp"] = next(iter((told.stdout + told.stderr).splitlines()), "unknown")
    if has_openvino():
        for package in ("openvino", "openvino-genai"):
            ask = f"import importlib.metadata as m; print(m.version('{package}'))"
            told = subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=False)
            found[package] = told.stdout.strip()
    return found


if __name__ == "__main__":
    main()
