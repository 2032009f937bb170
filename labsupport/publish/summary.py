"""Yours beside the published, claim by claim, and how far off the reader's guesses were."""

import json
import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from labsupport.publish import published
from labsupport.publish.claims import Verdict, decide, load_claims
from labsupport.publish.records import SUMMARY_MIME, Record
from labsupport.units import format_value

NO_GUESSES = "No guesses yet: lab.predict takes them."


def summary_bundle(
    lab: str,
    records: Mapping[str, Record],
    machines: Mapping[str, published.Published],
    family: str,
    guesses: Mapping[str, float | None],
) -> dict[str, Any]:
    """The output of `lab.summary()`, as text and as HTML: record by record, then claim by claim.

    A claim is decided here by the reader's own records. All lines are marked as measured.
    """
    columns = sorted(machines, key=lambda name: (name != family, name))
    rows = []
    for name, record in records.items():
        row = [name, format_value(record.value, record.unit)]
        for column in columns:
            other = machines[column].records(lab).get(name)
            row.append(format_value(other.value, other.unit) if other else "not published")
        rows.append([*row, _error_of(guesses.get(name), record.value)])
    header = ["record", "yours", *(f"published: {name}" for name in columns), "your guess"]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    claims = [f'claim "{verdict.claim.claim}": {verdict.status}' for verdict in _verdicts(lab, records)]
    items = "".join(f"<li>{escape(line)}</li>" for line in claims)
    return {
        SUMMARY_MIME: {"lab": lab, "records": list(records)},
        "text/plain": "\n".join(f"{line} (measured)" for line in [*lines, *claims]),
        "text/html": f"<!-- (measured) --><table><tr>{head}</tr>{cells}</table><ul>{items}</ul>",
    }


def _verdicts(lab: str, records: Mapping[str, Record]) -> list[Verdict]:
    """What these records say of the claims that this lab alone can settle."""
    values = {f"{lab}/{name}": record.value for name, record in records.items()}
    ours = [claim for claim in load_claims() if claim.records and all(r.startswith(f"{lab}/") for r in claim.records)]
    return [decide(claim, values) for claim in ours]


def _error_of(guess: float | None, value: float) -> str:
    """How far a guess was: as a factor where both are positive, for a guess of half is as wrong as twice."""
    if guess is None:
        return "none"
    if guess > 0 and value > 0:
        return f"{guess:g}, off by {max(guess / value, value / guess):.2g}x"
    return f"{guess:g}, off by {abs(guess - value):.2g}"


class Diary:
    """The reader's guesses over all labs, in a file of their own: no lab takes a number from it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_reader(cls) -> "Diary | None":
        """None for a user without a home."""
        try:
            return cls(Path.home() / ".labsupport" / "guesses.json")
        except RuntimeError:  # a container's user without a home
            return None

    def keep(self, lab: str, guesses: Mapping[str, tuple[float, float]]) -> None:
        """Remember guess and measured value of each question. A home that cannot be written is no reason to stop."""
        kept = self.read()
        kept[lab] = {**kept.get(lab, {}), **{name: list(pair) for name, pair in guesses.items()}}
        try:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps(kept, indent=1))
        except OSError:
            pass

    def read(self) -> dict[str, dict[str, list[float]]]:
        try:
            found = json.loads(self.path.read_text())
            return {
                lab: {name: [float(guess), float(value)] for name, (guess, value) in guesses.items()}
                for lab, guesses in found.items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    @property
    def text(self) -> str:
        """One bar a question, lab by lab: a longer bar was further off (a bar's step is a factor of 1.25)."""
        lines = []
        for lab, guesses in sorted(self.read().items()):
            for name, (guess, value) in guesses.items():
                steps = 20
                if guess > 0 and value > 0:
                    steps = min(20, round(abs(math.log(guess / value)) / math.log(1.25)))
                lines.append(f"lab {lab}  {name:30} {'#' * steps or '='} {_error_of(guess, value)}")
        return "\n".join(["Your guesses so far:", *lines]) if lines else NO_GUESSES
