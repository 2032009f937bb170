"""Steps that run on a GPU while the host goes on; skipped without one."""

import subprocess
import sys

import pytest
import torch

from labsupport.measure import KeptState, compare, measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

CYCLES = 20_000_000  # about ten milliseconds; how many exactly depends on the clock of the card


def kernel(cycles=CYCLES):
    torch.cuda._sleep(cycles)


def test_a_kernel_is_timed_by_events_and_by_the_wall_clock():
    found = measure(kernel, min_time_s=0.2)
    assert found.machine.profile == "cuda" and found.machine.device == torch.cuda.get_device_name()
    assert found.wall_s and found.median_s > 1e-3  # a launch alone takes some microseconds
    assert found.median_s == pytest.approx(sum(found.wall_s) / len(found.wall_s), rel=0.5)


def test_a_kernel_twice_as_long_takes_twice_the_time():
    """Of the ratio only: two kernels that count the same clock's cycles."""
    found = compare(lambda: kernel(2 * CYCLES), kernel, min_time_s=0.5, max_time_s=2.0)
    assert found.ratio == pytest.approx(2.0, rel=0.1) and found.verdict == "faster"
    assert found.a.wall_s and len(found.a.wall_s) == found.n


def test_parameters_state_and_draws_on_the_gpu_are_put_back():
    model = torch.nn.Linear(2, 2, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    kept, weight, draws = KeptState([model, optimizer]), model.weight.detach().clone(), torch.cuda.get_rng_state()
    model(torch.rand(4, 2, device="cuda")).sum().backward()
    optimizer.step()
    kept.put_back()
    assert torch.equal(model.weight, weight) and model.weight.device.type == "cuda"
    assert not optimizer.state and torch.equal(torch.cuda.get_rng_state(), draws)


def test_a_model_moved_to_the_gpu_is_back_on_the_host():
    model = torch.nn.Linear(2, 2)
    kept, weight = KeptState([model]), model.weight.detach().clone()
    model.cuda()
    kept.put_back()
    assert model.weight.device.type == "cpu" and torch.equal(model.weight, weight)


UNTOUCHED = """
import torch
from labsupport.measure import measure
measure(lambda: sum(range(10_000)), min_time_s=0.01)
print(torch.cuda.is_initialized())
"""


def test_a_step_on_the_host_creates_no_context():
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
