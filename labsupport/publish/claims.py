"""The claims ledger: sentences others published, each decided on every machine by what the labs recorded."""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from labsupport.publish.predicates import Predicate, parse_predicate
from labsupport.publish.records import Record, fields_of, sentence

Status = Literal["holds", "holds under conditions", "does not hold", "not measurable here", "not yet decided"]
STATUSES: tuple[Status, ...] = get_args(Status)
# {machine family: {"00/name": Record}}
PublishedRecords = Mapping[str, Mapping[str, Record]]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim, as `claims.toml` describes it; `holds` and `conditions` are predicates over `records`.

    Raises ValueError, naming the claim, for an expression that is not a predicate over its records, a record
    that nothing uses, or records without a predicate.
    """

    id: str
    topic: str
    source: tuple[str, ...]
    claim: str
    known: str
    lab: str = ""
    records: tuple[str, ...] = ()
    holds: str = ""
    conditions: str = ""
    says: str = ""

    def __post_init__(self) -> None:
        if bad := [name for name in self.records if not re.fullmatch(r"\d\d/[a-z][a-z0-9_]*", name)]:
            raise ValueError(f"claim {self.id!r} lists record {bad[0]!r}; lab/name is expected, as 00/loss")
        names = set(map(short_name, self.records))
        if len(names) < len(self.records):
            raise ValueError(f"claim {self.id!r} lists two records of one name: {', '.join(self.records)}")
        if bool(self.records) != bool(self.holds) or (self.conditions and not self.holds):
            raise ValueError(f"claim {self.id!r}: records need holds, holds needs records, conditions both")
        used = fields_of(self.says)
        for expression in filter(None, (self.holds, self.conditions)):
            used |= self.predicate(expression).names
        if used != names:
            wrong = sorted(used ^ names)[0]
            raise ValueError(f"claim {self.id!r}: {wrong!r} must be both listed in records and used")

    def predicate(self, expression: str) -> Predicate:
        """The predicate of one of its expressions. Raises ValueError naming claim and expression."""
        try:
            return parse_predicate(expression, set(map(short_name, self.records)))
        except ValueError as error:
            raise ValueError(f"claim {self.id!r}, expression {expression!r}: {error}") from error


@dataclass(frozen=True)
class Verdict:
    """What one machine's records say of a claim; `values` are those found, by "00/name"."""

    claim: Claim
    status: Status
    values: Mapping[str, float]


@dataclass(frozen=True)
class LedgerRow:
    """One claim with its verdict on every machine family that has published."""

    claim: Claim
    verdicts: Mapping[str, Verdict]


def load_claims(path: str | Path | None = None) -> tuple[Claim, ...]:
    """The ledger's claims in their order; without a path, those that come with the package.

    Raises ValueError, naming file and claim, for what does not parse, an id given twice, an unknown or
    missing key, a source that is not described, and whatever `Claim` refuses.
    """
    where = Path(path) if path else files("labsupport") / "claims.toml"
    try:
        found = tomllib.loads(where.read_text(encoding="utf-8"))
        sources = found.get("sources", {})
        return tuple(_claim(id_, entry, sources) for id_, entry in found.get("claims", {}).items())
    except ValueError as error:  # tomllib's is one too: it names the line, and a table declared twice
        raise ValueError(f"{where}: {error}") from error


def _claim(id_: str, entry: Mapping[str, Any], sources: Mapping[str, str]) -> Claim:
    known = [field.name for field in fields(Claim) if field.name != "id"]
    if unknown := [key for key in entry if key not in known]:
        raise ValueError(f"claim {id_!r} has the unknown key {unknown[0]!r}; known are {', '.join(known)}")
    if missing := [key for key in ("topic", "source", "claim", "known") if not entry.get(key)]:
        raise ValueError(f"claim {id_!r} lacks {', '.join(missing)}")
    values: dict[str, Any] = dict(entry)
    for key, value in entry.items():
        listed = key in ("source", "records")
        texts = value if listed else [value]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            shape = "a list of strings" if listed else "a string"
            raise ValueError(f"claim {id_!r}: {key} is {value!r}; {shape} is expected")
        values[key] = tuple(value) if listed else value
    if strange := [letter for letter in values["source"] if letter not in sources]:
        raise ValueError(f"claim {id_!r}: source {strange[0]!r} is not described in [sources]")
    return Claim(id=id_, **values)


