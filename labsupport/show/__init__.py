"""Pictures and panels: the only wing that draws. Results never import it: `show.plot(result)`."""

from labsupport.show.plots import plot, timeline

__all__ = ["plot", "timeline"]
