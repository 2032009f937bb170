"""The fit of throughput and its knee, on steps whose times are known; no real clock."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from labsupport.train import Workload
from labsupport.train.throughput import Throughput, fitted, measure_throughput, sizes_to_time, time_sizes


class Watch:
    """A clock that only steps move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def timed(seconds_of, sizes, **options):
    watch = Watch()
    made = []

    def step(size):
        watch.now += seconds_of(size)

    found = time_sizes(
        step, sizes, seconds=5.0, peak_of=lambda size: 10 * size, prepare=made.append, clock=watch, **options
    )
    return found, made, watch


@given(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2))
def test_a_straight_line_is_found(fixed, per_sample):
    found, _, _ = timed(lambda size: fixed + per_sample * size, [2, 8, 32, 128])
    assert found.fixed_s == pytest.approx(fixed, rel=1e-6)
    assert found.per_sample_s == pytest.approx(per_sample, rel=1e-6)
    assert found.knee == pytest.approx(9 * fixed / per_sample, rel=1e-5)
    assert found.samples_per_s(found.knee) == pytest.approx(0.9 * found.asymptote, rel=1e-6)
    assert found.interval == pytest.approx((found.knee, found.knee), rel=1e-5)


def test_no_fixed_part_has_its_knee_at_once():
    found, _, _ = timed(lambda size: 1e-3 * size, [2, 8, 32])
    assert found.knee == pytest.approx(0, abs=1e-6) and found.asymptote == pytest.approx(1000)


def test_a_step_that_gets_dearer_has_no_negative_part():
    found, _, _ = timed(lambda size: 1e-4 * size**1.5, [2, 8, 32, 128])
    assert found.fixed_s == 0 and found.per_sample_s > 0


def test_rounds_go_up_and_down_and_end_in_time():
    found, made, watch = timed(lambda size: 0.05 + 1e-3 * size, [2, 8, 32])
    assert made[:6] == [2, 8, 32, 32, 8, 2]
    assert 5 <= watch.now < 6 and all(each.n == len(made) // 3 for each in found.timings)
    assert [each.peak_bytes for each in found.timings] == [20, 80, 320]


def test_six_rounds_at_least():
    found, made, watch = timed(lambda size: 2.0, [2, 8])
    assert len(made) == 12 and watch.now == pytest.approx(2 * 14)


def test_ranks_agree_on_rounds_and_counts():
    told = []

    def agree(mine):
        told.append(mine)
        return mine if not isinstance(mine, bool) else len([each for each in told if isinstance(each, bool)]) <= 7

    found, made, _ = timed(lambda size: 0.01, [2, 8], agree=agree)
    assert len(made) == 14 and [each for each in told if not isinstance(each, bool)] == [2, 2]


def test_gain_is_paired_by_round():
    found = fitted(
        [2, 8], [[[1.0], [2.0], [1.0], [2.0], [1.0], [2.0]], [[2.0], [4.0], [2.0], [4.0], [2.0], [4.0]]], [1, 1]
    )
    gain = found.gain(2, 8)
    assert gain.value == 2 and gain.interval == (2, 2)
    with pytest.raises(ValueError, match="16 samples were not timed in turns; those that were: \\[2, 8\\]"):
        found.gain(2, 16)
    later = found.also(fitted([4], [[[1.0]]], [1]))
    assert [each.size for each in later.timings] == [2, 4, 8] and later.knee == found.knee
    with pytest.raises(ValueError, match="4 samples were not timed in turns"):
        later.gain(2, 4)


@pytest.mark.parametrize(
    ("largest", "step_s", "multiple", "expected"),
    [
        (191, 0.1, 1, [2, 4, 7, 14, 27, 52, 100, 191]),
        (1000, 10.0, 1, [2, 4, 7, 14, 27, 52, 100]),  # a step of 100 samples takes a second
        (5, 0.1, 1, [2, 3, 4, 5]),
        (1, 0.1, 1, [1]),
        (64, 0.1, 32, [32, 64]),
        (3, 100.0, 1, [2, 3]),
    ],
)
def test_sizes(largest, step_s, multiple, expected):
    found = sizes_to_time(largest, step_s, multiple)
    assert found[0] == expected[0] and found[-1] == expected[-1] and len(found) <= 8
    assert found == expected or len(expected) == 7


def test_measured_for_real_and_put_back(monkeypatch):
    monkeypatch.setenv("LABS_PROFILE", "cpu")
    model = nn.Linear(256, 256)
    own = torch.optim.Adam(model.parameters())
    workload = Workload(
        "one", lambda: model, lambda n, device: torch.randn(n, 256), lambda model, x: model(x).mean(), lambda _: own
    )
    before = model.weight.clone()
    found = measure_throughput(workload, None, [64, 8], budget="64MiB", seconds=0.2)
    assert isinstance(found, Throughput) and [each.size for each in found.timings] == [8, 64]
    assert all(each.peak_bytes > 4 * model.weight.nbytes for each in found.timings)  # with the optimizer's state
    assert torch.equal(model.weight, before) and not own.state and model.weight.grad is None
    with pytest.raises(torch.OutOfMemoryError):
        measure_throughput(workload, None, [8], budget="300KiB", seconds=0.2)
    assert torch.equal(model.weight, before)
