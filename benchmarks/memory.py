"""Which memory instrument is how far off, and what does it cost? `MemoryLedger` and `plan_memory`, beside their peers.

    python benchmarks/memory.py            the whole plan; a run that was stopped goes on where it stopped
    python benchmarks/memory.py --plan     what that is, and about how long it takes
    python benchmarks/memory.py --quick    one small cell of each kind, into build/, to try it
    python benchmarks/memory.py --table    README.md's tables, from the records

The truth of a peak is what the CPU's allocator was asked for, replayed from the profiler, on top of the bytes that
were there before.
"""

import argparse
import ast
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: the profiler is entered hundreds of times

import numpy as np
import torch
from memory_tables import SECTION
from memory_tools import TOOLS, overhead, peaks, planned
from readme import load, still_to_do

import labsupport
from labsupport.machine import allowed_cores, fingerprint
from labsupport.measure.stopwatch import OtherProcesses
from labsupport.publish.provenance import Modules, dump

HERE = Path(__file__).resolve().parent
SCHEMA = "memory benchmark 1"
# Times are taken again if other processes kept this much of a core busy meanwhile; after so many tries the quietest
# is shown. Bytes do not depend on it.
DISTURBED_CORES = 0.15
TRIES = 3
GIB = 2**30
SIZES = tuple(int(each) for each in np.geomspace(2, 1000, 16).round())
ROUNDS, QUICK_ROUNDS = (20, 40), (6, 6)
OFFERED_S = 10.0
TAKES_S = {"peak": 8.0, "overhead": 10.5, "plan": 22.0}


@dataclass(frozen=True)
class Cell:
    """One record: "peak" (two steps under each tool), "overhead" (of one tool, in turns), "plan" (all batch sizes)."""

    kind: str
    workload: str
    batch: int = 0
    tool: str = ""
    sizes: tuple[int, ...] = ()
    most_bytes: int = 4 * GIB  # up to here the truth is a real run

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.workload}" + (f", {self.batch}" if self.batch else "") + f" {self.tool}".rstrip()


BATCHES = {"MLP": 256, "CNN": 64, "ResNet-18, 32 px": 32, "ResNet-50, 32 px": 16, "encoder": 32, "embedding": 256}
PLAN = (
    *(Cell("peak", f"{name}, {kind}", n) for name, n in BATCHES.items() for kind in ("AdamW", "SGD")),
    # A thousand images of 224 px take minutes and 90 GB: there few are real, and the others are fake.
    *(
        Cell("plan", name, sizes=SIZES, most_bytes=most)
        for name, most in (
            ("MLP, AdamW", 4 * GIB),
            ("CNN, AdamW", 4 * GIB),
            ("encoder, AdamW", 4 * GIB),
            ("embedding, AdamW", 4 * GIB),
            ("ResNet-18, 32 px, SGD", 4 * GIB),
            ("ResNet-50, 32 px, AdamW", 4 * GIB),
            ("ResNet-50, 224 px, SGD", GIB),
        )
    ),
    *(
        Cell("overhead", f"{name}, AdamW", BATCHES[name], tool)
        for name in ("MLP", "CNN", "encoder", "ResNet-18, 32 px")
        for tool in TOOLS
    ),
)
QUICK = (
    Cell("peak", "CNN, AdamW", 8),
    Cell("plan", "MLP, AdamW", sizes=(2, 3, 24, 191)),
    *(Cell("overhead", "MLP, AdamW", 32, tool) for tool in TOOLS),
)


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def carry_out(cell: Cell, *, quick: bool) -> dict[str, Any]:
    """The cell's record."""
    record: dict[str, Any] = {"cell": cell.key, "kind": cell.kind, "workload": cell.workload}
    others, start = OtherProcesses(), time.perf_counter()
    with threads(1 if cell.kind == "overhead" else int(allowed_cores())):
        record["threads"] = torch.get_num_threads()
        if cell.kind == "peak":
            record |= {"batch": cell.batch, **peaks(cell.workload, cell.batch)}
        elif cell.kind == "plan":
            record |= planned(cell.workload, cell.sizes, cell.most_bytes, 1 if quick else 3)
        else:
            seconds, rounds = (1.0, QUICK_ROUNDS) if quick else (OFFERED_S, ROUNDS)
            found = overhead(cell.workload, cell.batch, cell.tool, seconds, rounds)
            record |= {"batch": cell.batch, "tool": cell.tool, **found}
    record["seconds"] = round(time.perf_counter() - start, 3)
    record["others"] = round(others.cores(), 3)
    record["disturbed"] = cell.kind == "overhead" and record["others"] > DISTURBED_CORES
    return record


