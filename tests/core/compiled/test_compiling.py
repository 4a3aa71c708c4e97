"""A region compiled for real, once for all tests here: by the child, kept, loaded, adopted."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch

from core.compiled import adoption
from core.compiled.adoption import CompiledRegions
from core.compiled.artifacts import VARIANTS, ArtifactHeader, artifact_path, read_header, write_artifact
from core.compiled.child import LOG_NAME, CompilingChild, find_compiler
from core.compiled.job import CompileJob, wanted_region
from core.compiled.keys import file_stem, region_key
from core.execution.worker_info import RegionStatus
from core.layers.region import Region
from tests.architecture.source import ROOT
from tests.core.compiled.regions import WIDTH, normed_region, scaled_region

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
MOST_COMPILE_S = 600.0
"""About 30 s on an idle machine; the child yields to everybody."""


def until(condition: Callable[[], bool], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def paths_in(folder: Path, region: Region) -> list[Path]:
    stem = file_stem(region.name, region_key(region))
    return [artifact_path(folder, stem, variant) for variant in VARIANTS]


def opened(folder: Path, *regions: Region, say: Callable[[str], None] | None = None) -> CompiledRegions:
    unheard: list[str] = []
    compiled = CompiledRegions(regions, folder=str(folder), say=say or unheard.append)
    compiled.adopt_kept()
    return compiled


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


@pytest.fixture(scope="module")
def _looks_at_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adoption, "LOOK_EVERY_S", 0.0)
        yield


@pytest.fixture(scope="module")
def raced(tmp_path_factory, _looks_at_once) -> tuple[Path, list[RegionStatus], Region]:
    """The folder after two servers have started at once, and how the first one fared."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler here")
    folder = tmp_path_factory.mktemp("compiled")
    region = scaled_region()
    first, second = opened(folder, region), opened(folder, scaled_region())
    statuses = []
    try:
        for regions in (first, second):
            regions.compile_missing()
            statuses.append(regions.status())

        def both_ended() -> bool:
            first.look()
            second.look()
            return not first.status().compiling and not second.status().compiling

        until(both_ended, within_s=MOST_COMPILE_S)
        statuses += [first.status(), second.status()]
    finally:
        first.close()
        second.close()
    return folder, statuses, region


@pytest.mark.slow
@pytest.mark.timeout(MOST_COMPILE_S + 60)
def test_two_servers_that_start_at_once_compile_a_region_once_and_serve_meanwhile(raced):
    folder, (first_began, second_began, first, second), region = raced
    assert (first_began.compiling, second_began.compiling) == (True, True)
    assert first_began.num_compiled == second_began.num_compiled == 0
    log = (folder / LOG_NAME).read_text()
    assert log.count("compiled") == 1, log
    assert [header_of(path, region).problem for path in paths_in(folder, region)] == ["", ""]
    left = {path.name for path in folder.iterdir()} - {path.name for path in paths_in(folder, region)}
    assert left == {LOG_NAME, "compiling.lock"}, "nothing else is left behind"
    # The region's bits are those of the eager function, so that it may change under running requests.
    for status in (first, second):
        assert (status.num_compiled, status.num_compilations, status.note) == (1, 1, "")
    assert region.run is not region.eager


def header_of(path: Path, region: Region) -> ArtifactHeader:
    header = read_header(path, region_key(region))
    assert header is not None
    return header


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 300])
def test_a_compiled_region_takes_any_number_of_rows_and_odd_strides(raced, num_rows):
    folder, _, _ = raced
    region = scaled_region()
    opened(folder, region)
    assert region.run is not region.eager
    weight = torch.randn(WIDTH)
    for x in (
        torch.randn(num_rows, WIDTH),
        torch.randn(WIDTH, num_rows).T,
        torch.randn(num_rows, 99)[:, :WIDTH],
    ):
        assert torch.equal(region(x, weight)[0], region.eager(x, weight)[0])


@pytest.mark.slow
def test_a_wrong_call_raises_instead_of_reading_what_is_not_its_own(raced):
    folder, _, _ = raced
    region = scaled_region()
    opened(folder, region)
    with pytest.raises(RuntimeError, match="unmatched dim"):
        region(torch.zeros(3, 4), torch.zeros(WIDTH))
    with pytest.raises(RuntimeError, match="unmatched dtype"):
        region(torch.zeros(3, WIDTH).double(), torch.zeros(WIDTH))


FRESH = """
import sys, torch
from core.compiled.adoption import CompiledRegions
from tests.core.compiled.regions import scaled_region
region = scaled_region()
compiled = CompiledRegions([region], folder=sys.argv[1])
compiled.adopt_kept()
compiled.compile_missing()
assert compiled.status().num_compiled == 1, compiled.status()
assert not compiled.status().compiling
x, weight = torch.randn(5, 24), torch.randn(24)
assert torch.equal(region(x, weight)[0], region.eager(x, weight)[0])
compilers = {"torch._inductor", "torch._dynamo"} & set(sys.modules)
sys.exit(f"it imported {compilers}" if compilers else 0)
"""


