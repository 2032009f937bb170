"""Checkpointing problems that people reported, re-created: what PyTorch does, and what an instrument has to show."""

import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from measure.allocator import allocator_peak
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from labsupport.measure import MemoryLedger

saving = partial(checkpoint, use_reentrant=False)


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# C36


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def each(blocks, x):
    for block in blocks:
        x = saving(block, x)
    return x


def segments(blocks, x, n):
    return checkpoint_sequential(blocks, n, x, use_reentrant=False)


WAYS = {
    "none": lambda blocks, x: blocks(x),
    "whole": saving,
    "per block": each,
    "2": partial(segments, n=2),
    "4": partial(segments, n=4),
    "8": partial(segments, n=8),
}
PEAKS = {"none": 36, "whole": 35.02, "per block": 20.31, "2": 21.02, "4": 15.06, "8": 15.14}


def peaks_of(blocks, forward, loss, held=True):
    """The allocator's peak of a forward and a backward pass, and the ledger's, in activations of 256 x 256.

    `held`: a name holds the result until the end, as in most training loops."""
    x = torch.randn(256, 256)
    for p in blocks.parameters():
        p.grad = torch.zeros_like(p)

    def run():
        out = [forward(blocks, x)]
        loss(out[0] if held else out.pop()).backward()

    run()
    with MemoryLedger(blocks, inputs=x) as ledger:
        before = ledger.live_bytes
        run()
    return allocator_peak(run) / x.nbytes, (ledger.peak_bytes - before) / x.nbytes


@pytest.mark.parametrize("how", WAYS)
def test_c36_one_checkpoint_around_everything_saves_nothing(how):
    blocks = nn.Sequential(*(Residual() for _ in range(16)))
    allocated, seen = peaks_of(blocks, WAYS[how], lambda out: out.square().mean())
    assert allocated == pytest.approx(PEAKS[how], abs=0.006)
    checkpoints = {"none": 0, "whole": 1, "per block": 16}.get(how) if how not in "248" else int(how) - 1
    random_states = checkpoints * torch.get_rng_state().nbytes / (256 * 256 * 4)  # which no operation makes
    assert seen + random_states == pytest.approx(PEAKS[how], abs=0.006)


def test_c36_a_lone_linear_in_a_checkpoint_keeps_what_it_kept_without():
    linears = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    plain, checkpointed = (peaks_of(linears, forward, torch.sum, held=False) for forward in (WAYS["none"], each))
    assert plain[0] == pytest.approx(10, abs=0.006)
    assert checkpointed[0] == pytest.approx(10.15, abs=0.006)
    assert checkpointed[1] == plain[1]  # the random states are all that a checkpoint adds


def around(where, blocks, x):
    """A model of two layers with a checkpoint at one of the places where there can be one."""
    first, second = nn.Sequential(blocks[0], blocks[1]), blocks[2]
    if where == "both":
        return saving(lambda x: second(first(x)), x)
    x = saving(first, x) if where in ("first", "each") else first(x)
    return saving(second, x) if where in ("second", "each") else second(x)


@pytest.mark.parametrize(
    ("where", "loss", "saved"),
    [
        *((where, "sum", 0) for where in ("first", "second", "each", "both")),
        *((where, "squares", 0) for where in ("first", "second", "each")),
        ("both", "squares", 1),  # the peak is in the loss's own backward pass, before anything is computed again
    ],
)
def test_what_a_checkpoint_saves_in_a_model_of_two_layers(where, loss, saved):
    losses = {"sum": torch.sum, "squares": lambda out: out.square().mean()}
    layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    plain, checkpointed = (
        peaks_of(layers, forward, losses[loss], held=False)[1] for forward in (WAYS["none"], partial(around, where))
    )
    assert plain - checkpointed == pytest.approx(saved, abs=0.01)


