"""Running out of memory, explained: within a budget to the byte, and without one from the steps that were watched."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from labsupport.diagnose import explain_oom
from labsupport.measure import memory_budget
from labsupport.train import Recipe, Workload, build_step, plan_memory

WORKLOAD = Workload(
    "wide",
    lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),
    lambda n, device: torch.randn(n, 64, device=device),
    lambda model, batch: model(batch).square().mean(),
    torch.optim.Adam,
)


def run_out(loop, *arguments):
    with pytest.raises(torch.OutOfMemoryError) as caught, explain_oom(*arguments):
        loop()
    return caught.value.report, caught.value


def too_large(batch=4096, budget="2MiB"):
    with memory_budget(budget):
        step = build_step(WORKLOAD, Recipe(batch_size=batch), "cpu")
        step()


def test_within_a_budget_it_tells_the_moment():
    report, error = run_out(too_large, WORKLOAD)
    assert report.at_the_error and report.step == 1
    assert sum(report.parts.values()) <= 2 << 20
    assert report.limit_bytes == 2 << 20
    assert report.largest_batch == plan_memory(WORKLOAD).max_batch("2MiB") and report.batch_from == "by its plan"
    assert str(report) in error.__notes__[0]
    assert str(report).startswith("Live when step 1 ran out of memory")
    together = [count * each.nbytes for count, each in report.largest]
    assert together == sorted(together, reverse=True)


def test_the_largest_batch_really_is():
    report, _ = run_out(too_large, WORKLOAD)
    for batch, fits in ((report.largest_batch, True), (report.largest_batch + 1, False)):
        try:
            with memory_budget("2MiB"):
                step = build_step(WORKLOAD, Recipe(batch_size=batch), "cpu")
                step()
                step()
        except torch.OutOfMemoryError:
            assert not fits
        else:
            assert fits


def test_without_a_workload_the_batch_is_an_upper_bound():
    report, _ = run_out(too_large)
    assert report.batch_from.startswith("at most")
    assert 4096 > report.largest_batch >= plan_memory(WORKLOAD).max_batch("2MiB")


def test_a_workload_without_a_plan_is_told():
    unplanned = Workload(
        "odd", WORKLOAD.model, WORKLOAD.batch, lambda m, b: m(b).sum() * b.sum().item(), torch.optim.Adam
    )
    report, _ = run_out(too_large, unplanned)
    assert report.largest_batch is None and "there is no plan" in str(report)


def training(steps, leak=None, fail_at=None):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    kept = []
    for step in range(steps):
        if step == fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        out = model(torch.randn(32, 64))
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if leak:
            kept.append(out)


def test_without_a_budget_the_watched_steps_tell():
    report, _ = run_out(lambda: training(30, fail_at=20))
    assert not report.at_the_error and report.step == 21
    assert report.parts["parameter"] == report.parts["gradient"] == (64 * 64 + 64) * 4
    assert report.parts["optimizer state"] == 2 * (64 * 64 + 64) * 4 + 8
    assert report.limit_bytes is None and report.largest_batch is None
    assert not report.growth


def test_in_the_first_step_the_moment_is_told_without_a_budget():
    def loop():
        model = nn.Linear(64, 64)
        out = model(torch.randn(32, 64))
        raise torch.OutOfMemoryError(f"CUDA out of memory at {len(out)}")

    report, _ = run_out(loop)
    assert report.at_the_error and report.step == 1
    assert report.parts["parameter"] == (64 * 64 + 64) * 4


def test_what_grew_is_named_with_its_line():
    report, _ = run_out(lambda: training(80, leak=True, fail_at=70))
    (grown,) = [each for each in report.growth if each.op.startswith("aten.addmm")]
    assert "out = model(torch.randn(32, 64))" in grown.source
    assert grown.nbytes == grown.count * 32 * 64 * 4 > 0
    assert "Left behind" in str(report)


def test_a_leak_within_a_budget_is_named_too():
    def loop():
        with memory_budget("1MiB"):
            training(1000, leak=True)

    report, _ = run_out(loop)
    assert report.at_the_error and report.step > 10
    assert any("out = model" in each.source for each in report.growth)


def test_a_budget_around_it_tells_as_well():
    with memory_budget("1MiB"):
        report, _ = run_out(lambda: training(1000, leak=True))
    assert report.at_the_error and report.limit_bytes == 1 << 20
    assert sum(report.parts.values()) > 1_000_000
    assert "the batch is not what grows" in report.batch_from


def test_a_full_budget_around_it_leaves_room_for_the_plan():
    with memory_budget("1MiB"):
        report, _ = run_out(lambda: training(1000, leak=True), WORKLOAD)
    assert report.largest_batch == plan_memory(WORKLOAD).max_batch("1MiB")


def test_whatever_hinders_the_plan_the_error_is_that_of_memory():
    alone = Workload("alone", lambda: nn.Linear(64, 64), WORKLOAD.batch, WORKLOAD.loss, torch.optim.Adam)
    report, _ = run_out(too_large, alone, Recipe(checkpointing=True))
    assert report.largest_batch is None and "no Sequential or ModuleList" in report.batch_from


def test_many_small_tensors_are_added_up():
    def loop():
        with memory_budget("1MiB"):
            training(1000, leak=True)

    report, _ = run_out(loop)
    count, each = report.largest[0]
    assert count > 50 and each.category == "kept"


@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("shape mismatch"), KeyboardInterrupt()])
def test_other_errors_pass(error):
    def loop():
        raise error

    with pytest.raises(type(error)) as caught, explain_oom():
        loop()
    assert caught.value is error and not hasattr(error, "report")


def test_a_plain_runtime_error_of_the_cpu_counts():
    with pytest.raises(RuntimeError) as caught, explain_oom():
        torch.empty(10**15)
    assert caught.value.report


def count_of_hooks():
    return (
        len(hooks._global_forward_hooks) + len(hooks._global_forward_pre_hooks),
        len(optimizer_hooks._global_optimizer_pre_hooks) + len(optimizer_hooks._global_optimizer_post_hooks),
    )


def test_nothing_stays_behind():
    before = count_of_hooks()
    with explain_oom():
        training(9)
    run_out(lambda: training(30, fail_at=20))
    assert count_of_hooks() == before
    assert _get_current_dispatch_mode() is None


class Modes:
    """Which steps of a loop run under a dispatch mode."""

    def __init__(self):
        self.on = []

    def __call__(self, *_):
        self.on.append(_get_current_dispatch_mode() is not None)


def test_it_is_on_in_the_first_steps_and_at_powers_of_two():
    seen = Modes()
    handle = hooks.register_module_forward_hook(seen)
    with explain_oom():
        training(20)
    handle.remove()
    assert [step for step, on in enumerate(seen.on) if on] == [0, 1, 4, 8, 16]
    assert not any(hooks._global_forward_hooks)


class Other(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_the_stack_of_dispatch_modes_is_left_alone():
    with explain_oom():
        training(1)
        with Other() as other:
            training(7)
            assert _get_current_dispatch_mode() is other
        training(3)
    assert _get_current_dispatch_mode() is None


def test_losses_are_the_same_bit_for_bit():
    def losses():
        torch.manual_seed(0)
        step = build_step(WORKLOAD, Recipe(batch_size=8), "cpu")
        return [step().item() for _ in range(12)]

    with explain_oom():
        watched = losses()
    assert watched == losses()
