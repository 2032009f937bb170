"""Pictures and panels: the only wing that draws. Results never import it: `show.plot(result)`."""

from labsupport.show import memory as memory  # with these, `plot` draws ledgers, plans and timings too
from labsupport.show import timings as timings
from labsupport.show.plots import plot, timeline

__all__ = ["plot", "timeline"]
