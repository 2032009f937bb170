"""What tests of every wing share."""

from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


@pytest.fixture(scope="session")
def lab_notebooks() -> dict[Path, nbformat.NotebookNode]:
    """Every committed lab: path -> notebook."""
    return {path: nbformat.read(path, as_version=4) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
