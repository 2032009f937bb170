"""Each exercise's check passes its solution and fails a planned wrong answer, in the lab itself."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

NOTEBOOKS = {path.stem[:2]: path for path in (Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb")}
# Lab -> exercise -> an answer that a learner might well give, and that is wrong.
WRONG = {
    "00": {"monthly_cost": "720 * price_per_hour", "enough_workers": "workers + 10_000"},
    "01": {
        "true_rate": "reported * 50 / 51",  # the bias undone in the wrong direction
        "epoch_rate": "128 / 0.1",  # the rate of a full batch
        "layer_mfu": "2 * 1024**3 / 1e-3 / 100e12",  # the forward pass alone
    },
    "02": {
        "square_bytes": "2 * 1000 * 1000 * 4",  # one moment, as with momentum
        "scores_bytes": "4 * 256**2 * 4",  # of one sample
        "cat_bytes": "20 * 64 * 1000 * 4",  # the result alone
    },
    "03": {
        "card_batch": "int(0.9 * 16e9) // 25_000_000",  # without the fixed part
        "knee_batch": "16",  # where both parts are equal: half of it
        "micro_batch": "24",  # halved until it fits
    },
    "06": {
        "smallest_exponent": "6",  # the smallest number itself, though half of it is where zero begins
        "skipped_steps": "3",  # those at the start
        "even_batch": "3000",  # the width of the input
    },
    "07": {
        "best_segments": "8",  # near the root of the depth
        "work_factor": "4 / 3",  # as if the last segment ran again too
        "pays_below": "round(12e-3 / 0.1e-3)",  # where both parts of a sample are equal
    },
    "08": {
        "second_epoch": "7 / 8",  # what is left, without the window that follows
        "window_loss": "(0.5 + 0.3) / 2",  # a mean of means
        "rank_micro_batch": "31",  # halved until it fits
    },
    "09": {
        "break_even": "12 / 42e-3",  # as if a compiled step had cost nothing before
        "reported": "10e-3 / 5e-3",  # what it will be, not what was timed
        "graphs": "9",  # three an epoch
    },
}


def solutions_in(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Exercise -> code, from the folded Markdown cell."""
    folded = [cell.source for cell in notebook.cells if "<summary>Solutions</summary>" in cell.source]
    blocks = re.findall(r"```python\n(.*?)```", "\n".join(folded), re.DOTALL)
    return {re.findall(r"^(\w+) = ", block, re.MULTILINE)[-1]: block for block in blocks}


def answered(source: str, answers: dict[str, str]) -> str:
    name = re.search(r"^(\w+) = None$", source, re.MULTILINE)[1]
    return source.replace(f"{name} = None", answers[name])


@pytest.mark.slow
@pytest.mark.parametrize("lab", sorted(NOTEBOOKS))
def test_checks_pass_the_solution_and_fail_the_wrong_answer(lab, monkeypatch):
    monkeypatch.setenv("LABS_RUN", "1")
    notebook = nbformat.read(NOTEBOOKS[lab], as_version=4)
    solutions = solutions_in(notebook)
    wrong = {name: f"{name} = {answer}" for name, answer in WRONG[lab].items()}
    assert set(solutions) == set(wrong)
    tell = "print('ANSWERS', __import__('json').dumps(lab.answers))"
    cells = []
    for cell in notebook.cells:
        if "exercise" in cell.metadata.get("tags", []):
            cells += [new_code_cell(answered(cell.source, wrong)), new_code_cell(tell)]
            cells += [new_code_cell(answered(cell.source, solutions)), new_code_cell(tell)]
        else:
            cells.append(cell)
    notebook.cells = cells
    folder = {"metadata": {"path": str(NOTEBOOKS[lab].parent)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=folder).execute()
    texts = [output.text for cell in cells for output in cell.get("outputs", []) if output.output_type == "stream"]
    told = [json.loads(text.split(" ", 1)[1]) for text in texts if text.startswith("ANSWERS")]
    for order, name in enumerate(solutions):
        assert told[2 * order][name] is False and told[2 * order + 1][name] is True
