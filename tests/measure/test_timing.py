"""`measure` and `compare` on a planned clock: what they time, in which order, and that they leave all as it was."""

import functools
import itertools
import random
import re

import numpy as np
import pytest
import torch
from measure.fakes import FakeClock
from samples import CPU
from torch import nn

from labsupport.measure import Measurement, compare, measure, timing
from labsupport.measure.stopwatch import Stopwatch


def nothing():
    """Waits for a device that is never behind: with it no CUDA event is used, on any machine."""


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(Stopwatch, "machine", lambda self: CPU)


def measured(clock, step, **options):
    return measure(step, clock=clock, synchronize=nothing, **options)


def compared(clock, a, b, **options):
    return compare(a, b, clock=clock, synchronize=nothing, **options)


def always(clock, step_s):
    return clock.step(itertools.repeat(step_s))


class Training:
    """A step of `seconds` that trains a model; `seen` has the weight at the start of each."""

    def __init__(self, clock, step_s=0.125, stop_after=None, error=KeyError):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.clock, self.step_s, self.stop_after, self.error = clock, step_s, stop_after, error
        self.seen = []

    def weight(self):
        return self.model.weight[0, 0].item()

    def step(self):
        self.seen.append(self.weight())
        if len(self.seen) == self.stop_after:
            raise self.error("enough")
        self.model(torch.rand(4, 2)).sum().backward()
        self.optimizer.step()
        self.clock.now += self.step_s

    def everything(self):
        gradients = [None if p.grad is None else p.grad.tolist() for p in self.model.parameters()]
        state = [value.tolist() for state in self.optimizer.state.values() for value in state.values()]
        return self.weight(), gradients, state, torch.get_rng_state().tolist()


def test_a_measurement_of_planned_times(clock):
    found = measured(clock, clock.step(itertools.chain([60.0, 5.0], itertools.repeat(0.125))), label="forward")
    assert set(found.samples_s) == {0.125} and found.total_s >= 1.0
    assert (found.dropped_s, found.wall_s, found.warmup.steady) == ((60.0, 5.0), (), True)
    assert (found.label, found.machine) == ("forward", CPU)


@pytest.mark.parametrize("min_time_s", [0.25, 2, np.float32(2.5)])
def test_it_takes_the_time_it_is_given(clock, min_time_s):
    found = measured(clock, always(clock, 0.0625), min_time_s=min_time_s)
    assert max(min_time_s, 6 * 0.0625) <= found.total_s <= 1.5 * max(min_time_s, 7 * 0.0625)


def test_the_label_is_the_steps_name(clock):
    def forward(x):
        clock.now += 1.0

    assert measured(clock, functools.partial(forward, 1)).label == "forward"


def test_a_measurement_trains_nothing(clock):
    training = Training(clock)
    was = training.everything()
    measured(clock, training.step)
    assert len(set(training.seen)) > 6
    assert training.everything() == was


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, StopIteration])
@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_an_error_of_the_step_comes_through_and_all_is_put_back(clock, error, stop_after):
    training = Training(clock, stop_after=stop_after, error=error)
    was = training.everything()
    with pytest.raises(error, match="enough"):
        measured(clock, training.step)
    assert len(training.seen) == stop_after
    assert training.everything() == was


def test_batches_that_run_out_end_it_and_all_is_put_back(clock):
    training, batches = Training(clock), iter(range(3))
    was = training.everything()
    with pytest.raises(StopIteration):
        measured(clock, lambda: (next(batches), training.step()))
    assert training.everything() == was


@pytest.mark.parametrize("call", ["measure", "compare"])
def test_a_step_too_short_to_time_is_refused_and_all_is_put_back(call):
    clock = FakeClock(reading_s=1e-6)
    training = Training(clock, step_s=0.0)
    was = training.everything()
    with pytest.raises(ValueError, match="step takes .* too short to time alone"):
        measured(clock, training.step) if call == "measure" else compared(clock, training.step, training.step)
    assert training.everything() == was


