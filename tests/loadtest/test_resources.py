import os
import subprocess
import sys
import time

import pytest

from loadtest.errors import PlanInvalid
from loadtest.resources import ResourceMeter

BURN = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
WAIT = "print(flush=True); input()\n"
PARENT = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {BURN + WAIT!r}], stdin=subprocess.PIPE)\n"
    "input(); child.communicate(b'\\n')\n"
)


def test_a_servers_children_count():
    server = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        meter = ResourceMeter(server.pid)
        meter.start()
        assert server.stdout is not None
        server.stdout.readline()  # the child has burnt its time
        used = meter.stop()
        assert used.cpu_s is not None
        assert used.cpu_s >= 0.15
        assert used.rss_bytes is not None
        assert used.rss_bytes > 0
        assert used.peak_rss_bytes is not None
        assert used.peak_rss_bytes >= used.rss_bytes * 0.9
    finally:
        server.communicate(b"\n", timeout=60)


def test_what_was_used_before_the_pass_is_not_counted():
    meter = ResourceMeter(os.getpid())
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    meter.start()
    used = meter.stop()
    assert used.cpu_s is not None
    assert used.cpu_s < time.process_time()


def test_without_a_pid_everything_about_the_process_is_unknown(tmp_path):
    meter = ResourceMeter(None, powercap=tmp_path)
    meter.start()
    used = meter.stop()
    assert (used.cpu_s, used.rss_bytes, used.pss_bytes, used.joules) == (None, None, None, None)


def test_a_pid_that_is_no_process_is_refused():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    with pytest.raises(PlanInvalid, match=f"--server-pid is {done.pid}: there is no such process"):
        ResourceMeter(done.pid).start()


def test_a_server_that_died_during_the_pass_is_unknown_and_not_zero(tmp_path):
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    meter = ResourceMeter(server.pid, powercap=tmp_path)
    meter.start()
    server.communicate(b"\n", timeout=60)
    assert meter.stop().cpu_s is None


def zone(powercap, name, *, kind="package-0", energy):
    folder = powercap / name
    folder.mkdir(exist_ok=True)
    (folder / "name").write_text(kind + "\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text("1000000000\n")


def test_energy_is_the_sum_of_the_packages_and_counters_may_wrap(tmp_path):
    zone(tmp_path, "intel-rapl:0", energy=999_000_000)
    zone(tmp_path, "intel-rapl:1", kind="package-1", energy=5_000_000)
    zone(tmp_path, "intel-rapl:0:0", kind="core", energy=1)
    meter = ResourceMeter(None, powercap=tmp_path)
    meter.start()
    zone(tmp_path, "intel-rapl:0", energy=1_000_000)  # wrapped: 2 J
    zone(tmp_path, "intel-rapl:1", kind="package-1", energy=8_000_000)
    zone(tmp_path, "intel-rapl:0:0", kind="core", energy=900_000_000)
    assert meter.stop().joules == pytest.approx(5.0)


def test_energy_that_may_not_be_read_is_unknown(tmp_path):
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:0" / "name").write_text("package-0\n")
    meter = ResourceMeter(None, powercap=tmp_path)
    meter.start()
    assert meter.stop().joules is None
