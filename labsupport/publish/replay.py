"""Committed outputs against what came out: nbval's own comparison, over an execution that papermill already did."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from labsupport.machine import Machine
from labsupport.publish.catalogue import UsageError
from labsupport.publish.published import Published
from labsupport.publish.records import METADATA_KEY, SAY_MIME, SUMMARY_MIME, Record, records_in, said_text
from labsupport.publish.summary import summary_bundle

# A line with this mark differs from run to run. tests/notebooks/sanitize.cfg gives `pytest --nbval` the same rule.
SANITIZE = {r"(?m)^.*\(measured.*$": "(measured)"}
SKIP = (
    "metadata",
    "output_type",
    "name",
    "execution_count",
    "image/png",
    "application/vnd.jupyter.widget-view+json",
)

# The reader's own model: what it prints is theirs. Nothing of it is published, and nothing compared.
OWN = {"your-model"}


def differences(committed: Mapping[str, Any], executed: Mapping[str, Any]) -> list[str]:
    """How an execution's outputs differ from the committed ones, a line a cell; measured numbers do not count."""
    from nbformat import from_dict

    pairs = zip(committed["cells"], executed["cells"], strict=False)
    sources = [["".join(cell["source"]) for cell in book["cells"]] for book in (committed, executed)]
    if sources[0] != sources[1]:
        return ["the run is of another version of the notebook: run the lab again"]
    found = []
    absent = {name for cell in executed["cells"] for output in cell.get("outputs", []) for name in _absent(output)}
    for number, cell, other in _numbered(pairs):
        if OWN & set(cell["metadata"].get("tags", [])):
            continue
        if problem := _compare(_without(absent, cell["outputs"]), from_dict(other["outputs"])):
            found.append(f"In [{number}]: {problem}")
    return found


def _absent(output: Mapping[str, Any]) -> list[str]:
    """The record that this output stands for, where the machine lacks what it needs."""
    ours = output.get("metadata", {}).get(METADATA_KEY, {})
    return [ours["name"]] if ours.get("absent") else []


def _without(absent: set[str], outputs: Any) -> Any:
    """The outputs, with a summary that does not list these records."""
    from nbformat import from_dict

    found = from_dict(json.loads(json.dumps(outputs)))
    for output in found:
        data = output.get("data", {})
        if SUMMARY_MIME in data:
            names = data[SUMMARY_MIME]["records"]
            data[SUMMARY_MIME]["records"] = [name for name in names if name not in absent]
            lines = data.get("text/plain", "").splitlines()
            data["text/plain"] = "\n".join(line for line in lines if line.split(" ", 1)[0] not in absent)
    return found


def _numbered(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[int, Any, Any]]:
    """The code cells, each with the number in brackets that a reader sees."""
    code = (pair for pair in pairs if pair[0]["cell_type"] == "code")
    return ((number, *pair) for number, pair in enumerate(code, start=1))


def _compare(committed: Any, ran: Any) -> str:
    """What nbval's comparison finds different between two lists of outputs; "" for nothing."""
    from nbval.plugin import IPyNbCell, coalesce_streams, nocolors

    class Comparison(IPyNbCell):
        def format_output_compare(self, key: str, left: Any, right: Any) -> None:
            self.comparison_traceback.append(f"{key}: committed {_short(left)}, this run {_short(right)}")

    # nbval compares inside a pytest item, which is born in a session; these are the parts it compares with.
    cell = Comparison.__new__(Comparison)
    cell.parent = SimpleNamespace(skip_compare=SKIP, sanitize_patterns=SANITIZE)
    cell.colors = nocolors
    if cell.compare_outputs(coalesce_streams(ran), coalesce_streams(committed)):
        return ""
    return " ".join(str(line) for line in cell.comparison_traceback)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text if len(text) <= 160 else f"{text[:160]}...")


