"""What the stopwatch makes of a planned clock and a planned device; nothing here waits or knows a real speed."""

import functools
import itertools
import math
import re
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measure.fakes import FakeClock, FakeDevice

from labsupport.measure import stopwatch
from labsupport.measure.stopwatch import (
    OtherProcesses,
    Stopwatch,
    check_callable,
    check_positive,
    name_of,
    refuse_too_short,
    run_until_steady,
)


def nothing():
    """Waits for a device that is never behind: with it no CUDA event is used, on any machine."""


def run(times_s, min_time_s=1.0, reading_s=0.0):
    clock = FakeClock(reading_s)
    samples, _, warmup = run_until_steady(Stopwatch(nothing, clock), clock.step(times_s), min_time_s)
    return samples, warmup


def steady(first, then=0.01):
    return itertools.chain(first, itertools.repeat(then))


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=20))
def test_each_step_has_its_own_time_by_the_wall_clock(ticks):
    clock = FakeClock()
    times_s = [tick / 1024 for tick in ticks]  # exact in binary
    samples, wall_s = Stopwatch(nothing, clock).turn(clock.step(times_s), len(times_s))
    assert samples == times_s
    assert wall_s == sum(times_s) / len(times_s)


def test_it_waits_before_the_first_step_and_after_each():
    log = []
    watch = Stopwatch(lambda: log.append("wait"), FakeClock())
    watch.turn(lambda: log.append("step"), 3)
    assert log == ["wait", "step", "wait", "step", "wait", "step", "wait"]


def test_work_left_over_from_before_is_not_timed():
    clock = FakeClock()
    device = FakeDevice(clock)
    device.launch(kernel_s=5.0)
    samples, wall_s = Stopwatch(device.synchronize, clock).turn(lambda: device.launch(0.25), 2)
    assert (samples, wall_s) == ([0.25, 0.25], 0.25)


def test_events_time_the_device_and_the_clock_all_of_it():
    """The host needs 0.25 s a launch, the device 0.5 s: it is never idle between, and 1.5 s are over at the end."""
    clock = FakeClock()
    device = FakeDevice(clock)
    watch = Stopwatch(device.synchronize, clock, device.event)
    samples, wall_s = watch.turn(lambda: device.launch(kernel_s=0.5, host_s=0.25), 3)
    assert (samples, wall_s) == ([0.5, 0.5, 0.5], 0.5)


def test_the_host_runs_ahead_between_events():
    device = FakeDevice(FakeClock())
    Stopwatch(device.synchronize, device.clock, device.event).turn(lambda: device.launch(0.5), 3)
    assert device.log == ["wait", "record", *["launch", "record"] * 3, "wait"]


def test_a_slow_host_shows_in_both():
    """The stream's events tell the pause too: they stand in the queue behind it."""
    clock = FakeClock()
    device = FakeDevice(clock)
    watch = Stopwatch(device.synchronize, clock, device.event)
    samples, wall_s = watch.turn(lambda: device.launch(kernel_s=0.25, host_s=1.0), 4)
    assert (samples, wall_s) == ([1.0] * 4, 1.0)


def test_wall_seconds_are_kept_with_events_only():
    clock = FakeClock()
    device = FakeDevice(clock)
    by_events = Stopwatch(device.synchronize, clock, device.event)
    samples, wall, _ = run_until_steady(by_events, lambda: device.launch(0.25), 1.0)
    assert set(samples) == {0.25} and set(wall) == {0.25}
    assert run_until_steady(Stopwatch(nothing, clock), clock.step(itertools.repeat(0.25)), 1.0)[1] == []


@pytest.mark.parametrize(
    "initialized, synchronize, event, uses", [(True, None, None, True), (False, None, None, False)]
    + [(True, nothing, None, False), (False, nothing, FakeDevice(FakeClock()).event, True)],
)  # fmt: skip
def test_when_events_are_used(monkeypatch, initialized, synchronize, event, uses):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    assert Stopwatch(synchronize, event=event).uses_events is uses


