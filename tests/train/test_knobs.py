"""Each pair of a recipe's knobs does what the labs write in plain PyTorch, bit for bit."""

from contextlib import nullcontext
from functools import cache, partial
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from labsupport.measure import MemoryLedger
from labsupport.train import Recipe, Workload, build_step, find_batch_size, plan_memory
from labsupport.train.precision import products_in
from labsupport.train.traces import CannotPlan

BLOCKS = 4


def keep_convolutions(ctx, op, *args, **kwargs):
    wanted = op == torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


KNOBS = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "channels_last": {"channels_last": True},
    "every block": {"checkpointing": True},
    "segments": {"checkpointing": 2},
    "policy": {"checkpointing": keep_convolutions},
    "accumulation": {"accumulation": 3},
    "clipping": {"clip_norm": 0.1},
    "schedule": {"schedule": partial(StepLR, step_size=1, gamma=0.5)},
    "compile": {"compile": "aot_eager"},
}
PAIRS = [pair for pair in combinations(KNOBS, 2) if len({*KNOBS[pair[0]], *KNOBS[pair[1]]}) == 2]


class Net(nn.Module):
    """Blocks of a convolution, dropout and a norm without batch statistics; recomputed by hand where `how` says so."""

    def __init__(self, how=False):
        super().__init__()
        self.stem, self.how = nn.Conv2d(3, 8, 3, padding=1), how
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Dropout(0.2))]
        blocks += [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()) for _ in range(BLOCKS - 1)
        ]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        if self.how is False:
            x = self.blocks(x)
        elif self.how is True or callable(self.how):
            more = {}
            if callable(self.how):
                more = {"context_fn": partial(create_selective_checkpoint_contexts, self.how)}
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, **more)
        else:
            x = checkpoint_sequential(self.blocks, self.how, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


def batch(n, device):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.randint(5, (n,), generator=generator)


def net(how=False):
    torch.manual_seed(1)
    return Net(how)


WORKLOAD = Workload(
    "blocks",
    net,
    batch,
    lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
)


def plain_loop(knobs, steps):
    """What a lab writes: gradients and weights after some steps."""
    model = net(knobs.get("checkpointing", False))
    if knobs.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = knobs["schedule"](optimizer) if "schedule" in knobs else None
    precision, window = knobs.get("precision"), knobs.get("accumulation", 1)
    autocast = nullcontext()
    if precision:
        autocast = torch.autocast("cpu", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    compiled = torch.compile(model, backend="aot_eager") if "compile" in knobs else model
    images, labels = batch(8, None)
    if knobs.get("channels_last"):
        images = images.contiguous(memory_format=torch.channels_last)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(window):
            with autocast:
                loss = cross_entropy(compiled(images), labels)
            scaler.scale(loss / window).backward()
        if "clip_norm" in knobs:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), knobs["clip_norm"])
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scheduler and scaler.get_scale() >= before:
            scheduler.step()
    return results(model)


def results(model):
    return [each.grad for each in model.parameters()], [each.detach() for each in model.parameters()]


def built(knobs, steps):
    step = build_step(WORKLOAD, Recipe(batch_size=8, **knobs), "cpu")
    for _ in range(steps):
        step()
    return results(step.model)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("pair", [(name,) for name in KNOBS] + PAIRS, ids=" + ".join)
def test_build_step_is_the_plain_loop(pair):
    knobs = {name: value for each in pair for name, value in KNOBS[each].items()}
    torch.manual_seed(7)
    expected = plain_loop(knobs, 3)
    torch.manual_seed(7)
    found = built(knobs, 3)
    for here, there in zip(found, expected, strict=True):
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["every block", "segments", "policy", "compile"])
def test_results_are_those_without_the_knob(name):
    def trained(knobs):
        torch.manual_seed(7)
        return built(knobs, 3)

    for here, there in zip(trained(KNOBS[name]), trained({}), strict=True):
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["every block", "segments", "policy"])
def test_what_recomputes_is_compiled_once(name):
    step = build_step(WORKLOAD, Recipe(batch_size=8, **KNOBS[name], **KNOBS["compile"]), "cpu")
    step()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


