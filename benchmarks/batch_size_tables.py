"""README.md's tables of batch-size finders, from the records that batch_size.py made. Nothing is measured here."""

from collections.abc import Callable

from readme import Records, Section, percent, table


def of_kind(records: Records, kind: str) -> list[dict]:
    return [record for record in records if record["kind"] == kind]


def finders(records: Records) -> str:
    rows = []
    for record in of_kind(records, "found"):
        found, true = record["found"], record["true"]
        share = record["error"] or f"{found} of {true} ({percent(found / true, 0)})"
        survives = "yes" if record["survives"] else "no" if found else "–"
        rows.append(
            (f"{record['workload']}, {record['budget']}", record["finder"], share, "yes" if record["tested"] else "no")
            + (survives, record["sizes"], f"{record['samples']:,}", record["refused"], f"{record['seconds']:.1f} s")
            + (", ".join(record["left"]) or "nothing",)
        )
    return table(
        "workload, budget | finder | found | was it tried | does it train | sizes tried | samples pushed | "
        "out of memory | seconds | left changed",
        rows,
    )


def summary(records: Records) -> str:
    """Over all workloads: how near, and at what price."""
    rows = []
    found = of_kind(records, "found")
    for finder in dict.fromkeys(record["finder"] for record in found):
        mine = [record for record in found if record["finder"] == finder]
        shares = [record["found"] / record["true"] for record in mine]
        rows.append(
            (finder, f"{sum(share == 1 for share in shares)} of {len(mine)}")
            + (percent(min(shares), 0), percent(max(shares), 0))
            + (f"{sum(record['survives'] for record in mine)} of {len(mine)}",)
            + (max(record["sizes"] for record in mine), f"{sum(record['samples'] for record in mine):,}")
            + (f"{sum(record['seconds'] for record in mine):.0f} s",)
        )
    return table(
        "finder | exact | smallest share | largest share | trains | sizes tried, most | samples pushed, all | "
        "seconds, all",
        rows,
    )


def planned(records: Records) -> str:
    rows = [
        (record["workload"], record["budget"], record["planned"], "yes" if record["exact"] else "no")
        + (f"{record['seconds']:.1f} s",)
        for record in of_kind(records, "planned")
    ]
    return table(
        "workload | budget | the plan's largest | it fits and the next does not, by traces of both | built in", rows
    )


TABLES: dict[str, Callable[[Records], str]] = {"summary": summary, "finders": finders, "planned": planned}


def about(header: dict) -> str:
    machine, versions = header["machine"], header["versions"]
    return (
        f"{machine['cpu_model']} ({machine['isa']}), 1 thread, torch {machine['torch']}, Lightning "
        f"{versions['pytorch-lightning']}, Accelerate {versions['accelerate']}; records of `{machine['family']}`:"
    )


SECTION = Section("batch_size", about, TABLES)
