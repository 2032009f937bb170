"""What people got wrong with accumulation, re-created with the right values: our step beside loops in plain PyTorch.

C45 for a plain loop is in measure/test_memory_cases.py, C65 in test_knobs.py.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from labsupport.measure import MemoryLedger
from labsupport.train import Recipe, Workload, build_step


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def step_of(model, loss, *, accumulation=1, optimizer=None, batch=None, **knobs):
    """A step of ours on a live model."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    parts = {"batch": lambda n, device: batch or (torch.zeros(n, 1),), "loss": loss, "optimizer": lambda _: optimizer}
    return build_step(Workload("case", lambda: model, **parts), Recipe(accumulation=accumulation, **knobs), "cpu")


def gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def rows(count=32, width=4):
    inputs = (
        torch.randn(count, width, dtype=torch.float64) * torch.linspace(0.5, 2, count, dtype=torch.float64)[:, None]
    )
    return inputs, torch.randn(count, 1, dtype=torch.float64)


def parts_of(batch, count=4):
    return list(zip(*(each.chunk(count) for each in batch), strict=True))


def squared(model, batch):
    return mse_loss(model(batch[0]), batch[1])


# C40: micro-batches with different token counts.


def tokens(reduction):
    def loss(model, batch):
        found = cross_entropy(model(batch[0]), batch[1], reduction=reduction)
        return (found, (batch[1] != -100).sum()) if reduction == "sum" else found

    return loss


def token_batch(lengths=(100, 900)):
    words, labels = torch.randn(sum(lengths), 6, dtype=torch.float64), torch.randint(11, (sum(lengths),))
    return (words, labels), list(zip(words.split(lengths), labels.split(lengths), strict=True))


def test_c40_a_mean_of_means_is_off_and_sums_over_the_windows_count_are_not():
    head, (whole, parts) = nn.Linear(6, 11).double(), token_batch()
    at_once = step_of(head, tokens("mean"))([whole])
    wanted = gradient(head)
    by_counts = step_of(head, tokens("sum"), accumulation=2)(parts)
    assert error(gradient(head), wanted) < 1e-7  # the counts' shares are float32
    assert by_counts.item() == pytest.approx(at_once.item())
    by_means = step_of(head, tokens("mean"), accumulation=2)(parts)
    assert error(gradient(head), wanted) > 0.3 and abs(by_means.item() - at_once.item()) > 1e-3


def test_c40_the_loss_that_is_told():
    weight = nn.Linear(1, 1)
    parts = [(0.5, 100), (0.3, 900)]

    def sums(model, part):
        return (0 * model.weight).sum() + part[0] * part[1], part[1]

    def means(model, part):
        return (0 * model.weight).sum() + part[0]

    assert step_of(weight, sums, accumulation=2)(parts).item() == pytest.approx(0.32)
    assert step_of(weight, means, accumulation=2)(parts).item() == pytest.approx(0.4)


@pytest.mark.parametrize("lengths", [(100, 900), (100,)], ids=["one of two", "the only one"])
def test_c40_a_micro_batch_of_padding_alone_adds_nothing(lengths):
    head, (_, parts) = nn.Linear(6, 11).double(), token_batch(lengths)
    parts[0][1].fill_(-100)
    assert torch.isnan(step_of(head, tokens("mean"), accumulation=2)(parts))
    loss = step_of(head, tokens("sum"), accumulation=2)(parts)
    found = gradient(head).clone()
    assert torch.isfinite(loss) and torch.isfinite(found).all()
    if len(parts) > 1:
        step_of(head, tokens("mean"))(parts[1:])
        assert error(found, gradient(head)) < 1e-12
    else:
        assert loss == 0 and not found.any()


# C42: BatchNorm.


def normed(norm):
    torch.manual_seed(1)
    layers = {"none": nn.Identity(), "layer": nn.LayerNorm(8), "batch": nn.BatchNorm1d(8), "frozen": nn.BatchNorm1d(8)}
    return nn.Sequential(nn.Linear(4, 8), layers[norm], nn.Linear(8, 1)).double().train(norm != "frozen")


@pytest.mark.parametrize("norm", ["none", "layer", "batch", "frozen"])
def test_c42_only_batch_statistics_change_the_gradient(norm):
    batch = rows()
    whole, parts = normed(norm), normed(norm)
    step_of(whole, squared)([batch])
    step_of(parts, squared, accumulation=4)(parts_of(batch))
    off = error(gradient(parts), gradient(whole))
    assert off > 0.05 if norm == "batch" else off < 1e-12


