"""The step that is timed, and the tools that say which of two is faster: `compare`, and what people use instead."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.benchmark import Compare, Timer
from torch.utils.benchmark import Measurement as TorchMeasurement

from labsupport.measure import PairedRatio, compare, measure, timing
from labsupport.measure.statistics import paired_interval
from labsupport.measure.stopwatch import Stopwatch

MARGIN = 0.01
STEP_S = 0.0045  # of the step below, about: how many steps fill the seconds offered


class TrainingStep:
    """One optimizer step of a small MLP, then an idle turn of `share` of the seconds it just took."""

    def __init__(self, share: float = 0.0, *, width: int = 384, samples: int = 128) -> None:
        torch.manual_seed(0)
        layers = (layer for _ in range(3) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU()))
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(samples, width)
        self.share = share
        self.work_s = 0.0
        self.shares_reached: list[float] = []

    def __call__(self) -> None:
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.work_s = time.perf_counter() - begun
        if self.share:
            end = begun + self.work_s * (1 + self.share)
            while time.perf_counter() < end:
                pass
            self.shares_reached.append((time.perf_counter() - begun) / self.work_s - 1)


# Tools: a step, another, and seconds to spend -> time of A / time of B, and a verdict on B by each rule there is.


@dataclass(frozen=True)
class Answer:
    ratio: float
    verdicts: dict[str, str]
    rounds: int = 0


def peer_verdict(ratio: float, differs: bool) -> str:
    """The one rule for all peers, which have no third verdict: within the margin is "same"; beyond it the tool's own
    rule decides, and "cannot tell" is what it does not call a difference. So no peer errs by a lack of a margin."""
    if 1 - MARGIN <= ratio <= 1 + MARGIN:
        return "same"
    return ("faster" if ratio > 1 else "slower") if differs else "cannot tell"


def ours(a: TrainingStep, b: TrainingStep, seconds: float) -> Answer:
    found = compare(a, b, margin=MARGIN, max_time_s=seconds)
    return Answer(found.ratio, {"compare": found.verdict}, found.n)


def unsettled(a: TrainingStep, b: TrainingStep, seconds: float) -> Answer:
    """`compare` without the untimed step after each switch."""
    with mock.patch.object(timing, "SETTLE_BELOW_S", 0.0):
        found = ours(a, b, seconds)
    return replace(found, verdicts={"compare, unsettled": found.verdicts["compare"]})


def naive(a: TrainingStep, b: TrainingStep, seconds: float) -> Answer:
    """What tutorials do: N steps of A, then N of B, by `time.time()`. It takes every difference for one."""
    took = []
    for step in (a, b):
        start = time.time()
        for _ in range(max(1, int(seconds / 2 / STEP_S))):
            step()
        took.append(time.time() - start)
    ratio = took[0] / took[1]
    return Answer(ratio, {"time.time() loop": peer_verdict(ratio, differs=True)})


def torch_timer(a: TrainingStep, b: TrainingStep, seconds: float) -> Answer:
    """`Timer.blocked_autorange` of A, then of B; read twice, by the printed IQR and by `Compare`'s table."""
    threads = torch.get_num_threads()
    one, other = (
        Timer("step()", globals={"step": step}, num_threads=threads, label="step", sub_label=name, description="time")
        for name, step in (("A", a), ("B", b))
    )
    one, other = (timer.blocked_autorange(min_run_time=seconds / 2) for timer in (one, other))
    ratio = one.median / other.median
    rules = {"torch Timer, IQRs": iqrs_are_apart(one, other), "torch Compare": compare_shows_apart(one, other)}
    return Answer(ratio, {rule: peer_verdict(ratio, differs) for rule, differs in rules.items()})


def iqrs_are_apart(a: TorchMeasurement, b: TorchMeasurement) -> bool:
    """Whether the interquartile ranges that the two print ("4.01 to 6.26") do not overlap."""
    (a_low, a_high), (b_low, b_high) = (np.quantile(each.times, [0.25, 0.75]) for each in (a, b))
    return bool(a_high < b_low or b_high < a_low)


def compare_shows_apart(a: TorchMeasurement, b: TorchMeasurement) -> bool:
    """Whether Compare's table, with digits trimmed to the significant ones, prints two numbers and marks one of them
    the best: bold green is what lies within 1 % of the fastest, a margin of its own."""
    table = Compare([a, b])
    table.trim_significant_figures()
    table.colorize()
    rows = re.findall(r"^ +[AB] +\|(.+)$", str(table), re.MULTILINE)
    numbers = {re.sub(r"\x1b\[\d+m|\s", "", row) for row in rows}
    return len(numbers) == 2 and sum("\x1b[92m" in row for row in rows) == 1


