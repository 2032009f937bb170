"""find_batch_size: exact under a budget, in few trials, and nothing is left behind."""

import contextlib
import copy
import gc
import random
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from workloads import OPTIMIZERS, WORKLOADS

from labsupport.measure import MemoryLedger, memory_budget
from labsupport.train import Recipe, Workload, find_batch_size
from labsupport.train import trials as trials_module
from labsupport.train.search import Trial


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("LABS_PROFILE", "cpu")
    monkeypatch.setattr("labsupport.train.batch_size.KNEE_S", 0.2)


def find(*args, **options):
    return find_batch_size(*args, **{"progress": None, "knee": False, **options})


def mlp(*, live=True, samples=None, optimizer="AdamW", width=64):
    """A workload around live objects, as a user in the middle of a training has them."""
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * width, 10))
    made = OPTIMIZERS[optimizer](model.parameters())
    return Workload(
        "MLP",
        (lambda: model) if live else (lambda: copy.deepcopy(model)),
        lambda n, device: (torch.randn(n, width), torch.randint(10, (n,))),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        (lambda _: made) if live else OPTIMIZERS[optimizer],
        samples,
    )


def trains(workload, size, budget, *, steps=3):
    """Whether so many steps of a fresh copy fit, in a plain loop."""
    model = copy.deepcopy(workload.model())
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        with memory_budget(budget, model, optimizer):
            for _ in range(steps):
                batch = None
                batch = workload.batch(size, torch.device("cpu"))
                optimizer.zero_grad()
                workload.loss(model, batch).backward()
                optimizer.step()
    except torch.OutOfMemoryError:
        return False
    return True


# Exact, in few trials.

BUDGETS = {
    "MLP, AdamW": "16MiB",
    "CNN, momentum": "32MiB",
    "ResNet-18, 32 px, SGD": "120MiB",
    "encoder, AdamW": "40MiB",
    "embedding, SGD": "80MiB",
}


@pytest.mark.parametrize("name", BUDGETS)
def test_exact_in_two_trials_with_a_plan_and_six_without(name):
    planned = find(WORKLOADS[name], budget=BUDGETS[name])
    assert planned.stopped_by == "memory" and len(planned.trials) == 2
    searched = find(WORKLOADS[name], budget=BUDGETS[name], plan=False)
    assert searched.max_batch == planned.max_batch and searched.stopped_by == "memory"
    assert len(searched.trials) <= 6
    for found in (planned, searched):
        tried = {trial.size: trial.fits for trial in found.trials}
        assert tried[found.max_batch] and not tried[found.max_batch + 1]


def test_the_largest_trains_in_a_plain_loop_and_the_next_does_not():
    workload = mlp()
    found = find(workload, budget="2MiB")
    assert trains(workload, found.max_batch, "2MiB") and not trains(workload, found.max_batch + 1, "2MiB")


def test_recipe_counts():
    workload = WORKLOADS["encoder, SGD"]
    sizes = [
        find(workload, budget="40MiB", recipe=recipe).max_batch
        for recipe in (Recipe(), Recipe(checkpointing=True), Recipe(checkpointing=True, batch_size=7))
    ]
    assert sizes[0] < sizes[1] == sizes[2]


def test_live_gradients_are_lent():
    """What zero_grad frees at the start of a step is no memory that the batch lacks."""
    workload = mlp()
    fresh = find(workload, budget="1MiB").max_batch
    workload.loss(workload.model(), workload.batch(4, None)).backward()
    assert find(workload, budget="1MiB").max_batch == fresh


# What users of other finders reported.


def test_all_sizes_fit_within_the_limit_of_trials():
    found = find(mlp(), budget="4GiB", plan=False, max_trials=2)
    assert (found.max_batch, found.stopped_by) == (8, "trial limit")
    assert found.max_batch in [trial.size for trial in found.trials if trial.fits]


@pytest.mark.parametrize("plan", [True, False])
def test_the_first_size_already_fails(plan):
    with pytest.raises(
        torch.OutOfMemoryError, match="not even 1 sample fits in 4.88 KiB. Parameters, buffers.* take 37.5 KiB"
    ) as caught:
        find(mlp(), budget=5000, plan=plan)
    assert caught.value.limit_bytes == 5000
    assert [trial.fits for trial in caught.value.trials] == [False] * len(caught.value.trials)


