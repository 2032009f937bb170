"""The published values: one JSON file a machine family, package data, so that a notebook opened alone has them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from labsupport.publish.records import Record

REMEDY = "Restore it (git checkout), or delete it and run: labs publish"


class PublishedError(Exception):
    """A published file that cannot be used, with the file's name and what to do."""


@dataclass(frozen=True)
class Entry:
    """One published record with the hash of what made it and, for a ratio, the band it stays in."""

    record: Record
    hash: str
    band: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        found = self.record.to_dict() | {"hash": self.hash}
        del found["name"]
        return found | ({"band": list(self.band)} if self.band else {})


@dataclass(frozen=True)
class Published:
    """What one machine family has published: its fingerprint, and each lab's entries by record name.

    `made_on` has the fingerprint of a lab that was published earlier, on the same family, when the machine was
    another one in some detail: a kernel, a driver, a Python.
    """

    machine: Mapping[str, Any]
    labs: Mapping[str, Mapping[str, Entry]]
    made_on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def with_lab(self, lab: str, machine: Mapping[str, Any], entries: Mapping[str, Entry]) -> "Published":
        """With this lab published anew, on the machine as it is now."""
        others = {name: self.machine_of(name) for name in self.labs if name != lab}
        made_on = {name: other for name, other in others.items() if other != machine}
        return Published(machine, {**self.labs, lab: entries}, made_on)

    def machine_of(self, lab: str) -> Mapping[str, Any]:
        """The fingerprint behind a lab's values."""
        return self.made_on.get(lab, self.machine)

    def records(self, lab: str) -> dict[str, Record]:
        return {name: entry.record for name, entry in self.labs.get(lab, {}).items()}

    @property
    def profile(self) -> str:
        return self.machine["profile"]

    @property
    def torch_minor(self) -> str:
        return ".".join(self.machine["torch"].split(".")[:2])

    def to_json(self) -> str:
        labs = {
            lab: {name: entry.to_dict() for name, entry in entries.items()}
            for lab, entries in sorted(self.labs.items())
        }
        made_on = {"made_on": self.made_on} if self.made_on else {}
        return json.dumps({"machine": self.machine, "labs": labs, **made_on}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> "Published":
        """Raises PublishedError, naming the file, for text that is not a published file."""
        try:
            found = json.loads(text)
            labs = {
                lab: {
                    name: Entry(
                        Record.from_dict({"name": name} | entry),
                        entry["hash"],
                        tuple(entry["band"]) if "band" in entry else None,
                    )
                    for name, entry in entries.items()
                }
                for lab, entries in found["labs"].items()
            }
            machine = dict(found["machine"])
            machine["profile"], machine["torch"].split
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PublishedError(
                f"{where} is not a published file ({type(error).__name__}: {error}). {REMEDY}"
            ) from error
        return cls(machine, labs, dict(found.get("made_on", {})))


def folder() -> Path:
    """Where the published files of the installed package lie."""
    return Path(str(files("labsupport"))) / "published"


def load_all(where: Path | None = None) -> dict[str, Published]:
    """Every published machine, by family. A family that has published nothing is simply not there.

    Raises PublishedError for a file that cannot be read or does not parse.
    """
    found = {}
    for path in sorted((where or folder()).glob("*.json")):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PublishedError(f"{path} cannot be read: {error}. {REMEDY}") from error
        found[path.stem] = Published.from_json(text, str(path))
    return found
