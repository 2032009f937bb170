"""The formats that a step computes in."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(precision: str, kind: str) -> AbstractContextManager:
    """What the forward pass runs in, on a device of that kind ("cpu", "cuda")."""
    return torch.autocast(kind, dtype=AUTOCAST[precision]) if precision in AUTOCAST else nullcontext()


def scaler_of(precision: str, kind: str) -> torch.amp.GradScaler | None:
    """fp16 ends at 6e-8: gradients need a scale. bf16 has the range of fp32, and none."""
    return torch.amp.GradScaler(kind) if precision == "fp16" else None


@contextmanager
def products_in(precision: str, kind: str) -> Iterator[None]:
    """On a GPU, the format in which fp32 matrices and images are multiplied: else cuDNN's convolutions would use
    TF32 in what is called fp32, for that is their default, and products of matrices would not.

    By the settings of PyTorch 2.9 and later; within, the older `allow_tf32` may refuse to be read.
    """
    if kind != "cuda" or precision not in ("fp32", "tf32"):
        yield
        return
    backends: Any = torch.backends
    settings = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [each.fp32_precision for each in settings]
    try:
        for each in settings:
            each.fp32_precision = "ieee" if precision == "fp32" else "tf32"
        yield
    finally:
        for each, own in zip(settings, before, strict=True):
            each.fp32_precision = own
