"""The panel base, through its functions and by setting values: nothing is swallowed."""

import threading
from pathlib import Path

import ipywidgets
import pytest

from labsupport.show import widgets
from labsupport.show.widgets import PANEL_MIME, Panel, choice, png_of, slider

SQUARE = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" width="9"><rect width="{0}" height="9"/></svg>'


def picture(values):
    if values["batch"] == 8:
        raise RuntimeError("eight <is> too many")
    return SQUARE.format(values["batch"])


def text(values):
    return f"batch {values['batch']}, {values['precision']}"


@pytest.fixture
def pressed():
    return []


@pytest.fixture
def panel(pressed):
    controls = {"batch": slider("batch", [1, 2, 4, 8], 2), "precision": choice("precision", ["fp32", "bf16"], "fp32")}
    return Panel("a panel", controls, picture, text, actions={"run it": pressed.append})


@pytest.fixture
def shown(monkeypatch):
    bundles = []
    monkeypatch.setattr(widgets, "display", lambda data, metadata, raw: bundles.append(data | {"metadata": metadata}))
    return bundles


def html(panel):
    return panel.box.children[-1].value


def test_picture_and_text_follow_the_controls(panel):
    assert SQUARE.format(2) in html(panel) and "batch 2, fp32" in html(panel)
    panel.controls["batch"].value = 4
    panel.controls["precision"].value = "bf16"
    assert SQUARE.format(4) in html(panel) and "batch 4, bf16" in html(panel) and not panel.errors
    assert panel.values == {"batch": 4, "precision": "bf16"}


def test_an_error_is_shown_and_kept_and_the_next_value_works(panel):
    panel.controls["batch"].value = 8
    assert "RuntimeError: eight &lt;is&gt; too many" in html(panel)
    assert [str(error) for error in panel.errors] == ["eight <is> too many"]
    panel.controls["batch"].value = 4
    assert SQUARE.format(4) in html(panel)


def test_set_moves_several_at_once_and_refuses_as_one(panel):
    panel.set(batch=1, precision="bf16")
    assert panel.values == {"batch": 1, "precision": "bf16"}
    with pytest.raises(ValueError, match="batch: one of 1, 2, 4, 8 is expected, got 3"):
        panel.set(precision="fp32", batch=3)
    with pytest.raises(ValueError, match="no control 'size'; it has batch, precision"):
        panel.set(precision="fp32", size=3)
    assert panel.values == {"batch": 1, "precision": "bf16"} and "batch 1, bf16" in html(panel)


def test_a_button_runs_once_with_the_values_and_is_disabled_meanwhile(panel, pressed):
    states = []
    button = panel.buttons["run it"]
    button.observe(lambda change: states.append((change["name"], change["new"])), names=["disabled", "description"])
    panel.press("run it")
    assert pressed == [panel.values]
    assert states == [
        ("description", "running ..."),
        ("disabled", True),
        ("description", "run it"),
        ("disabled", False),
    ]


def test_an_action_that_fails_is_shown():
    def fails(values):
        raise ValueError("no such thing")

    panel = Panel("p", {"batch": slider("batch", [1, 2], 1)}, lambda v: SQUARE, lambda v: "", actions={"go": fails})
    panel.buttons["go"].click()
    assert "ValueError: no such thing" in html(panel) and len(panel.errors) == 1
    with pytest.raises(ValueError, match="no such thing"):
        panel.press("go")
    assert not panel.buttons["go"].disabled


def test_a_value_that_a_widget_refuses_moves_nothing():
    controls = {"batch": slider("batch", [1, 2], 1), "count": ipywidgets.BoundedIntText(min=0, max=5)}
    panel = Panel("p", controls, lambda values: SQUARE, str)
    with pytest.raises(ValueError, match="count: "):
        panel.set(batch=2, count="many")
    assert panel.values == {"batch": 1, "count": 0}


def test_what_runs_already_is_not_begun_again():
    begun, may_end = threading.Event(), threading.Event()

    def action(values):
        begun.set()
        may_end.wait(10)

    panel = Panel("p", {"batch": slider("batch", [1, 2], 1)}, lambda v: SQUARE, str, actions={"go": action})
    thread = threading.Thread(target=panel.press, args=("go",))
    thread.start()
    begun.wait(10)
    with pytest.raises(RuntimeError, match="go: the panel is still running"):
        panel.press("go")
    panel.buttons["go"].click()  # a second click that was on its way
    panel.set(batch=2)
    assert "&#x27;batch&#x27;: 2" in html(panel) and panel.buttons["go"].disabled and not panel.errors
    may_end.set()
    thread.join()
    assert not panel.buttons["go"].disabled


def test_a_picture_has_its_words_on_a_machine_without_fonts(monkeypatch):
    given = {}
    monkeypatch.setattr("resvg_py.svg_to_bytes", lambda **options: given.update(options) or b"")
    png_of(SQUARE)
    assert given["skip_system_fonts"] and all(Path(font).is_file() for font in given["font_files"])


def test_one_bundle_has_view_picture_and_text(panel, shown):
    panel.show()
    (bundle,) = shown
    view = bundle["application/vnd.jupyter.widget-view+json"]
    assert view == {"version_major": 2, "version_minor": 0, "model_id": panel.box.model_id}
    assert bundle["text/plain"] == "batch 2, fp32" and bundle[PANEL_MIME] == {"panel": "a panel"}
    assert bundle["image/png"].startswith("iVBOR") and bundle["metadata"] == {"image/png": {"width": 9}}
    panel.show()
    assert shown[1] == bundle  # the same picture, byte for byte


def test_without_resvg_there_is_text(panel, shown, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    assert png_of(SQUARE.format(3)) is None
    panel.show()
    assert "image/png" not in shown[0] and shown[0]["text/plain"]


def test_threads_leave_the_last_values_shown(panel):
    def move(values):
        for value in values:
            panel.controls["batch"].value = value

    threads = [threading.Thread(target=move, args=([1, 2, 4] * 30,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert f"batch {panel.values['batch']}," in html(panel) and not panel.errors


def test_only_core_widgets_are_used(panel):
    def every(widget):
        return [widget, *(part for child in getattr(widget, "children", ()) for part in every(child))]

    known = {"VBox", "HBox", "HTML", "Button", "SelectionSlider", "Dropdown"}
    assert {type(each).__name__ for each in every(panel.box)} <= known
    assert all(isinstance(each, ipywidgets.CoreWidget) for each in every(panel.box))
