"""Pictures and panels: the only wing that draws. Results never import it: `show.plot(result)`."""

from importlib import import_module

from labsupport.show import memory as memory  # with these, `plot` draws ledgers, plans and timings too
from labsupport.show import timings as timings
from labsupport.show.plots import plot, timeline

# Panels need ipywidgets, pictures do not.
_PANELS = {
    "AccumulationPanel": "accumulation_panel",
    "BatchPanel": "batch_panel",
    "CheckpointPanel": "checkpoint_panel",
    "CompilePanel": "compile_panel",
    "Panel": "widgets",
    "PrecisionPanel": "precision_panel",
}
__all__ = [*_PANELS, "plot", "timeline"]


def __getattr__(name: str) -> object:
    if name in _PANELS:
        return getattr(import_module(f"{__name__}.{_PANELS[name]}"), name)
    raise AttributeError(f"module 'labsupport.show' has no attribute {name!r}; it offers {', '.join(__all__)}")
