"""README.md's memory tables, from the records that memory.py made. Nothing is measured here."""

from collections.abc import Callable, Sequence

from readme import Records, Section, percent, table

from labsupport.units import format_bytes

SAYING = ("MemoryLedger", "MemTracker", "torch.profiler", "RSS")
PREDICTING = ("plan", "line", "Accelerate")


def of_kind(records: Records, kind: str) -> list[dict]:
    """One record a cell, the quietest, in the order of the cells' first ones."""
    best: dict[str, dict] = {}
    for record in records:
        if record["kind"] == kind:
            cell = record["cell"]
            best[cell] = min(best.get(cell, record), record, key=lambda each: (each["disturbed"], each["others"]))
    return list(best.values())


def off(said: int, truth: int) -> str:
    """An error in bytes, and as a share of the truth."""
    error = said - truth
    if not error:
        return "0 B"
    share = f"{100 * error / truth:.2f}"
    return f"{error:,} B" + ("" if float(share) == 0 else f" ({share} %)")


def peaks(records: Records) -> str:
    rows = []
    for record in of_kind(records, "peak"):
        for when, found in record["peaks"].items():
            errors = (off(found[tool], found["truth"]) for tool in SAYING)
            step = record["workload"], record["batch"], when, f"{found['truth']:,} B"
            rows.append((*step, *errors, format_bytes(found["process"])))
    return table(f"step | batch | entered | truth | {' | '.join(SAYING)} | RSS of the whole process", rows)


def overhead(records: Records) -> str:
    rows = [
        (f"{r['workload']}, {r['batch']}", f"{1e3 * r['bare_s']:.2f} ms", r["tool"])
        + (_interval(r["around"]), _interval(r["inside"]), r["around"]["n"], f"{r['others']:.2f}")
        for r in of_kind(records, "overhead")
    ]
    return table(
        "step | bare | tool | entered, one step, left and asked / bare | step inside / bare | n | cores of others", rows
    )


def _interval(found: dict) -> str:
    return f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def worst(rows: Sequence[dict], predictor: str) -> str:
    """The largest error of one that predicts, and at which batch size."""
    errors = {row["batch"]: row[predictor] / row["truth"] - 1 for row in rows if row[predictor] != row["truth"]}
    if not errors:
        return "0 B"
    batch = max(errors, key=lambda each: abs(errors[each]))
    return f"{percent(errors[batch])} at {batch}"


def plan(records: Records) -> str:
    rows = []
    for record in of_kind(records, "plan"):
        sizes = record["rows"]
        first, last = sizes[0], sizes[-1]
        real = [row["batch"] for row in sizes if row["real"]]
        exact = sum(row["plan"] == row["truth"] for row in sizes)
        grows = f"{format_bytes(first['truth'])} to {format_bytes(last['truth'])}"
        checked = f"{exact} of {len(sizes)}"
        errors = (worst(sizes, each) for each in PREDICTING)
        rows.append((record["workload"], grows, max(real, default=0), checked, *errors))
    return table(
        "step | peak at the smallest batch, at the largest | real runs up to | plan exact at | plan, worst | "
        "line through two, worst | Accelerate, worst",
        rows,
    )


def asking(records: Records) -> str:
    rows = [
        (r["workload"], f"{r['build_s']:.2f} s", f"{r['line_s']:.2f} s", f"{r['ask_us']:.2f} µs")
        + (r["moments"], f"{r['json_bytes']:,} B")
        for r in of_kind(records, "plan")
    ]
    return table("step | plan built in | the two runs for a line | plan asked in | lines in its hull | as JSON", rows)


TABLES: dict[str, Callable[[Records], str]] = {
    "peaks": peaks,
    "overhead": overhead,
    "plan": plan,
    "asking": asking,
}


def about(header: dict) -> str:
    """The machine that made a table."""
    machine, versions = header["machine"], header["versions"]
    return (
        f"{machine['cpu_model']} ({machine['isa']}), {machine['cores']:g} cores, torch {machine['torch']}, "
        f"accelerate {versions['accelerate']}, psutil {versions['psutil']}; records of `{machine['family']}`:"
    )


SECTION = Section("memory", about, TABLES)