def test_what_is_in_the_way_is_told():
    with pytest.raises(
        torch.OutOfMemoryError, match="Live when memory ran out: parameter 37.5 KiB, gradient"
    ) as caught:
        find(mlp(), budget="80KiB")
    assert caught.value.ledger.log.refused is not None


def test_one_sample_that_is_refused_is_no_error_of_its_own():
    workload = WORKLOADS["CNN, SGD"]  # BatchNorm at the end of which one value a channel would be left
    normed = Workload(
        "normed",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.BatchNorm1d(64), nn.Linear(64, 10)),
        workload.batch,
        workload.loss,
        workload.optimizer,
    )
    with pytest.raises(torch.OutOfMemoryError, match="not even 2 samples fit.*a smaller one is refused: Expected more"):
        find(normed, budget="800KiB")


class Broken(Exception):
    pass


def own_step(*, fails_at=None, error=None, where="loss", limit=None):
    """A step of a user's own, with live objects, that raises `error` from some size on."""
    model = nn.Linear(32, 32)
    optimizer = torch.optim.Adam(model.parameters())

    def check(place, size):
        if error is not None and place == where and size >= fails_at:
            raise error

    def step(batch_size):
        check("loader", batch_size)
        inputs = torch.randn(batch_size, 32)
        optimizer.zero_grad()
        out = model(inputs)
        out.register_hook(lambda grad: check("backward", batch_size))
        check("loss", batch_size)
        out.square().mean().backward()
        handle = optimizer.register_step_pre_hook(lambda *_: check("optimizer", batch_size))
        try:
            optimizer.step()
        finally:
            handle.remove()
        with torch.no_grad():
            check("validation", batch_size)
            model(inputs)

    step.model, step.optimizer = model, optimizer
    return step


PLACES = ("loader", "loss", "backward", "optimizer", "validation")


