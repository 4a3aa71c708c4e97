"""`python -m core.execution.machine_probe`: try torch out here and print a `MachineReport` as JSON."""

import sys

import msgspec
import torch

from core.attention.tiled import TILE_TOKENS
from core.errors import ConfigError
from core.execution.machine_report import GPUReport, KernelReport, MachineReport
from core.execution.probe import (
    attention_row_rule,
    check_elementwise,
    check_row_reductions,
    kernel_row_multiple,
)
from core.quantization.kernels import LinearKernel, linear_kernels

SHAPE = (512, 512)
"""(out, in) of the weights that kernels are tried with; every kernel takes it."""
HEAD_DIM, WIDTH, NUM_ROWS = 64, 576, 64


def main() -> None:
    sys.stdout.write(msgspec.json.encode(probe()).decode() + "\n")


def probe() -> MachineReport:
    """Look at torch, its GPUs and every linear kernel."""
    rows, problem = _stable()
    return MachineReport(
        torch_version=str(torch.__version__),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        num_threads=torch.get_num_threads(),
        gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())),
        kernels=tuple(_kernel(kernel) for kernel in linear_kernels().values()),
        attention_rows=rows,
        stable_problem=problem,
    )


def _stable() -> tuple[int | None, str]:
    try:
        check_elementwise()
        check_row_reductions(WIDTH)
        return attention_row_rule(HEAD_DIM, TILE_TOKENS, num_rows=NUM_ROWS).multiple, ""
    except ConfigError as error:
        return None, str(error)


def _kernel(kernel: LinearKernel) -> KernelReport:
    stored_types = tuple(sorted(kernel.rank, key=lambda name: (kernel.rank[name], name)))
    tried = stored_types[0]
    assert kernel.fits(*SHAPE), kernel.name
    return KernelReport(
        name=kernel.name,
        stored_types=stored_types,
        tried_with=tried,
        works=kernel_row_multiple(kernel, tried, SHAPE, numerics="fast") is not None,
        row_multiple=kernel_row_multiple(kernel, tried, SHAPE, numerics="stable"),
    )


def _gpu(index: int) -> GPUReport:
    free, total = torch.cuda.mem_get_info(index)
    return GPUReport(name=torch.cuda.get_device_name(index), total_bytes=total, free_bytes=free)


if __name__ == "__main__":
    main()