def short_name(record: str) -> str:
    """The record's name inside expressions: without its lab."""
    return record.partition("/")[2]


def decide(claim: Claim, records: Mapping[str, float]) -> Verdict:
    """The verdict of one machine's `records` ("00/name" to value, in the record's own unit) on a claim.

    Raises ValueError, naming the claim, for a value that is not finite, and for a division by zero.
    """
    values = {name: records[name] for name in claim.records if name in records}
    if odd := [name for name, value in values.items() if not math.isfinite(value)]:
        raise ValueError(f"claim {claim.id!r}: record {odd[0]!r} is {values[odd[0]]}, not a finite number")
    status: Status = "does not hold"
    if not claim.holds:
        status = "not yet decided"
    elif len(values) < len(claim.records):
        status = "not measurable here"
    elif _is_true(claim, claim.holds, values):
        status = "holds"
    elif claim.conditions and _is_true(claim, claim.conditions, values):
        status = "holds under conditions"
    return Verdict(claim, status, values)


def _is_true(claim: Claim, expression: str, values: Mapping[str, float]) -> bool:
    try:
        return claim.predicate(expression).test({short_name(name): value for name, value in values.items()})
    except ArithmeticError as error:
        raise ValueError(f"claim {claim.id!r}, {expression!r} with {dict(values)}: {error}") from error


def verdicts(published: PublishedRecords, claims: tuple[Claim, ...] | None = None) -> list[LedgerRow]:
    """Every claim (of the package's ledger, unless given) decided on every machine."""
    values = {machine: {name: each.value for name, each in by.items()} for machine, by in published.items()}
    return [
        LedgerRow(claim, {machine: decide(claim, by) for machine, by in values.items()})
        for claim in (load_claims() if claims is None else claims)
    ]


def claims_markdown(published: PublishedRecords, claims: tuple[Claim, ...] | None = None) -> str:
    """The ledger in Markdown: a table for each topic, a column of verdicts and values for each machine."""
    parts = []
    for topic, rows in _by_topic(published, claims):
        header = ["id", "claim", "source", *published]
        table = [header, ["---"] * len(header)]
        for row in rows:
            shown = [_shown(verdict, published[machine]) for machine, verdict in row.verdicts.items()]
            table.append([f"`{row.claim.id}`", row.claim.claim, ", ".join(row.claim.source), *shown])
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
        parts.append("\n".join([f"**{topic}**", "", *lines]))
    return "\n\n".join(parts) + "\n"


def claims_text(published: PublishedRecords, claims: tuple[Claim, ...] | None = None) -> str:
    """The ledger in plain lines for a terminal; the last ones count each machine's verdicts."""
    lines, counts = [], {machine: Counter[Status]() for machine in published}
    for topic, rows in _by_topic(published, claims):
        lines.append(topic)
        for row in rows:
            claim = row.claim
            lines.append(f"  {claim.id} ({', '.join(claim.source)}): {claim.claim}")
            for machine, verdict in row.verdicts.items():
                counts[machine][verdict.status] += 1
                if claim.holds:
                    lines.append(f"      {machine}: {_shown(verdict, published[machine])}")
            if not claim.holds:
                lines.append("      not yet decided" + (f" (lab {claim.lab})" if claim.lab else ""))
    for machine, count in counts.items():
        lines.append(f"{machine}: " + ", ".join(f"{count[status]} {status}" for status in STATUSES))
    return "\n".join(lines if published else [*lines, "no machine has published results yet"])


def _by_topic(published: PublishedRecords, claims: tuple[Claim, ...] | None) -> Iterator[tuple[str, list[LedgerRow]]]:
    for topic, rows in groupby(verdicts(published, claims), key=lambda row: row.claim.topic):
        yield topic, list(rows)


def _shown(verdict: Verdict, records: Mapping[str, Record]) -> str:
    """The status and the values behind it, in the claim's own sentence where it has one."""
    claim = verdict.claim
    if verdict.status == "not measurable here":
        return f"{verdict.status} (no {', '.join(name for name in claim.records if name not in records)})"
    template = claim.says or ", ".join(f"{name} = {{{name}}}" for name in map(short_name, claim.records))
    said = sentence({"text": template}, {short_name(name): records[name] for name in verdict.values})
    return f"{verdict.status}: {said}" if said else verdict.status
