"""Which published number no longer holds: a run judged against what is published, record by record."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from labsupport.publish import replay
from labsupport.publish.catalogue import Book, UsageError
from labsupport.publish.provenance import record_hashes
from labsupport.publish.published import Entry, Published
from labsupport.publish.records import Record
from labsupport.publish.report import Report, Row
from labsupport.publish.run import Run, executed_copy, result_file
from labsupport.units import format_value

# Of the records published for this machine family, so many must have been judged: a check that only looks is none.
JUDGED_SHARE = 0.8
MADE_BY_OTHER_CODE = "made by other code than stands here now: labs publish"
PRESENT = "finite, in its unit"
NOTHING_PUBLISHED = "no published value for this profile and torch version"


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
        if again and any(_is_broken_ratio(row) for row in found):
            second = again(book)
            found = [_second_look(row, book, second, machines) if _is_broken_ratio(row) else row for row in found]
        rows += [*found, *_enough(book, found, build, machines)]
    return Report(tuple(rows))


def _lab_rows(book: Book, build: Path, machines: Mapping[str, Published], source: Path | None) -> Iterator[Row]:
    path = result_file(book, build)
    if not path.is_file():
        yield Row(lab=book.id, record="", outcome="failed", why=f"not run: labs run {book.id}")
        return
    run = Run.load(path)
    if run.status != "ok":
        why = f"the run ended with {run.status}: {run.error}: labs run {book.id}"
        yield Row(lab=book.id, record="", outcome="failed", why=why)
        return
    if run.parameters:
        given = ", ".join(f"{name}={value}" for name, value in run.parameters.items())
        yield from (Row(lab=book.id, record=name, outcome="skipped", why=f"run with {given}") for name in run.records)
        why = f"the last run was with {given}, and only the defaults are compared: labs run {book.id}"
        yield Row(lab=book.id, record="", outcome="failed", why=why)
        return
    try:
        executed = replay.load(executed_copy(book, build))
        hashes = record_hashes(executed, source)
    except (UsageError, ValueError) as error:
        yield Row(lab=book.id, record="", outcome="failed", why=f"the executed copy cannot be judged: {error}")
        return
    base, entries = _basis(book, run, machines)
    own, committed = base == run.family, base == book.metadata.get("published")
    yield from _notebook_rows(book, executed, run, machines, source, told=committed)
    for name, other in sorted(machines.items()):
        theirs = other.labs.get(book.id, {})
        old = sorted(key for key, entry in theirs.items() if hashes.get(key, entry.hash) != entry.hash)
        if old and name not in (run.family, book.metadata.get("published")):
            why = f"{name}: other code made its {', '.join(old)}: labs publish there"
            yield Row(lab=book.id, record="", outcome="beside", why=why)
    for name, record in run.records.items():
        if name in entries and entries[name].hash == hashes[name]:
            yield _judge(book.id, record, entries[name], base, own)
        elif name in entries and (own or committed):
            yield _row(book.id, record, entries[name].record, "stale", MADE_BY_OTHER_CODE)
        elif name in entries:
            yield _judge_alone(book.id, record, f"{base} published it with other code", entries[name].record)
        elif entries and own:
            yield _row(book.id, record, None, "new", "not published: labs publish")
        else:
            yield _judge_alone(book.id, record, NOTHING_PUBLISHED)
    yield from _missing_rows(book.id, run, entries)


def _missing_rows(lab: str, run: Run, entries: Mapping[str, Entry]) -> Iterator[Row]:
    """What is published and was not recorded; that fails, unless the machine lacks what it needs."""
    for name, entry in entries.items():
        if name in run.records:
            continue
        needs = entry.record.needs
        absent = bool(needs) and needs not in run.machine.get("present", ())
        outcome = "skipped" if absent else "missing"
        why = f"needs {needs}, not on this machine" if absent else "published, but this run did not record it"
        published = format_value(entry.record.value, entry.record.unit)
        yield Row(lab=lab, record=name, outcome=outcome, published=published, why=why, kind=entry.record.kind)


def _basis(book: Book, run: Run, machines: Mapping[str, Published]) -> tuple[str, Mapping[str, Entry]]:
    """The published machine to compare with: this family, else one of the same profile and torch minor version.

    Of several, the one that made the committed outputs: a reader sees those.
    """
    alike = [
        name
        for name, found in sorted(machines.items())
        if book.id in found.labs and (found.profile, found.torch_minor) == (run.profile, run.torch_minor)
    ]
    best = next((name for name in (run.family, book.metadata.get("published"), *alike) if name in alike), "")
    return best, machines[best].labs[book.id] if best else {}


def _judge(lab: str, record: Record, entry: Entry, base: str, own: bool) -> Row:
    """One record against its published entry, which the same code has made."""
    was = entry.record
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
    return _row(lab, record, was, "present", PRESENT)


def _judge_ratio(lab: str, record: Record, entry: Entry, base: str, own: bool) -> Row:
    if own and entry.band:
        low, high = entry.band
        if record.at_least is not None and record.bound_applies:  # true anywhere, so here too: a band may be wider
            low = max(low, record.at_least)
        held = low <= record.value <= high
        return _row(lab, record, entry.record, "held" if held else "broken", f"band {low:.3g} to {high:.3g}")
    if own:
        return _row(lab, record, entry.record, "new", "no band yet: labs publish --rebase 6")
    reason = f"another machine family than {base}"
    return _judge_alone(lab, record, reason, entry.record)


def _judge_alone(lab: str, record: Record, reason: str, was: Record | None = None) -> Row:
    """A record without a published value to hold it to: judged by what is true on any machine, or shown."""
    if record.kind == "info":
        return _row(lab, record, was, "present", f"{PRESENT}; {reason}")
    if record.kind == "ratio" and record.at_least is not None and record.bound_applies:
        held = record.value >= record.at_least
        return _row(lab, record, was, "held" if held else "broken", f"at least {record.at_least:g} anywhere; {reason}")
    return _row(lab, record, was, "beside", reason)


def _row(lab: str, record: Record, was: Record | None, outcome: str, why: str) -> Row:
    published = format_value(was.value, was.unit) if was else ""
    measured = format_value(record.value, record.unit)
    named = {"lab": lab, "record": record.name, "kind": record.kind}
    return Row(**named, outcome=outcome, published=published, measured=measured, why=why)


def _notebook_rows(
    book: Book,
    executed: Mapping[str, Any],
    run: Run,
    machines: Mapping[str, Published],
    source: Path | None,
    *,
    told: bool,
) -> Iterator[Row]:
    """The committed notebook itself: its outputs against this run, against the published values, and its code.

    `told`: that its code is another one is told record by record, where the run's records are judged.
    """
    committed = book.notebook
    machine = book.metadata.get("published", "")
    found: list[str] = []
    if machine not in machines or book.id not in machines[machine].labs:
        found.append(f"nothing is published for its machine {machine or '(none named)'}: labs publish")
    else:
        published = machines[machine]
        found += replay.inconsistencies(committed, book.id, machine, published)
        if (published.profile, published.torch_minor) == (run.profile, run.torch_minor):
            found += replay.differences(committed, executed)
        if not told:
            try:
                now = record_hashes(committed, source)
            except ValueError as error:
                now, found = {}, [*found, str(error)]
            stale = sorted(
                name for name, entry in published.labs[book.id].items() if now.get(name, entry.hash) != entry.hash
            )
            for name in stale:
                yield Row(lab=book.id, record=name, outcome="stale", why=f"{machine}: {MADE_BY_OTHER_CODE}")
    yield from (Row(lab=book.id, record="", outcome="failed", why=why) for why in found)


def _is_broken_ratio(row: Row) -> bool:
    return row.outcome == "broken" and row.kind == "ratio"


def _second_look(row: Row, book: Book, second: Run, machines: Mapping[str, Published]) -> Row:
    """A ratio that was out of its band, judged on a second run; the first value stays in the report."""
    base, entries = _basis(book, second, machines)
    record, entry = second.records.get(row.record), entries.get(row.record)
    if record is None or (entry and (entry.record.kind, entry.record.unit) != (record.kind, record.unit)):
        return row
    if entry:
        judged = _judge_ratio(row.lab, record, entry, base, base == second.family)
    else:
        judged = _judge_alone(row.lab, record, NOTHING_PUBLISHED)
    return replace(judged, why=f"{judged.why}; measured twice, first {row.measured}")


def _enough(book: Book, rows: list[Row], build: Path, machines: Mapping[str, Published]) -> Iterator[Row]:
    """A lab that judged nothing fails, and so does one that judged too few on the family that published."""
    if any(row.fails and not row.record for row in rows) or not result_file(book, build).is_file():
        return
    counted = [row for row in rows if row.record]
    judged = sum(row.outcome in ("held", "broken", "present") for row in counted)
    if not judged:
        yield Row(lab=book.id, record="", outcome="failed", why="judged nothing: a lab must hold some number")
        return
    run = Run.load(result_file(book, build))
    due = [row for row in counted if row.outcome != "skipped"]
    if run.family in machines and judged < JUDGED_SHARE * len(due):
        why = f"judged {judged} of {len(due)} records on the family that published them; {JUDGED_SHARE:.0%} are due"
        yield Row(lab=book.id, record="", outcome="failed", why=why)