def test_only_the_state_given_is_put_back(clock):
    training = Training(clock)
    weight, state = training.weight(), []
    measured(clock, training.step, state=iter([training.model]))
    assert training.weight() == weight
    assert training.optimizer.state
    measured(clock, training.step, state=state)
    assert training.weight() != weight


def test_random_draws_are_put_back_in_any_case(clock):
    was = torch.get_rng_state().tolist(), random.getstate()
    measured(clock, lambda: (torch.rand(1), random.random(), always(clock, 1.0)()), state=())
    assert (torch.get_rng_state().tolist(), random.getstate()) == was


def test_a_module_is_a_step_itself(clock):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self):
            self.calls += 1
            clock.now += 0.5

    model = Model()
    assert measured(clock, model).label == "Model"
    assert model.calls == 0


@pytest.mark.parametrize("min_time_s", [0, -1.0, float("nan"), float("inf"), "1", None, True])
def test_a_time_that_is_none_is_refused_before_anything_runs(clock, min_time_s):
    with pytest.raises(ValueError, match="min_time_s is .*; a positive number is expected"):
        measured(clock, pytest.fail, min_time_s=min_time_s)


def test_a_state_that_is_none_is_refused_before_anything_runs(clock):
    with pytest.raises(TypeError, match="cannot keep the state of 'model'"):
        measured(clock, pytest.fail, state={"model": nn.Linear(1, 1)})


def test_a_result_is_no_step(clock):
    with pytest.raises(TypeError, match="give the function, step and not step()"):
        measured(clock, torch.zeros(1))
    with pytest.raises(TypeError, match="give the function, step and not step()"):
        compared(clock, nothing, None)


@pytest.mark.parametrize("a_s, b_s, ratio, verdict", [(0.25, 0.125, 2.0, "faster"), (0.125, 0.25, 0.5, "slower")])
def test_twice_as_slow_is_twice_as_slow(clock, a_s, b_s, ratio, verdict):
    found = compared(clock, always(clock, a_s), always(clock, b_s), names=("old", "new"))
    assert (found.ratio, found.interval, found.total_ratio, found.verdict) == (ratio, (ratio, ratio), ratio, verdict)
    assert (found.a.median_s, found.b.median_s, found.names) == (a_s, b_s, ("old", "new"))
    assert set(found.rounds) == {(a_s, b_s)}


@pytest.mark.parametrize("step_s", [2.0**-12, 2.0**-7, 0.25, 3.0])
def test_a_step_is_as_fast_as_itself(clock, step_s):
    step = always(clock, step_s)
    found = compared(clock, step, step)
    assert (found.ratio, found.verdict) == (1.0, "same")


def test_noise_that_both_see_changes_nothing(clock):
    """Whole rounds are slower by up to tenfold; as to the medians of all steps nothing could be told."""
    slow = np.random.default_rng(0).uniform(1, 10, 10_000).repeat(2)
    turns = iter(slow)
    warm = itertools.chain(itertools.repeat(1.0, 14), turns)

    def takes(step_s):
        def step():
            clock.now += step_s * next(warm)

        return step

    found = compared(clock, takes(1.02), takes(1.0), max_time_s=1000.0)
    assert found.ratio == pytest.approx(1.02) and found.verdict == "faster"


def letters(clock, a_s, b_s, **options):
    called = []

    def recorded(letter, step):
        return lambda: (called.append(letter), step())

    found = compared(clock, recorded("A", always(clock, a_s)), recorded("B", always(clock, b_s)), **options)
    return "".join(called), found


def test_rounds_alternate_their_order(clock):
    called, found = letters(clock, 0.5, 0.5)
    assert re.fullmatch("A{7}B{7}(ABBA)*(AB)?", called)
    assert len(found.rounds) == (len(called) - 14) / 2 >= 6


