"""Where am I, and what can it do: the device, the fingerprint that goes with every number, and probes.

Importing this module does not import torch: the command line starts without it. What a container or the
environment allows is read in `limits`, the device chosen in `devices`, vendors' peaks in `accelerators`;
their public names can be had from here too.
"""

import math
import os
import platform
import re
import shlex
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labsupport.accelerators import Accelerator as Accelerator
from labsupport.accelerators import accelerators as accelerators
from labsupport.accelerators import find_accelerator as find_accelerator
from labsupport.devices import PROFILES as PROFILES
from labsupport.devices import DeviceChoice as DeviceChoice
from labsupport.devices import choose_device as choose_device
from labsupport.devices import device as device
from labsupport.devices import profile_wanted as profile_wanted
from labsupport.devices import run_kernel as run_kernel
from labsupport.limits import allowed_cores, allowed_memory_bytes, cpu_model, isa, isa_flags
from labsupport.units import format_bytes

if TYPE_CHECKING:
    import torch

NEEDS = ("cuda", "2 GPUs", "compiler", "root")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The fingerprint of the machine behind a number; None where it does not apply."""

    device: str  # "cpu", or the GPU's name
    profile: str  # "cpu" or "cuda"
    compute_capability: str | None
    device_memory_bytes: int | None
    driver: str | None
    cuda: str | None
    cudnn: str | None
    torch: str
    python: str
    os: str
    cpu_model: str
    isa: str
    isa_flags: tuple[str, ...]
    cores: float  # allowed, not installed
    threads: int
    memory_bytes: int  # the host's, allowed
    tf32: str  # how fp32 products are computed on the device: "ieee", "tf32" or "bf16"
    cudnn_benchmark: bool

    @property
    def family(self) -> str:
        """The machines whose ratios may be compared, as a file name: "cpu-avx512_bf16-2c-2t-torch2.14"."""
        kind = f"cpu-{self.isa}" if self.profile == "cpu" else self.device
        release = ".".join(self.torch.split("+")[0].split(".")[:2])
        slug = f"{kind}-{self.cores:g}c-{self.threads}t-torch{release}".lower()
        return re.sub(r"[^a-z0-9._]+", "-", slug).strip("-")

    def describe(self) -> str:
        """One line for people."""
        what = f"{self.cpu_model} ({self.isa})"
        if self.device_memory_bytes:
            gpu_memory = format_bytes(self.device_memory_bytes)
            what = f"{self.device} ({gpu_memory}, driver {self.driver or 'unknown'}) beside {what}"
        cores = f"{self.cores:g} {'core' if self.cores == 1 else 'cores'}, threads: {self.threads}"
        software = f"torch {self.torch}, Python {self.python}, {self.os}"
        return f"{what}, {cores}, {format_bytes(self.memory_bytes)}, {software}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it, with the family, which `from_dict` derives again."""
        return {**asdict(self), "isa_flags": list(self.isa_flags), "family": self.family}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Machine":
        """The Machine of `to_dict`; unknown keys are ignored, ValueError names missing ones."""
        names = [field.name for field in fields(cls)]
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"not a machine's fingerprint: it lacks {', '.join(missing)}")
        known = {name: values[name] for name in names}
        return cls(**{**known, "isa_flags": tuple(known["isa_flags"])})


def fingerprint(device: "torch.device | str | None" = None) -> Machine:
    """The machine as it is now, for the given device or the one that `choose_device` takes."""
    import torch

    where = torch.device(device) if device is not None else choose_device().device
    on_gpu = where.type == "cuda"
    properties = torch.cuda.get_device_properties(where) if on_gpu else None
    cudnn = torch.backends.cudnn.version() if on_gpu else None
    # The new fp32_precision can always be read; the old getters raise once both kinds of setter were used.
    backends: Any = torch.backends
    products = (backends.cuda if on_gpu else backends.mkldnn).matmul
    return Machine(
        device=properties.name if properties else where.type,
        profile="cuda" if on_gpu else "cpu",
        compute_capability=f"{properties.major}.{properties.minor}" if properties else None,
        device_memory_bytes=properties.total_memory if properties else None,
        driver=_driver() if on_gpu else None,
        cuda=torch.version.cuda if on_gpu else None,
        cudnn=str(cudnn) if cudnn else None,
        torch=str(torch.__version__),
        python=platform.python_version(),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_model=cpu_model(),
        isa=isa(),
        isa_flags=isa_flags(),
        cores=allowed_cores(),
        threads=torch.get_num_threads(),
        memory_bytes=allowed_memory_bytes(),
        tf32={"none": "ieee"}.get(products.fp32_precision, products.fp32_precision),
        cudnn_benchmark=torch.backends.cudnn.benchmark,
    )


def has(need: str) -> bool:
    """Whether this machine has what a lab or a record needs, by probe; `need` is one of NEEDS."""
    if need == "compiler":
        # What torch.compile calls: CXX where it is set ("ccache g++", "g++ -m64"), and then no other.
        named = shlex.split(os.environ.get("CXX", "")) or ["clang++" if sys.platform == "darwin" else "g++"]
        return shutil.which(named[0]) is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()
    if need == "root":
        return hasattr(os, "geteuid") and os.geteuid() == 0
    if need == "cuda":
        return choose_device("auto").device.type == "cuda"
    if need == "2 GPUs":
        import torch

        return has("cuda") and torch.cuda.device_count() >= 2
    raise ValueError(f"unknown need {need!r}: those known are {', '.join(map(repr, NEEDS))}")


@dataclass(frozen=True)
class Probe:
    """A square product timed in fp32 and in bf16; medians in seconds."""

    fp32_s: float
    bf16_s: float
    ratios: tuple[float, ...]  # fp32 over bf16 in each round: above 1, bf16 is faster
    native: bool  # a GPU with bf16 hardware; on a CPU only the clock decides

    @property
    def ratio(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.ratios)

    @property
    def pays(self) -> bool:
        """Whether to use bf16 for speed: hardware has it, and it was at least a tenth faster."""
        return self.native and self.ratio >= 1.1


def bf16_pays(device: "torch.device | str", *, clock: Callable[[], float] = time.perf_counter) -> Probe:
    """Time a product in fp32 and bf16, in turns, because flags lie: 256 cubed on a CPU, 4096 cubed on a GPU.

    AVX2 machines accept bf16 and emulate it; so do GPUs before compute capability 8.0.
    """
    import torch

    where = torch.device(device)
    on_gpu = where.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(f"cannot time {where}: torch {torch.__version__} sees no GPU; use cpu")
    size, rounds = (4096, 7) if on_gpu else (256, 15)
    a = torch.randn(size, size, device=where, generator=torch.Generator(where).manual_seed(0))
    products = [partial(torch.mm, x, x) for x in (a, a.bfloat16())]

    def seconds(product: Callable[[], Any]) -> float:
        start = clock()
        product()
        if on_gpu:
            torch.cuda.synchronize(where)
        return clock() - start

    for product in products * 2:  # warm-up: kernels are chosen, and on a CPU generated, in the first calls
        product()
    if on_gpu:
        torch.cuda.synchronize(where)
    pairs = [(seconds(products[0]), seconds(products[1])) for _ in range(rounds)]
    native = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    return Probe(
        fp32_s=statistics.median(fp32 for fp32, _ in pairs),
        bf16_s=statistics.median(bf16 for _, bf16 in pairs),
        ratios=tuple(fp32 / bf16 if bf16 else math.inf for fp32, bf16 in pairs),
        native=native,
    )


def _driver() -> str | None:
    """The driver's version, by NVML; None without it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else version
