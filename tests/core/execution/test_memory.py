"""How much memory there is, read from the system's files, and how much a loaded model takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.execution import memory
from core.execution.memory import (
    cgroup_headroom_bytes,
    default_pool_bytes,
    free_pool_bytes,
    kilobyte_fields,
    process_memory,
)

MEGABYTE = 1_000_000


def test_fields_of_a_proc_file_are_read_as_bytes(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text(
        "MemTotal:       16384000 kB\n"
        "MemAvailable:    8000000 kB\n"
        "HugePages_Total:       0\n"
        "55d0-55d1 ---p 00000000 00:00 0 [rollup]\n"
        "Odd: many kB kB\n"
        "\n"
        "Zero: 0 kB"
    )
    assert kilobyte_fields(str(path)) == {
        "MemTotal": 16384000 * 1024,
        "MemAvailable": 8000000 * 1024,
        "Zero": 0,
    }


def test_a_proc_file_that_is_not_there_has_no_fields(tmp_path):
    assert kilobyte_fields(str(tmp_path / "absent")) == {}


def write_cgroup(folder: Path, limit: str | None, used: str | None) -> tuple[str, str]:
    folder.mkdir()
    for name, text in (("limit", limit), ("used", used)):
        if text is not None:
            (folder / name).write_text(text + "\n")
    return str(folder / "limit"), str(folder / "used")


@pytest.mark.parametrize(
    ("first", "second", "headroom"),
    [
        (("1000000", "400000"), (None, None), 600_000),
        (("1000000", "1000001"), (None, None), 0),
        (("max", "400000"), (None, None), None),
        ((None, None), ("5000", "1000"), 4_000),
        (("max", "1"), ("5000", "1000"), 4_000),
        ((None, None), ("9223372036854771712", "1000"), None),  # version 1's way to say "no limit"
        (("1000000", None), (None, None), None),
        (("nonsense", "1"), (None, None), None),
        ((None, None), (None, None), None),
    ],
)
def test_the_control_groups_headroom_is_its_limit_less_what_is_used(first, second, headroom, tmp_path):
    files = (write_cgroup(tmp_path / "v2", *first), write_cgroup(tmp_path / "v1", *second))
    assert cgroup_headroom_bytes(files) == headroom


@pytest.mark.parametrize("name", ["inactive_file", "total_inactive_file"])
def test_page_cache_that_lies_idle_is_headroom_too(name, tmp_path):
    files = (write_cgroup(tmp_path / "v2", "1000000", "900000"),)
    (tmp_path / "v2" / "memory.stat").write_text(f"anon 100000\nactive_file 50000\n{name} 700000\n")
    assert cgroup_headroom_bytes(files) == 800_000


def test_the_default_pool_is_the_lesser_of_a_quarter_and_the_headroom(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 4000 kB\n")
    quarter = 1000 * 1024
    tight = (write_cgroup(tmp_path / "tight", "600000", "0"),)
    wide = (write_cgroup(tmp_path / "wide", "9000000000", "0"),)
    cpu = torch.device("cpu")
    assert default_pool_bytes(cpu, meminfo=str(meminfo), cgroup_files=tight) == 600_000
    assert default_pool_bytes(cpu, meminfo=str(meminfo), cgroup_files=wide) == quarter
    assert default_pool_bytes(cpu, meminfo=str(meminfo), cgroup_files=()) == quarter
    assert default_pool_bytes(cpu, meminfo=str(tmp_path / "absent"), cgroup_files=()) == 1 << 30
    assert default_pool_bytes(cpu, meminfo=str(tmp_path / "absent"), cgroup_files=tight) == 600_000


def test_what_a_pool_may_take_is_all_that_is_available_and_the_group_allows(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 4000 kB\n")
    tight = (write_cgroup(tmp_path / "tight", "600000", "0"),)
    cpu, absent = torch.device("cpu"), str(tmp_path / "absent")
    assert free_pool_bytes(cpu, meminfo=str(meminfo), cgroup_files=tight) == 600_000
    assert free_pool_bytes(cpu, meminfo=str(meminfo), cgroup_files=()) == 4_000 * 1024
    assert free_pool_bytes(cpu, meminfo=absent, cgroup_files=tight) == 600_000
    assert free_pool_bytes(cpu, meminfo=absent, cgroup_files=()) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable GPU here")
def test_the_default_pool_of_a_gpu_is_most_of_what_is_free_there():
    free, _ = torch.cuda.mem_get_info()
    assert 0.8 * free < default_pool_bytes(torch.device("cuda")) < 0.9 * free


def test_this_processs_memory_is_read():
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this system has no /proc/self/smaps_rollup")
    before = process_memory()
    kept = torch.ones(16 << 20, dtype=torch.uint8)
    after = process_memory()
    assert after.anonymous_bytes - before.anonymous_bytes >= len(kept) - MEGABYTE
    assert after.rss_bytes == after.anonymous_bytes + after.file_bytes
    assert 0 < after.pss_bytes <= after.rss_bytes


MEASURE = """
import json, sys, threading
import torch
from core.config import EngineConfig
from core.execution.memory import process_memory
from core.execution.worker import load_worker
from core.quantization.int8 import Int8Linear

