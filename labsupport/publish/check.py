"""Which published number no longer holds: a run judged against what is published, record by record."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from labsupport.publish import replay
from labsupport.publish.catalogue import Book
from labsupport.publish.provenance import record_hashes
from labsupport.publish.published import Entry, Published
from labsupport.publish.records import Record
from labsupport.publish.run import Run, executed_copy, result_file
from labsupport.units import format_value

# Of the records published for this machine family, so many must have been judged: a check that only looks is none.
JUDGED_SHARE = 0.8
FAILURES = ("broken", "missing", "stale", "new", "failed")
OUTCOMES = {
    "held": "judged, and as published",
    "broken": "judged, and no longer as published",
    "missing": "published, and not recorded by this run",
    "stale": "its published value was made by other code than stands here now",
    "new": "recorded, and not published yet",
    "failed": "the lab, its run or its committed outputs cannot be judged",
    "beside": "shown beside the published value, not judged",
    "skipped": "not compared",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the report."""

    lab: str
    record: str
    outcome: str
    published: str = ""
    measured: str = ""
    why: str = ""

    @property
    def fails(self) -> bool:
        return self.outcome in FAILURES

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        name = f"{self.lab}/{self.record}" if self.record else self.lab
        return self.outcome, name, self.published, self.measured, self.why