@pytest.mark.parametrize("where", PLACES)
def test_memory_that_runs_out_anywhere_in_the_step_counts(where):
    step = own_step(fails_at=40, error=torch.OutOfMemoryError("CUDA out of memory."), where=where)
    found = find(step=step, budget="1GiB")
    assert (found.max_batch, found.stopped_by) == (39, "memory")
    assert not step.optimizer.state and step.model.weight.grad is None


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "error",
    [
        Broken("mine"),
        RuntimeError("CUDA error: invalid configuration argument"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
    ids=lambda error: str(error)[-20:],
)
def test_any_other_error_at_a_large_size_is_raised_with_what_was_found(where, error):
    step = own_step(fails_at=100, error=error, where=where)
    before = step.model.weight.clone()
    with pytest.raises(type(error), match=str(error)[-12:]) as caught:
        find(step=step, budget="4MiB")
    told = " ".join(caught.value.__notes__)
    assert "8 samples (a first probe): fits" in told and "no error of memory" in told
    assert torch.equal(step.model.weight, before) and not step.optimizer.state


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory.",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_every_message_of_memory_counts(message):
    """C20: tools that know some of the messages stop at the others."""
    found = find(step=own_step(fails_at=20, error=RuntimeError(message)), budget="1GiB")
    assert found.max_batch == 19


def test_a_data_set_smaller_than_the_batch():
    found = find(mlp(samples=50), budget="1GiB")
    assert (found.max_batch, found.stopped_by) == (50, "samples")
    assert find(mlp(samples=1), budget="1GiB").max_batch == 1
    assert find(mlp(samples=50), budget="1GiB", max_batch=20).stopped_by == "max_batch"


def test_a_cost_that_does_not_rise_with_the_batch():
    model = nn.Linear(8, 8)
    inputs = torch.ones(4, 8)

    def step(batch_size):  # the batch size is not used
        model(inputs).sum().backward()

    found = find(step=step, budget="1MiB")
    assert found.stopped_by == "memory does not rise" and found.max_batch in [trial.size for trial in found.trials]
    assert find(step=step, budget="1MiB", max_batch=333).max_batch == 333


def test_a_maximum_of_one_step_does_not_survive_the_second():
    """Adam makes its state in the first step: what one step takes is no measure."""
    workload = mlp()
    parameters = sum(p.nbytes for p in workload.model().parameters())
    budget = 8 * parameters
    found = find(workload, budget=budget, plan=False)

    def one_step(size):
        model = copy.deepcopy(workload.model())
        try:
            with memory_budget(budget, model):
                workload.loss(model, workload.batch(size, None)).backward()
        except torch.OutOfMemoryError:
            return False
        return True

    assert one_step(found.max_batch + 1)
    assert trains(workload, found.max_batch, budget) and not trains(workload, found.max_batch + 1, budget)


@pytest.mark.parametrize("plan", [True, False])
def test_a_multiple(plan):
    exact = find(mlp(), budget="2MiB").max_batch
    found = find(mlp(), budget="2MiB", multiple_of=64, plan=plan)
    assert found.max_batch == exact // 64 * 64
    assert {trial.size for trial in found.trials if not trial.fits} >= {found.max_batch + 64}


def test_c16_a_trainer_whose_steps_are_used_up():
    """C16: a trial that runs no step 'fits' at any size."""

    class Trainer:
        def __init__(self, restorable):
            self.model = nn.Linear(4, 4)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.done, self.restorable = 0, restorable

        def fit(self, batch_size, max_steps=6):
            if self.done < max_steps:
                if batch_size > 48:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                self.model(torch.ones(batch_size, 4)).sum().backward()
                self.optimizer.step()
                self.done += 1

    class Restorable(Trainer):
        def state_dict(self):
            return {"done": self.done}

        def load_state_dict(self, state):
            self.done = state["done"]

    trainer = Restorable(True)
    assert find(step=lambda batch_size: trainer.fit(batch_size), budget="1GiB").max_batch == 48
    assert trainer.done == 0
    forgetful = Trainer(False)
    with pytest.raises(RuntimeError, match="made 0 optimizer steps: a trial that does not train proves nothing"):
        find(step=lambda batch_size: forgetful.fit(batch_size), budget="1GiB")


def test_c19_the_worst_batch_is_the_callers():
    """C19: attention's scores rise with the square of the length: the mean length says nothing."""
    found = {}
    for length in (48, 512):
        attention = nn.MultiheadAttention(32, 2, batch_first=True)

        def loss(model, batch):
            return model(batch, batch, batch, need_weights=True)[0].square().mean()

        workload = Workload(
            f"length {length}",
            lambda attention=attention: attention,
            lambda n, device, length=length: torch.randn(n, length, 32),
            loss,
            OPTIMIZERS["SGD"],
        )
        found[length] = find(workload, budget="64MiB").max_batch
    assert found[48] > 40 * found[512] >= 40


def test_a_step_that_swallows_the_error_does_not_fit():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch_size):
        with contextlib.suppress(RuntimeError):  # "skip the batches that do not fit"
            model(torch.ones(batch_size, 64)).sum().backward()
        optimizer.step()

    assert find(step=step, budget="1MiB", max_batch=1_000_000).stopped_by == "memory"


# Steps of people's own.


def test_two_models_and_two_optimizers():
    maker, judge = nn.Linear(16, 64), nn.Linear(64, 1)
    optimizers = [torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())]

    def step(batch_size):
        for optimizer in optimizers:
            optimizer.zero_grad()
            judge(maker(torch.randn(batch_size, 16))).mean().backward()
            optimizer.step()

    before = [maker.weight.clone(), judge.weight.clone()]
    found = find(step=step, budget="256KiB")
    assert found.stopped_by == "memory" and len(found.trials) <= 6
    assert torch.equal(maker.weight, before[0]) and torch.equal(judge.weight, before[1])
    assert not any(optimizer.state for optimizer in optimizers)


