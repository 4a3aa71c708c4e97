"""What a child finds out about torch here, and what is said when it finds no torch."""

import pytest

from core import MachineReport
from core.errors import WorkerFailed
from core.quantization.kernels import linear_kernels


def test_the_report_tries_every_kernel_and_finds_the_default_ones_row_invariant():
    report = MachineReport.probe()
    assert {kernel.name for kernel in report.kernels} == set(linear_kernels())
    assert all(kernel.row_multiple is None or kernel.works for kernel in report.kernels)
    assert any(kernel.row_multiple == 1 for kernel in report.kernels)
    assert report.stable_problem == ""
    assert report.attention_rows is not None


def test_a_broken_torch_is_named_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so is not there')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WorkerFailed, match=r"^torch does not work here .*: ImportError: libtorch.so is not"):
        MachineReport.probe()


def test_a_probe_that_hangs_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import signal\nsignal.pause()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WorkerFailed, match="trying torch out took longer than 1 s"):
        MachineReport.probe(deadline_s=1.0)