@dataclass(frozen=True)
class Report:
    """All rows, and whether every number held."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return not any(row.fails for row in self.rows)

    @property
    def counts(self) -> Counter[str]:
        return Counter(row.outcome for row in self.rows if row.record)

    @property
    def text(self) -> str:
        """The table of measured beside published, and the verdict below it."""
        lines = [("", "record", "published", "measured", "judged by"), *(row.cells for row in self.rows if row.record)]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        table = ["  ".join([*map(str.ljust, line, widths), line[4]]).rstrip() for line in lines]
        whole = [f"{row.outcome:8}  lab {row.lab}: {row.why}" for row in self.rows if not row.record]
        return "\n".join([*table, *whole, self.summary])

    @property
    def summary(self) -> str:
        found = self.counts
        judged = found["held"] + found["broken"]
        parts = [f"{judged} judged", f"{found['held']} held", f"{found['beside']} shown beside"]
        parts += [
            f"{found[name]} {name}"
            for name in ("stale", "skipped", "missing", "new")
            if found[name] or name in ("stale", "skipped")
        ]
        verdict = "every number held" if self.ok else "NOT every number held"
        return f"{verdict}: {', '.join(parts)}"


def check(
    books: list[Book],
    build: Path,
    machines: Mapping[str, Published],
    *,
    again: Callable[[Book], Run] | None = None,
    source: Path | None = None,
) -> Report:
    """Judge the last run of each lab in `build`.

    `again` runs a lab once more: a ratio out of its band is broken only if it is out of it twice. `source` is the
    folder of labsupport's sources (default: the running one), for the hashes.
    """
    rows: list[Row] = []
    for book in books:
        found = list(_lab_rows(book, build, machines, source))
        if again and any(row.outcome == "broken" and _kind(row, machines) == "ratio" for row in found):
            second = again(book)
            found = [_second_look(row, second, machines) for row in found]
        rows += [*found, *_enough(book, found, build, machines)]
    return Report(tuple(rows))


def _lab_rows(book: Book, build: Path, machines: Mapping[str, Published], source: Path | None) -> Iterator[Row]:
    path = result_file(book, build)
    if not path.is_file():
        yield Row(lab=book.id, record="", outcome="failed", why=f"not run: labs run {book.id}")
        return
    run = Run.load(path)
    if run.status != "ok":
        yield Row(
            lab=book.id,
            record="",
            outcome="failed",
            why=f"the run ended with {run.status}: {run.error}: labs run {book.id}",
        )
        return
    if run.parameters:
        why = f"run with {', '.join(f'{k}={v}' for k, v in run.parameters.items())}: never compared"
        yield from (Row(lab=book.id, record=name, outcome="skipped", why=why) for name in run.records)
        return
    yield from _notebook_rows(book, build, run, machines, source)
    hashes = record_hashes(replay.load(executed_copy(book, build)), source)
    family = _family(run)
    base, entries = _basis(book.id, run, machines)
    for name, record in run.records.items():
        if name in entries:
            yield _judge(
                book.id,
                record,
                entries[name],
                family if base == family else base,
                run,
                hashes[name],
                base == family,
            )
        elif entries and base == family:
            yield _row(book.id, record, None, "new", "not published: labs publish")
        else:
            yield _judge_alone(book.id, record, "no published value for this profile and torch version")
    present = set(run.machine.get("present", ()))
    for name, entry in entries.items():
        if name not in run.records:
            needs = entry.record.needs
            absent = bool(needs) and needs not in present
            why = f"needs {needs}, not on this machine" if absent else "published, but this run did not record it"
            yield Row(
                lab=book.id,
                record=name,
                outcome="skipped" if absent else "missing",
                published=format_value(entry.record.value, entry.record.unit),
                why=why,
            )


def _family(run: Run) -> str:
    return str(run.machine.get("family", ""))


def _basis(lab: str, run: Run, machines: Mapping[str, Published]) -> tuple[str, Mapping[str, Entry]]:
    """The published machine to compare with: this family, else one of the same profile and torch minor version."""
    family = _family(run)
    minor = ".".join(str(run.machine.get("torch", "")).split(".")[:2])
    alike = [
        name
        for name, found in sorted(machines.items())
        if lab in found.labs and found.profile == run.machine.get("profile") and found.torch_minor == minor
    ]
    best = family if family in alike else next(iter(alike), "")
    return best, machines[best].labs[lab] if best else {}


def _judge(lab: str, record: Record, entry: Entry, base: str, run: Run, digest: str, own: bool) -> Row:
    """One record against its published entry. Stale is told first: its value was made by other code."""
    was = entry.record
    if digest != entry.hash:
        if own:
            return _row(lab, record, was, "stale", "made by other code than stands here now: labs publish")
        return _judge_alone(lab, record, f"{base} published it with other code", was)
    if (was.kind, was.unit) != (record.kind, record.unit):
        return _row(lab, record, was, "broken", f"was {was.kind} in {was.unit!r}, is {record.kind} in {record.unit!r}")
    if record.kind == "exact":
        return _row(lab, record, was, "held" if record.value == was.value else "broken", "exact")
    if record.kind == "close":
        tolerance = was.tolerance or 0.0
        held = abs(record.value - was.value) <= tolerance * abs(was.value)
        return _row(lab, record, was, "held" if held else "broken", f"within {tolerance:g}")
    if record.kind == "ratio":
        return _judge_ratio(lab, record, entry, base, own)
    return _row(lab, record, was, "held", "present, finite, in its unit")


def _judge_ratio(lab: str, record: Record, entry: Entry, base: str, own: bool) -> Row:
    if own and entry.band:
        low, high = entry.band
        held = low <= record.value <= high
        return _row(lab, record, entry.record, "held" if held else "broken", f"band {low:.3g} to {high:.3g}")
    reason = "no band yet: labs publish --rebase 5" if own else f"another machine family than {base}"
    return _judge_alone(lab, record, reason, entry.record)


def _judge_alone(lab: str, record: Record, reason: str, was: Record | None = None) -> Row:
    """A record without a published value to hold it to: judged by what is true on any machine, or shown."""
    if record.kind == "info":
        return _row(lab, record, was, "held", f"present, finite, in its unit; {reason}")
    if record.kind == "ratio" and record.at_least is not None and record.bound_applies:
        held = record.value >= record.at_least
        return _row(lab, record, was, "held" if held else "broken", f"at least {record.at_least:g} anywhere; {reason}")
    return _row(lab, record, was, "beside", reason)


def _row(lab: str, record: Record, was: Record | None, outcome: str, why: str) -> Row:
    published = format_value(was.value, was.unit) if was else ""
    measured = format_value(record.value, record.unit)
    return Row(lab=lab, record=record.name, outcome=outcome, published=published, measured=measured, why=why)


def _notebook_rows(
    book: Book, build: Path, run: Run, machines: Mapping[str, Published], source: Path | None
) -> Iterator[Row]:
    """The committed notebook itself: its outputs against this run, against the published values, and its code."""
    committed = book.notebook
    machine = book.metadata.get("published", "")
    found: list[str] = []
    if machine not in machines or book.id not in machines[machine].labs:
        found.append(f"nothing is published for its machine {machine or '(none named)'}: labs publish")
    else:
        published = machines[machine]
        found += replay.inconsistencies(committed, book.id, machine, published)
        if published.profile == run.machine.get("profile"):
            found += replay.differences(committed, replay.load(executed_copy(book, build)))
        if machine != _family(run):
            # On the publishing family the records below tell it; here only the notebook can.
            try:
                now = record_hashes(committed, source)
            except ValueError as error:
                now, found = {}, [*found, str(error)]
            stale = sorted(
                name for name, entry in published.labs[book.id].items() if now.get(name, entry.hash) != entry.hash
            )
            for name in stale:
                why = f"the committed output was made by other code than stands here now ({machine}): labs publish"
                yield Row(lab=book.id, record=name, outcome="stale", why=why)
    yield from (Row(lab=book.id, record="", outcome="failed", why=why) for why in found)


def _kind(row: Row, machines: Mapping[str, Published]) -> str:
    entries = (found.labs.get(row.lab, {}).get(row.record) for found in machines.values())
    return next((entry.record.kind for entry in entries if entry), "")


def _second_look(row: Row, second: Run, machines: Mapping[str, Published]) -> Row:
    """A ratio that was out of its band, judged on a second run; the first value stays in the report."""
    if row.outcome != "broken" or _kind(row, machines) != "ratio" or row.record not in second.records:
        return row
    _, entries = _basis(row.lab, second, machines)
    record, base = second.records[row.record], _family(second)
    judged = _judge_ratio(row.lab, record, entries[row.record], base, base in machines)
    why = f"{judged.why}; measured twice, first {row.measured}"
    return _row(row.lab, record, entries[row.record].record, judged.outcome, why)


def _enough(book: Book, rows: list[Row], build: Path, machines: Mapping[str, Published]) -> Iterator[Row]:
    """A lab that judged nothing fails, and so does one that judged too few on the family that published."""
    if any(row.fails and not row.record for row in rows) or not result_file(book, build).is_file():
        return
    counted = [row for row in rows if row.record]
    judged = sum(row.outcome in ("held", "broken") for row in counted)
    if not judged:
        yield Row(lab=book.id, record="", outcome="failed", why="judged nothing: a lab must hold some number")
        return
    run = Run.load(result_file(book, build))
    due = [row for row in counted if row.outcome != "skipped"]
    if _family(run) in machines and judged < JUDGED_SHARE * len(due):
        why = f"judged {judged} of {len(due)} records on the family that published them; {JUDGED_SHARE:.0%} are due"
        yield Row(lab=book.id, record="", outcome="failed", why=why)
