"""The ceilings of this machine: what it can do at the very best, measured in seconds.

A roofline needs two kinds of ceiling, FLOP/s and bytes/s (Williams, Waterman and Patterson, "Roofline", CACM
52(4), 2009). Vendors' sheets promise peaks (`labsupport.accelerators`); these were reached.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labsupport.machine import Machine, fingerprint
from labsupport.units import format_bytes, format_value

MIB = 1024**2
HOST_COPY_BYTES = 128 * MIB  # source and target each: well above the 32 MiB of cache that a rented core shares
DISK_BYTES = 32 * MIB
# A product grows from the first size until one call takes PRODUCT_S, or to the largest size for the device.
PRODUCT_S = 5e-3
FIRST_SIZE = 256
LARGEST_SIZE = {"cpu": 2048, "cuda": 8192}
MIN_SAMPLES = 5

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """One measured ceiling: the work of one sample over the median of the samples' seconds."""

    name: str
    unit: str  # "FLOP/s" or "B/s"
    work: float  # FLOP or bytes of one sample
    samples_s: tuple[float, ...]
    note: str = ""

    @property
    def value(self) -> float:
        """Median rate, in `unit`."""
        return self.work / float(np.median(self.samples_s))

    @property
    def n(self) -> int:
        """How many samples were taken, after warm-up."""
        return len(self.samples_s)

    @property
    def spread(self) -> float:
        """Interquartile range of the samples over their median: 0.02 is steady, 0.2 is not."""
        low, median, high = np.percentile(self.samples_s, [25, 50, 75])
        return float((high - low) / median)


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Every ceiling measured on one machine, and what could not be measured, with the reason."""

    machine: Machine
    readings: tuple[Ceiling, ...]
    skipped: tuple[str, ...] = ()

    def get(self, name: str) -> Ceiling | None:
        """The reading of that name, such as "matmul_bf16" or "device_copy"; None if there is none."""
        return next((reading for reading in self.readings if reading.name == name), None)

    def __str__(self) -> str:
        return "\n".join(" | ".join(row) for row in self._rows())

    def _repr_markdown_(self) -> str:
        head, *rows = [f"| {' | '.join(row)} |" for row in self._rows()]
        lines = [
            head,
            "| --- | ---: | ---: | ---: | --- |",
            *rows,
            "",
            f"Measured on {self.machine.describe()}.",
        ]
        return "\n".join(lines + [f"\nNot measured: {reason}" for reason in self.skipped])

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        head = ("ceiling", "median", "iqr / median", "n", "note")
        return [head] + [
            (r.name, format_value(r.value, r.unit), f"{r.spread:.1%}", str(r.n), r.note) for r in self.readings
        ]


def measure_ceilings(
    device: torch.device | str,
    *,
    min_time_s: float = 0.15,
    folder: str | Path | None = None,
    clock: Clock = time.perf_counter,
) -> Ceilings:
    """Measure what the device, the host's memory and the disk can do, with as many threads as torch has now.

    Names: matmul_fp32, matmul_bf16, matmul_fp16, matmul_tf32 (FLOP/s, 2 n^3 a product; tf32 on CUDA only),
    device_copy and host_memory (B/s, read plus written), h2d_pinned and h2d_pageable (B/s, each byte once;
    CUDA only), disk_read (B/s, from a temporary file in `folder`, which is removed). Each is sampled for
    about `min_time_s` after warm-up; on a CPU all of it takes about 300 MB and two seconds. Random state and
    precision settings are left as they were. ValueError for a device other than CPU and CUDA, or
    not there, and for a time that is not above 0.
    """
    where = torch.device(device)
    if where.type not in LARGEST_SIZE:
        raise ValueError(f"no ceilings for the device {where}: use one of {', '.join(LARGEST_SIZE)}")
    if not 0 < min_time_s < math.inf:
        raise ValueError(f"min_time_s={min_time_s}: a time above 0 is expected, such as 0.15")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"no ceilings for {where}: torch {torch.__version__} sees no GPU; use cpu")
    on_gpu = where.type == "cuda"
    sampler = _Sampler(where, min_time_s, clock)
    readings: list[Ceiling] = []
    skipped: list[str] = []

    precisions = ["fp32", "bf16", "fp16"]
    if on_gpu and torch.cuda.get_device_capability(where) >= (8, 0):
        precisions.insert(1, "tf32")
    for precision in precisions:
        try:
            readings.append(_matmul(sampler, precision))
        except RuntimeError as error:  # a product in this precision does not exist here
            skipped.append(f"matmul_{precision}: {str(error).splitlines()[0]}")

    size = HOST_COPY_BYTES
    on_host = _Sampler(torch.device("cpu"), min_time_s, clock)
    host = _copy(on_host, "host_memory", _filled(size, "cpu"), _filled(size, "cpu"))
    if on_gpu:
        large = min(1024 * MIB, torch.cuda.mem_get_info(where)[0] // 4)  # others may hold most of it
        readings.append(_copy(sampler, "device_copy", _filled(large, where), _filled(large, where)))
        for name, pinned in (("h2d_pinned", True), ("h2d_pageable", False)):
            readings.append(_copy(sampler, name, _filled(size, "cpu", pinned=pinned), _filled(size, where)))
    else:
        readings.append(replace(host, name="device_copy", note="the device is the host: host_memory again"))
    readings.append(host)
    try:
        readings.append(_disk_read(on_host, folder))
    except OSError as error:
        skipped.append(f"disk_read: {error.strerror} in {folder or tempfile.gettempdir()}")
    return Ceilings(machine=fingerprint(where), readings=tuple(readings), skipped=tuple(skipped))


@dataclass(frozen=True)
class _Sampler:
    """Times repeated work on a device."""

    device: torch.device
    min_time_s: float
    clock: Clock

    def seconds(self, work: Callable[[], object]) -> float:
        start = self.clock()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock() - start

    def samples(self, work: Callable[[], object], before: Callable[[], object] | None = None) -> tuple[float, ...]:
        """Seconds of each call, `before` not counted: at least MIN_SAMPLES, unless they are very slow."""
        taken: list[float] = []
        while (sum(taken) < self.min_time_s or len(taken) < MIN_SAMPLES) and sum(taken) < 4 * self.min_time_s:
            if before is not None:
                before()
            taken.append(self.seconds(work))
        return tuple(taken)


def _matmul(sampler: _Sampler, precision: str) -> Ceiling:
    """A square product of random numbers, as large as pays: GPUs multiply zeros faster, at less power."""
    where = sampler.device
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    with _fp32_precision("tf32" if precision == "tf32" else "ieee"):
        size = FIRST_SIZE
        while True:
            source = torch.randn(size, size, device=where, generator=torch.Generator(where).manual_seed(0))
            a, b, out = (source.to(dtype, copy=True) for _ in range(3))

            def product(a=a, b=b, out=out):
                torch.mm(a, b, out=out)

            sampler.seconds(product)  # warm-up: kernels are chosen, on a CPU generated, in the first call
            # An emulated product (fp16 on most CPUs) stops at the first size: it may be 100 times slower.
            if sampler.seconds(product) >= PRODUCT_S or size >= LARGEST_SIZE[where.type]:
                break
            size *= 2
        samples_s = sampler.samples(product)
    return Ceiling(
        name=f"matmul_{precision}",
        unit="FLOP/s",
        work=2.0 * size**3,
        samples_s=samples_s,
        note=f"{size} cubed",
    )


@contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """Compute fp32 products so, and put the settings back; only by the new API, whose getters never raise."""
    torch_backends: Any = torch.backends
    backends = (torch_backends.cuda.matmul, torch_backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    backends[0].fp32_precision = precision
    backends[1].fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def _copy(sampler: _Sampler, name: str, source: torch.Tensor, target: torch.Tensor) -> Ceiling:
    """A copy between memory that was touched before: no page faults are timed."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)  # the sampler waits

    sampler.seconds(copy)
    within = source.device == target.device
    return Ceiling(
        name=name,
        unit="B/s",
        work=float(source.nbytes * (2 if within else 1)),
        samples_s=sampler.samples(copy),
        note=f"{format_bytes(source.nbytes)} a copy, {'read and write' if within else 'each byte'} counted",
    )


