"""Which finder of a batch size is how near the largest, and what does it cost? `find_batch_size` beside its peers.

    python benchmarks/batch_size.py            the whole plan
    python benchmarks/batch_size.py --plan     what that is, and about how long it takes
    python benchmarks/batch_size.py --quick    one small workload, into build/, to try it
    python benchmarks/batch_size.py --table    README.md's tables, from the records

The truth is a plain training loop: three steps at the largest size fit, and at the next one they do not.
"""

import argparse
import json
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from batch_size_tables import SECTION
from batch_size_tools import FINDERS, found_by, true_maximum
from workloads import WORKLOADS

from labsupport.machine import fingerprint
from labsupport.train import plan_memory
from labsupport.train.recipe import Recipe
from labsupport.train.traces import trace
from labsupport.units import parse_bytes

HERE = Path(__file__).resolve().parent
SCHEMA = "batch size benchmark 1"
PLAN = {
    "MLP, AdamW": "16MiB",
    "CNN, momentum": "32MiB",
    "ResNet-18, 32 px, SGD": "150MiB",
    "encoder, AdamW": "64MiB",
    "embedding, SGD": "76MiB",
}
PLANNED = {"ResNet-50, 224 px, SGD": "14GiB"}  # real steps of that size take minutes and as much memory here
QUICK = {"CNN, SGD": "4MiB"}
MINUTES = 4


def records(plan: dict[str, str], planned: dict[str, str]) -> Iterator[dict[str, Any]]:
    for name, budget in plan.items():
        true = true_maximum(name, parse_bytes(budget))
        for finder in FINDERS:
            about = {"kind": "found", "workload": name, "budget": budget, "finder": finder, "true": true}
            yield about | found_by(finder, name, budget)
    for name, budget in planned.items():
        start = time.perf_counter()
        largest = plan_memory(WORKLOADS[name]).max_batch(budget)
        seconds = time.perf_counter() - start
        at, beyond = (trace(WORKLOADS[name], Recipe(batch_size=each), "cpu").changes for each in (largest, largest + 1))
        exact = at.cumsum().max() <= parse_bytes(budget) < beyond.cumsum().max()
        about = {"kind": "planned", "workload": name, "budget": budget, "planned": largest}
        yield about | {"exact": bool(exact), "seconds": round(seconds, 2)}


def header() -> dict[str, Any]:
    versions = {name: version(name) for name in ("accelerate", "numpy", "pytorch-lightning", "torch")}
    return {"schema": SCHEMA, "versions": versions, "machine": fingerprint("cpu").to_dict()}


def run(path: Path, plan: dict[str, str], planned: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(header())]
    for record in records(plan, planned):
        lines.append(json.dumps(record))
        print(lines[-1], flush=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")  # a run that was stopped leaves the earlier records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small workload, into build/")
    parser.add_argument("--plan", action="store_true", help="print workloads, finders and minutes; run nothing")
    parser.add_argument("--table", action="store_true", help="write README.md's tables from the records, run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table:
        SECTION.write_tables(HERE)
    elif options.plan:
        for name, budget in {**PLAN, **PLANNED}.items():
            print(f"  {name} in {budget}")
        print(f"by {', '.join(FINDERS)}; about {MINUTES} minutes")
    elif options.quick:
        run(HERE.parent / "build" / "batch_size-quick.jsonl", QUICK, {})
    else:
        run(HERE / "records" / f"batch_size-{fingerprint('cpu').family}.jsonl", PLAN, PLANNED)


if __name__ == "__main__":
    main()
