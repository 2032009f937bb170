"""Pictures and panels: the only wing that draws. Results never import it: `show.plot(result)`."""

from labsupport.show import timings as timings  # with it, `plot` draws timings too
from labsupport.show.plots import plot, timeline

__all__ = ["plot", "timeline"]
