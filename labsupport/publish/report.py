"""The report of a check: a row a record, measured beside published, and whether every number held."""

from collections import Counter
from dataclasses import dataclass

FAILURES = ("broken", "missing", "stale", "new", "failed")
OUTCOMES = {
    "held": "judged against the published value, and as published",
    "present": "judged as a time or rate is: there, finite, in its unit",
    "broken": "judged against the published value, and no longer as published",
    "missing": "published, and not recorded by this run",
    "new": "recorded, and not published yet",
    "failed": "the lab, its run or its committed outputs cannot be judged",
    "beside": "shown beside the published value, not judged",
    "stale": "its published value was made by other code than stands here now",
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
    kind: str = ""

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
        judged = found["held"] + found["broken"] + found["present"]
        always = ("held", "present", "beside", "stale", "skipped")
        parts = [f"{found[name]} {name}" for name in OUTCOMES if found[name] or name in always]
        verdict = "every number held" if self.ok else "NOT every number held"
        return f"{verdict}: {judged} judged ({', '.join(parts)})"