def pyperf_values(a: TrainingStep, b: TrainingStep, seconds: float) -> Answer:
    """Values of loops of about 100 ms, one of them for warm-up, all of A first: two runs of `pyperf`, each with one
    worker. (Its default of 20 worker processes would import torch 40 times.)"""
    loops = max(1, round(0.1 / STEP_S))
    columns = []
    for step in (a, b):
        values = []
        for _ in range(1 + max(2, round(seconds / 2 / 0.1))):
            start = time.perf_counter()
            for _ in range(loops):
                step()
            values.append((time.perf_counter() - start) / loops)
        columns.append(values[1:])
    ratio = float(np.mean(columns[0]) / np.mean(columns[1]))
    return Answer(ratio, {"pyperf": peer_verdict(ratio, pyperf_tells_apart(*columns))})


def pyperf_tells_apart(a_s: Sequence[float], b_s: Sequence[float]) -> bool:
    """What `pyperf compare_to --min-speed 1` finds significant: Student's t test, two-sided, at 95 %."""
    import pyperf
    from pyperf._compare import CompareData, CompareResult

    def as_data(values: Sequence[float]) -> Any:
        made = pyperf.Run(list(values), metadata={"name": "step"}, collect_metadata=False)
        return CompareData("step", pyperf.Benchmark([made]))

    return bool(CompareResult(as_data(a_s), as_data(b_s), min_speed=100 * MARGIN).significant)


TOOLS: dict[str, Callable[[TrainingStep, TrainingStep, float], Answer]] = {
    "compare": ours,
    "unsettled": unsettled,
    "naive": naive,
    "Timer": torch_timer,
    "pyperf": pyperf_values,
}


# What else is claimed: of the cost of measuring, of short turns, of planting, of runs made apart.


def series(seconds: float) -> dict[str, Any]:
    """One step over and over, each timed: turns of any length are cut from it when the table is made."""
    step, samples = TrainingStep(), []
    run_for(0.5, step)
    end = last = time.perf_counter()
    end += seconds
    while last < end:
        step()
        now = time.perf_counter()
        samples.append(now - last)
        last = now
    return {"series_us": [round(1e6 * sample) for sample in samples]}


def overhead(seconds: float) -> dict[str, Any]:
    """Steps through the Stopwatch over as many bare ones, in turns of about 50 ms, which is how `measure` uses it: an
    idle turn of 1 ms, which is as long every time, and a training step of about that, which is not and gets longer."""

    def idle() -> None:
        end = time.perf_counter() + 0.001
        while time.perf_counter() < end:
            pass

    watch, count, found = Stopwatch(), 50, {}
    steps = (("an idle turn of 1 ms", idle, 0.2), ("a training step", TrainingStep(width=192, samples=96), 0.8))
    for name, step, part in steps:

        def bare(step: Callable[[], None] = step) -> None:
            for _ in range(count):
                step()

        def watched(step: Callable[[], None] = step) -> None:
            watch.turn(step, count)

        run_for(0.1, step)
        rounds = in_turns(part * seconds, lambda: wall_s(watched), lambda: wall_s(bare))
        found[name] = {"step_s": round(float(np.median(rounds, axis=0)[1]) / count, 7), **paired(rounds)}
    return {"overhead": found}


def spin(effect: float, seconds: float) -> dict[str, Any]:
    """How long the step's own work takes after an idle turn of this share, over what it takes after none."""
    step = TrainingStep()

    def work_after(share: float) -> float:
        step.share = share
        step()  # leaves its idle turn behind; the next one's work is what is read
        step()
        return step.work_s

    run_for(0.5, step)
    found = paired(in_turns(seconds, lambda: work_after(effect), lambda: work_after(0.0)))
    return {"work": found, "share": float(np.median(step.shares_reached))}


def process(seconds: float) -> dict[str, Any]:
    """`measure` of the step in a process of its own, which also says how busy others were."""
    code = f"import timing_tools; timing_tools.measure_here({seconds}, {torch.get_num_threads()})"
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout)


def measure_here(seconds: float, threads: int) -> None:
    torch.set_num_threads(threads)
    found = measure(TrainingStep(), min_time_s=seconds)
    print(json.dumps({"median_s": round(found.median_s, 7), "n": found.n, "others": found.others_cores}))


def run_for(seconds: float, step: Callable[[], Any]) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        step()


def wall_s(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turns(seconds: float, a: Callable[[], float], b: Callable[[], float]) -> list[tuple[float, float]]:
    """The readings of A and of B, in rounds whose order alternates; twelve rounds at least."""
    rounds: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < 12 or time.perf_counter() < end:
        if len(rounds) % 2:
            b_first = b()
            rounds.append((a(), b_first))
        else:
            rounds.append((a(), b()))
    return rounds


def paired(rounds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    found = PairedRatio.of(*zip(*rounds, strict=True))
    low, high = paired_interval(found.ratios)
    return {"ratio": round(found.value, 6), "low": round(low, 6), "high": round(high, 6), "n": found.n}