def test_a_scaler_that_skips_its_first_steps():
    """The optimizer has no state before the scale has fallen far enough."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    def step(batch_size):
        optimizer.zero_grad()
        loss = model(torch.randn(batch_size, 64)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    scale = scaler.get_scale()
    found = find(step=step, budget="256KiB")
    assert found.stopped_by == "memory" and scaler.get_scale() == scale

    def peak(size):
        plain, own = nn.Linear(64, 64), None
        own = torch.optim.Adam(plain.parameters())
        with MemoryLedger(plain, own) as ledger:
            for _ in range(2):
                own.zero_grad()
                plain(torch.randn(size, 64)).square().mean().backward()
                own.step()
        return ledger.peak_bytes

    assert peak(found.max_batch) <= 256 * 1024 + 64 and peak(found.max_batch + 1) > 256 * 1024 - 64


def test_adapters_beside_frozen_weights():
    frozen, down, up = nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 4), nn.Linear(4, 64)
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()])

    def step(batch_size):
        inputs = torch.randn(batch_size, 64)
        (frozen(inputs) + up(down(inputs))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = find(step=step, budget="512KiB")
    assert found.stopped_by == "memory" and frozen.weight.grad is None and down.weight.grad is None


# Nothing is left behind.


def state_of(workload):
    model, optimizer = workload.model(), workload.optimizer(None)
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "pointers": [p.data_ptr() for p in model.parameters()],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "modes": [module.training for module in model.modules()],
        "random": (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()),
    }


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor | np.ndarray):
        return bool((a == b).all())
    return a == b


def trained(workload, steps):
    torch.manual_seed(1)
    model, optimizer = workload.model(), workload.optimizer(None)
    for _ in range(steps):
        optimizer.zero_grad()
        workload.loss(model, workload.batch(8, None)).backward()
        optimizer.step()


def searches():
    def succeeds(workload):
        find(workload, budget="2MiB", knee=True)

    def runs_out(workload):
        with pytest.raises(torch.OutOfMemoryError):
            find(workload, budget=100)

    def fails(workload):
        def broken(model, batch):
            model.eval()
            if len(batch[0]) > 2:
                raise Broken
            return model(batch[0]).sum()

        with pytest.raises(Broken):
            find(
                Workload("broken", workload.model, workload.batch, broken, workload.optimizer),
                budget="2MiB",
                plan=False,
            )

    return [succeeds, runs_out, fails]


@pytest.mark.parametrize("search", searches(), ids=lambda each: each.__name__)
@pytest.mark.parametrize("steps", [0, 3], ids=["new", "trained"])
def test_live_objects_are_as_before(search, steps):
    workload = mlp()
    trained(workload, steps)
    before = state_of(workload)
    search(workload)
    assert same(state_of(workload), before)


def test_training_afterwards_is_bit_identical():
    plain, searched = mlp(), mlp()
    searched.model().load_state_dict(plain.model().state_dict())
    for workload in (plain, searched):
        trained(workload, 3)
        if workload is searched:
            find(workload, budget="2MiB", knee=True)
        trained(workload, 3)
    assert same(plain.model().state_dict(), searched.model().state_dict())


def live_bytes():
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors = [each for each in tensors if not torch.nn.parameter.is_lazy(each)]  # what other tests left
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.parametrize("search", searches(), ids=lambda each: each.__name__)
def test_nothing_stays_allocated(search):
    workload = mlp()
    trained(workload, 2)
    search(workload)  # the first time, for what is made once
    before = live_bytes()
    search(workload)
    assert live_bytes() == before


def test_gradients_that_were_there_are_free_once_they_are_dropped():
    """Without waiting for the garbage collector: the next training needs their bytes at once."""
    workload = mlp()
    trained(workload, 1)
    gradients = [weakref.ref(p.grad) for p in workload.model().parameters()]
    gc.collect()
    gc.disable()
    try:
        find(workload, budget="2MiB", plan=False)
        workload.model().zero_grad()
        assert not any(each() is not None for each in gradients)
    finally:
        gc.enable()


def test_a_knee_that_the_timings_do_not_tell_is_said_so():
    few = find(mlp(), budget="1GiB", max_batch=3, knee=True)
    assert few.throughput.knee <= 3 or "beyond what was timed" in str(few)


def test_hooks_and_modes_are_gone_afterwards():
    find(mlp(), budget="2MiB", knee=True)
    module, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    assert not module._global_forward_hooks and not optimizer._global_optimizer_post_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


# Time.


def test_a_trial_that_takes_too_long_is_ended(monkeypatch):
    model, now = nn.Linear(4, 4), [0.0]
    monkeypatch.setattr(trials_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step(batch_size):
        for _ in range(300 if batch_size > 10 else 1):
            model(torch.ones(4, 4))
            now[0] += 0.1
        model(torch.ones(batch_size, 4)).sum().backward()

    found = find(step=step, budget="1GiB", max_batch=64, trial_limit_s=0.5)
    assert found.stopped_by == "time limit" and found.max_batch in (8, 9, 10)
    assert any(trial.timed_out for trial in found.trials)
    assert now[0] < 5


def test_not_even_the_smallest_in_time():
    model = nn.Linear(4, 4)

    def step(batch_size):
        while True:
            model(torch.ones(4, 4))

    with pytest.raises(TimeoutError, match="trial_limit_s"):
        find(step=step, budget="1GiB", trial_limit_s=0.2)


# What it says.


def test_a_line_a_trial_and_a_table():
    said = []
    found = find_batch_size(mlp(), budget="2MiB", progress=said.append)
    assert said == [str(trial) for trial in found.trials]
    text = str(found)
    assert f"is {found.max_batch} samples; stopped by: memory" in text and "2.00 MiB (the budget given)" in text
    assert f"recommended: {found.recommended_batch} samples" in text and "the plan says" in text
    assert all(str(trial) in text for trial in found.trials)
    assert "text/plain" in found._repr_mimebundle_()


def test_the_recommended_batch_was_run_and_leaves_the_headroom():
    found = find(mlp(), budget="2MiB", knee=True, headroom=0.3)
    timing = next(each for each in found.timings if each.size == found.recommended_batch)
    assert timing.peak_bytes <= 0.7 * 2 * 1024**2
    assert found.recommended_batch <= found.max_batch and found.reason


def test_a_recommendation_at_the_searchs_own_limit_says_so():
    found = find(mlp(), budget="1GiB", max_batch=4, knee=True)
    assert found.recommended_batch == 4 or found.knee_batch == found.recommended_batch
    assert "leaves" not in found.reason


def test_why_there_is_no_plan():
    found = find(step=own_step(), budget="1MiB")
    assert found.plan_says == "there is no plan: a step of your own cannot be traced on fake tensors"
    assert "no plan was asked for" in find(mlp(), budget="2MiB", plan=False).plan_says
    branching = Workload(
        "branching",
        lambda: nn.Linear(4, 4),
        lambda n, device: torch.randn(n, 4),
        lambda model, batch: model(batch).sum() * (1 if len(batch) < 3 else batch.exp().mean()),
        OPTIMIZERS["SGD"],
    )
    found = find(branching, budget="1MiB")
    assert found.plan_says.startswith("there is no plan:") and found.stopped_by == "memory"


def test_without_a_budget_there_is_a_limit_all_the_same():
    found = find(mlp(), max_batch=32)
    assert (found.max_batch, found.stopped_by) == (32, "max_batch")
    assert "free memory" in found.budget_from and found.budget_bytes > 1 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "lots"}, "is not a size"),
        ({"max_batch": 0}, "max_batch: a whole number"),
        ({"multiple_of": True}, "multiple_of: a whole number"),
        ({"multiple_of": 64, "max_batch": 50}, "not one such size is within max_batch, 50"),
        ({"tolerance": 1}, "tolerance: a share"),
        ({"headroom": -0.1}, "headroom: a share"),
        ({"max_trials": 2.5}, "max_trials: a whole number"),
        ({"trial_limit_s": 0}, "trial_limit_s is 0"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(options, message):
    workload = mlp()
    before = state_of(workload)
    with pytest.raises(ValueError, match=message):
        find(workload, **options)
    assert same(state_of(workload), before)


def test_a_workload_or_a_step():
    for arguments in ({}, {"workload": mlp(), "step": print}):
        with pytest.raises(TypeError, match="a workload, or step="):
            find(**arguments)
    with pytest.raises(TypeError, match="a Workload is expected, got Linear"):
        find(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="give the function"):
        find(step=3)
    assert isinstance(find(mlp(), budget="2MiB").trials[0], Trial)


def test_a_budget_that_the_machine_has_not_is_refused_before_a_trial():
    with pytest.raises(ValueError, match="is more than the .* that are free here.*plan_memory"):
        find(mlp(), budget="1048576GiB")
