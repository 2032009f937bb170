"""The searches for the largest batch, ours and those that people use; the truth; and the plan for large GPUs."""

import copy
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from batch_size_subject import CPU, SAMPLES, STEPS, SUBJECTS, Subject, changed, state_of, train
from torch.utils.data import DataLoader

from labsupport.measure.allocations import CUDA_ROUNDING, emulated_error
from labsupport.train import Recipe, find_batch_size, plan_memory
from labsupport.train.rooms import rooms
from labsupport.train.traces import trace
from labsupport.units import parse_bytes

# The tools: each finds a size, and trains by it.


@dataclass(frozen=True)
class Tool:
    find: Callable[[Subject], int]
    train: Callable[[Subject, int], Any] = train
    module: str = "labsupport"  # imported before the clock runs


def ours(subject: Subject, *, plan: bool) -> int:
    found = find_batch_size(subject.workload, budget=subject.budget, plan=plan, knee=False, device=CPU, progress=None)
    subject.tried += [(trial.size, trial.fits) for trial in found.trials]
    return found.max_batch


def lightning(subject: Subject, size: int, **options: Any) -> tuple[Any, Any]:
    """A trainer and a module of the subject."""
    from pytorch_lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.batch_size = subject.model, size

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return subject.workload.loss(self.inner, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return subject.optimizer

        def train_dataloader(self) -> DataLoader:
            return subject.data.loader(self.batch_size)

    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **silent, **options), Module()


@contextmanager
def quiet() -> Iterator[str]:
    """Without Lightning's messages; a folder for its checkpoint."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
        yield folder


def lightning_tuner(subject: Subject, *, mode: str) -> int:
    """Its defaults: 3 steps a trial, 25 trials, from 2 to 8192 samples, and binsearch takes 5 % off. The budget is
    around each of its trials, not around the reading of its checkpoint, which a GPU's memory does not see."""
    from pytorch_lightning.tuner import Tuner

    with quiet() as folder:
        trainer, module = lightning(subject, 2, default_root_dir=folder)
        run = trainer.fit_loop.run

        def counted() -> None:
            with subject.trial(module.batch_size):
                run()

        trainer.fit_loop.run = counted
        return Tuner(trainer).scale_batch_size(module, mode=mode)


def lightning_trains(subject: Subject, size: int) -> None:
    with quiet() as folder:
        trainer, module = lightning(subject, size, default_root_dir=folder, max_steps=STEPS)
        trainer.fit(module)


def accelerate(subject: Subject, *, start: int) -> int:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=start)
    def training(batch_size: int, subject: Subject) -> int:
        with subject.trial(batch_size):
            train(subject, batch_size)
        return batch_size

    return training(subject)


AUTOBATCH_SIZES, AUTOBATCH_SHARE, AUTOBATCH_MOST, AUTOBATCH_ELSE = (1, 2, 4, 8, 16), 0.6, 1024, 16


def autobatch(subject: Subject) -> int:
    """Ultralytics' rule in our own words, as `ultralytics/utils/autobatch.py` had it in 8.3.

    Forward and backward of a copy, without an optimizer, at five sizes; a straight line through the logarithms of size
    and peak; the size at which it reaches 60 % of what is free: the total less what is reserved and what is allocated,
    so the model counts twice. Not above a size that ran out of memory. What lies outside 1 to 1024 becomes 16. A size
    that is refused for another reason (BatchNorm's single sample) is left out here; there it counts as run out.
    """
    model = copy.deepcopy(subject.model).train()
    resident = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    peaks: dict[int, int] = {}
    for size in AUTOBATCH_SIZES:
        batch = subject.data.__getitems__(list(range(size)))
        try:
            with subject.trial(size, model) as ledger:
                subject.workload.loss(model, batch).backward()
            peaks[size] = ledger.peak_bytes
        except (torch.OutOfMemoryError, ValueError):
            continue
    rising = [size for size in peaks if peaks[size] > max((peaks[n] for n in peaks if n < size), default=0)]
    free = AUTOBATCH_SHARE * (parse_bytes(subject.budget) - 2 * resident)
    return power_law(rising, [peaks[size] for size in rising], free, [n for n, fits in subject.tried if not fits])


