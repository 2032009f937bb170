"""How often is a timing tool wrong, and what does it see for the seconds it takes? `compare`, beside its peers.

    python benchmarks/timing.py            the whole plan; a run that was stopped goes on where it stopped
    python benchmarks/timing.py --plan     what that is, and about how long it takes
    python benchmarks/timing.py --quick    one trial of each cell, into build/, to try it
    python benchmarks/timing.py --table    README.md's tables, from the records

What is planted is known: a slower step turns idle, after its real work, for a share of the seconds which that work
just took, read from the clock. So it is (1 + share) times the step whatever the machine does meanwhile: a slow moment
makes the work and the idle turn longer alike. Each trial records the share that was really reached, and the cell
"spin" says whether the work itself takes as long after an idle turn as it does without.
"""

import argparse
import ast
import hashlib
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from readme import load, still_to_do
from timing_tables import SECTION
from timing_tools import MARGIN, TOOLS, TrainingStep, overhead, process, series, spin

import labsupport
from labsupport.machine import allowed_cores, fingerprint
from labsupport.measure import measure
from labsupport.measure.stopwatch import OtherProcesses
from labsupport.publish.processes import busy_neighbour
from labsupport.publish.provenance import Modules, dump

HERE = Path(__file__).resolve().parent
SCHEMA = "timing benchmark 1"
# A trial meant to be quiet is made again if other processes kept this much of a core busy meanwhile, whatever came
# out of it; after so many tries it is given up.
DISTURBED_CORES = 0.15
TRIES = 3
SEED = 7
PEERS = ("naive", "Timer", "pyperf")
OURS = ("compare", "unsettled", "overhead", "process")
# The seconds that each tool is offered, and those that a trial takes on a quiet machine, for the estimate.
OFFERED_S = {"compare": 10.0, "unsettled": 10.0, "naive": 0.5, "Timer": 1.0, "pyperf": 2.0}
TAKES_S = {"compare": 2.1, "unsettled": 5.0, "naive": 0.5, "Timer": 1.2, "pyperf": 2.0}
TAKES_S |= {"series": 61.0, "overhead": 25.0, "spin": 26.0, "process": 4.5}


# The plan: phases one after the other, the trials of a phase in an order drawn by lot.


@dataclass(frozen=True)
class Cell:
    """Trials of one kind: "same" (one step, given twice), "builds" (two builds of it), "planted" (one is slower)."""

    tool: str
    kind: str
    count: int
    effect: float = 0.0


@dataclass(frozen=True)
class Phase:
    cells: tuple[Cell, ...]
    loaded: bool = False
    threads: int = 1

    @property
    def condition(self) -> str:
        return f"{'loaded' if self.loaded else 'quiet'}, {self.threads} thread{'s' if self.threads > 1 else ''}"


def planted(tools: Iterable[str], **counts: int) -> tuple[Cell, ...]:
    return tuple(Cell(tool, "planted", n, int(name[1:]) / 100) for tool in tools for name, n in counts.items())


def of_each(tools: Iterable[str], kind: str, count: int) -> tuple[Cell, ...]:
    return tuple(Cell(tool, kind, count) for tool in tools)


PLAN = (
    # What this project promises comes first, so that an interrupted run has it.
    Phase((Cell("compare", "same", 200), *planted(["compare"], e3=100))),
    Phase(
        (
            *of_each(["compare", *PEERS], "builds", 60),
            *planted(["compare"], e1=30, e2=30, e5=30, e10=30),
            *planted(PEERS, e1=15, e2=15, e3=40, e5=15, e10=15),
            Cell("unsettled", "builds", 30),
            Cell("process", "apart", 12),
            *planted(["spin"], e1=1, e3=1, e10=1),
            Cell("overhead", "bare", 1),
            Cell("series", "raw", 1),
        )
    ),
    Phase(
        (
            Cell("compare", "same", 30),
            *planted(["compare"], e3=15, e10=15),
            *of_each(PEERS, "builds", 30),
            *planted(PEERS, e3=10),
        ),
        loaded=True,
    ),
    Phase((Cell("compare", "same", 30), *planted(["compare"], e3=15), *of_each(PEERS, "builds", 15)), threads=2),
    Phase((Cell("compare", "same", 10), *planted(["compare"], e3=10)), loaded=True, threads=2),
)


