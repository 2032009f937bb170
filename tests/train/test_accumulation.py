"""Who weighs how much, counted, is what a real loop does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport.train.accumulation import DROPPED, ENDS, LEAKS, STEPPED, WEIGHED, epoch_of


def real_updates(samples, micro_batch, window, end, divided, epochs=2):
    """The gradient at each optimizer step of the last of these epochs. Each sample is one input of a linear model, so
    that the gradient of its weight is what the sample weighs."""
    weight = torch.zeros(samples, dtype=torch.float64, requires_grad=True)
    steps = []
    for _ in range(epochs):
        steps.clear()
        if end != LEAKS:
            weight.grad = None
        batches = torch.eye(samples, dtype=torch.float64).split(micro_batch)
        for index, batch in enumerate(batches):
            start = index - index % window
            there = sum(len(each) for each in batches[start : start + window])
            loss = (batch @ weight).mean()
            if divided:
                loss = loss * len(batch) / there if end == WEIGHED else loss / window
            loss.backward()
            last = index + 1 == len(batches) and end in (STEPPED, WEIGHED)
            if (index + 1) % window == 0 or last:
                steps.append(weight.grad.clone())
                weight.grad = None
    return steps


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 6), st.sampled_from(ENDS), st.booleans())
def test_it_counts_what_a_real_loop_does(samples, micro_batch, window, end, divided):
    epoch = epoch_of(samples, micro_batch, window, end=end, divided=divided)
    steps = real_updates(samples, micro_batch, window, end, divided)
    assert len(steps) == len(epoch.updates)
    for update, gradient in zip(epoch.updates, steps, strict=True):
        weights = [weight for size, weight in zip(update.sizes, update.weights, strict=True) for _ in range(size)]
        # Sorted: what leaked is at the end of the data, and at the beginning of its update.
        assert sorted(weights) == pytest.approx(sorted(gradient[gradient != 0].tolist()))
        assert update.factor == pytest.approx(gradient.sum().item())
    seen = torch.stack(steps).sum(0) != 0 if steps else torch.zeros(samples, dtype=torch.bool)
    assert epoch.lost == int((~seen).sum())


@pytest.mark.parametrize(
    ("end", "steps", "lost", "factors"),
    [
        (DROPPED, 2, 16, [1, 1]),
        (STEPPED, 3, 0, [1, 1, 1 / 3]),
        (WEIGHED, 3, 0, [1, 1, 1]),
        (LEAKS, 2, 0, [4 / 3, 1]),
    ],
)
def test_a_window_that_the_epoch_cuts_short(end, steps, lost, factors):
    """400 samples in micro-batches of 64: six whole ones, and one of 16 samples."""
    epoch = epoch_of(400, 64, 3, end=end)
    assert (len(epoch.updates), epoch.lost) == (steps, lost)
    assert [update.factor for update in epoch.updates] == pytest.approx(factors)


def test_a_smaller_last_micro_batch_weighs_too_much_in_a_whole_window():
    light, heavy = epoch_of(1000, 64, 4, end=STEPPED).off()
    assert light == [(64, pytest.approx(232 / 256))] * 3 and heavy == [(40, pytest.approx(232 / 160))]
    assert epoch_of(1000, 64, 4, end=WEIGHED).off() == ([], [])


def test_a_window_longer_than_the_epoch_never_steps():
    epoch = epoch_of(64, 32, 4, end=LEAKS)
    assert not epoch.updates and epoch.lost == 64
    assert len(epoch_of(64, 32, 4, end=WEIGHED).updates) == 1


@pytest.mark.parametrize(
    "change",
    [{"samples": 0}, {"micro_batch": 0}, {"window": 0}, {"end": "lost"}],
    ids=lambda change: next(iter(change)),
)
def test_what_makes_no_sense_is_refused(change):
    with pytest.raises(ValueError, match="are expected: got"):
        epoch_of(**{"samples": 8, "micro_batch": 2, "window": 2} | change)
