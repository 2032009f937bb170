"""What dynamo compiles while steps run."""

import sys
from typing import Any

from labsupport.measure.storages import OURS, source_line

RESUMED = "torch_dynamo_resume_in_"  # how dynamo names the code behind a graph break


class Compilations:
    """`count`: code objects compiled, `breaks`: source lines of graph breaks, `again`: (call, why) of code that had to
    be compiled again."""

    def __init__(self) -> None:
        self.count = 0
        self.breaks: list[str] = []
        self.again: list[tuple[int, str]] = []
        self._known = _metrics()

    def see(self, call: int) -> None:
        """Look now: dynamo keeps the last few dozen only."""
        known = {id(each) for each in self._known}
        new = [each for each in _metrics() if id(each) not in known]
        self._known += new
        for each in new:
            if each.co_name is None:  # of a backward
                continue
            self.count += 1
            if each.recompile_reason:
                self.again.append((call, f"{each.co_name}: {each.recompile_reason.splitlines()[0]}"))
            elif each.co_name.startswith(RESUMED) and not each.co_filename.startswith(OURS):
                self.breaks.append(source_line(each.co_filename, each.co_firstlineno))


def _metrics() -> list[Any]:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return list(dynamo.get_compilation_metrics()) if dynamo else []