@dataclass(frozen=True)
class Trial:
    phase: Phase
    cell: Cell
    index: int

    @property
    def key(self) -> str:
        cell = self.cell
        return f"{self.phase.condition}: {cell.tool}, {cell.kind} {100 * cell.effect:g} %, {self.index}"


def trials_of(phase: Phase, scale: float = 1.0) -> list[Trial]:
    """The phase's trials in their order; `scale` multiplies every count, and leaves at least one of each."""
    counts = {cell: max(1, round(cell.count * scale)) for cell in phase.cells}
    trials = [Trial(phase, cell, index) for cell, count in counts.items() for index in range(count)]
    random.Random(f"{SEED}, {phase.condition}").shuffle(trials)
    return trials


def minutes(plan: Iterable[Phase], scale: float) -> float:
    """Roughly: a difference as large as the margin takes all that is offered; so do two threads beside neighbours."""
    seconds = 0.0
    for phase in plan:
        for trial in trials_of(phase, scale):
            tool, effect = trial.cell.tool, trial.cell.effect
            hard = tool == "compare" and (effect == MARGIN or (phase.loaded and phase.threads > 1))
            seconds += (OFFERED_S[tool] if hard else TAKES_S[tool]) * (1.4 if phase.loaded else 1)
    return seconds / 60


def carry_out(trial: Trial, quick: bool) -> dict[str, Any]:
    """The trial's record."""
    cell, condition = trial.cell, trial.phase.condition
    record: dict[str, Any] = {"trial": trial.key, "condition": condition}
    record |= {"tool": cell.tool, "kind": cell.kind, "effect": cell.effect}
    others, start = OtherProcesses(), time.perf_counter()
    if cell.tool in TOOLS:
        # The slower one is B and A in turn: which comes first must not decide.
        shares = (0.0, cell.effect) if trial.index % 2 == 0 else (cell.effect, 0.0)
        a = TrainingStep(shares[0])
        b = a if cell.kind == "same" else TrainingStep(shares[1])
        found = TOOLS[cell.tool](a, b, min(OFFERED_S[cell.tool], 3.0) if quick else OFFERED_S[cell.tool])
        truth = "same" if not cell.effect else "slower" if b.share else "faster"
        reached = a.shares_reached or b.shares_reached
        record |= {"truth": truth, "verdicts": found.verdicts, "ratio": round(found.ratio, 6)}
        record |= {"rounds": found.rounds} if found.rounds else {}
        record |= {"share": round(float(np.median(reached)), 6)} if reached else {}
    elif cell.tool == "spin":
        record |= spin(cell.effect, 0.5 if quick else 25.0)
    else:
        short, whole = {"series": (6.0, 60.0), "overhead": (2.0, 24.0), "process": (0.2, 1.0)}[cell.tool]
        record |= {"series": series, "overhead": overhead, "process": process}[cell.tool](short if quick else whole)
    record["seconds"] = round(time.perf_counter() - start, 3)
    # Neighbours of our own are our children, which OtherProcesses leaves out; of a child that has ended it cannot.
    record["others"] = round(record.get("others", others.cores()), 3)
    record["disturbed"] = not trial.phase.loaded and record["others"] > DISTURBED_CORES
    return record


@contextmanager
def conditions(phase: Phase) -> Iterator[None]:
    """This many threads, and a busy neighbour for each core or none."""
    before = torch.get_num_threads()
    torch.set_num_threads(phase.threads)
    try:
        with ExitStack() as neighbours:
            for _ in range(round(allowed_cores()) if phase.loaded else 0):
                neighbours.enter_context(busy_neighbour())
            time.sleep(1.0 if phase.loaded else 0.0)  # they start slowly
            yield
    finally:
        torch.set_num_threads(before)


