"""Executes one notebook with papermill, in a process of its own: `python -m labsupport.publish.worker JOB`.

JOB is a JSON text. Progress and the outcome leave as JSON lines on standard output; `run` is the other end. A
process a lab keeps kernels, memory and signals apart, and lets the parent end everything that a lab started.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config


def execute(job: dict[str, Any]) -> dict[str, Any]:
    """Run `job["notebook"]` into `job["output"]`, at most `job["timeout_s"]` in all; how it ended.

    A cell is named by its number in brackets, as a reader of the executed copy sees it: In [3].
    """
    total = len(json.loads(Path(job["notebook"]).read_text(encoding="utf-8"))["cells"])
    deadline = time.monotonic() + job["timeout_s"]
    at = {"cell": 0}

    def started(cell: Any, cell_index: int) -> None:
        at["cell"] += cell.cell_type == "code" and bool(cell.source.strip())
        say(cell=at["cell"], done=cell_index, of=total)

    try:
        papermill.execute_notebook(
            job["notebook"],
            job["output"],
            parameters=job["parameters"],
            cwd=str(Path(job["notebook"]).parent),
            kernel_name="python3",
            progress_bar=False,
            record_timing=False,
            coalesce_streams=True,
            # The limit is the lab's, so each cell has what is left of it.
            timeout_func=lambda cell: max(1, int(deadline - time.monotonic())),
            on_cell_start=started,
            # Without it ipykernel 7.4 warns on stderr that its sockets are in plain text.
            config=Config({"KernelManager": {"transport_encryption": "auto"}}),
        )
    except PapermillExecutionError as error:
        return {"status": "error", "cell": error.exec_count, "error": f"{error.ename}: {error.evalue}"}
    except CellTimeoutError:
        limit = f"not finished after {job['timeout_s']:g} s (--timeout)"
        return {"status": "timeout", "cell": at["cell"], "error": limit}
    except DeadKernelError:
        died = "the kernel died: killed by a signal (out of memory?) or crashed"
        return {"status": "died", "cell": at["cell"], "error": died}
    return {"status": "ok", "cell": None, "error": None}


def hidden_error(notebook: nbformat.NotebookNode) -> tuple[int | None, str] | None:
    """The first error in any output, also one that a widget swallowed: a green run must have none."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return cell.execution_count, f"{output.ename}: {output.evalue}"
    state = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    shown = {
        output.get("data", {}).get("application/vnd.jupyter.widget-view+json", {}).get("model_id"): cell.execution_count
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    }
    for key, model in state.items():
        for output in model.get("state", {}).get("outputs", []):
            if output.get("output_type") == "error":
                return shown.get(key), f"in a widget: {output.get('ename')}: {output.get('evalue')}"
    return None


def write_page(executed: Path) -> None:
    """The run as one HTML page beside the executed copy. A page has no kernel: panels are the pictures they left."""
    from nbconvert import HTMLExporter

    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata.pop("widgets", None)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    executed.with_suffix(".html").write_text(page, encoding="utf-8")


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    job = json.loads(sys.argv[1])
    outcome = execute(job)
    output = Path(job["output"])
    if output.is_file():
        found = hidden_error(nbformat.read(output, as_version=4))
        if outcome["status"] == "ok" and found:
            outcome = {"status": "error", "cell": found[0], "error": found[1]}
        write_page(output)
    say(outcome=outcome)


if __name__ == "__main__":
    main()