def code() -> str:
    """A hash of the instruments and of the tools here, without comments and docstrings."""
    modules = Modules(Path(labsupport.__file__).parent)
    behind = sorted(modules.closure({"labsupport.measure.memory", "labsupport.train.plan"}))
    here = [dump(ast.parse((HERE / name).read_text("utf-8"))) for name in ("memory_tools.py", "workloads.py")]
    return hashlib.sha256("\n".join([*map(modules.dump, behind), *here]).encode()).hexdigest()[:16]


def header() -> dict[str, Any]:
    versions = {name: version(name) for name in ("accelerate", "numpy", "psutil", "torch", "torchvision")}
    return {"schema": SCHEMA, "code": code(), "versions": versions, "machine": fingerprint("cpu").to_dict()}


def resumed(path: Path) -> list[dict]:
    """The records there are, header first; the file is begun if there is none. Exits where they do not go together."""
    new = header()
    records = (load(path) if path.is_file() else []) or [new]
    there = records[0]
    for what, of in (
        ("code", lambda each: each["code"]),
        ("versions", lambda each: each["versions"]),
        ("machine", lambda each: each["machine"]["cpu_model"]),
    ):
        if of(there) != of(new):
            sys.exit(f"{path}: made with other {what} ({of(there)}, here {of(new)}): move it away to begin anew")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written anew: a run that was killed may have left half a line.
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return records


def minutes(plan: Iterable[Cell]) -> float:
    return sum(TAKES_S[cell.kind] for cell in plan) / 60


def run(path: Path, plan: Sequence[Cell], *, quick: bool) -> None:
    records = resumed(path)
    while left := still_to_do(plan, records[1:], "cell", TRIES):
        with path.open("a", encoding="utf-8") as file:
            for number, cell in enumerate(left, start=1):
                record = carry_out(cell, quick=quick)
                records.append(record)
                file.write(json.dumps(record) + "\n")
                file.flush()
                told = f" DISTURBED by {record['others']:.2f} cores" if record["disturbed"] else ""
                print(f"{number}/{len(left)} {cell.key}:{told} ({record['seconds']:.1f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small cell of each kind, into build/")
    parser.add_argument("--plan", action="store_true", help="print cells and minutes; run nothing")
    parser.add_argument("--records", type=Path, help="the file to go on with (default: records/, named by the machine)")
    parser.add_argument("--table", action="store_true", help="write README.md's tables from the records, run nothing")
    options = parser.parse_args()
    if options.table and options.records:
        print("\n".join(SECTION.blocks([load(options.records)]).values()))
    elif options.table:
        SECTION.write_tables(HERE)
    else:
        folder = HERE.parent / "build" if options.quick else HERE / "records"
        path = options.records or folder / f"memory-{fingerprint('cpu').family}.jsonl"
        plan = QUICK if options.quick else PLAN
        print("\n".join(f"  {cell.key}" for cell in plan))
        print(f"{len(plan)} cells, about {0.5 if options.quick else minutes(plan):.1f} minutes")
        if options.plan:
            return
        if options.quick and not options.records:
            path.unlink(missing_ok=True)
        run(path, plan, quick=options.quick)


if __name__ == "__main__":
    main()