def power_law(sizes: list[int], peaks: list[int], free: float, failed: list[int]) -> int:
    if len(sizes) < 2 or free <= 0:
        return AUTOBATCH_ELSE
    slope, offset = np.polyfit(np.log(sizes), np.log(peaks), 1)
    with np.errstate(over="ignore"):
        found = float(np.exp((np.log(free) - offset) / slope))
    above = [size for size in failed if size > max(sizes)]
    if above and found >= min(above):
        return max(sizes)
    return round(found) if 0.5 < found <= AUTOBATCH_MOST else AUTOBATCH_ELSE


OURS = ("find_batch_size", "find_batch_size, no plan")
TOOLS = {
    OURS[0]: Tool(partial(ours, plan=True)),
    OURS[1]: Tool(partial(ours, plan=False)),
    "Lightning power": Tool(partial(lightning_tuner, mode="power"), lightning_trains, "pytorch_lightning.tuner"),
    "Lightning binsearch": Tool(
        partial(lightning_tuner, mode="binsearch"), lightning_trains, "pytorch_lightning.tuner"
    ),
    "Accelerate from 128": Tool(partial(accelerate, start=128), module="accelerate.utils"),
    "Accelerate from 1024": Tool(partial(accelerate, start=1024), module="accelerate.utils"),
    "AutoBatch's rule": Tool(autobatch),
}


# The cells.


def search(name: str, budget: str, tool: str) -> dict[str, Any]:
    """What a tool finds, at what cost, and whether that trains."""
    import_module(TOOLS[tool].module)
    subject = Subject(name, budget)
    before = state_of(subject)
    with patch("labsupport.measure.allocations.emulated_error", wraps=emulated_error) as errors:
        start = time.perf_counter()
        found = TOOLS[tool].find(subject)
        seconds = time.perf_counter() - start
    return {
        "found": found,
        "trials": subject.tried,
        "out_of_memory": errors.call_count,
        "samples": subject.samples,
        "took_s": round(seconds, 3),
        "changed": changed(before, state_of(subject)),
        "trains": trains(name, budget, found, TOOLS[tool].train),
    }


def trains(name: str, budget: str, size: int, by: Callable[[Subject, int], Any] = train) -> bool:
    """Whether some steps of a fresh build fit."""
    subject = Subject(name, budget)
    try:
        with subject.trial(size):
            by(subject, size)
    except torch.OutOfMemoryError:
        return False
    return True


def truth(name: str, budget: str) -> dict[str, Any]:
    """The largest batch: what the plan says and the data set allows, if real steps agree."""
    planned = plan_memory(SUBJECTS[name]).max_batch(parse_bytes(budget))
    largest = min(planned, SAMPLES)
    two_steps = partial(train, steps=2)
    fits = trains(name, budget, largest, two_steps)
    if not fits or (planned < SAMPLES and trains(name, budget, planned + 1, two_steps)):
        raise RuntimeError(f"{name}, {budget}: the plan says {planned}, but real steps do not agree")
    return {"planned": planned, "largest": largest}


def on_card(name: str, card: str) -> dict[str, Any]:
    """The largest batch on an accelerator that is not here, by the plan; and fresh traces of that very size and of one
    more, on fake tensors: they say whether the plan's lines still hold there."""
    start = time.perf_counter()
    plan = plan_memory(SUBJECTS[name], target="cuda")
    built = time.perf_counter()
    room = rooms()[card]
    largest = plan.max_batch(room)
    asked = time.perf_counter()
    sizes = (largest, largest + 1)
    return {
        "room": room,
        "largest": largest,
        "planned": [plan.peak_bytes(size) for size in sizes],
        "traced": [traced(name, size) for size in sizes],
        "build_s": round(built - start, 3),
        "asked_us": round(1e6 * (asked - built), 1),
    }


def traced(name: str, size: int) -> int:
    """The peak of a step of that size on a GPU, whose allocator rounds each size up."""
    changes = trace(SUBJECTS[name], Recipe(batch_size=size), "cuda").changes
    rounded = np.sign(changes) * (-(-np.abs(changes) // CUDA_ROUNDING) * CUDA_ROUNDING)
    return int(rounded.cumsum().max())
