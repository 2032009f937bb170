"""Panels: controls that change a picture and a sentence at once. Core ipywidgets (7.7 to 8) and one HTML widget.

There is no `Output`, `interact` or `interactive` here: those swallow exceptions, and wait for the kernel while it
runs a cell. A picture is an SVG made from text, a few milliseconds a change.
"""

import base64
import html
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ipywidgets
from IPython.display import display

PANEL_MIME = "application/vnd.labsupport.panel+json"
Values = dict[str, Any]


class Panel:
    """Controls over a picture and a text, both functions of the controls' values, and buttons that do something.

    `picture(values)` returns an SVG, `text(values)` some lines for people who do not see it; they are called from
    whatever thread a value changes in, one at a time. `actions` are (button's label -> function of the values).
    An exception is shown in place of the picture and kept in `errors`.
    """

    def __init__(
        self,
        title: str,
        controls: Mapping[str, ipywidgets.ValueWidget],
        picture: Callable[[Values], str],
        text: Callable[[Values], str],
        *,
        actions: Mapping[str, Callable[[Values], Any]] | None = None,
    ) -> None:
        self.title, self.controls, self.errors = title, dict(controls), list[BaseException]()
        self._picture, self._text = picture, text
        self._lock = threading.RLock()
        self._quiet = False
        self._html = ipywidgets.HTML()
        self.buttons = {name: ipywidgets.Button(description=name) for name in actions or {}}
        for name, action in (actions or {}).items():
            self.buttons[name].on_click(partial(self._pressed, action))
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        rows = [ipywidgets.VBox(list(self.controls.values())), ipywidgets.HBox(list(self.buttons.values())), self._html]
        self.box = ipywidgets.VBox(rows)
        self.redraw()

    @property
    def values(self) -> Values:
        return {name: control.value for name, control in self.controls.items()}

    def set(self, **values: Any) -> None:
        """Move controls from code. Raises ValueError, and moves none, for a name or value that no control has."""
        for name, value in values.items():
            if name not in self.controls:
                raise ValueError(f"the panel has no control {name!r}; it has {', '.join(self.controls)}")
            options = [each for _, each in getattr(self.controls[name], "_options_full", ())]
            if options and value not in options:
                raise ValueError(f"{name}: one of {', '.join(map(str, options))} is expected, got {value!r}")
        with self._lock:
            self._quiet = True
            try:
                for name, value in values.items():
                    self.controls[name].value = value
            finally:
                self._quiet = False
            self.redraw()

    def redraw(self) -> None:
        """Make picture and text anew."""
        with self._lock:
            try:
                values = self.values
                self._html.value = f"{self._picture(values)}<pre>{html.escape(self._text(values))}</pre>"
            except Exception as error:
                self.errors.append(error)
                self._html.value = f"<pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>"

    def press(self, name: str) -> None:
        """What its button does."""
        self.buttons[name].click()

    @property
    def svg(self) -> str:
        return self._picture(self.values)

    @property
    def text(self) -> str:
        return self._text(self.values)

    def show(self) -> None:
        """Display one bundle: the live panel where there is a notebook, its picture and text everywhere else."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.box.model_id}
        data = {
            "application/vnd.jupyter.widget-view+json": view,
            PANEL_MIME: {"panel": self.title},
            "text/plain": self.text,
        }
        if (png := png_of(self.svg)) is not None:
            data["image/png"] = base64.b64encode(png).decode()
        display(data, raw=True)

    def _changed(self, _: Any) -> None:
        if not self._quiet:
            self.redraw()

    def _pressed(self, action: Callable[[Values], Any], button: ipywidgets.Button) -> None:
        if button.disabled:
            return
        label, button.description, button.disabled = button.description, "running ...", True
        try:
            action(self.values)
        except Exception as error:
            self.errors.append(error)
            self._html.value = f"<pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>"
            return
        finally:
            button.description, button.disabled = label, False
        self.redraw()


def slider(label: str, options: list[Any], value: Any) -> ipywidgets.SelectionSlider:
    """Steps of a scale, for mouse and arrow keys."""
    style, layout = {"description_width": "110px"}, ipywidgets.Layout(width="560px")
    return ipywidgets.SelectionSlider(description=label, options=options, value=value, style=style, layout=layout)


def choice(label: str, options: list[Any], value: Any) -> ipywidgets.Dropdown:
    style, layout = {"description_width": "110px"}, ipywidgets.Layout(width="400px")
    return ipywidgets.Dropdown(description=label, options=options, value=value, style=style, layout=layout)


def png_of(svg: str) -> bytes | None:
    """The picture for pages where no panel can live; None where resvg is not installed."""
    try:
        import resvg_py
    except ImportError:
        return None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=2))
