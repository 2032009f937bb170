"""Real cases whose right values are known, from issue threads that the comments name."""

import itertools
import subprocess
import sys
from collections import Counter

import pytest
import torch
from measure.fakes import FakeClock, FakeDevice
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labsupport.measure import measure
from labsupport.measure.stopwatch import Stopwatch


class CountCalls(TorchDispatchMode):
    """How often each aten operator is called."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def second_step(group_per_tensor, foreach):
    """The calls of AdamW's second step for 50 layers, and the weights after it."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(50))
    parameters = list(layers.parameters())
    groups = [{"params": [p]} for p in parameters] if group_per_tensor else parameters
    optimizer = torch.optim.AdamW(groups, foreach=foreach)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with CountCalls() as counted:
        optimizer.step()
    return counted.calls.total(), [parameter.detach() for parameter in parameters]


def test_c60_one_group_per_tensor_calls_as_much_as_no_foreach_at_all():
    """roboflow/rf-detr#1409: the optimizer was slow, for foreach works within a group only."""
    found = {each: second_step(*each) for each in itertools.product([True, False], [True, False])}
    calls = {each: count for each, (count, _) in found.items()}
    assert calls == {(True, True): 1202, (True, False): 1002, (False, True): 212, (False, False): 1002}
    first, *others = [weights for _, weights in found.values()]
    assert all(torch.equal(a, b) for weights in others for a, b in zip(first, weights, strict=True))


# C61, throughput, is in test_statistics.py.

PEAKS = """
import re
from pathlib import Path

def read(name):
    return int(re.search(name + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def allocate(size):
    block = b"x" * (size << 20)
    return read("VmHWM")

start = read("VmHWM")
large, small = allocate(200), allocate(8)
try:
    Path("/proc/self/clear_refs").write_text("5")
except OSError as error:
    raise SystemExit(f"SKIP: {error}")
now, reset = read("VmRSS"), read("VmHWM")
print(large - start, small - large, reset - now, large - reset, allocate(8) - reset)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads and resets Linux's VmHWM")
def test_c62_a_peak_is_the_processs_until_it_is_reset_to_what_is_live():
    """vortex-data/vortex#9640: each later variant showed the largest peak before it."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=False)
    if done.stderr.startswith("SKIP: "):
        pytest.skip(f"the kernel resets no peak: {done.stderr.strip()}")
    added, later, above_live, forgotten, then = map(float, done.stdout.split())
    assert added == pytest.approx(200, abs=4)
    assert later == pytest.approx(0, abs=1)  # 8 MiB, and still the peak of 200
    assert above_live == pytest.approx(0, abs=1)  # not from nothing: what is live stays in it
    assert forgotten == pytest.approx(200, abs=4)
    assert then == pytest.approx(8, abs=1)


KERNEL_S, LAUNCH_S = 0.0625, 2.0**-14


@pytest.fixture
def device():
    return FakeDevice(FakeClock())


def forward_and_read(device, synchronize):
    """Seconds of a launch, and of reading its result, which waits; five times."""
    watch = Stopwatch(synchronize, device.clock)
    times = [
        watch.turn(step, 1)[0][0]
        for _ in range(5)
        for step in (lambda: device.launch(KERNEL_S, LAUNCH_S), device.synchronize)
    ]
    return set(times[::2]), set(times[1::2])


def test_c63_without_waiting_the_reader_gets_the_blame(device):
    """KaiyangZhou/deep-person-reid#281: forward took 2 ms, and .cpu() 3 s."""
    assert forward_and_read(device, lambda: None) == ({LAUNCH_S}, {KERNEL_S - LAUNCH_S})


def test_c63_with_waiting_each_has_its_own_time(device):
    assert forward_and_read(device, device.synchronize) == ({KERNEL_S}, {0.0})


@pytest.mark.parametrize("waits, seconds", [(False, 5 * LAUNCH_S), (True, 5 * KERNEL_S)])
def test_c63_five_launches_are_over_when_the_device_is(device, waits, seconds):
    watch = Stopwatch(device.synchronize if waits else lambda: None, device.clock)
    samples, wall_s = watch.turn(lambda: device.launch(KERNEL_S, LAUNCH_S), 5)
    assert sum(samples) == 5 * wall_s == seconds


def test_c63_measure_with_synchronize_times_the_kernel(device):
    found = measure(lambda: device.launch(KERNEL_S, LAUNCH_S), synchronize=device.synchronize, clock=device.clock)
    assert set(found.samples_s) == {KERNEL_S}
    asked_too_early = measure(lambda: device.launch(KERNEL_S, LAUNCH_S), synchronize=lambda: None, clock=device.clock)
    assert set(asked_too_early.samples_s) == {LAUNCH_S}