def _filled(size: int, device: torch.device | str, *, pinned: bool = False) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8, device=device, pin_memory=pinned)


def _disk_read(sampler: _Sampler, folder: str | Path | None) -> Ceiling:
    """Read a file from one end to the other, dropped from the page cache first where the system lets us."""
    block = bytearray(MIB)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(DISK_BYTES // MIB):
            file.write(os.urandom(MIB))  # random: no file system can compress it
        os.fsync(file.fileno())

        def drop() -> None:
            file.seek(0)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def read() -> None:
            while file.readinto(block):
                pass

        drop()
        dropped = _is_dropped(file.fileno())
        # The samples stand for the host's memory where the cache stayed: no warm-up, which would fill it.
        samples_s = _Sampler(torch.device("cpu"), sampler.min_time_s, sampler.clock).samples(read, before=drop)
    cache = {
        True: "dropped from the page cache before each read (a virtual machine's host may still cache it)",
        False: "still in the page cache: this is memory, not the disk",
        None: "the page cache could not be dropped, or not be checked: this may be memory, not the disk",
    }[dropped]
    return Ceiling(
        name="disk_read",
        unit="B/s",
        work=float(DISK_BYTES),
        samples_s=samples_s,
        note=f"{format_bytes(DISK_BYTES)}, {cache}",
    )


def _is_dropped(descriptor: int) -> bool | None:
    """Whether the file's middle is out of the page cache; None where the system cannot say (tmpfs, macOS)."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    try:
        os.preadv(descriptor, [bytearray(4096)], DISK_BYTES // 2, os.RWF_NOWAIT)
    except BlockingIOError:  # it would have to wait for the disk
        return True
    except OSError:
        return None
    return False