@pytest.mark.parametrize("name", ["every block", "segments", "policy"])
def test_recomputing_takes_the_bytes_of_the_plain_loop(name):
    """Results are the same however many segments there are: only bytes tell."""
    model = net(KNOBS[name]["checkpointing"])
    optimizer, (images, labels) = WORKLOAD.optimizer(model.parameters()), batch(8, None)
    with MemoryLedger(model, optimizer, inputs=(images, labels)) as plain:
        for _ in range(2):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            del loss
    step = build_step(WORKLOAD, Recipe(batch_size=8, **KNOBS[name]), "cpu")
    with MemoryLedger(step.model, step.optimizer, inputs=step.batch) as ledger:
        for _ in range(2):
            step()
    assert ledger.peak_bytes == plain.peak_bytes


# Windows.


def tokens(model, batch):
    """(sum of losses, count), as of sequences of which some tokens are padding."""
    inputs, labels = batch
    return cross_entropy(model(inputs), labels, reduction="sum", ignore_index=-100), (labels != -100).sum()


def of_tokens(**changes):
    torch.manual_seed(2)
    model = nn.Linear(6, 11)
    parts = {"batch": lambda n, device: (torch.randn(n, 6), torch.randint(11, (n,))), "loss": tokens}
    parts |= {"optimizer": partial(torch.optim.SGD, lr=0.1)} | changes
    return Workload("tokens", lambda: model, **parts), model


def uneven(sizes=(3, 20, 7)):
    torch.manual_seed(3)
    inputs, labels = torch.randn(30, 6), torch.randint(11, (30,))
    labels[:2] = -100
    return list(zip(inputs.split(sizes), labels.split(sizes), strict=True)), (inputs, labels)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("sizes", [(3, 20, 7), (20, 10), (30,), (2, 28)])  # the first two are padding
def test_unequal_micro_batches_weigh_as_the_whole_does(sizes, precision):
    micro_batches, whole = uneven(sizes)
    workload, model = of_tokens()
    loss = build_step(workload, Recipe(precision=precision, accumulation=3), "cpu")(micro_batches)
    workload, alone = of_tokens()
    expected = build_step(workload, Recipe(precision=precision), "cpu")([whole])
    close = {"rtol": 1e-5, "atol": 1e-7} if precision == "fp32" else {"rtol": 2e-3, "atol": 1e-4}
    torch.testing.assert_close(loss, expected, **close)
    torch.testing.assert_close(model.weight, alone.weight, **close)


def test_the_last_window_of_an_epoch_is_weighed_by_what_is_there():
    def mean(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    micro_batches = [(inputs, labels.clamp(min=0)) for inputs, labels in uneven((10, 10, 10))[0]]
    workload, model = of_tokens(loss=mean)
    build_step(workload, Recipe(accumulation=4), "cpu")(micro_batches)
    workload, alone = of_tokens(loss=mean)
    build_step(workload, Recipe(), "cpu")([tuple(torch.cat(each) for each in zip(*micro_batches, strict=True))])
    torch.testing.assert_close(model.weight, alone.weight)


def test_more_or_no_micro_batches_are_refused_and_nothing_changes():
    micro_batches, _ = uneven()
    workload, model = of_tokens()
    step, before = build_step(workload, Recipe(accumulation=2), "cpu"), model.weight.detach().clone()
    for window in (micro_batches, []):
        with pytest.raises(ValueError, match=f"1 to 2 micro-batches are expected.*got {len(window)}"):
            step(window)
    assert torch.equal(model.weight, before) and model.weight.grad is None


@pytest.mark.parametrize(
    ("wanted", "fits", "ranks", "found"),
    [(96, 40, 1, (32, 3)), (100, 32, 1, (25, 4)), (64, 24, 4, (16, 1)), (97, 32, 1, (1, 97)), (60, 100, 1, (60, 1))],
)
def test_c65_the_effective_batch_stays_what_was_wanted(wanted, fits, ranks, found):
    recipe = Recipe(precision="bf16").accumulated(wanted, at_most=fits, ranks=ranks)
    assert (recipe.batch_size, recipe.accumulation) == found
    assert recipe.effective_batch * ranks == wanted and recipe.precision == "bf16"


def test_an_effective_batch_that_ranks_cannot_share():
    with pytest.raises(ValueError, match="cannot be shared equally by 3 ranks; 96 or 99 could"):
        Recipe().accumulated(97, at_most=8, ranks=3)


# The scaler, clipping and the schedule.


def test_the_schedule_waits_where_the_scaler_skips():
    """C32: the loss is infinite in two of five steps."""
    infinite = iter([True, False, True, False, False])
    model = nn.Linear(4, 1)
    workload = Workload(
        "sometimes infinite",
        lambda: model,
        lambda n, device: torch.ones(n, 4),
        lambda model, batch: model(batch).float().mean() * (float("inf") if next(infinite) else 1.0),
        partial(torch.optim.SGD, lr=1.0),
    )
    recipe = Recipe(precision="fp16", schedule=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda s: 0.5**s))
    step, rates, scales = build_step(workload, recipe, "cpu"), [], []
    for _ in range(5):
        step()
        rates.append(step.scheduler.get_last_lr()[0])
        scales.append(step.scaler.get_scale())
    assert rates == [1, 0.5, 0.5, 0.25, 0.125]
    assert scales == [32768, 32768, 16384, 16384, 16384]


