"""Where autocast was asked for."""

import weakref
from collections.abc import Callable
from typing import Any

from torch.amp.autocast_mode import autocast

from labsupport.diagnose.watching.graphs import Region, Spans
from labsupport.diagnose.watching.patches import Patches


def watch_autocast(patches: Patches) -> Spans:
    """Spans of regions, filled as they are entered. One counts that its code enabled but that disabled itself, as
    autocast("cuda") does without CUDA, if it was made meanwhile."""
    spans = Spans()
    wanted: weakref.WeakSet[autocast] = weakref.WeakSet()

    def init(original: Callable[..., Any], mode: autocast, *args: Any, **kwargs: Any) -> None:
        original(mode, *args, **kwargs)
        if kwargs.get("enabled", args[2] if len(args) > 2 else True):
            wanted.add(mode)

    def enter(original: Callable[..., Any], mode: autocast) -> Any:
        spans.begin(Region(mode.device, mode.fast_dtype) if mode._enabled or mode in wanted else None)
        return original(mode)

    def leave(original: Callable[..., Any], mode: autocast, *error: Any) -> Any:
        spans.end()
        return original(mode, *error)

    for name, around in (("__init__", init), ("__enter__", enter), ("__exit__", leave)):
        patches.put(autocast, name, around)
    return spans
