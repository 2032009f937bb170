"""Pictures and panels: the only wing that draws. Results never import it: `show.plot(result)`."""

from labsupport.show import memory as memory  # with these, `plot` draws ledgers, plans and timings too
from labsupport.show import timings as timings
from labsupport.show.plots import plot, timeline

__all__ = ["BatchPanel", "Panel", "PrecisionPanel", "plot", "timeline"]


def __getattr__(name: str) -> object:
    """Panels need ipywidgets, pictures do not."""
    if name == "BatchPanel":
        from labsupport.show.batch_panel import BatchPanel

        return BatchPanel
    if name == "Panel":
        from labsupport.show.widgets import Panel

        return Panel
    if name == "PrecisionPanel":
        from labsupport.show.precision_panel import PrecisionPanel

        return PrecisionPanel
    raise AttributeError(f"module 'labsupport.show' has no attribute {name!r}; it offers {', '.join(__all__)}")
