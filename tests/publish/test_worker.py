"""The page of a run."""

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from labsupport.publish.worker import write_page

WIDGET = "application/vnd.jupyter.widget-view+json"
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="


def test_a_panel_is_its_picture_on_the_page(tmp_path):
    data = {WIDGET: {"model_id": "0a1b", "version_major": 2}, "image/png": DOT, "text/plain": "in words"}
    cell = new_code_cell("panel.show()", outputs=[new_output("display_data", data)])
    notebook = new_notebook(cells=[cell], metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {}}})
    path = tmp_path / "03.ipynb"
    nbformat.write(notebook, path)
    write_page(path)
    page = path.with_suffix(".html").read_text()
    assert f"data:image/png;base64,{DOT}" in page and "0a1b" not in page
    assert WIDGET in path.read_text()  # the executed copy is as it was