def test_a_turn_is_two_milliseconds_of_the_quicker_step_after_one_or_two_to_settle(clock):
    called, found = letters(clock, 2.0**-10, 2.0**-8, max_time_s=2.0)
    # Four or five a turn, of the slower one too. A B is followed by B A: but for the ends, turns stand in pairs.
    runs = [len(list(run)) for _, run in itertools.groupby(called)][2:]
    assert runs[0] in (4, 5) and set(runs[1:-1]) == {8, 9, 10}
    assert (found.a.n, found.b.n) == (3 * found.n, 3 * found.n)
    assert set(found.rounds) == {(2.0**-10, 2.0**-8)}  # seconds a step, not a turn


def test_both_settle_if_one_is_short(clock):
    called, found = letters(clock, 0.05, 0.2)
    settling = len(called) - len(found.a.dropped_s) - len(found.b.dropped_s) - found.a.n - found.b.n
    assert 2 * found.n < settling < 4 * found.n
    assert called.count("A") - len(found.a.dropped_s) == called.count("B") - len(found.b.dropped_s)


@pytest.mark.parametrize("warm", [0, 1])
def test_a_stall_every_twentieth_step_costs_what_it_costs(clock, warm):
    """One step in twenty takes ten times as long: 1.45 times the time, wherever the warm-up ended."""
    stalling = clock.step(0.5 if (i + warm) % 20 == 0 else 0.05 for i in itertools.count())
    found = compared(clock, stalling, always(clock, 0.05), max_time_s=400.0, min_time_s=200.0)
    assert found.total_ratio == pytest.approx(1.45, abs=0.1)


def test_a_step_whose_length_is_drawn_is_timed_on_many_draws(clock):
    """With the random state put back at each turn it would be timed on one, and A on another than B."""
    model = nn.Linear(2, 1)

    def step():
        clock.now += 0.05 * (1 + torch.rand(()).item())

    found = compared(clock, step, step, state=[model], max_time_s=60.0)
    assert len(set(found.a.samples_s)) > found.n / 2 and set(found.a.samples_s) != set(found.b.samples_s)


def test_the_step_after_a_switch_is_not_timed(clock):
    """The first step after the other one finds cold caches, and takes five times as long."""
    last = []

    def switching(letter):
        def step():
            clock.now += 0.0625 if last[-1:] == [letter] else 0.3125
            last.append(letter)

        return step

    found = compared(clock, switching("A"), switching("B"))
    assert set(found.a.samples_s) | set(found.b.samples_s) == {0.0625}


def test_at_least_six_rounds_of_any_length(clock):
    found = compared(clock, always(clock, 100.0), always(clock, 50.0))
    assert (found.n, found.verdict) == (6, "faster")


@pytest.mark.parametrize("max_time_s", [4.0, 7])
def test_the_time_is_up_when_it_is_up(clock, max_time_s):
    """Every other round A is 2 % slower: the interval crosses the margin for ever."""
    a = clock.step(itertools.chain([0.125] * 7, itertools.cycle([0.1275, 0.1275, 0.125, 0.125])))
    found = compared(clock, a, always(clock, 0.125), max_time_s=max_time_s)
    assert found.verdict == "cannot tell"
    assert max_time_s <= found.seconds == clock.now < max_time_s + 0.26


def test_a_clear_verdict_ends_it_after_the_least_time(clock):
    found = compared(clock, always(clock, 0.25), always(clock, 0.125), min_time_s=3.0)
    assert 3.0 <= sum(a + b for a, b in found.rounds) < 3.5


def test_stalls_of_one_side_take_the_verdict_back(clock):
    """B is twice as fast, but stalls in every tenth round: over all time it is the slower one."""
    b = clock.step(0.125 if i < 20 or i % 10 else 12.5 for i in itertools.count())
    found = compared(clock, always(clock, 0.25), b, min_time_s=100.0, max_time_s=400.0)
    assert found.ratio == 2.0 and found.total_ratio < 0.5
    assert found.verdict == "cannot tell" and found.seconds >= 400.0
    assert any("by the median step B is faster, but over all time" in warning for warning in found.warnings)


