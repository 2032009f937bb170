"""Other processes: a lab's whole tree with its memory and its end, and a neighbour that disturbs on purpose."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


class Tree:
    """A process with all its descendants: their memory together, and their end."""

    def __init__(self, process: "subprocess.Popen[str]", mark: str) -> None:
        self.process = process
        self.mark = mark  # the value of IPYTHONDIR, which all that it starts inherits
        self.peak_bytes = 0
        # Every process seen, by (pid, start time): one whose parent died first is still found.
        self.seen: set[psutil.Process] = {psutil.Process(process.pid)}

    def sample(self) -> None:
        self.seen |= self._descendants()
        self.peak_bytes = max(self.peak_bytes, sum(_memory(process) for process in self.seen))

    def _descendants(self) -> set[psutil.Process]:
        found: set[psutil.Process] = set()
        for process in self.seen:
            try:
                found.update(process.children(recursive=True))
            except psutil.Error:
                continue
        return found

    def _orphans(self) -> set[psutil.Process]:
        """Those whose parents are gone, so that no tree leads to them."""
        found = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("IPYTHONDIR") == self.mark:
                    found.add(process)
        return found

    def end(self) -> None:
        """Kill what still lives, until nothing does. Safe to call twice."""
        for _ in range(5):
            self.seen |= self._descendants() | self._orphans()
            alive = [process for process in self.seen if process.is_running()]
            for process in alive:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            _, left = psutil.wait_procs([p for p in alive if p.pid != self.process.pid], timeout=2)
            if not left:
                break
        self.process.wait()


def _memory(process: psutil.Process) -> int:
    """Proportional set size where the system has it: forked loader workers share most of their pages."""
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", full.rss))
    except psutil.Error:
        return 0


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Another process, busy on one core, for as long as this lasts."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()
