"""A made-up machine that tests of several wings vary with `dataclasses.replace`."""

from labsupport.machine import Machine

CPU = Machine(
    device="cpu",
    profile="cpu",
    compute_capability=None,
    device_memory_bytes=None,
    driver=None,
    cuda=None,
    cudnn=None,
    torch="2.14.1+cpu",
    python="3.11.7",
    os="Linux 6.1 x86_64",
    cpu_model="AMD EPYC 9V74",
    isa="avx512_bf16",
    isa_flags=("avx2", "avx512f"),
    cores=2.0,
    threads=2,
    memory_bytes=4 * 2**30,
    tf32="ieee",
    cudnn_benchmark=False,
)
