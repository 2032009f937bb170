"""What only a GPU can show; skipped without one."""

import pytest
import torch

from labsupport.machine import bf16_pays, choose_device, fingerprint
from labsupport.measure import measure_ceilings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_a_kernel_runs_and_the_fingerprint_names_the_card():
    found = fingerprint(choose_device("cuda").device)
    assert found.profile == "cuda" and found.compute_capability and found.device_memory_bytes


def test_ceilings_of_the_device_and_of_the_bus():
    found = measure_ceilings("cuda")
    assert all(found.get(name).value > 0 for name in ("matmul_fp32", "device_copy", "h2d_pinned", "h2d_pageable"))


def test_bf16_probe_runs():
    assert bf16_pays("cuda").ratio > 0