@pytest.mark.slow
def test_a_later_start_loads_what_is_kept_without_a_compiler(raced):
    folder, _, _ = raced
    command = [sys.executable, "-c", FRESH, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CXX": "/there/is/none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def copied(folder: Path, target: Path, *, change: Callable[[ArtifactHeader], ArtifactHeader]) -> None:
    """The compiled files with other headers."""
    for path in paths_in(folder, scaled_region()):
        header = header_of(path, scaled_region())
        write_artifact(target / path.name, path.read_bytes()[: header.num_bytes], change(header))


@pytest.mark.slow
def test_what_arrives_with_other_bits_waits_for_the_next_start(raced, tmp_path):
    folder, _, _ = raced
    region = scaled_region()
    compiled = opened(tmp_path, region)
    compiled.compile_missing()
    try:
        copied(folder, tmp_path, change=lambda header: msgspec.structs.replace(header, bit_equal=False))
        compiled.look()
        assert compiled.status().num_waiting == 1
        assert region.run is region.eager
        assert "1 are compiled for the next start" in compiled.status().describe()
    finally:
        compiled.close()
    later = opened(tmp_path, region)
    assert (later.status().num_compiled, later.status().num_compilations) == (1, 0)
    assert region.run is not region.eager


@pytest.mark.slow
def test_what_could_not_be_compiled_is_not_tried_again(raced, tmp_path):
    folder, _, _ = raced

    def failed(header: ArtifactHeader) -> ArtifactHeader:
        return msgspec.structs.replace(header, problem="no such instruction")

    copied(folder, tmp_path, change=failed)
    region = scaled_region()
    compiled = opened(tmp_path, region)
    compiled.compile_missing()
    assert not compiled.status().compiling
    assert compiled.status().num_refused == 1
    assert "no such instruction" in compiled.status().describe()
    assert region.run is region.eager


def injure(path: Path, how: str) -> None:
    content = path.read_bytes()
    match how:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "emptied":
            path.write_bytes(b"")
        case "a flipped bit in the library":
            path.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
        case "a flipped bit in the header":
            path.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
        case "one variant missing":
            path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["cut", "emptied", "a flipped bit in the library", "a flipped bit in the header", "one variant missing"],
)
def test_a_damaged_file_is_as_good_as_none(raced, tmp_path, how):
    folder, _, _ = raced
    copied(folder, tmp_path, change=lambda header: header)
    injure(paths_in(tmp_path, scaled_region())[1], how)
    region = scaled_region()
    compiled = opened(tmp_path, region)
    assert (compiled.status().num_compiled, compiled.status().num_refused) == (0, 0)
    assert region.run is region.eager
    compiled.compile_missing()
    assert compiled.status().compiling, "it is compiled anew"
    compiled.close()


def test_a_file_of_another_key_or_half_of_one_is_none(tmp_path):
    path = tmp_path / "x.so"
    header = ArtifactHeader(key="a", variant="few", num_bytes=3, crc32=zlib.crc32(b"abc"))
    write_artifact(path, b"abc", header)
    assert read_header(path, "a") == header
    assert read_header(path, "b") is None
    assert read_header(tmp_path / "y.so", "a") is None
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_header(path, "a") is None


def test_a_machine_without_a_compiler_says_so_once_and_computes_eagerly(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    said: list[str] = []
    region = normed_region()
    compiled = opened(tmp_path / "made", region, say=said.append)
    compiled.compile_missing()
    for _ in range(3):
        compiled.look()
    assert len(said) == 1
    assert "no C++ compiler is found" in said[0]
    assert "no C++ compiler is found" in compiled.status().describe()
    assert (compiled.status().compiling, compiled.status().num_eager) == (False, 1)
    assert region.run is region.eager


def test_libraries_are_not_loaded_from_where_everybody_may_put_some(tmp_path):
    tmp_path.chmod(0o777)
    said: list[str] = []
    compiled = opened(tmp_path, normed_region(), say=said.append)
    compiled.compile_missing()
    assert "can be written to by every user" in said[0]
    assert not compiled.status().compiling


def test_without_a_folder_nothing_is_compiled_and_nothing_is_said():
    said: list[str] = []
    compiled = CompiledRegions([normed_region()], folder="", say=said.append)
    compiled.adopt_kept()
    compiled.compile_missing()
    compiled.look()
    assert (said, compiled.status().describe()) == ([], "")


def test_equal_regions_are_one_and_all_run_what_was_adopted(tmp_path):
    compiled = opened(tmp_path, scaled_region(), scaled_region(), normed_region())
    assert compiled.status().num_regions == 2


@needs_compiler
def test_a_child_that_is_closed_leaves_no_process_and_its_folder_is_cleared_by_the_next(tmp_path):
    region = normed_region()
    job = CompileJob(str(tmp_path), [wanted_region(region, region_key(region))])
    child = CompilingChild(job)
    until(lambda: bool(list(tmp_path.glob("building-*"))), within_s=120)
    child.close()
    assert not child.is_running()
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    assert [path for path in tmp_path.iterdir() if path.suffix == ".so"] == []
    (left,) = tmp_path.glob("building-*")
    again = CompilingChild(CompileJob(str(tmp_path), []))
    until(lambda: not again.is_running(), within_s=120)
    again.close()
    assert not left.exists()
    shutil.rmtree(tmp_path)


PARENT = """
import sys, time
from core.compiled.child import CompilingChild
from core.compiled.job import CompileJob, wanted_region
from core.compiled.keys import region_key
from tests.core.compiled.regions import normed_region
region = normed_region()
child = CompilingChild(CompileJob(sys.argv[1], [wanted_region(region, region_key(region))]))
print(child.pid, flush=True)
time.sleep(600)
"""


@needs_compiler
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: bool(list(tmp_path.glob("building-*"))), within_s=120)
        parent.send_signal(signal.SIGKILL)
    until(lambda: not is_running(pid), within_s=30)
