import ast
import math
import os
import platform
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from samples import CPU

from labsupport import limits, machine

GIB = 1024**3
V1_UNLIMITED = "9223372036854771712"


def grow(root: Path, files: dict[str, str]) -> Path:
    """A recorded folder tree."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


# ---- cores and memory ----

CPU_TREES = {
    "no cgroups": ({}, 8),
    "v2 max": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, 8),
    "v2 quota in a container": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
    "v2 quota above affinity": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "3200000 100000"}, 8),
    "v2 own group": (
        {
            "proc/self/cgroup": "0::/user.slice/job",
            "sys/fs/cgroup/user.slice/job/cpu.max": "50000 100000",
            "sys/fs/cgroup/user.slice/cpu.max": "400000 100000",
        },
        0.5,
    ),
    "v2 a group above is tighter": (
        {
            "proc/self/cgroup": "0::/pods/pod1/app",
            "sys/fs/cgroup/pods/pod1/app/cpu.max": "max 100000",
            "sys/fs/cgroup/pods/cpu.max": "250000 100000",
        },
        2.5,
    ),
    "v2 sibling does not count": (
        {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/b/cpu.max": "100000 100000"},
        8,
    ),
    "v2 path outside of the namespace": (
        {"proc/self/cgroup": "0::/../../other", "sys/fs/cgroup/cpu.max": "200000 100000"},
        2,
    ),
    "v1 quota": (
        {
            "proc/self/cgroup": "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1",
            "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "350000",
            "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000",
        },
        3.5,
    ),
    "v1 seen from inside of its container": (
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/1",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        2,
    ),
    "v1 no quota": (
        {
            "proc/self/cgroup": "1:cpu:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        8,
    ),
    "hybrid": ({"proc/self/cgroup": "0::/x", "sys/fs/cgroup/unified/x/cpu.max": "100000 100000"}, 1),
    "garbled": (
        {
            "proc/self/cgroup": "::::\nnonsense",
            "sys/fs/cgroup/cpu.max": "lots of",
            "proc/meminfo": "MemTotal:",
        },
        8,
    ),
    "zero period": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "100000 0"}, 8),
}


@pytest.mark.parametrize("files, cores", CPU_TREES.values(), ids=CPU_TREES.keys())
def test_allowed_cores(tmp_path, eight_cores, files, cores):
    assert machine.allowed_cores(root=grow(tmp_path, files)) == cores


MEMINFO = {"proc/meminfo": f"MemTotal: {64 * 1024**2} kB\nMemFree: 5 kB"}
MEMORY_TREES = {
    "no cgroups": ({}, 64 * GIB),
    "v2 max": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, 64 * GIB),
    "v2 limit": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(2 * GIB)}, 2 * GIB),
    "v2 a group above is tighter": (
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/b/memory.max": str(8 * GIB),
            "sys/fs/cgroup/a/memory.max": str(4 * GIB),
        },
        4 * GIB,
    ),
    "v1 unlimited": (
        {"proc/self/cgroup": "4:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED},
        64 * GIB,
    ),
    "v1 own limit": (
        {
            "proc/self/cgroup": "4:memory:/kubepods/pod1",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
            "sys/fs/cgroup/memory/kubepods/pod1/memory.limit_in_bytes": str(3 * GIB),
        },
        3 * GIB,
    ),
    "garbled": ({"proc/self/cgroup": "\0", "sys/fs/cgroup/memory.max": "a lot"}, 64 * GIB),
}


@pytest.mark.parametrize("files, size", MEMORY_TREES.values(), ids=MEMORY_TREES.keys())
def test_allowed_memory(tmp_path, files, size):
    assert machine.allowed_memory_bytes(root=grow(tmp_path, MEMINFO | files)) == size


@pytest.mark.parametrize("meminfo", [{}, {"proc/meminfo": "MemTotal: ? kB"}, {"proc/meminfo": "MemTotal:"}])
def test_memory_without_meminfo_is_what_psutil_says(tmp_path, meminfo):
    assert machine.allowed_memory_bytes(root=grow(tmp_path, meminfo)) == psutil.virtual_memory().total


def test_this_machine_allows_something():
    assert machine.allowed_cores() > 0
    assert 0 < machine.allowed_memory_bytes() <= psutil.virtual_memory().total


# ---- instruction sets ----

AVX2 = "fpu sse4_2 avx f16c fma avx2 bmi2"
AVX512 = f"{AVX2} avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"
CPUS = {  # as their /proc/cpuinfo tell, shortened
    "Ivy Bridge": ("flags\t\t: fpu sse4_2 avx f16c", "x86_64"),
    "Zen 2, Colab": (f"processor\t: 0\nflags\t\t: {AVX2}", "avx2"),
    "Alder Lake": (f"flags\t\t: {AVX2} avx_vnni", "avx2"),
    "Knights Landing": (f"flags\t\t: {AVX2} avx512f avx512cd avx512er avx512pf", "avx2"),
    "Cascade Lake": (f"flags\t\t: {AVX512}", "avx512"),
    "Zen 4": (f"flags\t\t: {AVX512} avx512_bf16", "avx512_bf16"),
    "Sapphire Rapids": (
        f"flags\t\t: {AVX512} avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16",
        "amx_bf16",
    ),
    "Sapphire Rapids without AMX": (f"flags\t\t: {AVX512} avx512_bf16 avx512_fp16", "avx512_fp16"),
    "Graviton 3": ("Features\t: fp asimd asimdhp sve bf16 i8mm", "aarch64"),
    "Apple M2": ("hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_SME: 0", "arm64"),
    "Intel Mac": ("machdep.cpu.features: FMA AVX1.0 F16C\nmachdep.cpu.leaf7_features: BMI2 AVX2", "avx2"),
    "garbled": ("\0flags avx2 no colon", "unheard_of"),
    "nothing": ("", "riscv64"),
}


@pytest.fixture
def no_caps(monkeypatch):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("text, best", CPUS.values(), ids=CPUS.keys())
def test_isa_of_real_cpus(monkeypatch, no_caps, text, best):
    monkeypatch.setattr(platform, "machine", lambda: best)  # what is left if there is none of ours
    assert machine.isa(flags=machine.isa_flags(text)) == best


@pytest.mark.parametrize(
    "variable, value, best",
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX2", "avx2"),
        ("ONEDNN_MAX_CPU_ISA", "avx512_core", "avx512"),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI", "avx512"),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", "avx512_bf16"),
        ("ONEDNN_MAX_CPU_ISA", "AVX10_1_512", "avx512_fp16"),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX", "amx_bf16"),
        ("ONEDNN_MAX_CPU_ISA", "ALL", "amx_bf16"),
        ("ONEDNN_MAX_CPU_ISA", "SSE41", "x86_64"),
        ("ONEDNN_MAX_CPU_ISA", "misspelt", "amx_bf16"),
        ("DNNL_MAX_CPU_ISA", "AVX2", "avx2"),
        ("ATEN_CPU_CAPABILITY", "avx2", "avx2"),
        ("ATEN_CPU_CAPABILITY", "avx512", "amx_bf16"),
        ("ATEN_CPU_CAPABILITY", "default", "x86_64"),
    ],
)
def test_isa_is_capped_by_the_environment(monkeypatch, no_caps, variable, value, best):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv(variable, value)
    assert machine.isa(flags=machine.isa_flags(CPUS["Sapphire Rapids"][0])) == best


def test_the_lowest_cap_wins(monkeypatch, no_caps):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert machine.isa(flags=machine.isa_flags(CPUS["Sapphire Rapids"][0])) == "avx2"


def test_flags_are_sorted_and_only_the_telling_ones():
    assert machine.isa_flags("flags: sse4_2 fma avx2 avx") == ("avx", "avx2", "fma")
    assert machine.isa_flags("hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_SHA1: 1") == ("bf16",)


def test_this_cpu_has_a_name():
    assert limits.cpu_model()


# ---- the device ----


def passes(device: torch.device) -> None:
    pass


def fails(error: Exception):
    def smoke_test(device: torch.device) -> None:
        raise error

    return smoke_test


@pytest.mark.parametrize("set_to, wanted", [(None, "auto"), ("", "auto"), ("cpu", "cpu"), (" cuda ", "cuda")])
def test_profile_from_the_environment(monkeypatch, set_to, wanted):
    monkeypatch.delenv("LABS_PROFILE", raising=False)
    if set_to is not None:
        monkeypatch.setenv("LABS_PROFILE", set_to)
    assert machine.profile_wanted() == wanted


def test_a_wrong_profile_names_the_right_ones(monkeypatch):
    monkeypatch.setenv("LABS_PROFILE", "gpu")
    with pytest.raises(ValueError, match="LABS_PROFILE is 'gpu': use one of auto, cpu, cuda"):
        machine.choose_device(smoke_test=passes)
    with pytest.raises(ValueError, match="profile is 'tpu'"):
        machine.choose_device("tpu", smoke_test=passes)


@pytest.mark.parametrize("profile", ["auto", "cuda"])
def test_a_gpu_that_computes_is_taken(profile):
    choice = machine.choose_device(profile, smoke_test=passes)
    assert choice.device == torch.device("cuda")
    assert "ran" in choice.reason


def test_the_cpu_profile_tries_no_gpu():
    choice = machine.choose_device("cpu", smoke_test=fails(Exception("tried")))
    assert choice.device == torch.device("cpu")
    assert "no GPU was tried" in choice.reason


FAILURES = [
    ("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors", "cu126"),
    ("CUDA out of memory. Tried to allocate 2 MiB", "Another process"),
    ("torch 2.14.1+cu130 sees no GPU, or no driver for it", "nvidia-smi"),
    ("torch 2.14.1+cpu is built without CUDA", "built with CUDA"),
    ("something new", "something new"),
]


@pytest.mark.parametrize("message, advice", FAILURES)
def test_a_gpu_that_fails_is_not_used_and_the_reason_says_why(message, advice):
    choice = machine.choose_device("auto", smoke_test=fails(RuntimeError(message)))
    assert choice.device == torch.device("cpu")
    assert choice.reason.startswith("A small product tried on the GPU did not run")
    assert message.splitlines()[0] in choice.reason
    assert advice in choice.reason
    assert "\n" not in choice.reason


def test_asking_for_cuda_without_it_says_what_to_do():
    error = AssertionError("Torch not compiled with CUDA enabled")
    with pytest.raises(RuntimeError, match="profile cuda .* LABS_PROFILE=cpu") as raised:
        machine.choose_device("cuda", smoke_test=fails(error))
    assert raised.value.__cause__ is error


def test_another_error_of_the_smoke_test_is_raised_as_it_is():
    with pytest.raises(KeyError):
        machine.choose_device("auto", smoke_test=fails(KeyError("a bug")))


def test_the_kernel_runs_on_a_cpu_and_is_checked(monkeypatch):
    machine.run_kernel(torch.device("cpu"))
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda size, value, **options: full(size, value + 1, **options))
    with pytest.raises(RuntimeError, match="came out as"):
        machine.run_kernel(torch.device("cpu"))


def test_no_gpu_in_sight_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="built without CUDA"):
        machine.run_kernel(torch.device("cuda"))


def test_device_is_the_short_form(monkeypatch):
    monkeypatch.setenv("LABS_PROFILE", "cpu")
    assert machine.device() == torch.device("cpu")


# ---- the fingerprint ----

H200 = replace(
    CPU,
    device="NVIDIA H200",
    profile="cuda",
    compute_capability="9.0",
    device_memory_bytes=150_000_000_000,
    driver="580.65",
    cores=16.0,
    threads=16,
)


@pytest.mark.parametrize(
    "this, family",
    [
        (CPU, "cpu-avx512_bf16-2c-2t-torch2.14"),
        (replace(CPU, cores=1.5, threads=1), "cpu-avx512_bf16-1.5c-1t-torch2.14"),
        (replace(CPU, isa="arm64", torch="2.9.0a0+git1"), "cpu-arm64-2c-2t-torch2.9"),
        (H200, "nvidia-h200-16c-16t-torch2.14"),
        (replace(H200, device="NVIDIA GeForce RTX 4090"), "nvidia-geforce-rtx-4090-16c-16t-torch2.14"),
        (replace(H200, device="Weird/GPU (R) #1"), "weird-gpu-r-1-16c-16t-torch2.14"),
    ],
)
def test_family(this, family):
    assert this.family == family


@pytest.mark.parametrize("this", [CPU, H200])
def test_round_trip_with_unknown_keys(this):
    assert machine.Machine.from_dict({**this.to_dict(), "added": "in a later version"}) == this


def test_a_missing_key_is_named():
    values = CPU.to_dict()
    del values["threads"], values["isa"]
    with pytest.raises(ValueError, match="lacks isa, threads"):
        machine.Machine.from_dict(values)


def test_describe_is_one_line_and_names_the_device():
    assert "AMD EPYC 9V74 (avx512_bf16), 2 cores, threads: 2, 4.00 GiB" in CPU.describe()
    assert H200.describe().startswith("NVIDIA H200 (140 GiB, driver 580.65) beside AMD EPYC")
    assert "\n" not in H200.describe()


def test_fingerprint_of_this_machine():
    this = machine.fingerprint("cpu")
    assert (this.device, this.profile, this.driver) == ("cpu", "cpu", None)
    assert this.torch == torch.__version__
    assert this.threads == torch.get_num_threads()
    assert this.tf32 == "ieee"
    assert machine.Machine.from_dict(this.to_dict()) == this


def test_fingerprint_survives_mixed_precision_settings():
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        assert machine.fingerprint("cpu").tf32 == "ieee"
    finally:
        products.fp32_precision = before


# ---- probes ----


@pytest.mark.parametrize("need", machine.NEEDS)
def test_needs_are_answered(need):
    assert machine.has(need) in (True, False)


def test_an_unknown_need_names_those_known():
    with pytest.raises(ValueError, match="'tpu'.*'cuda', '2 GPUs', 'compiler', 'root'"):
        machine.has("tpu")


def test_a_compiler_is_found_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not machine.has("compiler")
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o755)
    monkeypatch.setenv("CXX", "mine -m64")
    assert machine.has("compiler")
    (tmp_path / "mine").rename(tmp_path / "g++")
    assert not machine.has("compiler")  # the one that is named is asked, as torch.compile does, and no other
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("sys.platform", "linux")
    assert machine.has("compiler")


def test_a_compiler_without_pythons_headers_is_of_no_use(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert not machine.has("compiler")


def scripted_clock(*durations_s):
    """A clock whose pairs of readings are these durations apart, in turns."""
    times, now = [], 0.0
    for _ in range(100):
        for duration in durations_s:
            times += [now, now + duration]
            now += duration
    return iter(times).__next__


@pytest.mark.parametrize("fp32_s, bf16_s, pays", [(2.0, 1.0, True), (1.0, 1.0, False), (1.0, 4.0, False)])
def test_bf16_pays_by_the_clock(fp32_s, bf16_s, pays):
    state = torch.get_rng_state()
    probe = machine.bf16_pays("cpu", clock=scripted_clock(fp32_s, bf16_s))
    assert (probe.fp32_s, probe.bf16_s, probe.ratio, probe.pays) == (fp32_s, bf16_s, fp32_s / bf16_s, pays)
    assert torch.equal(torch.get_rng_state(), state)


def test_bf16_is_not_timed_on_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="cannot time cuda: .* sees no GPU; use cpu"):
        machine.bf16_pays("cuda")


# ---- vendors' peaks ----


@pytest.mark.parametrize(
    "name, row",
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB SXM"),
        ("A100-SXM4-40GB", "A100 40GB SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2"),
        ("Tesla V100-SXM2-32GB", "V100 SXM2"),
        ("Quadro M4000", "M4000"),
        ("Quadro P5000", "P5000"),
        ("NVIDIA RTX A4000", "RTX A4000"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_a_card_is_found_by_the_name_torch_gives_it(name, row):
    found = machine.find_accelerator(name)
    assert found is not None and found.name == row


@pytest.mark.parametrize(
    "name",
    [
        "A10",
        "A400",
        "L40",
        "NVIDIA L40S",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "Tesla V100-PCIE-16GB",
        "T400",
        "T4G",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "Quadro RTX 4000",
        "Quadro M4000M",
        "NVIDIA RTX 4000 Ada Generation",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA A100",
        "cpu",
        "NVIDIA",
        "",
    ],
)
def test_no_row_is_better_than_a_wrong_one(name):
    assert machine.find_accelerator(name) is None


@pytest.mark.parametrize(
    "name, gib, row",
    [
        ("NVIDIA A100", 39.4, "A100 40GB SXM"),
        ("NVIDIA A100-SXM4", 79.1, "A100 80GB SXM"),
        ("Tesla V100-SXM2", 31.7, "V100 SXM2"),
        ("NVIDIA H200", 139.8, "H200 SXM"),
        ("Tesla T4", 14.6, "T4"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA A100", 19.5, None),
        ("NVIDIA RTX A6000", 23.7, None),  # a share of one
    ],
)
def test_memory_decides_where_the_name_does_not(name, gib, row):
    found = machine.find_accelerator(name, memory_bytes=int(gib * GIB))
    assert (found.name if found else None) == row


def test_every_row_is_complete_and_finds_itself():
    rows = machine.accelerators()
    assert len(rows) == 13
    for name, row in rows.items():
        assert row.name == name
        assert row.source and row.compute_capability and row.bandwidth_gbs > 0
        assert all(math.isfinite(gb) for gb in row.memory_gb)
        assert row.flops_per_s("fp32") == row.fp32 * 1e12


def test_peaks_by_precision():
    t4 = machine.accelerators()["T4"]
    assert (t4.flops_per_s("fp16"), t4.flops_per_s("bf16")) == (65e12, None)


# ---- imports ----


@pytest.mark.parametrize("module", ["units", "limits", "devices", "accelerators", "machine"])
def test_importing_does_not_import_torch(module):
    tree = ast.parse(Path(machine.__file__).with_name(f"{module}.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [node for node in imports if "torch" in ast.unparse(node)]