checkpoint, cache_dir = sys.argv[1:]
torch.ones(64, 64) @ torch.ones(64, 64)
before = process_memory().anonymous_bytes
peak, done = before, threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, process_memory().anonymous_bytes)

watcher = threading.Thread(target=watch)
watcher.start()
worker = load_worker(EngineConfig(checkpoint=checkpoint, num_blocks=8, cache_dir=cache_dir, compile="off"))
done.set()
watcher.join()
model = worker.runner._model
print(json.dumps({
    "growth": process_memory().anonymous_bytes - before,
    "peak": peak - before,
    "packed": worker.info.packed_weight_bytes,
    "sealed": sum(
        module.out_features * -(-module.in_features // 512) * 512
        for module in model.modules() if isinstance(module, Int8Linear)
    ),
    "embedding": sum(buffer.nbytes for buffer in model.embed_tokens.buffers()),
    "largest": worker.info.vocab_size * 576,
    "rotary": model.rotary.cos_PD.nbytes + model.rotary.sin_PD.nbytes,
}))
"""
TORCH_BYTES = 20 * MEGABYTE
"""What torch's operators and allocator keep once they were called: 8 to 13 MB were seen."""
METADATA_BYTES = 12 * MEGABYTE
"""A vocabulary of 49,152 tokens and its merges as Python strings: kept while loading only."""


def measured_load(checkpoint: Path, cache_dir: str) -> dict[str, int]:
    """Load in a fresh process and return its anonymous memory above that of torch alone, in bytes."""
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this system has no /proc/self/smaps_rollup")
    command = [sys.executable, "-c", MEASURE, str(checkpoint), cache_dir]
    root = Path(memory.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr
    result: dict[str, int] = json.loads(finished.stdout)
    print(result)
    return result


def most_growth(m: dict[str, int]) -> float:
    """FBGEMM's copy of the weights, with rows filled up to multiples of 512, and what a load leaves."""
    return 1.1 * m["sealed"] + m["rotary"] + TORCH_BYTES


def test_the_default_model_takes_its_sealed_size_and_one_form_more_while_loading(default_model_path):
    m = measured_load(default_model_path, "")
    assert m["growth"] <= most_growth(m) + m["embedding"]
    assert m["growth"] >= 0.9 * m["sealed"], "the weights should have been counted"
    assert m["peak"] <= most_growth(m) + m["packed"] + m["largest"] + METADATA_BYTES


def test_from_the_cache_file_nothing_but_the_sealed_weights_takes_anonymous_memory(
    default_model_path, tmp_path
):
    measured_load(default_model_path, str(tmp_path))
    second = measured_load(default_model_path, str(tmp_path))
    assert second["growth"] <= most_growth(second)
    assert second["peak"] <= most_growth(second) + METADATA_BYTES + 3 * second["largest"]