def inconsistencies(notebook: Mapping[str, Any], lab: str, machine: str, published: Published) -> list[str]:
    """Where the notebook's own outputs disagree with the published values they stand for.

    Every digit that a reader sees in a record, a sentence or the summary is rendered again from the published
    values, so a digit edited by hand in either place is found, also in a number that differs from run to run.
    """
    values = published.records(lab)
    found = []
    shown: set[str] = set()
    for number, cell, _ in _numbered((cell, None) for cell in notebook["cells"]):
        own = OWN & set(cell["metadata"].get("tags", []))
        if "".join(cell["source"]).strip() and not own and cell["execution_count"] is None:
            # nbval passes over such a cell, so it is caught here.
            found.append(f"In [{number}] was never executed: run and publish the lab")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = "".join(data.get("text/markdown", data.get("text/plain", "")))
            try:
                records = list(records_in([output]))
                for record in records:
                    shown.add(record.name)
                    if record != values.get(record.name):
                        found.append(
                            f"In [{number}]: record {record.name} is not the published {_value(values, record)}"
                        )
                    elif text != record.text:
                        found.append(f"In [{number}]: shows {text!r}, published is {record.text!r}")
                about = output.get("metadata", {}).get(METADATA_KEY, {}).get("machine")
                if about and (line := Machine.from_dict(dict(published.machine_of(lab))).describe()) not in text:
                    found.append(f"In [{number}]: describes another machine than the published {line!r}")
                if SAY_MIME in data and text != (said := said_text(data[SAY_MIME], values)):
                    found.append(f"In [{number}]: says {text!r}, the published values say {said!r}")
                if SUMMARY_MIME in data and data != _summary(lab, machine, published):
                    found.append(f"In [{number}]: the summary is not that of the published values")
            except (ValueError, KeyError) as error:
                found.append(f"In [{number}]: {error}")
    if hidden := [name for name in values if name not in shown]:
        found.append(f"its notebook does not show {', '.join(hidden)}: run and publish the lab")
    return found


def _value(values: Mapping[str, Record], record: Record) -> str:
    return values[record.name].text if record.name in values else "(there is none)"


def _summary(lab: str, machine: str, published: Published) -> dict[str, Any]:
    return summary_bundle(lab, published.records(lab), {machine: published}, machine, {})


def normalised(executed: Mapping[str, Any], lab: str, machine: str, published: Published) -> dict[str, Any]:
    """The executed copy as it is committed: nothing in it that differs without the numbers having changed.

    Left out: papermill's and the kernel's own metadata, timestamps, widget state and views (published pages show
    the picture), empty tags. The summary is rendered from what is now published.
    """
    cells = []
    for cell in executed["cells"]:
        metadata = {
            key: cell["metadata"][key] for key in ("tags", "jupyter", METADATA_KEY) if cell["metadata"].get(key)
        }
        kept = {
            "cell_type": cell["cell_type"],
            "id": cell["id"],
            "metadata": metadata,
            "source": cell["source"],
        }
        if cell["cell_type"] == "code":
            own = OWN & set(cell["metadata"].get("tags", []))
            outputs = [_without_view(output) for output in cell["outputs"] if not own]
            for output in outputs:
                if SUMMARY_MIME in output.get("data", {}):
                    output["data"] = _summary(lab, machine, published)
            kept |= {"execution_count": cell["execution_count"], "outputs": outputs}
        cells.append(kept)
    ours = executed["metadata"].get(METADATA_KEY, {}) | {"published": machine}
    metadata = {
        METADATA_KEY: ours,
        "accelerator": "GPU",  # Colab asks for one by this key
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _without_view(output: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(output)
    if "data" in kept:
        kept["data"] = {k: v for k, v in kept["data"].items() if k != "application/vnd.jupyter.widget-view+json"}
    return kept


def notebook_text(notebook: Mapping[str, Any]) -> str:
    """A notebook as nbformat writes it: multi-line strings as lists of lines, sorted keys, a final newline."""
    from nbformat import from_dict, validate, writes

    node = from_dict(notebook)
    validate(node)
    return writes(node) + "\n"


def load(path: Path) -> Any:
    """A notebook with its multi-line strings joined."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.reader.NotJSONError) as error:
        raise UsageError(f"{path} cannot be read as a notebook ({error}): run the lab again") from error
