"""`pytest --nbval` for real, with our rule for measured lines, on the quick part of lab 00."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from labsupport.publish import replay

HERE = Path(__file__).parent
LAB = HERE.parents[1] / "notebooks" / "00_meet_your_machine.ipynb"
QUICK = ("setup", "parameters", "imports", "session", "data", "model", "train-step", "same-losses", "record-losses")


def quick_part() -> nbformat.NotebookNode:
    notebook = nbformat.read(LAB, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.id in QUICK]
    return notebook


def nbval(notebook: nbformat.NotebookNode, folder: Path) -> subprocess.CompletedProcess:
    path = folder / "lab.ipynb"
    nbformat.write(notebook, path)
    options = ["--nbval", "--nbval-sanitize-with", str(HERE / "sanitize.cfg"), "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(path), "--rootdir", str(folder)],
        cwd=folder,
        env={**__import__("os").environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
    )


def with_one_digit_changed() -> nbformat.NotebookNode:
    notebook = quick_part()
    output = next(cell for cell in notebook.cells if cell.id == "record-losses").outputs[0]
    assert "= 0 of 8" in output.data["text/plain"]
    output.data["text/plain"] = output.data["text/plain"].replace("= 0 of 8", "= 1 of 8")
    return notebook


@pytest.mark.slow
def test_nbval_passes_the_committed_outputs_and_fails_one_changed_digit(tmp_path):
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    good, bad = nbval(quick_part(), tmp_path / "good"), nbval(with_one_digit_changed(), tmp_path / "bad")
    assert good.returncode == 0, good.stdout
    assert bad.returncode == 1 and "1 of 8" in bad.stdout


def test_our_replay_finds_the_same_changed_digit():
    assert replay.differences(quick_part(), quick_part()) == []
    (found,) = replay.differences(with_one_digit_changed(), quick_part())
    assert "1 of 8" in found and "0 of 8" in found


def test_both_hide_measured_lines_by_the_same_rule():
    from nbval.plugin import get_sanitize_patterns

    assert dict(get_sanitize_patterns((HERE / "sanitize.cfg").read_text())) == replay.SANITIZE
