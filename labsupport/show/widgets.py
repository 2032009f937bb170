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
from matplotlib import get_data_path

ZOOM = 2  # pixels of the PNG for one of the SVG: sharp on screens that have as many
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
        self._picture, self._text, self._actions = picture, text, dict(actions or {})
        self._lock, self._running = threading.RLock(), threading.Lock()
        self._quiet = False
        self._html = ipywidgets.HTML()
        self.buttons = {name: ipywidgets.Button(description=name) for name in self._actions}
        for name, button in self.buttons.items():
            button.on_click(partial(self._clicked, name))
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
            before, self._quiet = self.values, True
            try:
                for name, value in values.items():
                    self.controls[name].value = value
            except Exception as error:  # of the widget's own check
                for name in values:
                    self.controls[name].value = before[name]
                raise ValueError(f"{name}: {error}") from error
            finally:
                self._quiet = False
            self.redraw()

    def redraw(self) -> None:
        """Make picture and text anew."""
        with self._lock:
            try:
                values = self.values
                self._html.value = f"{self._picture(values)}{_paragraph(self._text(values))}"
            except Exception as error:
                self._tell(error)

    def press(self, name: str) -> Any:
        """What its button does, one at a time; returns what the action returns, and raises what it raises."""
        button = self.buttons[name]
        if not self._running.acquire(blocking=False):
            raise RuntimeError(f"{name}: the panel is still running; wait until its button is back")
        button.description, button.disabled = "running ...", True
        try:
            return self._actions[name](self.values)
        finally:
            button.description, button.disabled = name, False
            self._running.release()
            self.redraw()

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
        metadata = {}
        if (png := png_of(self.svg)) is not None:
            data["image/png"] = base64.b64encode(png).decode()
            metadata["image/png"] = {"width": int.from_bytes(png[16:20], "big") // ZOOM}  # its header has the pixels
        display(data, metadata=metadata, raw=True)

    def _changed(self, _: Any) -> None:
        if not self._quiet:
            self.redraw()

    def _clicked(self, name: str, button: ipywidgets.Button) -> None:
        if button.disabled:  # a second click was on its way
            return
        try:
            self.press(name)
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        self.errors.append(error)
        self._html.value = _paragraph(f"{type(error).__name__}: {error}")


def _paragraph(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'


def slider(label: str, options: list[Any], value: Any) -> ipywidgets.SelectionSlider:
    """Steps of a scale, for mouse and arrow keys."""
    style, layout = {"description_width": "110px"}, ipywidgets.Layout(width="560px")
    return ipywidgets.SelectionSlider(description=label, options=options, value=value, style=style, layout=layout)


def choice(label: str, options: list[Any], value: Any) -> ipywidgets.Dropdown:
    style, layout = {"description_width": "110px"}, ipywidgets.Layout(width="400px")
    return ipywidgets.Dropdown(description=label, options=options, value=value, style=style, layout=layout)


def png_of(svg: str) -> bytes | None:
    """The picture for pages where no panel can live; None where resvg is not installed.

    The letters are matplotlib's: what fonts a machine has differs, and a container may have none, which would leave
    a picture without a word in it.
    """
    try:
        import resvg_py
    except ImportError:
        return None
    fonts = [f"{get_data_path()}/fonts/ttf/DejaVuSans{style}.ttf" for style in ("", "-Bold")]
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=ZOOM, font_files=fonts, skip_system_fonts=True))
