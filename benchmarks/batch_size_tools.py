"""Finders of a batch size, ours and those people use, on one live model under one emulated budget.

Each finder is called as its documentation says, with its defaults; what it does is counted from outside: a hook on
the model sees every forward pass, and the budget every refusal.
"""

import copy
import gc
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from accelerate.utils import find_executable_batch_size
from workloads import WORKLOADS

from labsupport.measure import MemoryLedger, allocations, memory_budget
from labsupport.train import Workload, find_batch_size, plan_memory
from labsupport.units import parse_bytes

SAMPLES = 32768  # in the data set behind Lightning's loader
STEPS = 3  # of a trial where the finder leaves that to its user; Lightning's default is the same
CPU = torch.device("cpu")


class Live:
    """A workload's model and optimizer as a user has them, and what is done to them."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        made = WORKLOADS[name]
        self.model = made.model()
        self.optimizer = made.optimizer(self.model.parameters())
        self.workload = Workload(name, lambda: self.model, made.batch, made.loss, lambda _: self.optimizer)
        self.made = made
        self.sizes: list[int] = []
        self.refused = 0
        self.model.register_forward_pre_hook(lambda _, args: self._count(args[0]))

    def _count(self, inputs: torch.Tensor) -> None:
        if type(inputs).__name__ != "FakeTensor":  # a plan's traces push no sample
            self.sizes.append(len(inputs))

    def state(self) -> dict[str, Any]:
        model, optimizer = self.model, self.optimizer
        return {
            "parameters": [p.detach().clone() for p in model.parameters()],
            "buffers": [b.clone() for b in model.buffers()],
            "gradients": [p.grad is not None for p in model.parameters()],
            "optimizer": len(optimizer.state),
            "mode": model.training,
            "random": torch.get_rng_state(),
        }

    @contextmanager
    def watched(self):
        """Counts the refusals of budgets."""
        before = allocations.emulated_error

        def counted(*args, **options):
            self.refused += 1
            return before(*args, **options)

        allocations.emulated_error = counted
        try:
            yield
        finally:
            allocations.emulated_error = before

    def step(self, size: int, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
        """So many steps as a plain training loop makes them."""
        for _ in range(steps):
            batch = None
            batch = self.made.batch(size, CPU)
            optimizer.zero_grad()
            self.made.loss(self.model, batch).backward()
            optimizer.step()


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if not _same(before[name], after[name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool((a == b).all()) if isinstance(a, torch.Tensor) else a == b


# The finders: each takes a live workload and a budget in bytes, and returns a size.


def ours(live: Live, budget: int, **options: Any) -> int:
    return find_batch_size(live.workload, budget=budget, knee=False, progress=None, device=CPU, **options).max_batch


class Rows(torch.utils.data.Dataset):
    """The samples in arrays of numpy, which the budget does not count: a data set lies in host memory."""

    def __init__(self, live: Live) -> None:
        self.arrays = [part.numpy() for part in live.made.batch(SAMPLES, CPU)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(each[index : index + 1]))[0] for each in self.arrays]


def lightning(live: Live, budget: int, *, mode: str) -> int:
    import pytorch_lightning as pl
    from pytorch_lightning.tuner import Tuner

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    rows = Rows(live)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = live.model, 2

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return live.made.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return live.made.optimizer(self.model.parameters())

        def train_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)

    module = Module()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet)
    with warnings.catch_warnings(), memory_budget(budget, live.model, device=CPU):
        warnings.simplefilter("ignore")
        return int(Tuner(trainer).scale_batch_size(module, mode=mode))


def accelerate(live: Live, budget: int, *, start: int) -> int:
    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> int:
        optimizer = live.made.optimizer(live.model.parameters())
        live.step(batch_size, optimizer)
        return batch_size

    with memory_budget(budget, live.model, device=CPU):
        return train()


def ultralytics(live: Live, budget: int) -> int:
    """The rule of Ultralytics' AutoBatch, re-stated: forward and backward at 1, 2, 4, 8 and 16 samples, a straight line
    through the peaks of those that run, and the batch at which it reaches 60 % of the memory; 16 if that is below 1 or
    above 1024. (ultralytics/utils/autobatch.py; the package itself would bring much more, under another licence.)"""
    peaks = {}
    for size in (1, 2, 4, 8, 16):
        live.model.zero_grad()
        with suppress(ValueError), MemoryLedger(live.model) as ledger:  # BatchNorm refuses one sample
            live.made.loss(live.model, live.made.batch(size, CPU)).backward()
            peaks[size] = ledger.peak_bytes
    slope, fixed = np.polyfit(list(peaks), list(peaks.values()), deg=1)
    found = int((0.6 * budget - fixed) / slope) if slope > 0 else 0
    return found if 1 <= found <= 1024 else 16


FINDERS: dict[str, Callable[[Live, int], int]] = {
    "find_batch_size": ours,
    "find_batch_size, no plan": lambda live, budget: ours(live, budget, plan=False),
    "Lightning, power": lambda live, budget: lightning(live, budget, mode="power"),
    "Lightning, binsearch": lambda live, budget: lightning(live, budget, mode="binsearch"),
    "Accelerate, from 128": lambda live, budget: accelerate(live, budget, start=128),
    "Accelerate, from 4096": lambda live, budget: accelerate(live, budget, start=4096),
    "Ultralytics' rule": ultralytics,
}


def fits(name: str, size: int, budget: int) -> bool:
    """Whether three steps of a fresh model fit, in a plain loop."""
    live = Live(name)
    try:
        with memory_budget(budget, live.model, live.optimizer, device=CPU):
            live.step(size, live.optimizer)
    except torch.OutOfMemoryError:
        return False
    return True


def true_maximum(name: str, budget: int) -> int:
    """By the plan, and then shown: it trains for three steps, and the next size does not. RuntimeError otherwise."""
    largest = plan_memory(WORKLOADS[name]).max_batch(budget)
    if not fits(name, largest, budget) or fits(name, largest + 1, budget):
        raise RuntimeError(f"{name}: {largest} is not the largest batch of a plain loop in {budget:,} B")
    return largest


def found_by(finder: str, name: str, budget: str) -> dict[str, Any]:
    """What a finder finds on a workload, and what that takes and leaves behind."""
    nbytes, live = parse_bytes(budget), Live(name)
    before = copy.deepcopy(live.state())
    error = ""
    start = time.perf_counter()
    with live.watched():
        try:
            size = FINDERS[finder](live, nbytes)
        except Exception as raised:  # a finder may fail: that is a result
            size, error = 0, f"{type(raised).__name__}: {str(raised).splitlines()[0][:80]}"
    seconds = time.perf_counter() - start
    left = changed(before, live.state())
    tried, pushed = list(live.sizes), sum(live.sizes)
    gc.collect()
    return {
        "found": size,
        "error": error,
        "sizes": len(set(tried)),
        "tested": size in tried,
        "samples": pushed,
        "refused": live.refused,
        "left": left,
        "survives": bool(size) and fits(name, size, nbytes),
        "seconds": round(seconds, 2),
    }
