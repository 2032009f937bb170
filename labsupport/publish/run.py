"""Runs labs: a worker process each, watched from outside, with everything it started ended when it ends."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labsupport.publish.catalogue import Book, UsageError
from labsupport.publish.processes import Tree
from labsupport.publish.records import METADATA_KEY, Record, records_in

# A worker that does not end by itself this long after its lab's limit is ended from outside.
GRACE_S = 30.0
# Reading the memory of a process tree takes its kernel locks: rare enough not to disturb what a lab times.
SAMPLE_EVERY_S = 1.0
# A lab this close to its limit counts as failed: the next machine would lose it (nbclient#312).
NEAR_LIMIT = 0.95


@dataclass(frozen=True, kw_only=True)
class Run:
    """How one lab's run ended, and what it recorded. Kept as JSON beside the executed copy."""

    lab: str
    status: str  # ok, error, timeout, died, stopped
    seconds: float
    peak_bytes: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    records: Mapping[str, Record] = field(default_factory=dict)
    cell: int | None = None  # its number in brackets: In [3]
    error: str | None = None

    @property
    def family(self) -> str:
        """The machine family it ran on; "" where it ended before it knew."""
        return str(self.machine.get("family", ""))

    @property
    def profile(self) -> str:
        return str(self.machine.get("profile", ""))

    @property
    def torch_minor(self) -> str:
        return ".".join(str(self.machine.get("torch", "")).split(".")[:2])

    def to_json(self) -> str:
        found = asdict(self) | {"records": {name: record.to_dict() for name, record in self.records.items()}}
        return json.dumps(found, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Raises UsageError, naming the file, when it is not a run's."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            found["records"] = {name: Record.from_dict(record) for name, record in found["records"].items()}
            return cls(**found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not the record of a run ({error}): run the lab again") from error


def executed_copy(book: Book, build: Path) -> Path:
    return build / book.path.name


def result_file(book: Book, build: Path) -> Path:
    return build / f"{book.path.stem}.json"


def run_labs(
    books: list[Book],
    build: Path,
    *,
    profile: str = "auto",
    jobs: int = 1,
    timeout_s: float = 600,
    parameters: Mapping[str, Any] | None = None,
    on_cell: Callable[[Book, int, int], None] = lambda book, cell, of: None,
) -> Iterator[tuple[Book, Run]]:
    """Execute each lab into `build`, yielding its `Run` as it ends; one that fails does not stop the others.

    Labs that time something run alone; the others in up to `jobs` processes of one thread each, because two torch
    processes with two threads each on two cores are several times slower than with one. Interrupted, it ends what
    is running, keeps what ran, and lets KeyboardInterrupt pass. Raises UsageError if `build` cannot be written.
    """
    _check_writable(build)
    watch = Watch(build, profile, timeout_s, dict(parameters or {}), on_cell)
    together = [book for book in books if not book.timing]
    alone = [book for book in books if book.timing]
    for group, workers in ((together, jobs), (alone, 1)):
        with ThreadPoolExecutor(max_workers=workers) as pool:
            try:
                futures = {pool.submit(watch.run, book): book for book in group}
                yield from ((futures[done], done.result()) for done in as_completed(futures))
            except BaseException:
                watch.stop()
                pool.shutdown(cancel_futures=True)
                raise


class Watch:
    """Supervises workers: their progress, their memory, their limit, and their end."""

    def __init__(
        self,
        build: Path,
        profile: str,
        timeout_s: float,
        parameters: dict[str, Any],
        on_cell: Callable[[Book, int, int], None],
    ) -> None:
        self.build, self.profile, self.timeout_s = build, profile, timeout_s
        self.parameters, self.on_cell = parameters, on_cell
        self.stopping = threading.Event()

    def stop(self) -> None:
        """End every worker, with all that it started."""
        self.stopping.set()

    def run(self, book: Book) -> Run:
        copy = executed_copy(book, self.build)
        for old in (copy, copy.with_suffix(".html"), result_file(book, self.build)):
            old.unlink(missing_ok=True)
        started = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="labs-") as scratch,
            self._worker(book, copy, scratch) as tree,
        ):
            outcome = self._follow(book, tree, started + self.timeout_s + GRACE_S)
        run = self._gather(book, copy, outcome, time.monotonic() - started, tree.peak_bytes)
        try:
            write_whole(result_file(book, self.build), run.to_json())
        except OSError as error:
            raise _unwritable(self.build, error) from error
        return run

    @contextmanager
    def _worker(self, book: Book, copy: Path, scratch: str) -> Iterator[Tree]:
        job = {
            "notebook": str(book.path),
            "output": str(copy),
            "parameters": self.parameters,
            "timeout_s": self.timeout_s,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "labsupport.publish.worker", json.dumps(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment(book, scratch),
            # Ctrl-C in the terminal reaches us alone; we end the worker, and say what was kept.
            start_new_session=True,
        )
        tree = Tree(process, scratch)
        try:
            yield tree
        finally:
            tree.end()

    def _environment(self, book: Book, scratch: str) -> dict[str, str]:
        """The caller's environment, less what would make one run differ from the next."""
        env = dict(os.environ)
        # A kernel called python3 from JUPYTER_PATH or the home folder would win over this environment's own.
        env.pop("JUPYTER_PATH", None)
        env |= {
            "JUPYTER_PREFER_ENV_PATH": "1",
            "IPYTHONDIR": scratch,
            "LABS_RUN": "1",
            "LABS_PROFILE": self.profile,
        }
        # The notebooks import the package that runs them, wherever the command was started.
        source = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH")]))
        env["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
        return env if book.timing else env | {"OMP_NUM_THREADS": "1"}

    def _follow(self, book: Book, tree: Tree, deadline: float) -> dict[str, Any]:
        """Read the worker's messages until it ends, or has to be ended."""
        messages: list[dict[str, Any]] = []
        reader = threading.Thread(target=self._read, args=(book, tree.process, messages), daemon=True)
        complaints: list[str] = []
        errors = threading.Thread(target=lambda: complaints.extend(tree.process.stderr or ()), daemon=True)
        reader.start()
        errors.start()
        sampled = 0.0
        while tree.process.poll() is None and time.monotonic() < deadline and not self.stopping.wait(0.1):
            if time.monotonic() - sampled >= SAMPLE_EVERY_S:
                tree.sample()
                sampled = time.monotonic()
        ended = tree.process.poll()
        tree.end()
        reader.join(5)
        errors.join(5)
        last = next((m["cell"] for m in reversed(messages) if "cell" in m), None)
        if self.stopping.is_set() and ended is None:
            return {"status": "stopped", "cell": last, "error": "interrupted"}
        if ended is None:
            return {
                "status": "timeout",
                "cell": last,
                "error": f"not finished after {self.timeout_s:g} s, and killed",
            }
        outcome = next((m["outcome"] for m in messages if "outcome" in m), None)
        detail = complaints[-1].strip() if complaints else f"exit status {ended}"
        return outcome or {"status": "died", "cell": last, "error": f"the worker ended early: {detail}"}

    def _read(self, book: Book, process: "subprocess.Popen[str]", messages: list[dict[str, Any]]) -> None:
        for line in process.stdout or ():
            try:
                message = json.loads(line)
            except ValueError:
                continue  # a library's stray print is not ours
            messages.append(message)
            if "of" in message:
                self.on_cell(book, message["done"], message["of"])

    def _gather(self, book: Book, copy: Path, outcome: dict[str, Any], seconds: float, peak_bytes: int) -> Run:
        machine: Mapping[str, Any] = {}
        records: dict[str, Record] = {}
        try:
            cells = json.loads(copy.read_text(encoding="utf-8"))["cells"]
        except (OSError, ValueError):
            cells = []  # ended before its copy was whole
        for cell in cells:
            outputs = cell.get("outputs", [])
            records |= {record.name: record for record in records_in(outputs)}
            banners = (output.get("metadata", {}).get(METADATA_KEY, {}) for output in outputs)
            machine = next((banner["machine"] for banner in banners if "machine" in banner), machine)
        if outcome["status"] == "ok" and seconds > NEAR_LIMIT * self.timeout_s:
            near = f"took {seconds:.0f} s of the {self.timeout_s:g} s allowed: too near the limit (--timeout)"
            outcome = {"status": "timeout", "cell": None, "error": near}
        return Run(
            lab=book.id,
            seconds=round(seconds, 1),
            peak_bytes=peak_bytes,
            parameters=self.parameters,
            machine=machine,
            records=records,
            **outcome,
        )


def write_whole(path: Path, text: str) -> None:
    """Write beside, then rename: a reader sees the old file or the new one, never half of one."""
    beside = path.with_name(path.name + ".new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _check_writable(build: Path) -> None:
    try:
        build.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=build):
            pass
    except OSError as error:
        raise _unwritable(build, error) from error


def _unwritable(build: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write to {build} ({error.strerror}): name another folder with --build")
