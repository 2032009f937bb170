"""The memory instruments on one training step, and what people use instead: what each says, and what it costs."""

import gc
import json
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import psutil
import torch
from timing_tools import paired
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS

from labsupport.measure import MemoryLedger
from labsupport.measure.storages import tensors_in
from labsupport.train import Recipe, build_step, plan_memory
from labsupport.train.step import Step
from labsupport.train.traces import trace

STEPS = 2  # the first makes the optimizer's state, the second has it
FRESH, LATER = "before step 1", "before step 3"  # when a tool is entered


def seeded(name: str, batch: int) -> Step:
    torch.manual_seed(0)
    return build_step(WORKLOADS[name], Recipe(batch_size=batch), "cpu")


def live_bytes(step: Step) -> int:
    """Of what a step works on, each storage once."""
    parameters = list(step.model.parameters())
    known = [*parameters, *step.model.buffers(), *(p.grad for p in parameters), *step.batch]
    known += [each for state in step.optimizer.state.values() for each in state.values()]
    storages = [each.untyped_storage() for each in known if isinstance(each, torch.Tensor)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


# The tools: entered around steps, told when one is over (`between`), and asked for the peak after the last.


class NoTool:
    """What the ratios of two bare steps look like."""

    def __init__(self, step: Step) -> None:
        pass

    def __enter__(self) -> "NoTool":
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def between(self) -> None:
        pass

    def peak(self) -> int:
        return 0


class Ledger(NoTool):
    def __init__(self, step: Step) -> None:
        self.ledger = MemoryLedger(step.model, step.optimizer, inputs=step.batch)

    def __enter__(self) -> "Ledger":
        self.ledger.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.ledger.__exit__(*error)

    def peak(self) -> int:
        return sum(self.ledger.at_peak().values())


class Tracker(NoTool):
    """PyTorch's own MemTracker. It refuses the next step if not told to forget its modules' numbers in between."""

    def __init__(self, step: Step) -> None:
        self.tracker = MemTracker()
        self.tracker.track_external(step.model, step.optimizer, *tensors_in(step.batch))

    def __enter__(self) -> "Tracker":
        self.tracker.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.tracker.__exit__(*error)

    def between(self) -> None:
        self.tracker.reset_mod_stats()

    def peak(self) -> int:
        return self.tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


class Profiler(NoTool):
    """What the allocator was asked for, in order, on top of what was there before."""

    def __init__(self, step: Step) -> None:
        self.before = live_bytes(step)
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> "Profiler":
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profiler.__exit__(*error)

    def peak(self) -> int:
        return max(self.before, *self.live())

    def live(self) -> list[int]:
        """The bytes that are live after each allocation and release."""
        events = [each for each in self.profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
        changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
        return [self.before + change for change in accumulate(changes)]


class Resident(NoTool):
    """What the process had more of in RAM at its peak than at the start, on top of what was there before."""

    def __init__(self, step: Step) -> None:
        self.before, self.start, self.high = live_bytes(step), 0, 0

    def __enter__(self) -> "Resident":
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        self.start = psutil.Process().memory_info().rss
        return self

    def __exit__(self, *error: Any) -> None:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        self.high = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def peak(self) -> int:
        return self.before + self.high - self.start


TOOLS: dict[str, type[NoTool]] = {
    "no tool": NoTool,
    "MemoryLedger": Ledger,
    "MemTracker": Tracker,
    "torch.profiler": Profiler,
    "RSS": Resident,
}


# Peaks.


def under(tool: NoTool, step: Step) -> int:
    """The peak of the first two steps, by a tool."""
    with tool:
        for _ in range(STEPS):
            step()
            tool.between()
    return tool.peak()


def truths(name: str, batch: int) -> dict[str, int]:
    """What the allocator was asked for in the first two steps, and in the two after them: seen from the start on."""
    lives = []
    for count in (STEPS, 2 * STEPS):
        gc.collect()
        step = seeded(name, batch)
        with Profiler(step) as tool:
            for _ in range(count):
                step()
        lives.append(tool.live())
    first, both = lives
    return {FRESH: max(first), LATER: max(both[len(first) :])}


def peaks(name: str, batch: int) -> dict[str, Any]:
    """Two steps of a new build under each tool, entered before the first step or the third. RSS, and a profiler that
    did not see the first steps, in a process of their own."""
    found: dict[str, dict[str, int]] = {when: {"truth": truth} for when, truth in truths(name, batch).items()}
    for said, when in (*product(("MemoryLedger", "MemTracker"), (FRESH, LATER)), ("torch.profiler", FRESH)):
        gc.collect()
        step = seeded(name, batch)
        for _ in range(STEPS if when == LATER else 0):
            step()
        found[when][said] = under(TOOLS[said](step), step)
    code = f"import memory_tools; memory_tools.peaks_here({name!r}, {batch}, {torch.get_num_threads()})"
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True, timeout=300
    )
    for when, more in json.loads(done.stdout.splitlines()[-1]).items():
        found[when] |= more
    return {"peaks": found}


def peaks_here(name: str, batch: int, threads: int) -> None:
    torch.set_num_threads(threads)
    step, found = seeded(name, batch), {}
    for when in (FRESH, LATER):
        tool = Resident(step)
        found[when] = {"RSS": under(tool, step), "process": tool.high}
    found[LATER]["torch.profiler"] = under(Profiler(step), step)
    print(json.dumps(found))


# Cost.


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def overhead(name: str, batch: int, tool: str, seconds: float, rounds: tuple[int, int]) -> dict[str, Any]:
    """In turns, each after an untimed step: a bare step; the tool made, entered, around one step, left and asked for
    the peak; and the second step inside of it."""
    kind, step = TOOLS[tool], seeded(name, batch)

    def around() -> None:
        with kind(step) as entered:
            step()
        entered.peak()

    def inside() -> float:
        with kind(step) as entered:
            step()
            return seconds_of(lambda: (entered.between(), step()))

    turns = {
        "bare": lambda: (step(), seconds_of(step))[1],
        "around": lambda: (step(), seconds_of(around))[1],
        "inside": inside,
    }
    for turn in turns.values():
        turn()
    found: dict[str, list[float]] = {each: [] for each in turns}
    order, end, (fewest, most) = list(turns), time.perf_counter() + seconds, rounds
    while (n := len(found["bare"])) < fewest or (n < most and time.perf_counter() < end):
        for each in order:
            found[each].append(turns[each]())
        order = [*order[1:], order[0]]
    ratios = {each: paired(list(zip(found[each], found["bare"], strict=True))) for each in ("around", "inside")}
    return {"bare_s": round(statistics.median(found["bare"]), 7), **ratios}


# The plan.


def really(name: str, batch: int) -> int:
    step = seeded(name, batch)
    return under(Ledger(step), step)


def accelerates(name: str) -> int:
    """What `accelerate estimate-memory` shows as "Training using Adam" (there, for a model of the Hub)."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    total, _ = calculate_maximum_sizes(WORKLOADS[name].model())
    return max(estimate_training_usage(total, "float32").values())


def planned(name: str, sizes: Sequence[int], most_bytes: int, builds: int) -> dict[str, Any]:
    """The plan at each batch size beside a line through the real peaks at the two smallest, and Accelerate's
    estimate; the truth is a real run under the ledger where that takes `most_bytes` at most, else a fake one there."""
    workload, built_s = WORKLOADS[name], []
    for _ in range(builds):
        start = time.perf_counter()
        plan = plan_memory(workload)
        built_s.append(time.perf_counter() - start)
    asks = timeit.repeat(lambda: plan.peak_bytes(777), number=1000, repeat=5)
    start = time.perf_counter()
    (x, y), (at_x, at_y) = sizes[:2], [really(name, batch) for batch in sizes[:2]]
    line_s = time.perf_counter() - start
    estimate, rows = accelerates(name), []
    for batch in sizes:
        real = plan.peak_bytes(batch) <= most_bytes
        if real:
            truth = really(name, batch)
        else:
            truth = int(trace(workload, Recipe(batch_size=batch), "cpu").changes.cumsum().max())
        line = at_x + (at_y - at_x) * (batch - x) // (y - x)
        row = {"batch": batch, "truth": truth, "real": real, "plan": plan.peak_bytes(batch)}
        rows.append({**row, "line": line, "Accelerate": estimate})
    return {
        "rows": rows,
        "build_s": round(statistics.median(built_s), 4),
        "ask_us": round(1e3 * statistics.median(asks), 2),
        "line_s": round(line_s, 4),
        "json_bytes": len(json.dumps(plan.as_dict())),
        "moments": len(plan.moments),
    }