def test_gradients_are_clipped_after_they_are_unscaled():
    """C30: a true norm below the limit is left as it is."""
    workload, model = of_tokens()
    step = build_step(workload, Recipe(precision="fp16", clip_norm=1e3), "cpu")
    step()
    workload, plain = of_tokens()
    build_step(workload, Recipe(precision="fp16"), "cpu")
    found = model.weight.grad.norm()
    assert 0 < found < 1e3
    workload, _ = of_tokens()
    clipped = build_step(workload, Recipe(precision="fp16", clip_norm=0.5 * found.item()), "cpu")
    clipped.batch = step.batch
    clipped()
    assert clipped.model.weight.grad.norm() <= 0.5 * found.item() * (1 + 1e-5)


def test_no_bf16_scaler_and_a_scaler_of_fp16():
    workload, _ = of_tokens()
    assert build_step(workload, Recipe(precision="bf16"), "cpu").scaler is None
    assert build_step(workload, Recipe(precision="fp16"), "cpu").scaler.is_enabled()


# On a GPU only; the settings themselves are there without one.


@pytest.mark.parametrize(("precision", "inside"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", None)])
def test_what_fp32_products_round_to(precision, inside):
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [each.fp32_precision for each in settings]
    with pytest.raises(KeyError), products_in(precision, "cuda"):
        assert [each.fp32_precision for each in settings] == ([inside] * 3 if inside else before)
        raise KeyError
    assert [each.fp32_precision for each in settings] == before
    with products_in(precision, "cpu"):
        assert [each.fp32_precision for each in settings] == before


# What makes no sense.


@pytest.mark.parametrize(
    ("recipe", "error", "said"),
    [
        ({"precision": "tf32"}, ValueError, "a format of GPUs"),
        ({"compile": "reduce-overhead"}, ValueError, "CUDA graphs"),
        ({"compile": "fast"}, ValueError, "one of default"),
        ({"channels_last": True}, ValueError, "no convolution"),
        ({"channels_last": 1}, TypeError, "True or False"),
        ({"checkpointing": 1}, ValueError, "would save nothing"),
        ({"checkpointing": 9}, ValueError, "9 segments are wanted.* has 3 blocks"),
        ({"checkpointing": "all"}, TypeError, "segments or a policy"),
        ({"accumulation": 0}, ValueError, "1 or more micro-batches"),
        ({"accumulation": 1.5}, TypeError, "whole number of micro-batches"),
        ({"clip_norm": 0}, ValueError, "above 0"),
        ({"clip_norm": float("nan")}, ValueError, "finite"),
        ({"clip_norm": "1"}, TypeError, "number or None"),
        ({"schedule": 0.1}, TypeError, "function from the optimizer"),
    ],
)
def test_what_cannot_be(recipe, error, said):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 11))
    workload, _ = of_tokens()
    workload = Workload("linear", lambda: model, workload.batch, workload.loss, workload.optimizer)
    with pytest.raises(error, match=said):
        build_step(workload, Recipe(**recipe), "cpu")


