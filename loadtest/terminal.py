"""A run in front of a person: progress on stderr, and Ctrl-C that ends it with what there is."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from loadtest.bench import TargetOptions
from loadtest.errors import LoadTestError
from loadtest.experiment import ExperimentOptions, Watcher, run_experiment
from loadtest.plan import Plan
from loadtest.report import Report
from loadtest.runner import Progress
from loadtest.transport import raise_open_files

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A person ended the run before there was anything to report."""


@contextmanager
def progress_on(console: Console) -> Iterator[Watcher]:
    """Bars where a person looks; lines alone where the output is a file or a pipe."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    # Drawing is the client's CPU too: four times a second is enough.
    with Bars(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def on_progress(name: str, progress: Progress) -> None:
            if name not in tasks:
                for before in tasks.values():
                    bars.update(before, visible=False)
                tasks[name] = bars.add_task(name, total=progress.num_planned, state="")
                if not console.is_terminal:
                    console.print(name, highlight=False, markup=False)
            failed = f", {progress.num_failed} failed" if progress.num_failed else ""
            bars.update(
                tasks[name],
                completed=progress.num_ended,
                state=f"{progress.num_running} running{failed}",
            )

        def say(line: str) -> None:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

        yield Watcher(say=say, on_progress=on_progress)


def play(
    plans: Sequence[Plan], targets: Sequence[TargetOptions], options: ExperimentOptions, *, console: Console
) -> tuple[Report, ...]:
    """Run in an event loop of its own.

    The first Ctrl-C ends the pass that is being played, and gives the reports of what there is; before
    any pass, or the second time, there is nothing to report.

    Raises:
        PlanInvalid, TargetUnusable: before any load.
        Stopped: see above.
    """
    raise_open_files()
    with progress_on(console) as watcher:
        return uvloop.run(_until_interrupted(plans, targets, options, watcher=watcher))


async def _until_interrupted(
    plans: Sequence[Plan], targets: Sequence[TargetOptions], options: ExperimentOptions, *, watcher: Watcher
) -> tuple[Report, ...]:
    loop, work, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    assert work is not None
    begun: set[str] = set()

    def on_progress(name: str, progress: Progress) -> None:
        begun.add(name)
        watcher.on_progress(name, progress)

    def interrupt() -> None:
        if begun and not stop.is_set():
            watcher.say("stopping; once more: at once")
            stop.set()
        else:
            work.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupt)
    try:
        told = Watcher(say=watcher.say, on_progress=on_progress)
        return await run_experiment(plans, targets, options, watcher=told, stop=stop)
    except asyncio.CancelledError:
        raise Stopped from None
    except BaseExceptionGroup as group:
        raise _first_known(group) or group from None
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _first_known(group: BaseExceptionGroup[BaseException]) -> LoadTestError | None:
    """What task groups wrapped, if it is somebody's mistake rather than ours."""
    for error in group.exceptions:
        inner = _first_known(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(inner, LoadTestError):
            return inner
    return None
