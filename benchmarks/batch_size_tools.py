"""The searches for the largest batch, ours and those that people use, on live models in the middle of a training."""

import copy
import itertools
import logging
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.utils.data import DataLoader, Dataset
from workloads import WORKLOADS, Encoder, named, tokens

from labsupport.measure import MemoryLedger, memory_budget
from labsupport.measure.allocations import emulated_error
from labsupport.train import Recipe, Workload, find_batch_size, plan_memory
from labsupport.train.rooms import rooms
from labsupport.train.traces import trace
from labsupport.units import parse_bytes

SAMPLES = 10_000  # in each data set
DISTINCT = 64  # of them
STEPS = 3  # of a trial and of a training: Lightning's default
SUBJECTS = {**WORKLOADS, **named("encoder, 128 tokens", Encoder, tokens(128, 1000))}
CPU = torch.device("cpu")


class Data(Dataset):
    """Batches in host memory, which is none of the budget's: a loader's batch counts from its first use on."""

    def __init__(self, workload: Workload) -> None:
        self.arrays = [each.numpy() for each in workload.batch(DISTINCT, CPU)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        rows = np.asarray(indices) % DISTINCT
        return [torch.from_numpy(each[rows]) for each in self.arrays]

    def loader(self, size: int) -> DataLoader:
        return DataLoader(self, batch_size=size, collate_fn=tuple)


class Subject:
    """A model and its optimizer after one step, so that they have gradients and a state to lose, under a budget.
    Counts trials, and samples that enter the model's forward, also those that never leave it."""

    def __init__(self, name: str, budget: str) -> None:
        torch.manual_seed(0)
        workload = SUBJECTS[name]
        self.model, self.budget = workload.model(), budget
        self.optimizer = workload.optimizer(self.model.parameters())
        self.data = Data(workload)
        self.workload = replace(workload, model=lambda: self.model, optimizer=lambda _: self.optimizer, samples=SAMPLES)
        train(self, 2, steps=1)
        self.tried: list[tuple[int, bool]] = []
        self.samples = 0

        def count(_: Any, inputs: Any) -> None:  # no method: a copy of the model has to count here too
            self.samples += 0 if isinstance(inputs[0], FakeTensor) else len(inputs[0])

        self.model.register_forward_pre_hook(count)

    @contextmanager
    def trial(self, size: int, model: torch.nn.Module | None = None) -> Iterator[MemoryLedger]:
        """One size under the budget, by a search that is not ours; its errors are raised on."""
        things = (self.model, self.optimizer) if model is None else (model,)
        fits = False
        try:
            with memory_budget(self.budget, *things, device=CPU) as ledger:
                yield ledger
            fits = True
        finally:
            self.tried.append((size, fits))


def train(subject: Subject, size: int, *, steps: int = STEPS) -> None:
    """The plain loop."""
    epochs = itertools.chain.from_iterable(itertools.repeat(subject.data.loader(size)))
    for batch in itertools.islice(epochs, steps):
        subject.optimizer.zero_grad()
        subject.workload.loss(subject.model, batch).backward()
        subject.optimizer.step()


# The tools: each finds a size, and trains by it.


@dataclass(frozen=True)
class Tool:
    find: Callable[[Subject], int]
    train: Callable[[Subject, int], Any] = train
    module: str = "labsupport"  # imported before the clock runs


def ours(subject: Subject, *, plan: bool) -> int:
    found = find_batch_size(
        subject.workload, budget=subject.budget, plan=plan, knee=False, device=CPU, progress=None
    )
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
BINSEARCH = "Lightning binsearch"
TOOLS = {
    OURS[0]: Tool(partial(ours, plan=True)),
    OURS[1]: Tool(partial(ours, plan=False)),
    "Lightning power": Tool(partial(lightning_tuner, mode="power"), lightning_trains, "pytorch_lightning.tuner"),
    BINSEARCH: Tool(partial(lightning_tuner, mode="binsearch"), lightning_trains, "pytorch_lightning.tuner"),
    "Accelerate from 128": Tool(partial(accelerate, start=128), module="accelerate.utils"),
    "Accelerate from 1024": Tool(partial(accelerate, start=1024), module="accelerate.utils"),
    "AutoBatch's rule": Tool(autobatch),
}


# What they leave behind.


def state_of(subject: Subject) -> dict[str, Any]:
    """All that a search may change, by kind; copies."""
    model, state = subject.model, subject.optimizer.state_dict()
    return {
        "parameters": copied(dict(model.named_parameters())),
        "buffers": copied(dict(model.named_buffers())),
        "optimizer state": copied(state["state"]),
        "optimizer options": copied(state["param_groups"]),
        "gradients": copied({name: p.grad for name, p in model.named_parameters()}),
        "modes": {name: part.training for name, part in model.named_modules()},
        "random state": copied([torch.get_rng_state(), list(np.random.get_state()), list(random.getstate())]),
    }


def copied(thing: Any) -> Any:
    """With tensors as bytes: equal means bit-identical."""
    if isinstance(thing, dict):
        return {key: copied(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [copied(each) for each in thing]
    if isinstance(thing, torch.Tensor):
        thing = thing.detach().numpy()
    if isinstance(thing, np.ndarray):
        return str(thing.dtype), thing.shape, thing.tobytes()
    return thing


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [kind for kind in before if before[kind] != after[kind]]


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
    fits, one_more = trains(name, budget, largest, two_steps), trains(name, budget, planned + 1, two_steps)
    if not fits or one_more:
        raise RuntimeError(f"{name}, {budget}: the plan says {planned}, but real steps do not agree")
    return {"planned": planned, "largest": largest}


def cards(name: str, shown: tuple[str, ...]) -> dict[str, Any]:
    """The largest batch on accelerators that are not here, by the plan; and fresh traces of that very size and of one
    more, on fake tensors: they say whether the plan's lines still hold there."""
    start = time.perf_counter()
    plan = plan_memory(SUBJECTS[name], target="cuda")
    build_s, rows = time.perf_counter() - start, []
    for card in shown:
        room = rooms()[card]
        start = time.perf_counter()
        largest = plan.max_batch(room)
        asked_s = time.perf_counter() - start
        traced = [
            int(trace(SUBJECTS[name], Recipe(batch_size=n), "cuda").changes.cumsum().max())
            for n in (largest, largest + 1)
        ]
        planned = [plan.peak_bytes(n) for n in (largest, largest + 1)]
        rows.append({"card": card, "room": room, "largest": largest, "traced": traced, "planned": planned})
        rows[-1]["asked_us"] = round(1e6 * asked_s, 1)
    return {"build_s": round(build_s, 3), "rows": rows}
