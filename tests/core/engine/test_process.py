"""What only a worker process can show: signals, output, parents and children."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from core.config import EngineConfig
from core.engine.process import ProcessExecutor
from core.engine.worker_host import bound_spinning
from core.engine.worker_process import ORPHANED_EXIT_CODE
from core.errors import WorkerFailed
from tests.conformance.test_executors import FAKE, Failures, plan
from tests.core.engine import odd_workers
from tests.core.engine.leftovers import children, is_alive, nothing_left_behind, wait_until_dead
from tests.core.engine.loops import on_each_loop

CONFIG = EngineConfig(checkpoint="fake:", num_blocks=64, step_deadline_s=30.0)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    with nothing_left_behind():
        yield


@on_each_loop
async def test_a_killed_worker_is_noticed_while_it_is_idle() -> None:
    failures = Failures()
    executor = ProcessExecutor(CONFIG, worker=FAKE, on_failure=failures)
    await executor.start()
    os.kill(executor.pid, signal.SIGKILL)
    await asyncio.wait_for(failures.seen.wait(), 10)
    assert "SIGKILL" in str(executor.failure)
    await executor.close()
    assert failures.count == 1


@on_each_loop
async def test_a_worker_that_exits_in_a_step_is_named_with_its_exit_code() -> None:
    config = EngineConfig(checkpoint="fake:die_on_step=1", num_blocks=64)
    executor = ProcessExecutor(config, worker=FAKE, on_failure=Failures())
    await executor.start()
    with pytest.raises(WorkerFailed, match="exited with code 13"):
        await executor.execute(plan(1))
    await executor.close()


@on_each_loop
async def test_interrupts_and_termination_are_the_parents_business() -> None:
    executor = ProcessExecutor(CONFIG, worker=FAKE, on_failure=Failures())
    await executor.start()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        os.kill(executor.pid, signal_number)
        assert (await executor.execute(plan(1))).step_id == 1
    assert executor.failure is None
    await executor.close()


@on_each_loop
async def test_a_worker_stuck_with_the_gil_is_killed_together_with_its_children() -> None:
    config = EngineConfig(checkpoint="stuck", num_blocks=64, step_deadline_s=0.5)
    executor = ProcessExecutor(config, worker=f"{odd_workers.THIS}:load_stuck_worker", on_failure=Failures())
    await executor.start()
    (grandchild,) = children_of(executor.pid)
    with pytest.raises(WorkerFailed, match="took longer"):
        await executor.execute(plan(1))
    assert not children()
    await asyncio.to_thread(wait_until_dead, grandchild)
    await executor.close()


@on_each_loop
async def test_a_worker_whose_parent_lets_go_ends_by_itself_in_the_middle_of_a_step() -> None:
    """Not every system kills the children of the dead; the socket's end tells them everywhere."""
    config = EngineConfig(checkpoint="", num_blocks=64)
    executor = ProcessExecutor(
        config, worker=f"{odd_workers.THIS}:load_hanging_worker", on_failure=Failures()
    )
    await executor.start()
    async with asyncio.TaskGroup() as tasks:
        step = tasks.create_task(failure_of(executor))
        await asyncio.sleep(0)
        assert executor._child is not None
        assert executor._child._socket is not None
        executor._child._socket.close()
    assert f"exited with code {ORPHANED_EXIT_CODE}" in str(step.result())
    await executor.close()


async def failure_of(executor: ProcessExecutor) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as raised:
        await executor.execute(plan(1))
    return raised.value


@on_each_loop
async def test_a_stopped_worker_does_not_delay_closing_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.process.CLOSE_GRACE_S", 0.2)
    executor = ProcessExecutor(CONFIG, worker=FAKE, on_failure=Failures())
    await executor.start()
    os.kill(executor.pid, signal.SIGSTOP)
    await executor.close()
    assert not children()


def test_what_a_worker_prints_stays_off_our_standard_output() -> None:
    script = """
import asyncio
from core.config import EngineConfig
from core.engine.process import ProcessExecutor
from tests.conformance.test_executors import plan

async def main():
    config = EngineConfig(checkpoint="", num_blocks=64)
    worker = "tests.core.engine.odd_workers:load_printing_worker"
    executor = ProcessExecutor(config, worker=worker, on_failure=print)
    await executor.start()
    await executor.execute(plan(1))
    await executor.close()
    print("done")

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout == "done\n"
    assert "a library says hello" in ended.stderr
    assert "and again" in ended.stderr


@pytest.mark.parametrize("loop_name", ["asyncio", "uvloop"])
@pytest.mark.parametrize("worker", ["load_hanging_worker", "load_stuck_worker"])
@pytest.mark.parametrize("moment", ["idle", "step"])
def test_no_worker_outlives_a_killed_parent(loop_name: str, worker: str, moment: str) -> None:
    script = f"""
import asyncio, uvloop
from core.config import EngineConfig
from core.engine.process import ProcessExecutor
from tests.conformance.test_executors import plan

async def main():
    config = EngineConfig(checkpoint="", num_blocks=64)
    worker = "tests.core.engine.odd_workers:{worker}"
    executor = ProcessExecutor(config, worker=worker, on_failure=lambda: None)
    await executor.start()
    print(executor.pid, flush=True)
    if {moment!r} == "step":
        await executor.execute(plan(1))
    await asyncio.sleep(600)

{loop_name}.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        pid = int(parent.stdout.readline())
        if moment == "step":
            assert parent.stderr.readline() == "hanging\n"
        grandchildren = children_of(pid)
        assert is_alive(pid)
        parent.kill()
        wait_until_dead(pid)
        for grandchild in grandchildren:  # nobody promised that a killed child's do; and they hold our pipes
            os.kill(grandchild, signal.SIGKILL)


def test_the_child_finds_our_modules_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "__init__.py").write_text("raise SystemExit('the wrong core')")
    script = f"""
import asyncio, sys
sys.path[0] = {str(Path(__file__).parents[3])!r}
from core.config import EngineConfig
from core.engine.process import ProcessExecutor

async def main():
    config = EngineConfig(checkpoint="fake:", num_blocks=64)
    executor = ProcessExecutor(config, worker={FAKE!r}, on_failure=lambda: None)
    print((await executor.start()).architecture)
    await executor.close()

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=60
    )
    assert ended.stdout == "fake\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_spinning_is_bounded_unless_the_user_has_decided(
    before: dict[str, str], after: dict[str, str]
) -> None:
    bound_spinning(before)
    assert before == after


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children()]