# C37


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("reentrant", [True, False, None])
def test_c37_reentrant_loses_the_gradients_of_a_block_whose_input_needs_none(reentrant, needs_grad):
    block, head = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 1)
    x = torch.randn(4, 8, requires_grad=needs_grad)
    flag = {} if reentrant is None else {"use_reentrant": reentrant}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        head(checkpoint(block, x, **flag)).sum().backward()
    lost = reentrant is not False and not needs_grad
    assert all((p.grad is None) is lost for p in block.parameters())
    assert all(p.grad is not None for p in head.parameters())
    told = [str(warning.message) for warning in caught]
    assert any("None of the inputs have requires_grad=True" in text for text in told) is lost
    assert any("use_reentrant parameter should be passed" in text for text in told) is (reentrant is None)


# C38


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("p", [0.5, 0.0])
def test_c38_a_mask_drawn_anew_makes_wrong_gradients_of_an_equal_loss(reentrant, preserve, p):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(p), nn.Linear(64, 64)), torch.randn(32, 64)
    x.requires_grad_()

    def run(forward):
        torch.manual_seed(1)
        model.zero_grad()
        loss = forward(model, x).square().mean()
        loss.backward()
        return loss.item(), gradients(model), torch.rand(()).item()

    right = run(lambda model, x: model(x))
    got = run(partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=preserve))
    off = ((got[1] - right[1]).norm() / right[1].norm()).item()
    assert got[0] == right[0]  # comparing losses does not find it
    drawn_anew = p > 0 and not preserve
    assert off == (pytest.approx(0.75, abs=0.1) if drawn_anew else 0)
    assert (got[2] != right[2]) is drawn_anew


# BatchNorm


@contextmanager
def frozen_statistics(norm):
    momentum, norm.momentum = norm.momentum, 0.0
    try:
        yield
    finally:
        norm.momentum = momentum


@pytest.mark.parametrize(
    ("how", "updates", "mean_over_right"),
    [("plain", 1, 1), ("checkpoint", 2, 1.9), ("frozen", 2, 1), ("momentum", 2, 1), ("left out", 1, 1)],
)
def test_batch_statistics_are_counted_twice_and_the_cures(how, updates, mean_over_right):
    def one_step(how):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16, momentum=1 - 0.9**0.5 if how == "momentum" else 0.1)
        linear, x = nn.Linear(16, 16), torch.randn(64, 16) + 1
        both = nn.Sequential(linear, norm, nn.ReLU())
        contexts = {"context_fn": lambda: (nullcontext(), frozen_statistics(norm))} if how == "frozen" else {}
        if how == "plain":
            out = both(x)
        elif how == "left out":
            out = saving(nn.ReLU(), norm(saving(linear, x)))
        else:
            out = saving(both, x, **contexts)
        out.square().mean().backward()
        return norm, gradients(both)

    (right, wanted), (norm, got) = one_step("plain"), one_step(how)
    assert norm.num_batches_tracked == updates and torch.equal(wanted, got)
    torch.testing.assert_close(norm.running_mean, mean_over_right * right.running_mean, rtol=1e-4, atol=1e-6)
    if how in ("plain", "frozen", "left out"):
        assert torch.equal(norm.running_mean, right.running_mean) and torch.equal(norm.running_var, right.running_var)


# Policies


def test_a_policy_that_stores_the_products_lies_between_the_extremes_with_equal_gradients():
    def policy(ctx, op, *args, **kwargs):
        keep = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(6)))
    x, unit = torch.randn(128, 64), 128 * 64 * 4

    def run(forward):
        blocks.zero_grad()
        with MemoryLedger(blocks, inputs=x) as ledger:
            before = ledger.live_bytes
            loss = forward(blocks, x).square().mean()
            kept = ledger.live_bytes - before
            loss.backward()
        return kept, gradients(blocks)

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def selective(blocks, x):
        for block in blocks:
            x = saving(block, x, context_fn=contexts)
        return x

    (plain, wanted), (middle, by_policy), (least, again) = run(WAYS["none"]), run(selective), run(each)
    assert torch.equal(wanted, by_policy) and torch.equal(wanted, again)
    assert [nbytes // unit for nbytes in (least, middle, plain)] == [6, 12, 18]
    with pytest.raises(ValueError, match="context_fn"):
        checkpoint_sequential(blocks, 2, x, use_reentrant=False, context_fn=contexts)
