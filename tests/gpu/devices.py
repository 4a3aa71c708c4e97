"""The devices that a conformance suite runs on: `cpu` always, `cuda` where there is one."""

import pytest
import torch

DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no usable GPU here"),
        ],
    ),
)
ON_EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES)
