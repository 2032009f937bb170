"""What this process may use: cores, memory, instruction set. Imports nothing of ours and no torch.

Containers show the host's cores and memory; their real limits stand in Linux's control groups. The files and
their meanings: docs.kernel.org, admin-guide/cgroup-v2, admin-guide/cgroup-v1/memory, scheduler/sched-bwc.
"""

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

ISAS = ("amx_bf16", "avx512_fp16", "avx512_bf16", "avx512", "avx2")
"""The x86 instruction sets that change what a matrix product costs, the most capable first."""

# Flags an ISA needs. avx512 is what ATen and oneDNN mean by it: chips with only f and cd run as avx2.
_NEEDED_FLAGS = {
    "avx2": {"avx2"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
    "avx512_fp16": {"avx512_fp16"},
    "amx_bf16": {"amx_tile", "amx_bf16"},
}
# Those of /proc/cpuinfo that decide how PyTorch's CPU kernels run; the other hundred do not.
_X86 = "avx avx2 fma f16c avx_vnni avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 avx512_fp16"
_AMX = "amx_tile amx_int8 amx_bf16 amx_fp16"
_ARM = "asimd asimdhp asimddp sve sve2 bf16 i8mm sme"
_TELLING_FLAGS = set(f"{_X86} {_AMX} {_ARM}".split())


def allowed_cores(*, root: Path = Path("/")) -> float:
    """Cores that this process may keep busy: the least of affinity and every CPU quota above it.

    A quota may be fractional: 1.5 means one and a half cores' worth of time, whatever the number of threads.
    `root` is the folder that holds proc and sys. Missing or garbled files count as no limit.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has none
    cores = float(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    for folder in _cgroup_folders(root, "cpu"):
        v2 = _words(folder / "cpu.max")
        v1 = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        for words in (v2, v1):
            quota_us, period_us = [_positive(word) for word in (*words, "", "")[:2]]
            if quota_us and period_us:
                cores = min(cores, quota_us / period_us)
    return cores


def allowed_memory_bytes(*, root: Path = Path("/")) -> int:
    """Bytes of memory that we may use: the least of what is installed and each control group's limit.

    `root` is the folder that holds proc and sys. Missing or garbled files count as no limit.
    """
    installed_kib = [line.split()[1:2] for line in _read(root / "proc/meminfo").splitlines() if "MemTotal:" in line]
    total = _positive(installed_kib[0][0]) * 1024 if installed_kib and installed_kib[0] else 0
    limits = [total or psutil.virtual_memory().total]
    for folder in _cgroup_folders(root, "memory"):
        # v1 writes "unlimited" as a number near 2**63; the least of all is then what is installed.
        for words in (_words(folder / "memory.max"), _words(folder / "memory.limit_in_bytes")):
            limits += [_positive(word) for word in words[:1] if _positive(word)]
    return min(limits)


def isa_flags(cpuinfo_text: str | None = None) -> tuple[str, ...]:
    """The CPU's flags that decide how PyTorch's kernels run, sorted; () where the system does not tell.

    `cpuinfo_text` is the text of Linux's /proc/cpuinfo or of macOS's `sysctl machdep.cpu hw.optional.arm`.
    """
    words: set[str] = set()
    for line in (cpuinfo() if cpuinfo_text is None else cpuinfo_text).splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features", "machdep.cpu.features", "machdep.cpu.leaf7_features"):
            words |= set(value.lower().split())
        elif key.startswith("hw.optional.arm.FEAT_") and value.strip() == "1":
            words.add(key.removeprefix("hw.optional.arm.FEAT_").lower())
    return tuple(sorted(words & _TELLING_FLAGS))


def isa(*, flags: tuple[str, ...] | None = None) -> str:
    """The most capable of ISAS that PyTorch may use here, else the architecture, such as "aarch64".

    The CPU's flags (those given, else this machine's), capped by the environment as oneDNN and ATen are:
    ONEDNN_MAX_CPU_ISA (or its older name DNNL_MAX_CPU_ISA) and ATEN_CPU_CAPABILITY. They read it once, early
    in the process. A flag is a promise, not a speed: see `machine.bf16_pays`.
    """
    has = set(isa_flags() if flags is None else flags)
    for name in ISAS[max(_onednn_cap(), _aten_cap()) :]:
        chain = ("avx2",) if name == "avx2" else ("avx2", "avx512", name)
        if all(_NEEDED_FLAGS[needed] <= has for needed in chain):
            return name
    return platform.machine() or "unknown"


def cpu_model() -> str:
    """The CPU's name as the system gives it ("AMD EPYC 9V74"), else the architecture."""
    for line in cpuinfo().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "machdep.cpu.brand_string", "Model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def cpuinfo() -> str:
    """What the system says of its first CPU: /proc/cpuinfo on Linux, sysctl on macOS, else ""."""
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional.arm"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.SubprocessError):
            return ""
    lines = []
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                # One block a CPU: the first is enough, and the file is megabytes on a server of 256.
                if not line.strip():
                    break
                lines.append(line)
    except OSError:
        return ""
    return "".join(lines)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The process's control groups, from the mount's root to its own: every one of them limits."""
    mount = root / "sys/fs/cgroup"
    # Without /proc/self/cgroup, and in a container that sees only its own subtree, the roots still tell.
    yield from (mount, mount / "unified", mount / controller)
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        mounts = (mount / names, mount / controller) if names else (mount, mount / "unified")
        parts = [part for part in path.strip().split("/") if part]
        # A group outside of this namespace shows as /../..: nothing below the mount's root is ours then.
        own = [] if ".." in parts else parts
        for base in mounts:
            for depth in range(len(own), 0, -1):
                yield base.joinpath(*own[:depth])


def _onednn_cap() -> int:
    """The index in ISAS where ONEDNN_MAX_CPU_ISA lets the search begin."""
    text = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if text in ("", "ALL", "DEFAULT") or "AMX" in text:
        return 0
    if text.startswith("AVX10") or text == "AVX512_CORE_FP16":
        return ISAS.index("avx512_fp16")
    if text == "AVX512_CORE_BF16":
        return ISAS.index("avx512_bf16")
    if text.startswith("AVX512"):
        return ISAS.index("avx512")
    if text.startswith("AVX2"):
        return ISAS.index("avx2")
    # SSE41 and AVX end below avx2; a word that oneDNN does not know changes nothing.
    return len(ISAS) if text in ("SSE41", "AVX") else 0


def _aten_cap() -> int:
    """The same for ATEN_CPU_CAPABILITY, whose highest value, avx512, caps nothing: ATen ends there."""
    text = os.environ.get("ATEN_CPU_CAPABILITY", "").lower()
    return {"avx2": ISAS.index("avx2"), "default": len(ISAS)}.get(text, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return _read(path).split()


def _positive(word: str) -> int:
    """A positive whole number, or 0 for "max", -1 and anything else: no limit."""
    return int(word) if word.isascii() and word.isdigit() else 0
