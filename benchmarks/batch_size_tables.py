"""README.md's tables of searches for the largest batch, from the records of batch_size.py. Nothing is measured here."""

from collections.abc import Callable, Sequence

from readme import Records, Section, percent, table

from labsupport.units import format_bytes, format_seconds, parse_bytes

BINSEARCH = "Lightning binsearch"


def of_kind(records: Records, kind: str) -> list[dict]:
    """One record a cell, the quietest, in the order of the cells' first ones."""
    best: dict[str, dict] = {}
    for record in records:
        if record["kind"] == kind:
            cell = record["cell"]
            best[cell] = min(best.get(cell, record), record, key=lambda each: (each["disturbed"], each["others"]))
    return list(best.values())


def largest_of(records: Records) -> dict[tuple[str, str], int]:
    """The true maximum by workload and budget."""
    return {(each["workload"], each["budget"]): each["largest"] for each in of_kind(records, "truth")}


def with_truth(records: Records) -> list[dict]:
    """The searches, each beside the true maximum."""
    largest = largest_of(records)
    found = of_kind(records, "search")
    keys = [(each["workload"], each["budget"]) for each in found]
    return [each | {"largest": largest[key]} for each, key in zip(found, keys, strict=True) if key in largest]


def tasks(records: Records) -> str:
    rows = [
        (r["workload"], format_bytes(parse_bytes(r["budget"])), f"{r['largest']:,}")
        + ("memory" if r["planned"] == r["largest"] else f"the data set (memory: {r['planned']:,}, by the plan)",)
        for r in of_kind(records, "truth")
    ]
    return table("workload | budget | largest batch | what ends it", rows)


def tried(record: dict) -> str:
    """Whether the size that was returned ever ran, or at least a larger one."""
    fitting = [size for size, fits in record["trials"] if fits]
    if record["found"] in fitting:
        return "yes"
    return "a larger one" if record["found"] < max(fitting, default=0) else "no"


def searches(records: Records) -> str:
    rows = []
    for r in with_truth(records):
        sizes = [size for size, fits in r["trials"] if fits]
        share = percent(r["found"] / r["largest"], 0)
        rows.append(
            (f"{r['workload']}: {r['largest']:,}", r["tool"], f"{r['found']:,}", share, f"{max(sizes, default=0):,}")
            + (tried(r), "yes" if r["trains"] else "**no**", len(r["trials"]), r["out_of_memory"], f"{r['samples']:,}")
            + (format_seconds(r["took_s"]), ", ".join(r["changed"]) or "as before")
        )
    return table(
        "workload: largest batch | tool | found | of the largest | largest that ran | the found size ran | three steps "
        "of it fit | trials | out of memory | samples | seconds | changed afterwards",
        rows,
    )


def span(values: Sequence[float], write: Callable[[float], str]) -> str:
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def summary(records: Records) -> str:
    """A line a tool, over all workloads."""
    found = with_truth(records)
    samples = {(r["workload"], r["tool"]): r["samples"] for r in found}
    rows = []
    for tool in dict.fromkeys(r["tool"] for r in found):
        mine = [r for r in found if r["tool"] == tool]
        exact = [r for r in mine if r["found"] == r["largest"]]
        ratios = [
            samples[r["workload"], BINSEARCH] / r["samples"] for r in mine if (r["workload"], BINSEARCH) in samples
        ]
        counted = [sum(test(r) for r in mine) for test in (ran, trains, kept)]
        rows.append(
            (tool, of(len(exact), mine), span([r["found"] / r["largest"] for r in mine], lambda x: percent(x, 1)))
            + (span([len(r["trials"]) for r in mine], lambda x: f"{x:.0f}"), *(of(n, mine) for n in counted))
            + (span(ratios, lambda x: f"{x:.1f}") if ratios else "–", format_seconds(sum(r["took_s"] for r in mine)))
        )
    return table(
        "tool | exact | of the largest | trials | the found size ran | it trains | all as before | "
        f"samples of {BINSEARCH} over its | seconds, all together",
        rows,
    )


def ran(record: dict) -> bool:
    return tried(record) == "yes"


def trains(record: dict) -> bool:
    return record["trains"]


def kept(record: dict) -> bool:
    return not record["changed"]


def of(n: int, records: Sequence[dict]) -> str:
    return f"{n} of {len(records)}"


def cards(records: Records) -> str:
    rows = [
        (r["workload"], r["card"], format_bytes(r["room"]), f"{r['largest']:,}", *holds(r))
        + (format_seconds(r["build_s"]), f"{r['asked_us']:.0f} µs")
        for r in of_kind(records, "card")
    ]
    return table(
        "workload | card | room for tensors | largest batch, by the plan | a trace of it | a trace of one more | "
        "plan built in | asked in",
        rows,
    )


def holds(record: dict) -> list[str]:
    """What fresh traces of the largest batch and of one more say."""
    said = []
    for planned, traced in zip(record["planned"], record["traced"], strict=True):
        off = f"{traced - planned:+,} B" if traced != planned else "the plan's bytes"
        said.append(f"{'fits' if traced <= record['room'] else 'does not fit'}, {off}")
    return said


TABLES: dict[str, Callable[[Records], str]] = {
    "tasks": tasks,
    "summary": summary,
    "searches": searches,
    "cards": cards,
}


def about(header: dict) -> str:
    """The machine that made a table."""
    machine, versions = header["machine"], header["versions"]
    return (
        f"{machine['cpu_model']} ({machine['isa']}), {machine['cores']:g} cores, torch {machine['torch']}, "
        f"pytorch-lightning {versions['pytorch-lightning']}, accelerate {versions['accelerate']}; records of "
        f"`{machine['family']}`:"
    )


SECTION = Section("batch_size", about, TABLES)
