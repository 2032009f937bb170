"""Problems with mixed precision that people reported, re-created with their right values."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from labsupport.measure import MemoryLedger


def scaler(**options):
    return torch.amp.GradScaler("cpu", **options)


# C29: fp16 autocast without a loss scale: gradients become exactly zero.


@pytest.mark.parametrize(
    ("dtype", "scale", "zeros", "error"),
    [(torch.float16, 1.0, 0.0797, 0.317), (torch.float16, 65536.0, 0, 0.0005), (torch.bfloat16, 1.0, 0, 0.0041)],
)
def test_c29_small_gradients_are_zero_without_a_scale(dtype, scale, zeros, error):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    inputs, targets = torch.randn(32, 64), torch.randn(32, 64)

    def gradients(dtype, scale):
        model.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = F.mse_loss(model(inputs), targets) * 1e-4
        (loss * scale).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]) / scale

    true, found = gradients(None, 1.0), gradients(dtype, scale)
    assert not (true == 0).any() and true.abs().max() == pytest.approx(1.5e-6, rel=0.05)
    assert (found == 0).float().mean().item() == pytest.approx(zeros, abs=0.002)
    assert ((found - true).norm() / true.norm()).item() == pytest.approx(error, rel=0.1)


# C30: clipping before unscale_.


@pytest.mark.parametrize(
    ("unscale", "clip", "norm", "reported"),
    [(False, False, 0.565685, None), (True, True, 0.565685, 0.565685), (False, True, 1 / 1024, 1024 * 0.565685)],
)
def test_c30_clipping_before_unscale_divides_the_norm_by_the_scale(unscale, clip, norm, reported):
    model = nn.Linear(8, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer, own = torch.optim.SGD(model.parameters(), lr=1.0), scaler(init_scale=1024.0)
    own.scale(model(torch.full((1, 8), 0.2)).sum()).backward()
    if unscale:
        own.unscale_(optimizer)
    if clip:
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(reported, rel=1e-5)
    own.step(optimizer)
    assert model.weight.norm().item() == pytest.approx(norm, rel=1e-5)


# C31: with accumulation, unscale_ and update once in a window.


class Window:
    """Four micro-batches of four samples, scaled; `off` compares the gradient with a weighed sum of their true ones."""

    def __init__(self):
        torch.manual_seed(0)
        self.model, inputs = nn.Linear(4, 1), torch.randn(16, 4)
        self.parts = inputs.split(4)
        self.optimizer, self.scaler = torch.optim.SGD(self.model.parameters(), lr=0.0), scaler(init_scale=128.0)
        self.true = []
        for part in self.parts:
            self.optimizer.zero_grad()
            self.loss(part).backward()
            self.true.append(self.gradient())
        self.optimizer.zero_grad()

    def loss(self, part):
        return self.model(part).square().mean() / 4

    def gradient(self):
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def backward(self):
        """Yields after the backward pass of each micro-batch."""
        for number, part in enumerate(self.parts):
            self.scaler.scale(self.loss(part)).backward()
            yield number

    def off(self, weights):
        expected = sum(weight * each for weight, each in zip(weights, self.true, strict=True))
        return ((self.gradient() - expected).norm() / expected.norm()).item()


def test_c31_at_the_boundary_it_is_the_gradient_of_the_whole_batch():
    window = Window()
    for _ in window.backward():
        pass
    window.scaler.unscale_(window.optimizer)
    assert window.off((1, 1, 1, 1)) < 1e-6


def test_c31_unscaled_twice_in_a_window_is_refused():
    window = Window()
    with pytest.raises(RuntimeError, match="unscale_.. has already been called on this optimizer"):
        for _ in window.backward():
            window.scaler.unscale_(window.optimizer)


def test_c31_unscaled_after_the_first_the_others_count_by_the_scale():
    window = Window()
    for number in window.backward():
        if number == 0:
            window.scaler.unscale_(window.optimizer)
    window.scaler.step(window.optimizer)  # finds it unscaled, and takes it as it is
    assert window.off((1, 128, 128, 128)) < 1e-6


def test_c31_unscaled_and_updated_after_each_all_but_the_last_vanish():
    window = Window()
    for _ in window.backward():
        window.scaler.unscale_(window.optimizer)
        window.scaler.update()
    assert window.off((128**-3, 128**-2, 128**-1, 1)) < 1e-6


def test_c31_a_scale_that_changes_within_the_window_weighs_by_it():
    window = Window()
    for number in window.backward():
        window.scaler.update(256.0 * 2**number)
    window.scaler.unscale_(window.optimizer)
    assert window.off((1 / 16, 1 / 8, 1 / 4, 1 / 2)) < 1e-6


# C32: a skipped step still advances the schedule.


@pytest.mark.parametrize(
    ("guarded", "rates", "told"),
    [(False, [0.5, 0.25, 0.125, 0.0625, 0.03125], 1), (True, [1, 0.5, 0.5, 0.25, 0.125], 0)],
)
def test_c32_a_skipped_step_moves_the_schedule_unless_the_scale_is_asked(guarded, rates, told):
    model = nn.Linear(4, 1)
    optimizer, own = torch.optim.SGD(model.parameters(), lr=1.0), scaler(init_scale=65536.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    seen, scales, taken = [], [], []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iteration in range(5):
            optimizer.zero_grad()
            own.scale(model(torch.ones(2, 4)).mean() * (math.inf if iteration in (0, 2) else 1.0)).backward()
            before = own.get_scale()
            own.step(optimizer)
            own.update()
            scales.append(own.get_scale())
            if not guarded or scales[-1] >= before:
                scheduler.step()
            seen.append(scheduler.get_last_lr()[0])
    assert seen == rates and len(taken) == 3
    assert scales == [32768, 32768, 16384, 16384, 16384]
    assert sum("`lr_scheduler.step()` before `optimizer.step()`" in str(each.message) for each in caught) == told


# C34: more memory, where weights outweigh activations.


@pytest.mark.parametrize(
    ("batch", "fp32", "bf16"),
    [
        (4, 4_210_696, 4_725_768),
        (64, 4_333_576, 4_725_768),
        (256, 4_726_792, 4_725_768),
        (1024, 12_582_920, 9_961_480),
        (4096, 50_331_656, 35_127_304),
    ],
)
def test_c34_peak_on_top_of_weights_and_input(batch, fp32, bf16):
    found = []
    for enabled in (False, True):
        model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())])
        inputs = torch.randn(batch, 512)
        with MemoryLedger(model, inputs=inputs) as ledger:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = model(inputs).float().mean()
            loss.backward()
        found.append(ledger.peak_bytes - sum(p.nbytes for p in model.parameters()) - inputs.nbytes)
    assert found == [fp32, bf16]


# C35: weights stay fp32.


def test_c35_the_scaler_refuses_gradients_of_half_weights():
    model, own = nn.Linear(4, 1).half(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own.scale(model(torch.ones(2, 4).half()).float().mean()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        own.step(optimizer)


def test_c35_bf16_weights_with_a_scaler_raise_nothing_and_lose_small_updates():
    model, own = nn.Linear(4, 1).bfloat16(), scaler()
    own.scale(model(torch.ones(2, 4).bfloat16()).float().mean()).backward()
    own.step(torch.optim.SGD(model.parameters(), lr=0.1))
    narrow, wide = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)
    for _ in range(1000):
        narrow -= 1e-3
        wide -= 1e-3
    assert narrow.item() == 1.0 and abs(wide.item()) < 1e-4


def test_c35_under_autocast_only_the_product_is_narrow():
    model = nn.Linear(4, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.ones(2, 4))
    output.float().mean().backward()
    found = model.weight.dtype, output.dtype, model.weight.grad.dtype
    assert found == (torch.float32, torch.bfloat16, torch.float32)
