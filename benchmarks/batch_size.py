"""Which search finds the largest batch, and what does it cost? `find_batch_size`, beside its peers.

    python benchmarks/batch_size.py            the whole plan; a run that was stopped goes on where it stopped
    python benchmarks/batch_size.py --plan     what that is, and about how long it takes
    python benchmarks/batch_size.py --quick    one small cell of each kind, into build/, to try it
    python benchmarks/batch_size.py --table    README.md's tables, from the records

The budget is emulated on the CPU: the same bytes on every machine, so trials, samples and sizes are, too.
"""

import argparse
import ast
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from batch_size_tables import SECTION
from batch_size_tools import OURS, TOOLS, on_card, search, truth
from readme import load, still_to_do

import labsupport
from labsupport.machine import allowed_cores, fingerprint
from labsupport.measure.stopwatch import OtherProcesses
from labsupport.publish.provenance import Modules, dump

HERE = Path(__file__).resolve().parent
SCHEMA = "batch size benchmark 1"
# Seconds are taken again if other processes kept this much of a core busy meanwhile; after so many tries the quietest
# are shown. Nothing else depends on it.
DISTURBED_CORES = 0.15
TRIES = 2


@dataclass(frozen=True)
class Cell:
    """One record: "truth" (the largest batch of a workload under a budget), "search" (by one tool), "card" (the plan
    on an accelerator)."""

    kind: str
    workload: str
    budget: str = ""
    tool: str = ""
    card: str = ""

    @property
    def key(self) -> str:
        return ", ".join(filter(None, (f"{self.kind}: {self.workload}", self.budget, self.tool, self.card)))


BUDGETS = {
    "ResNet-18, 32 px, momentum": "200MiB",
    "ResNet-50, 224 px, momentum": "1200MiB",
    "encoder, 128 tokens, AdamW": "256MiB",
    "embedding, AdamW": "192MiB",
    "MLP, SGD": "48MiB",
    "CNN, AdamW": "100MiB",
}
ON_CARDS = "ResNet-50, 224 px, momentum"
CARDS = ("T4 (16 GB)", "RTX 4090 (24 GB)", "A100 40GB SXM (40 GB)", "H100 SXM (80 GB)", "H200 SXM (141 GB)")


def cells(budgets: dict[str, str], cards: Sequence[str]) -> tuple[Cell, ...]:
    return (
        *(Cell("truth", *each) for each in budgets.items()),
        *(Cell("card", ON_CARDS, card=card) for card in cards),
        *(Cell("search", *each, tool) for each in budgets.items() for tool in TOOLS),
    )


PLAN = cells(BUDGETS, CARDS)
QUICK = cells({"MLP, SGD": "4MiB"}, CARDS[:1])
# A search of a workload with three steps of what it found, or its truth; of what is not named, and of a card's plan.
TAKES_S = {"ResNet-50, 224 px, momentum": 35.0, "ResNet-18, 32 px, momentum": 5.0, "encoder, 128 tokens, AdamW": 4.0}
ELSE_S, CARD_S = 3.0, 7.0


def carry_out(cell: Cell) -> dict[str, Any]:
    """The cell's record."""
    record: dict[str, Any] = {"cell": cell.key, "kind": cell.kind, "workload": cell.workload, "budget": cell.budget}
    others, start = OtherProcesses(), time.perf_counter()
    if cell.kind == "truth":
        record |= truth(cell.workload, cell.budget)
    elif cell.kind == "card":
        record |= {"card": cell.card, **on_card(cell.workload, cell.card)}
    else:
        record |= {"tool": cell.tool, **search(cell.workload, cell.budget, cell.tool)}
    record["seconds"] = round(time.perf_counter() - start, 3)
    record["others"] = round(others.cores(), 3)
    record["disturbed"] = cell.kind == "search" and record["others"] > DISTURBED_CORES
    return record


def code() -> dict[str, str]:
    """Hashes of what only our search is made of, and of what all searches run in; no comments, no docstrings."""
    modules = Modules(Path(labsupport.__file__).parent)
    under = modules.closure({"labsupport.measure.budget", "labsupport.measure.memory"})
    behind = modules.closure({"labsupport.train.batch_size"}) - under
    files = ("batch_size_subject.py", "batch_size_tools.py", "workloads.py")
    here = [dump(ast.parse((HERE / name).read_text("utf-8"))) for name in files]
    texts = {"ours": map(modules.dump, sorted(behind)), "tools": [*map(modules.dump, sorted(under)), *here]}
    return {name: hashlib.sha256("\n".join(each).encode()).hexdigest()[:16] for name, each in texts.items()}


def header() -> dict[str, Any]:
    packages = ("accelerate", "numpy", "psutil", "pytorch-lightning", "torch", "torchvision")
    versions = {name: version(name) for name in packages}
    threads = torch.get_num_threads()
    return {
        "schema": SCHEMA,
        "code": code(),
        "versions": versions,
        "machine": fingerprint("cpu").to_dict(),
        "threads": threads,
    }


def resumed(path: Path) -> list[dict]:
    """The records there are, header first; the file is begun if there is none. Exits where they do not go together;
    if only our search has changed, the peers' records stay."""
    new = header()
    records = (load(path) if path.is_file() else []) or [new]
    there = records[0]
    for what, of in (
        ("tools", lambda each: each["code"]["tools"]),
        ("versions", lambda each: each["versions"]),
        ("machine", lambda each: each["machine"]["cpu_model"]),
    ):
        if of(there) != of(new):
            sys.exit(f"{path}: made with other {what} ({of(there)}, here {of(new)}): move it away to begin anew")
    if there["code"] != new["code"]:
        kept = [each for each in records[1:] if each["kind"] == "search" and each["tool"] not in OURS]
        print(f"find_batch_size has changed: {len(kept)} records of its peers stay, the others are made again")
        records = [{**there, "code": new["code"]}, *kept]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written anew: a run that was killed may have left half a line.
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return records


def minutes(plan: Iterable[Cell]) -> float:
    return sum(CARD_S if cell.card else TAKES_S.get(cell.workload, ELSE_S) for cell in plan) / 60


def run(path: Path, plan: Sequence[Cell]) -> None:
    torch.set_num_threads(int(allowed_cores()))
    records = resumed(path)
    while left := still_to_do(plan, records[1:], "cell", TRIES):
        with path.open("a", encoding="utf-8") as file:
            for number, cell in enumerate(left, start=1):
                record = carry_out(cell)
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
        path = options.records or folder / f"batch_size-{fingerprint('cpu').family}.jsonl"
        plan = QUICK if options.quick else PLAN
        print("\n".join(f"  {cell.key}" for cell in plan))
        print(f"{len(plan)} cells, about {minutes(plan):.1f} minutes")
        if options.plan:
            return
        if options.quick and not options.records:
            path.unlink(missing_ok=True)
        run(path, plan)


if __name__ == "__main__":
    main()
