"""A model in the middle of a training, under an emulated budget: what is tried on it, and what is left of it."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.utils.data import DataLoader, Dataset
from workloads import WORKLOADS, Encoder, named, tokens

from labsupport.measure import MemoryLedger, memory_budget
from labsupport.train import Workload

SAMPLES = 10_000  # in each data set
DISTINCT = 64  # of them
STEPS = 3  # of a trial and of a training: Lightning's default
SUBJECTS = {**WORKLOADS, **named("encoder, 128 tokens", Encoder, tokens(128, 1000))}
CPU = torch.device("cpu")


class Data(Dataset):
    """Samples in host memory, which is none of the budget's; of a loader the batch counts, once."""

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