def test_c42_the_statistics_move_four_times_and_a_smaller_momentum_undoes_it():
    """With one mean for all micro-batches it would be (1 - 0.9**4) / 0.1 = 3.44 times as far."""
    batch = rows()
    whole, parts, gentle = normed("batch"), normed("batch"), normed("batch")
    gentle[1].momentum = 1 - 0.9**0.25
    step_of(whole, squared)([batch])
    for model in (parts, gentle):
        step_of(model, squared, accumulation=4)(parts_of(batch))
    assert [int(model[1].num_batches_tracked) for model in (whole, parts)] == [1, 4]
    moved = [float(model[1].running_mean.norm()) for model in (whole, parts, gentle)]
    assert 3 < moved[1] / moved[0] < 4 and moved[2] / moved[0] == pytest.approx(1, rel=0.1)


# C43: the scheduler.


def falling(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=5)


def test_c43_the_schedule_counts_optimizer_steps():
    model, batch = nn.Linear(4, 1).double(), rows()
    optimizer, rates = torch.optim.SGD(model.parameters(), lr=1.0), []
    optimizer.register_step_pre_hook(lambda each, *_: rates.append(each.param_groups[0]["lr"]))
    step = step_of(model, squared, accumulation=4, optimizer=optimizer, schedule=falling)
    for _ in range(5):
        step(parts_of(batch))
    assert rates == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_c43_stepped_after_each_micro_batch_it_is_over_after_the_first_update():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler, rates = falling(optimizer), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call comes before the first step
        for index in range(20):
            weight.sum().backward()
            if index % 4 == 3:
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
            scheduler.step()
    assert rates == pytest.approx([0.4, 0, 0, 0, 0], abs=1e-12)


# C44: divided too late.


@pytest.mark.parametrize(("kind", "times"), [(torch.optim.SGD, 4), (torch.optim.Adam, 1)])
def test_c44_divided_after_backward_the_log_is_right_and_sgd_is_not(kind, times):
    batch, updates, logged = rows(), [], []
    for late in (False, True):
        torch.manual_seed(2)
        model = nn.Linear(4, 1).double()
        optimizer = kind(model.parameters(), lr=0.01)
        before, told = nn.utils.parameters_to_vector(model.parameters()).detach().clone(), 0.0
        for part in parts_of(batch):
            loss = squared(model, part)
            if late:
                loss.backward()
                loss = loss / 4
            else:
                loss = loss / 4
                loss.backward()
            told += loss.item()
        optimizer.step()
        updates.append((nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm())
        logged.append(told)
    assert logged[0] == pytest.approx(logged[1])
    assert float(updates[1] / updates[0]) == pytest.approx(times, rel=1e-4)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_c44_our_step_makes_the_update_of_the_whole_batch(kind):
    batch, found = rows(), []
    for parts in ([batch], parts_of(batch)):
        torch.manual_seed(2)
        model = nn.Linear(4, 1).double()
        step_of(model, squared, accumulation=4, optimizer=kind(model.parameters(), lr=0.01))(parts)
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*found)


# C45: one backward for summed losses.


def test_c45_our_step_needs_one_micro_batch_and_the_gradients():
    """The second micro-batch runs beside the gradients of the first."""
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    parameters = sum(each.nbytes for each in model.parameters())

    def loss(model, batch):
        return model(batch[0]).square().mean()

    peaks = []
    for accumulation in (1, 8):
        batch = (torch.randn(512, 64),)
        step = step_of(model, loss, accumulation=accumulation, batch=batch)
        model.zero_grad()
        with MemoryLedger(step.model, step.optimizer, inputs=step.batch) as ledger:
            step()
        peaks.append(ledger.peak_bytes)
    assert 0 < peaks[1] - peaks[0] <= parameters + 64  # a scalar or so


# C67: zero_grad inside the window.


@pytest.mark.parametrize("clear", ["after the step", "each time", "before the last"])
def test_c67_cleared_within_the_window_only_the_last_micro_batch_counts(clear):
    model, batch = nn.Linear(4, 1).double(), rows()
    squared(model, batch).backward()
    wanted = gradient(model)
    model.zero_grad()
    for index, part in enumerate(parts_of(batch)):
        if clear == "each time" or (clear == "before the last" and index == 3):
            model.zero_grad()
        (squared(model, part) / 4).backward()
    found = gradient(model)
    model.zero_grad()
    (squared(model, parts_of(batch)[-1]) / 4).backward()
    if clear == "after the step":
        assert error(found, wanted) < 1e-12
    else:
        assert error(found, wanted) > 0.3 and torch.equal(found, gradient(model))


def test_c67_our_step_clears_between_steps_only():
    model, batch = nn.Linear(4, 1).double(), rows()
    squared(model, batch).backward()
    wanted = gradient(model)
    step = step_of(model, squared, accumulation=4)
    for _ in range(2):
        step(parts_of(batch))
        assert error(gradient(model), wanted) < 1e-12
