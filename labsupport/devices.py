"""Which device to use: the GPU if a kernel really runs on it, else the CPU, with the reason in plain words.

torch is imported only where a device is tried.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROFILES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class DeviceChoice:
    """The device that the labs use, and why, in a sentence for people."""

    device: "torch.device"
    reason: str


def profile_wanted() -> str:
    """The profile that the environment's LABS_PROFILE asks for: "auto" (also if unset), "cpu" or "cuda"."""
    return _profile(os.environ.get("LABS_PROFILE", "").strip() or "auto", "LABS_PROFILE")


def run_kernel(device: "torch.device") -> None:
    """Run a small product and its backward on the device; RuntimeError where that fails or is wrong.

    A GPU that torch lists may still have no kernels in this wheel, too old a driver, or no free memory.
    """
    import torch

    if device.type == "cuda" and not torch.cuda.is_available():
        missing = "sees no GPU, or no driver for it" if torch.version.cuda else "is built without CUDA"
        raise RuntimeError(f"torch {torch.__version__} {missing}")
    a = torch.ones(32, 32, device=device, requires_grad=True)
    product = a @ torch.full((32, 32), 2.0, device=device)
    product.sum().backward()
    # Small whole numbers: exact in every precision, TF32 included. tolist() waits for the device.
    got = [product.unique().tolist(), a.grad.unique().tolist() if a.grad is not None else None]
    if got != [[64.0], [64.0]]:
        raise RuntimeError(f"a 32 x 32 product and its gradient came out as {got}, not [[64.0], [64.0]]")


def choose_device(
    profile: str | None = None, *, smoke_test: Callable[["torch.device"], None] = run_kernel
) -> DeviceChoice:
    """The GPU if a kernel really runs on it, else the CPU, with the reason.

    `profile` is "auto", "cpu" or "cuda"; None asks LABS_PROFILE. RuntimeError if "cuda" is asked for and no
    kernel runs. `smoke_test` raises if the device cannot compute.
    """
    import torch

    wanted = profile_wanted() if profile is None else _profile(profile, "profile")
    if wanted == "cpu":
        return DeviceChoice(torch.device("cpu"), "The profile cpu was asked for; no GPU was tried.")
    gpu = torch.device("cuda")
    try:
        smoke_test(gpu)
    except (RuntimeError, AssertionError) as error:  # torch's builds without CUDA assert
        why = f"{_first_line(error)}. {_advice(str(error))}".rstrip()
        tried = f"small product tried on the GPU did not run: {why}"
        if wanted == "cuda":
            raise RuntimeError(f"The profile cuda was asked for, but a {tried} Or set LABS_PROFILE=cpu.") from error
        return DeviceChoice(torch.device("cpu"), f"A {tried}")
    return DeviceChoice(gpu, "A small product and its backward ran on the GPU and came out right.")


def device() -> "torch.device":
    """The device that the labs use here: the short form of `choose_device().device`."""
    return choose_device().device


def _profile(name: str, origin: str) -> str:
    if name not in PROFILES:
        raise ValueError(f"{origin} is {name!r}: use one of {', '.join(PROFILES)}")
    return name


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _advice(message: str) -> str:
    """What to do about a GPU that does not compute, by the driver's words."""
    if "no kernel image" in message:
        return (
            "This torch has no kernels for this card: install wheels of an older CUDA (cu126 serves cards "
            "before compute capability 7.5, up to torch 2.14)."
        )
    if "out of memory" in message:
        return "Another process holds the GPU's memory: end it, or wait."
    if "driver" in message:
        return "Check the driver with nvidia-smi; on Colab or Kaggle switch the accelerator on."
    if "without CUDA" in message or "not compiled with CUDA" in message:
        return "Install a torch built with CUDA to use a GPU."
    return ""