def test_a_shared_state_is_the_same_at_each_turn_and_the_old_one_at_the_end(clock):
    training = Training(clock)
    seen = {"A": [], "B": []}

    def side(letter):
        return lambda: (seen[letter].append(training.weight()), training.step())

    was = training.everything()
    compared(clock, side("A"), side("B"), state=[training.model, training.optimizer])
    for weights in seen.values():
        assert len(set(weights[:7])) == 7  # the warm-up, each from the same beginning
        assert len(weights) == 7 + 8 and len(set(weights[7:])) == 1
    assert seen["A"][0] == seen["B"][0] == was[0]
    assert training.everything() == was


def test_steps_that_name_the_same_model_share_it(clock):
    training = Training(clock)
    was = training.everything()
    compared(clock, training.step, functools.partial(training.step))
    assert len(set(training.seen[14:])) == 1
    assert training.everything() == was


def test_steps_that_share_nothing_go_on_training(clock):
    """Each from where it stood: the first is not set back when the second warms up."""
    one, other = Training(clock), Training(clock)
    was = one.everything(), other.everything()
    compared(clock, one.step, other.step)
    assert len(set(one.seen)) == len(one.seen) == len(set(other.seen)) == 7 + 8
    assert (one.everything(), other.everything()) == was


@pytest.mark.parametrize("stop_after", [3, 8, 13])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_in_a_warmup_or_a_turn_puts_both_back(clock, stop_after, error):
    one, other = Training(clock), Training(clock, stop_after=stop_after, error=error)
    was = one.everything(), other.everything()
    with pytest.raises(error):
        compared(clock, one.step, other.step)
    assert (one.everything(), other.everything()) == was


def test_both_sides_warm_up_apart_and_their_warmup_is_kept(clock):
    slow_once = clock.step(itertools.chain([30.0], itertools.repeat(0.125)))
    found = compared(clock, slow_once, always(clock, 0.125), max_time_s=60)
    assert found.a.dropped_s == (30.0, *[0.125] * 6)
    assert set(found.a.samples_s) == {0.125}
    assert (found.a.wall_s, found.a.warmup.dropped) == ((), len(found.a.dropped_s))


@pytest.mark.parametrize(
    "options",
    [
        {"names": ("A", "A")}, {"names": ("A",)}, {"names": ("A", "B", "A")}, {"names": ("A", "B", "C")},
        {"margin": 1.0}, {"margin": 2}, {"min_time_s": 11.0}, {"min_time_s": 2.0, "max_time_s": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_do_not_fit_are_refused_before_anything_runs(clock, options):
    with pytest.raises(ValueError, match="a margin below 1, two different names and max_time_s of at least min_time_s"):
        compared(clock, pytest.fail, pytest.fail, **options)


@pytest.mark.parametrize("name", ["margin", "min_time_s", "max_time_s"])
@pytest.mark.parametrize("value", [0, -0.01, float("nan"), "1"])
def test_numbers_that_are_not_positive_are_refused_by_name(clock, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; a positive number is expected"):
        compared(clock, pytest.fail, pytest.fail, **{name: value})


def test_a_comparison_can_be_made_of_saved_sides(clock, tmp_path):
    found = compared(clock, always(clock, 0.25), always(clock, 0.125))
    found.a.save(tmp_path / "a.json")
    assert Measurement.load(tmp_path / "a.json") == found.a


def test_a_put_back_that_takes_time_makes_longer_turns(clock, monkeypatch):
    """Else a big model would spend its time with copies and not with steps."""

    class Slow(timing.KeptState):
        def put_back(self):
            clock.now += 0.5
            super().put_back()

    monkeypatch.setattr(timing, "KeptState", Slow)
    training = Training(clock)
    found = compared(clock, training.step, training.step)
    assert (found.a.n, found.b.n) == (4 * found.n, 4 * found.n)


def test_both_steps_draw_the_same_random_numbers_in_their_warmup(clock):
    drawn = {"A": [], "B": []}

    def side(letter):
        return lambda: (drawn[letter].append(torch.rand(1).item()), always(clock, 0.125)())

    compared(clock, side("A"), side("B"))
    assert drawn["A"][:7] == drawn["B"][:7]