def code() -> dict[str, str]:
    """Hashes of the code behind `compare` and of the tools here, without comments and docstrings."""
    modules = Modules(Path(labsupport.__file__).parent)
    behind = [modules.dump(name) for name in sorted(modules.closure({"labsupport.measure.timing"}))]
    texts = {"compare": "\n".join(behind), "tools": dump(ast.parse((HERE / "timing_tools.py").read_text("utf-8")))}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def header() -> dict[str, Any]:
    versions = {name: version(name) for name in ("numpy", "psutil", "pyperf", "torch")}
    return {
        "schema": SCHEMA,
        "code": code(),
        "versions": versions,
        "machine": fingerprint("cpu").to_dict(),
        "margin": MARGIN,
        "disturbed_cores": DISTURBED_CORES,
    }


def resumed(path: Path) -> list[dict]:
    """The records there are, header first; the file is begun if there is none. Exits where they do not go together;
    if only `compare` has changed, those of other tools stay, and its own are made again."""
    new = header()
    records = load(path) if path.is_file() else []
    if not records:
        with conditions(Phase(())):
            step_s = measure(TrainingStep()).median_s
        records = [{**new, "step_s": round(step_s, 7)}]
    there = records[0]
    for what, of in (
        ("tools", lambda each: each["code"]["tools"]),
        ("versions", lambda each: each["versions"]),
        # The system's own version and memory may change between two days of one machine, its CPU may not.
        ("machine", lambda each: each["machine"]["cpu_model"]),
    ):
        if of(there) != of(new):
            sys.exit(f"{path}: made with other {what} ({of(there)}, here {of(new)}): move it away to begin anew")
    if there["code"] != new["code"]:
        kept = [record for record in records[1:] if record["tool"] not in OURS]
        print(f"`compare` has changed: {len(records) - 1 - len(kept)} records of it are dropped, {len(kept)} stay")
        records = [{**there, "code": new["code"]}, *kept]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written anew: a run that was killed may have left half a line.
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return records


def show_plan(scale: float) -> None:
    for phase in PLAN:
        for cell, count in sorted(Counter(trial.cell for trial in trials_of(phase, scale)).items(), key=str):
            print(f"  {phase.condition:18} {cell.tool:10} {cell.kind:8} {100 * cell.effect:3g} %  {count}")
    print(f"{sum(len(trials_of(phase, scale)) for phase in PLAN)} trials, about {minutes(PLAN, scale):.0f} minutes")


def run(path: Path, *, scale: float, quick: bool) -> None:
    records = resumed(path)
    for phase in PLAN:
        trials = trials_of(phase, scale)
        while left := still_to_do(trials, records[1:], "trial", TRIES):
            with conditions(phase), path.open("a", encoding="utf-8") as file:
                for number, trial in enumerate(left, start=1):
                    record = carry_out(trial, quick)
                    records.append(record)
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    told = f"{record['verdicts']} {record['ratio']:.4f}" if "verdicts" in record else ""
                    told += f" DISTURBED by {record['others']:.2f} cores" if record["disturbed"] else ""
                    print(f"{number}/{len(left)} {trial.key}: {told} ({record['seconds']:.1f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one trial of each cell and short ones, into build/")
    parser.add_argument("--plan", action="store_true", help="print cells, counts and minutes; run nothing")
    parser.add_argument("--scale", type=float, default=1.0, help="times every count of the plan (default 1)")
    parser.add_argument("--records", type=Path, help="the file to go on with (default: records/, named by the machine)")
    parser.add_argument("--table", action="store_true", help="write README.md's tables from the records, run nothing")
    options = parser.parse_args()
    # Ended from outside, it takes its busy neighbours with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.table and options.records:
        print("\n".join(SECTION.blocks([load(options.records)]).values()))
    elif options.table:
        SECTION.write_tables(HERE)
    else:
        folder = HERE.parent / "build" if options.quick else HERE / "records"
        path = options.records or folder / f"timing-{fingerprint('cpu').family}.jsonl"
        scale = 0.0 if options.quick else options.scale
        show_plan(scale)
        if options.quick and not options.records:
            path.unlink(missing_ok=True)
        if not options.plan:
            run(path, scale=scale, quick=options.quick)


if __name__ == "__main__":
    main()