def test_segments_need_a_sequential_and_fp16_needs_fp32_weights():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    workload, _ = of_tokens()
    for model, recipe, said in [
        (Listed(), {"checkpointing": 2}, "as in a Sequential"),
        (nn.Linear(6, 11).half(), {"precision": "fp16"}, "leave out .half"),
    ]:
        broken = Workload("x", lambda model=model: model, workload.batch, workload.loss, workload.optimizer)
        with pytest.raises(ValueError, match=said):
            build_step(broken, Recipe(**recipe), "cpu")


def test_no_compiler(monkeypatch):
    monkeypatch.setattr("labsupport.machine.has", lambda need: False)
    with pytest.raises(RuntimeError, match="apt install g.*aot_eager"):
        build_step(WORKLOAD, Recipe(compile="default"), "cpu")
    build_step(WORKLOAD, Recipe(compile="aot_eager"), "cpu")


# The other instruments.


@pytest.mark.parametrize("pair", [(name,) for name in KNOBS if name != "compile"] + [("fp16", "accumulation")])
def test_plans_are_exact(pair):
    knobs = {name: value for each in pair for name, value in KNOBS[each].items()}
    recipe = Recipe(batch_size=6, **knobs)
    step = build_step(WORKLOAD, recipe, "cpu")
    with MemoryLedger(step.model, step.optimizer, inputs=step.batch) as ledger:
        for _ in range(2):
            step()
    assert plan_memory(WORKLOAD, recipe).peak_bytes(6) == ledger.peak_bytes


def test_what_is_compiled_has_no_plan_and_no_trial_on_a_cpu():
    with pytest.raises(CannotPlan, match="torch.compile"):
        plan_memory(WORKLOAD, Recipe(compile="aot_eager"))
    with pytest.raises(ValueError, match="compile.*on a CPU"):
        find_batch_size(WORKLOAD, budget="1MiB", recipe=Recipe(compile="aot_eager"), device="cpu")


def test_a_search_leaves_a_live_model_and_its_layout():
    model = net()
    before = {name: (each.detach().clone(), each.stride()) for name, each in model.named_parameters()}
    workload = Workload("live", lambda: model, batch, WORKLOAD.loss, WORKLOAD.optimizer)
    recipe = Recipe(precision="fp16", channels_last=True, accumulation=2, **KNOBS["schedule"])
    plan_memory(workload, recipe)
    for name, each in model.named_parameters():
        assert torch.equal(each, before[name][0]) and each.stride() == before[name][1]
    found = find_batch_size(workload, budget="1MiB", recipe=recipe, device="cpu", knee=False, progress=None)
    assert found.stopped_by == "memory" and len(found.trials) == 2
    assert all(torch.equal(each, before[name][0]) for name, each in model.named_parameters())


def test_a_model_that_is_made_once_is_a_real_one_after_its_plan():
    @cache
    def made_once():
        return net()

    workload = Workload("cached", made_once, batch, WORKLOAD.loss, WORKLOAD.optimizer)
    plan_memory(workload)
    assert {each.device.type for each in made_once().parameters()} == {"cpu"}
    build_step(workload, Recipe(batch_size=2), "cpu")()


@pytest.mark.parametrize(("precision", "checkpointing"), [("bf16", False), ("fp16", True)])
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.GroupNorm(4, 8),
        lambda: nn.BatchNorm2d(8),
        lambda: nn.LayerNorm([8, 8]),
        lambda: nn.InstanceNorm2d(8, affine=True),
        lambda: nn.BatchNorm2d(8, affine=False),
    ],
    ids=["group", "batch", "layer", "instance", "batch without weights"],
)
def test_plans_of_norms_under_autocast_are_exact(norm, precision, checkpointing):
    def model():
        rows = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(), nn.ReLU()) for _ in range(3)]
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *rows, nn.Flatten(), nn.Linear(512, 5))

    workload = Workload("norms", model, batch, WORKLOAD.loss, WORKLOAD.optimizer)
    recipe = Recipe(batch_size=6, precision=precision, checkpointing=checkpointing)
    step = build_step(workload, recipe, "cpu")
    with MemoryLedger(step.model, step.optimizer, inputs=step.batch) as ledger:
        for _ in range(2):
            step()
    assert plan_memory(workload, recipe).peak_bytes(6) == ledger.peak_bytes