@pytest.mark.parametrize("device, waits", [("cuda", False), ("mps", True), ("xpu", True)])
def test_an_accelerator_is_waited_for_but_an_idle_cuda_not_touched(monkeypatch, device, waits):
    log = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    here = SimpleNamespace(
        is_available=lambda: True,
        current_accelerator=lambda: torch.device(device),
        synchronize=lambda: log.append("wait"),
    )
    monkeypatch.setattr(torch, "accelerator", here)
    Stopwatch(clock=FakeClock()).turn(lambda: log.append("step"), 1)
    assert log == (["wait", "step", "wait"] if waits else ["step"])


@pytest.mark.parametrize("initialized, device", [(True, "cuda"), (False, "cpu")])
def test_the_machine_is_the_gpu_once_cuda_is_in_use(monkeypatch, initialized, device):
    """Also if the caller waits himself: `synchronize=torch.cuda.synchronize` makes no CPU of a GPU."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(stopwatch, "fingerprint", str)
    assert Stopwatch(nothing).machine() == device


def test_what_a_step_returns_is_not_kept():
    alive = []

    class Result:
        def __init__(self):
            alive.append(1)

        def __del__(self):
            alive.pop()

    Stopwatch(nothing, FakeClock()).turn(Result, 5)
    assert alive == []


def test_it_stops_as_soon_as_enough_steady_steps_are_timed():
    samples, warmup = run(steady([], 0.125))
    assert (len(samples), warmup.dropped) == (1 + 8, 1)


@pytest.mark.parametrize("first", [[60.0], [60.0, 5.0], [60.0, 2.0, 2.0, 2.0], [0.1] * 4, [300.0, 300.0]], ids=str)
def test_slow_first_steps_are_dropped_and_do_not_end_it_early(first):
    """A compiled step, compiled a second time for another shape, or run three times before a graph is captured."""
    samples, warmup = run(steady(first))
    assert (warmup.dropped, warmup.steady) == (len(first), True)
    assert 1.0 <= sum(samples[warmup.dropped :]) < 1.5


def test_at_least_six_steady_steps_of_any_length():
    samples, warmup = run(steady([], 100.0))
    assert (len(samples), warmup.dropped) == (7, 1)


def test_a_step_that_never_gets_steady_ends_after_four_times_the_time():
    samples, warmup = run((0.01 * 1.02**i for i in itertools.count()), min_time_s=0.5)
    assert not warmup.steady
    assert 1.0 <= sum(samples[len(samples) // 2 :]) < 1.3  # it looks again when a quarter more was spent


def test_the_steps_of_a_group_take_about_50_ms():
    sizes = []
    clock = FakeClock()

    class Watch(Stopwatch):
        def turn(self, step, count):
            sizes.append(count)
            return super().turn(step, count)

    run_until_steady(Watch(nothing, clock), clock.step(steady([], 1 / 128)), 1.0)
    assert sizes[:4] == [1, 1, 6, 6] and set(sizes[2:]) == {6}


def test_the_clock_may_be_one_percent_of_a_step():
    clock = FakeClock(reading_s=2**-20)
    watch = Stopwatch(nothing, clock)
    assert watch.shortest_s() == 100 * 2**-20
    refuse_too_short(watch, nothing, [100.1 * 2**-20] * 9)
    with pytest.raises(ValueError, match="nothing takes 95.4 µs: too short to time alone.* below 95.4 µs"):
        refuse_too_short(watch, nothing, [100 * 2**-20] * 9)


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-8, 9.8e-6))
def test_the_advice_for_a_short_step_works(step_s):
    with pytest.raises(ValueError, match="too short to time alone") as refused:
        run(steady([], step_s), min_time_s=1e-3, reading_s=1e-7)
    times = int(re.search(r"range\((\d+)\)", str(refused.value))[1])
    samples, _ = run(steady([], times * step_s), min_time_s=1e-3, reading_s=1e-7)
    assert np.median(samples) > 1e-5


def test_a_slow_clock_refuses_longer_steps():
    with pytest.raises(ValueError, match="takes 11.0 ms: too short to time alone.* below 100 ms.*range\\(32\\)"):
        run(steady([]), reading_s=1e-3)


def test_a_step_of_nothing_is_refused_at_once():
    """Not after a second of it: that would be ten million steps, each of them kept."""
    calls = itertools.count()
    with pytest.raises(ValueError, match="too short"):
        run_until_steady(Stopwatch(nothing, FakeClock(reading_s=1e-7)), lambda: next(calls), 1.0)
    assert next(calls) < 2000


@pytest.mark.parametrize(
    "readings", [itertools.repeat(1.0), iter(np.repeat(np.arange(1e5), 5))], ids=["stuck", "coarse"]
)
def test_a_clock_too_coarse_for_the_step_is_refused(readings):
    with pytest.raises(ValueError, match="takes 0 s: too short .* range\\(1000\\)"):
        run_until_steady(Stopwatch(nothing, readings.__next__), nothing, 1.0)


@pytest.mark.parametrize("readings", [itertools.count(0.0, -0.5), itertools.repeat(math.nan)], ids=["backwards", "nan"])
def test_a_clock_that_is_none_is_refused(readings):
    with pytest.raises(ValueError, match="the clock went backwards, or gave no number: a step took (-0.5|nan) s by it"):
        run_until_steady(Stopwatch(nothing, readings.__next__), nothing, 1.0)


@pytest.mark.parametrize("given", [1, 0.5, np.float32(2), np.int64(3), Fraction(1, 3)], ids=repr)
def test_positive_numbers_of_any_kind_pass(given):
    check_positive(min_time_s=given)


@pytest.mark.parametrize("given", [0, -1, math.nan, math.inf, True, "1", None, 1j], ids=repr)
def test_anything_else_is_refused_by_name(given):
    with pytest.raises(ValueError, match=f"min_time_s is {re.escape(repr(given))}; a positive number is expected"):
        check_positive(min_time_s=given)


@pytest.mark.parametrize("step", [None, torch.zeros(1), 3], ids=["None", "tensor", "number"])
def test_what_a_step_returned_is_no_step(step):
    with pytest.raises(TypeError, match="give the function, step and not step()"):
        check_callable(nothing, step)


class Trainer:
    def __call__(self):
        pass

    def step(self):
        pass


@pytest.mark.parametrize(
    "step, name",
    [
        (nothing, "nothing"),
        (Trainer().step, "step"),
        (Trainer(), "Trainer"),
        (torch.nn.Identity(), "Identity"),
        (functools.partial(functools.partial(nothing, 1), x=2), "nothing"),
    ],
)
def test_a_step_has_a_name(step, name):
    assert name_of(step) == name


def times_of(busy_s, own_s, now_s, monkeypatch):
    idle, iowait, guest = 5 * now_s, 3 * now_s, busy_s  # guests' time is in the first field already
    times = type("Times", (tuple,), {"idle": idle, "iowait": iowait})([busy_s, 0, 0, idle, iowait, 0, 0, 0, guest])
    me = SimpleNamespace(children=lambda recursive: [], cpu_times=lambda: (own_s, 0.0, 0.0, 0.0, 9.0))
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    monkeypatch.setattr(psutil, "Process", lambda: me)
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now_s)


@pytest.mark.parametrize(
    "busy_s, own_s, now_s, cores",
    [(3.0, 1.0, 2.0, 1.0), (1.0, 1.0, 2.0, 0.0), (0.9, 1.0, 2.0, 0.0), (3.0, 1.0, 0.05, 0.0)],
    ids=["one core of others'", "all is ours", "ours, and rounded", "too short to say"],
)
def test_what_others_keep_busy_is_all_but_ours_and_idle(monkeypatch, busy_s, own_s, now_s, cores):
    times_of(0.0, 0.0, 0.0, monkeypatch)
    others = OtherProcesses()
    times_of(busy_s, own_s, now_s, monkeypatch)
    assert others.cores() == cores


def test_a_child_that_worked_and_ended_is_ours():
    """A data loader's workers come and go between two readings."""
    before = OtherProcesses()._read()[2]
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert OtherProcesses()._read()[2] - before >= 0.25


def test_a_child_that_cannot_be_read_is_left_out(monkeypatch):
    def gone():
        raise psutil.NoSuchProcess(1)

    times_of(0.0, 2.0, 0.0, monkeypatch)
    psutil.Process().children = lambda recursive: [SimpleNamespace(cpu_times=gone)]
    assert OtherProcesses()._read()[2] == 2.0
