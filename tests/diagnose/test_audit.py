"""Each fault planted and named, and nothing else; correct loops accused of nothing; nothing that runs is changed."""

import io
import random
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # bound before any audit, as in scripts
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizers
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import labsupport
from labsupport.diagnose import audit
from labsupport.measure.state import found_in
from labsupport.train import Recipe, Workload, build_step

WINDOW = 4
TABLE = Path(labsupport.__file__).parent / "diagnose" / "faults.toml"
FAULTS = [each["name"] for each in tomllib.loads(TABLE.read_text())["fault"]]


def net(*middle, width=16, outputs=1):
    return nn.Sequential(nn.Linear(8, width), *(middle or (nn.Tanh(),)), nn.Linear(width, outputs))


def mse(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


class Training:
    """A model, an optimizer and batches, as a script has them; `micro` counts the calls."""

    def __init__(self, model=None, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = net() if model is None else model
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 1e-2, **options})
        self.batches = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(32)]
        self.micro = 0

    def next(self):
        self.micro += 1
        return self.batches[(self.micro - 1) % len(self.batches)]

    @property
    def boundary(self):
        return self.micro % WINDOW == 0


PLANTED, CORRECT = {}, {}


def planted(name, **options):
    """A maker of a step with this fault, and with no other."""

    def keep(make):
        PLANTED[make.__name__] = (make, name, options)
        return make

    return keep


def correct(make=None, **options):
    """A maker of a step without a fault."""

    def keep(make):
        CORRECT[make.__name__] = (make, options)
        return make

    return keep(make) if make else keep


def run(make, options):
    torch.manual_seed(0)
    step = make()
    options = dict(options)
    return audit(loop=step, **options) if options.pop("whole", False) else audit(step, **options)


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_fault_is_named_and_nothing_else(title):
    make, name, options = PLANTED[title]
    report = run(make, options)
    assert set(report.names) == {name}, report
    assert name not in report.not_seen and name in repr(report)


@pytest.mark.parametrize("title", CORRECT)
def test_a_correct_loop_is_accused_of_nothing(title):
    make, options = CORRECT[title]
    report = run(make, options)
    assert report.names == (), report
    assert report.backwards


# Windows.


@planted("gradients pile up")
def no_zero_grad():
    it = Training()

    def step():
        mse(it.model, it.next()).backward()
        it.optimizer.step()

    return step


@planted("gradients pile up")
def no_zero_grad_after_a_window():
    it = Training()

    def step():
        (mse(it.model, it.next()) / WINDOW).backward()
        if it.boundary:
            it.optimizer.step()

    return step


@planted("gradients cleared inside the window")
def zero_grad_for_each_micro_batch():
    it = Training()

    def step():
        it.optimizer.zero_grad(set_to_none=False)
        (mse(it.model, it.next()) / WINDOW).backward()
        if it.boundary:
            it.optimizer.step()

    return step


@planted("gradients cleared inside the window")
def zero_grad_before_the_last_micro_batch():
    it = Training()

    def step():
        batch = it.next()
        if it.boundary:
            for parameter in it.model.parameters():  # by hand
                parameter.grad = None
        (mse(it.model, batch) / WINDOW).backward()
        if it.boundary:
            it.optimizer.step()
            it.optimizer.zero_grad()

    return step


@planted("gradients cleared before the step")
def zero_grad_between_backward_and_step():
    it = Training()

    def step():
        loss = mse(it.model, it.next())
        loss.backward()
        it.optimizer.zero_grad()
        it.optimizer.step()

    return step


@planted("step before backward")
def step_before_the_first_backward():
    it = Training()

    def step():
        it.optimizer.zero_grad()
        loss = mse(it.model, it.next())
        it.optimizer.step()
        loss.backward()

    return step


def with_scaler(order, scale=1024.0, interval=2000, k=1):
    it = Training(optimizer=torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)

    def step():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse(it.model, it.next()) / k
        scaler.scale(loss).backward()
        order(it, scaler)

    return step


@planted("clipped before unscale_")
def clip_before_unscale():
    def order(it, scaler):
        clip_grad_norm_(it.model.parameters(), 1.0)
        scaler.step(it.optimizer)
        scaler.update()
        it.optimizer.zero_grad()

    return with_scaler(order)


@planted("clipped before unscale_")
def clip_values_before_unscale():
    def order(it, scaler):
        clip_grad_value_(it.model.parameters(), 0.5)
        scaler.unscale_(it.optimizer)
        scaler.step(it.optimizer)
        scaler.update()
        it.optimizer.zero_grad()

    return with_scaler(order)


@planted("scales mixed in a window")
def unscale_and_update_for_each_micro_batch():
    def order(it, scaler):
        scaler.unscale_(it.optimizer)
        if it.boundary:
            scaler.step(it.optimizer)
        scaler.update()
        if it.boundary:
            it.optimizer.zero_grad()

    return with_scaler(order, k=WINDOW)


@planted("scales mixed in a window")
def the_scale_grows_inside_the_window():
    def order(it, scaler):
        if it.boundary:
            scaler.step(it.optimizer)
            scaler.update()
            it.optimizer.zero_grad()
        elif it.micro % WINDOW == 2:
            scaler.update(2048.0 if it.micro < WINDOW else 512.0)

    return with_scaler(order, k=WINDOW)


@planted("scheduler inside the window")
def scheduler_for_each_micro_batch():
    it = Training()
    scheduler = lr_scheduler.SequentialLR(
        it.optimizer,
        [lr_scheduler.LinearLR(it.optimizer, total_iters=3), lr_scheduler.CosineAnnealingLR(it.optimizer, 9)],
        milestones=[3],
    )

    def step():
        (mse(it.model, it.next()) / WINDOW).backward()
        if it.boundary:
            it.optimizer.step()
            it.optimizer.zero_grad()
        scheduler.step()

    return step


@planted("scheduler at a skipped step")
def scheduler_moves_on_at_a_skipped_step():
    it = Training(optimizer=torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu")
    scheduler = lr_scheduler.LambdaLR(it.optimizer, lambda n: 0.5**n)

    def step():
        loss = mse(it.model, it.next()) * (float("inf") if it.micro in (1, 3) else 1.0)
        it.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(it.optimizer)
        scaler.update()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()

    return step


@planted("window left over", whole=True)
def a_window_left_over_at_the_end():
    it = Training()

    def train():
        for _ in range(10):
            (mse(it.model, it.next()) / WINDOW).backward()
            if it.boundary:
                it.optimizer.step()
                it.optimizer.zero_grad()

    return train


@planted("loss not divided by the window")
def loss_of_a_window_not_divided():
    it = Training()

    def step():
        mse(it.model, it.next()).backward()
        if it.boundary:
            it.optimizer.step()
            it.optimizer.zero_grad()

    return step


@planted("loss not divided by the window")
def loss_divided_after_backward():
    it = Training(optimizer=torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    logged = []

    def step():  # a whole window in one call
        it.optimizer.zero_grad()
        for _ in range(WINDOW):
            loss = mse(it.model, it.next())
            scaler.scale(loss).backward()
            loss = loss / WINDOW
            logged.append(float(loss))
        scaler.step(it.optimizer)
        scaler.update()

    return step


@planted("BatchNorm per micro-batch")
def batch_norm_under_accumulation():
    it = Training(net(nn.BatchNorm1d(16), nn.ReLU()))

    def step():
        (mse(it.model, it.next()) / WINDOW).backward()
        if it.boundary:
            it.optimizer.step()
            it.optimizer.zero_grad()

    return step


# Compilation.


def compiled(model, sizes=(16,)):
    torch._dynamo.reset()
    it = Training(model)
    run_it = torch.compile(it.model, backend="eager")

    def step():
        it.optimizer.zero_grad()
        x, y = it.next()
        size = sizes[(it.micro - 1) % len(sizes)]
        F.mse_loss(run_it(x[:size]), y[:size]).backward()
        it.optimizer.step()

    return step


@planted("recompiled for a shape")
def the_last_batch_is_smaller():
    return compiled(net(), sizes=(16, 16, 5))


class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.first(x)
        if hidden.sum() > 0:
            hidden = torch.tanh(hidden)
        return self.last(hidden)


@planted("graph breaks")
def a_branch_on_data():
    return compiled(Breaking())


class Printing(Breaking):
    def forward(self, x):
        hidden = self.first(x)
        self.seen = hidden.detach().abs().max().item()
        return self.last(hidden)


@planted("graph breaks")
def an_item_in_the_middle():
    return compiled(Printing())


# Checkpoints.


class Block(nn.Module):
    def __init__(self, width=32, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Dropout(dropout))

    def forward(self, x):
        return x + self.layers(x)


class Deep(nn.Module):
    def __init__(self, run, blocks=6, **options):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 1)
        self.blocks = nn.Sequential(*(Block(**options) for _ in range(blocks)))
        self.run = run

    def forward(self, x):
        return self.last(self.run(self, self.first(x)))


def plain(it):
    def step():
        it.optimizer.zero_grad()
        mse(it.model, it.next()).backward()
        it.optimizer.step()

    return step


def each_block(model, x, **options):
    for block in model.blocks:
        x = checkpoint(block, x, **{"use_reentrant": False, **options})
    return x


@planted("checkpoint saves nothing")
def one_checkpoint_around_everything():
    return plain(Training(Deep(lambda model, x: checkpoint(model.blocks, x, use_reentrant=False))))


@planted("checkpoint saves nothing")
def lone_linears():
    def linears(model, x):
        for block in model.blocks:
            x = torch.tanh(checkpoint(block.layers[0], x, use_reentrant=False))
        return x

    model = Deep(linears)
    for block in model.blocks:
        block.layers = block.layers[:1]
    return plain(Training(model))


@planted("checkpoint without gradients")
def a_reentrant_checkpoint_on_the_batch():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 1)

        def forward(self, x):
            return self.last(checkpoint(self.first, x, use_reentrant=True))

    step = plain(Training(Model()))

    def quietly():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step()

    return quietly


@planted("checkpoint with other randomness")
def dropout_without_its_random_state():
    return plain(Training(Deep(lambda *a: each_block(*a, preserve_rng_state=False), dropout=0.1)))


@planted("checkpoint with other randomness")
def dropout_without_its_random_state_reentrant():
    def reentrant(*arguments):
        return each_block(*arguments, preserve_rng_state=False, use_reentrant=True)

    return plain(Training(Deep(reentrant, dropout=0.1)))


# Precision.


@planted("autocast without effect")
def the_forward_is_outside():
    it = Training()

    def step():
        it.optimizer.zero_grad()
        out = it.model(it.next()[0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(out, it.batches[0][1])
        loss.backward()
        it.optimizer.step()

    return step


@planted("autocast without effect")
def autocast_for_another_device():
    it = Training()

    def step():
        it.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context = torch.autocast("cuda", dtype=torch.bfloat16)
        with context:
            loss = mse(it.model, it.next())
        loss.backward()
        it.optimizer.step()

    return step


@planted("autocast without effect")
def autocast_cannot_lower_float64():
    it = Training(net().double())

    def step():
        it.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = it.model(it.next()[0].double())
        out.square().mean().backward()
        it.optimizer.step()

    return step


@planted("float16 gradients lost")
def fp16_without_a_scaler():
    it = Training(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), optimizer=torch.optim.SGD)
    x, y = torch.randn(64, 64), torch.randn(64, 64)

    def step():
        it.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = it.model(x)
        (F.mse_loss(out.float(), y) * 1e-4).backward()
        it.optimizer.step()

    return step


@planted("weights too coarse for the steps")
def bfloat16_weights():
    it = Training(net().bfloat16(), lr=1e-6)

    def step():
        it.optimizer.zero_grad()
        x, y = it.next()
        F.mse_loss(it.model(x.bfloat16()).float(), y).backward()
        it.optimizer.step()

    return step


@planted("dimensions off the tensor cores", target="cuda")
def odd_dimensions():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(50257, 64), nn.Linear(64, 1001)

        def forward(self, x):
            return self.head(self.table(x))

    it = Training(Tagger())
    tokens = torch.randint(50257, (4, 8))

    def step():
        it.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(it.model(tokens).flatten(0, 1), tokens.flatten() % 1001)
        loss.backward()
        it.optimizer.step()

    return step


# What is kept, and what gets nothing.


@planted("graphs kept")
def the_sum_of_losses_keeps_their_graphs():
    it = Training()
    total = SimpleNamespace(loss=0.0)

    def step():
        it.optimizer.zero_grad()
        loss = mse(it.model, it.next())
        loss.backward()
        it.optimizer.step()
        total.loss = total.loss + loss

    return step


@planted("graphs kept", whole=True)
def a_list_of_losses_in_a_loop():
    it = Training()

    def train():
        losses = []
        for _ in range(6):
            it.optimizer.zero_grad()
            losses.append(mse(it.model, it.next()))
            losses[-1].backward()
            it.optimizer.step()

    return train


@planted("graphs kept")
def retain_graph_for_nothing():
    it = Training()

    def step():
        it.optimizer.zero_grad()
        mse(it.model, it.next()).backward(retain_graph=True)
        it.optimizer.step()

    return step


@planted("graphs kept")
def a_recurrent_state_without_detach():
    it = Training(nn.RNNCell(8, 8), optimizer=torch.optim.SGD, lr=0.0)
    state = SimpleNamespace(h=torch.zeros(16, 8))

    def step():
        it.optimizer.zero_grad()
        state.h = it.model(it.next()[0], state.h)
        state.h.square().mean().backward(retain_graph=True)

    return step


@planted("parameters without gradient")
def a_detach_on_the_way():
    it = Training()

    def step():
        it.optimizer.zero_grad()
        x, y = it.next()
        F.mse_loss(it.model[2](it.model[1](it.model[0](x)).detach()), y).backward()
        it.optimizer.step()

    return step


@planted("gradients without optimizer")
def a_head_that_was_exchanged():
    it = Training()
    it.model[2] = nn.Linear(16, 1)
    it.optimizer.param_groups[0]["params"] = it.optimizer.param_groups[0]["params"][:2]
    return plain(it)


# Correct loops.


@correct
def plain_training():
    return plain(Training())


@correct(whole=True)
def accumulation_with_a_partial_window():
    it = Training()

    def train():
        for start in range(0, 10, WINDOW):
            window = it.batches[start : min(10, start + WINDOW)]
            it.optimizer.zero_grad()
            for batch in window:
                (mse(it.model, batch) / len(window)).backward()
            it.optimizer.step()

    return train


@correct
def accumulation_a_micro_batch_a_call():
    it = Training()
    scheduler = lr_scheduler.OneCycleLR(it.optimizer, 0.1, total_steps=50)

    def step():
        (mse(it.model, it.next()) / WINDOW).backward()
        if it.boundary:
            clip_grad_norm_(it.model.parameters(), 0.1)
            it.optimizer.step()
            scheduler.step()
            it.optimizer.zero_grad()

    return step


@correct
def gradients_divided_instead_of_the_loss():
    it = Training()

    def step():
        mse(it.model, it.next()).backward()
        if it.boundary:
            for parameter in it.model.parameters():
                parameter.grad.data.div_(WINDOW)
            it.optimizer.step()
            it.optimizer.zero_grad(set_to_none=False)

    return step


@correct
def tokens_of_the_window():
    it = Training(net(outputs=5))
    labels = torch.randint(5, (32, 16))

    def step():
        counts = [int(n) for n in torch.randint(3, 16, (WINDOW,))]
        it.optimizer.zero_grad()
        for count, y in zip(counts, labels, strict=False):
            loss = F.cross_entropy(it.model(it.next()[0][:count]), y[:count], reduction="sum")
            (loss / sum(counts)).backward()
        it.optimizer.step()

    return step


@correct
def bf16_autocast():
    it = Training()

    def step():
        it.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = it.model(it.next()[0])
        F.mse_loss(out.float(), it.batches[0][1]).backward()
        it.optimizer.step()

    return step


@correct
def autocast_switched_off():
    it = Training()

    def step():
        it.optimizer.zero_grad()
        with torch.autocast("cuda", enabled=torch.cuda.is_available()):
            loss = mse(it.model, it.next())
        loss.backward()
        it.optimizer.step()

    return step


@correct
def a_teacher_under_autocast():
    it, teacher = Training(), net()

    def step():
        it.optimizer.zero_grad()
        x, _ = it.next()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            wanted = teacher(x).float()
        F.mse_loss(it.model(x), wanted).backward()
        it.optimizer.step()

    return step


def fp16(k=1, fused=None):
    it = Training(net(width=64), optimizer=torch.optim.Adam, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # too large at first: some steps are skipped
    scheduler = lr_scheduler.LambdaLR(it.optimizer, lambda n: 1 / (1 + n))

    def step():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse(it.model, it.next()) / k
        scaler.scale(loss).backward()
        if it.micro % k:
            return
        scaler.unscale_(it.optimizer)
        clip_grad_norm_((p for p in it.model.parameters()), 0.1)
        scaler.step(it.optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        it.optimizer.zero_grad()

    return step


@correct(calls=16)
def fp16_with_a_scaler():
    return fp16()


@correct(calls=16)
def fp16_with_a_fused_optimizer():
    return fp16(fused=True)


@correct(calls=40)
def fp16_accumulation():
    return fp16(WINDOW)


@correct
def clipped_to_a_limit_times_the_scale():
    def order(it, scaler):
        clip_grad_norm_(it.model.parameters(), 0.1 * scaler.get_scale())
        clip_grad_norm_(it.model.parameters(), float("inf"))
        scaler.step(it.optimizer)
        scaler.update()
        it.optimizer.zero_grad()

    return with_scaler(order)


@correct
def a_scheduler_an_epoch():
    it = Training(optimizer=torch.optim.SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(it.optimizer)

    def step():
        loss = mse(it.model, it.next()) / WINDOW * (float("inf") if it.micro == 8 else 1.0)
        scaler.scale(loss).backward()
        if it.boundary:
            scaler.step(it.optimizer)
            scaler.update()
            it.optimizer.zero_grad()
        if it.micro % 6 == 0 or it.micro == 8:  # in the middle of a window, and at a skipped step
            scheduler.step(1.0)

    return step


@correct
def checkpointed_blocks():
    return plain(Training(Deep(each_block, dropout=0.1)))


@correct
def checkpointed_segments():
    return plain(Training(Deep(lambda model, x: checkpoint_sequential(model.blocks, 3, x, use_reentrant=False))))


@correct
def checkpointed_reentrant():
    return plain(Training(Deep(lambda *a: each_block(*a, use_reentrant=True), dropout=0.1)))


@correct
def checkpointed_by_a_policy():
    def keep_products(context, op, *args, **kwargs):
        return op == torch.ops.aten.addmm.default

    def contexts():
        return create_selective_checkpoint_contexts(keep_products)

    return plain(Training(Deep(lambda *a: each_block(*a, context_fn=contexts))))


@correct
def checkpoints_without_randomness():
    return plain(Training(Deep(lambda *a: each_block(*a, preserve_rng_state=False))))


@correct
def compiled_with_fixed_shapes():
    return compiled(net())


@correct
def a_compiled_step():
    torch._dynamo.reset()
    it = Training()
    x, y = it.next()

    @torch.compile(backend="aot_eager")
    def step():
        loss = F.mse_loss(it.model(x), y)
        loss.backward()
        clip_grad_norm_(it.model.parameters(), 1.0)
        it.optimizer.step()
        it.optimizer.zero_grad()

    return step


@correct
def two_networks_against_each_other():
    torch.manual_seed(0)
    maker, critic = net(outputs=8), net(nn.BatchNorm1d(16), nn.LeakyReLU())
    of_maker, of_critic = (torch.optim.Adam(each.parameters(), 1e-3) for each in (maker, critic))
    real = torch.randn(16, 8)
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    judge = F.binary_cross_entropy_with_logits

    def step():
        fake = maker(torch.randn(16, 8))
        of_critic.zero_grad()
        judge(critic(real), ones).backward()
        judge(critic(fake.detach()), zeros).backward()
        of_critic.step()
        of_maker.zero_grad()
        judge(critic(fake), ones).backward()  # gradients of the critic, for nobody
        of_maker.step()

    return step


@correct
def a_gradient_penalty():
    it = Training(optimizer=torch.optim.Adam)

    def step():
        x, _ = it.next()
        x = x.clone().requires_grad_()
        out = it.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        it.optimizer.zero_grad()
        (out.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()
        it.optimizer.step()

    return step


@correct
def two_losses_of_one_forward():
    it = Training()

    def step():
        it.optimizer.zero_grad()
        x, y = it.next()
        out = it.model(x)
        F.mse_loss(out, y).backward(retain_graph=True)
        F.l1_loss(out, y).backward()
        it.optimizer.step()

    return step


@correct
def a_closure_called_often():
    it = Training(optimizer=torch.optim.LBFGS)

    def step():
        batch = it.next()

        def closure():
            it.optimizer.zero_grad()
            loss = mse(it.model, batch)
            loss.backward()
            return loss

        it.optimizer.step(closure)

    return step


@correct
def an_average_of_weights():
    it = Training()
    average = torch.optim.swa_utils.AveragedModel(it.model)
    step = plain(it)

    def with_average():
        step()
        average.update_parameters(it.model)

    return with_average


@correct
def frozen_layers():
    model = net()
    model[0].requires_grad_(False)
    return plain(Training(model))


@correct
def steps_by_hand():
    model = net()
    x, y = torch.randn(16, 8), torch.randn(16, 1)

    def step():
        mse(model, (x, y)).backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad.data
            parameter.grad.data.zero_()

    return step


@correct
def sharpness_aware():
    it = Training(optimizer=torch.optim.SGD)

    def step():
        batch = it.next()
        mse(it.model, batch).backward()
        before = [p.detach().clone() for p in it.model.parameters()]
        with torch.no_grad():
            for parameter in it.model.parameters():
                parameter.add_(0.05 * parameter.grad)
        it.optimizer.zero_grad()
        mse(it.model, batch).backward()
        with torch.no_grad():
            for parameter, old in zip(it.model.parameters(), before, strict=True):
                parameter.copy_(old)
        it.optimizer.step()
        it.optimizer.zero_grad()

    return step


@correct
def gradients_projected():
    it = Training(optimizer=torch.optim.SGD)

    def step():
        x, y = it.next()
        flat = []
        for wanted in (y, -y, y.square()):
            it.optimizer.zero_grad()
            F.mse_loss(it.model(x), wanted).backward()
            flat.append([p.grad.clone() for p in it.model.parameters()])
        it.optimizer.zero_grad()
        for parameter, *each in zip(it.model.parameters(), *flat, strict=True):
            parameter.grad = torch.stack(each).median(0).values
        it.optimizer.step()

    return step


@correct
def bad_batches_skipped():
    it = Training()

    def step():
        it.optimizer.zero_grad()
        loss = mse(it.model, it.next()) * (float("nan") if it.micro in (1, 5) else 1.0)
        loss.backward()
        if all(p.grad.isfinite().all() for p in it.model.parameters()):
            it.optimizer.step()

    return step


@correct
def float32_masters_of_half_weights():
    model = net().bfloat16()
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-4)
    x, y = torch.randn(16, 8).bfloat16(), torch.randn(16, 1)

    def step():
        F.mse_loss(model(x).float(), y).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    return step


@correct
def steps_within_backward():
    model = net()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    x, y = torch.randn(16, 8), torch.randn(16, 1)

    def at_once(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(at_once)

    def step():
        mse(model, (x, y)).backward()

    return step


@correct
def trained_between_its_yields():
    it = Training()
    step = plain(it)

    def loop():
        while True:
            step()
            yield

    return loop()


@correct
def a_table_with_rows_that_are_not_used():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(100, 16, sparse=True), nn.Linear(16, 1)

        def forward(self, x):
            return self.head(self.table(x).mean(1))

    it = Training(Tagger(), optimizer=torch.optim.SGD)

    def step():
        it.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(it.model(torch.randint(100, (16, 5))).float(), it.next()[1])
        loss.backward()
        it.optimizer.step()

    return step


# Steps that look like faults, and are none.


@correct
def losses_in_cycles():
    it = Training()

    def step():
        it.optimizer.zero_grad()
        out = SimpleNamespace(loss=mse(it.model, it.next()))
        out.itself = out
        out.loss.backward()
        it.optimizer.step()

    return step


@correct
def inputs_attacked_by_their_gradients():
    it = Training()

    def step():
        x, y = it.next()
        x = x.clone().requires_grad_()
        F.mse_loss(it.model(x), y).backward()
        it.optimizer.zero_grad()  # the gradient of x was wanted, not those of the model
        F.mse_loss(it.model((x + 0.1 * x.grad.sign()).detach()), y).backward()
        it.optimizer.step()
        it.optimizer.zero_grad()

    return step


@correct
def a_loss_at_its_minimum():
    it, twin = Training(), net()
    twin.load_state_dict(it.model.state_dict())

    def step():
        it.optimizer.zero_grad()
        x, _ = it.next()
        F.mse_loss(it.model(x), twin(x).detach()).backward()
        it.optimizer.step()

    return step


@correct
def gradients_of_replicas():
    it = Training()
    replicas = [net() for _ in range(2)]

    def step():
        for replica in replicas:
            mse(replica, it.next()).backward()
        for parameter, *others in zip(it.model.parameters(), *(r.parameters() for r in replicas), strict=True):
            parameter.grad = torch.stack([p.grad for p in others]).mean(0)
            for other in others:
                other.grad = None
        it.optimizer.step()

    return step


@correct
def two_optimizers_of_unlike_rates():
    torch.manual_seed(0)
    first, second = net(outputs=8), net()
    often, rarely = torch.optim.Adam(first.parameters()), torch.optim.Adam(second.parameters())
    calls = []

    def step():
        calls.append(1)
        second(first(torch.randn(16, 8))).square().mean().backward()
        often.step()
        often.zero_grad()
        if len(calls) % 2 == 0:
            rarely.step()
            rarely.zero_grad()

    return step


@correct
def low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(8, 1).requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 1, bias=False)
            nn.init.zeros_(self.up.weight)  # so that the first gradient of the other is zero

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    it = Training(Adapted())
    it.optimizer = torch.optim.AdamW([p for p in it.model.parameters() if p.requires_grad])
    return plain(it)


@correct
def gradients_of_representations_kept():
    it = Training(net(outputs=4))

    def step():
        it.optimizer.zero_grad()
        x = torch.randn(32, 8)
        with torch.no_grad():
            made = torch.cat([it.model(part) for part in x.chunk(4)])
        made.requires_grad_()
        F.cross_entropy(made @ made.T, torch.arange(32)).backward()
        for part, gradient in zip(x.chunk(4), made.grad.chunk(4), strict=True):
            it.model(part).backward(gradient)
        it.optimizer.step()

    return step


@correct
def several_tasks_in_a_loop():
    torch.manual_seed(0)
    body, heads = net(outputs=16), nn.ModuleList(nn.Linear(16, 1) for _ in range(3))
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()])

    def step():
        optimizer.zero_grad()
        for head in heads:
            head(body(torch.randn(16, 8))).square().mean().backward()
        optimizer.step()

    return step


@correct
def complex_weights():
    it = Training(nn.Linear(8, 1, dtype=torch.complex64))

    def step():
        it.optimizer.zero_grad()
        it.model(it.next()[0].to(torch.complex64)).abs().mean().backward()
        it.optimizer.step()

    return step


@correct
def checkpoints_with_a_wide_mask():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, mask):
            scores = self.query(x) @ x.transpose(1, 2) + mask
            return x + self.out(torch.tanh(scores.softmax(-1) @ x))

    layers = nn.ModuleList(Masked() for _ in range(3))
    it = Training(layers)
    mask, start = torch.zeros(4, 64, 64).repeat(8, 1, 1), nn.Parameter(torch.randn(1, 64, 16))
    it.optimizer.add_param_group({"params": [start]})

    def step():
        it.optimizer.zero_grad()
        x = start.expand(32, -1, -1) * 1.0
        for layer in layers:
            x = checkpoint(layer, x, mask, use_reentrant=False)
        x.square().mean().backward()
        it.optimizer.step()

    return step


@correct
def jagged_tensors():
    it = Training()

    def step():
        it.optimizer.zero_grad()
        rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
        it.model(rows).values().square().mean().backward()
        it.optimizer.step()

    return step


@correct
def every_child_checkpointed():
    workload = Workload(
        "deep",
        lambda: nn.Sequential(*(Block(8) for _ in range(4)), nn.Linear(8, 1)),
        lambda n, device: torch.randn(n, 8, device=device),
        lambda model, batch: model(batch).square().mean(),
        torch.optim.AdamW,
    )
    return build_step(workload, Recipe(16, precision="bf16", checkpointing=True), "cpu")


# What an audit leaves alone.


def test_each_fault_was_planted():
    assert set(FAULTS) == {name for _, name, _ in PLANTED.values()}


def state_of(*things):
    """Everything that a step may change, as bytes."""
    buffer = io.BytesIO()
    gradients = [p.grad for each in things if isinstance(each, nn.Module) for p in each.parameters()]
    torch.save([[each.state_dict() for each in things], gradients, torch.get_rng_state()], buffer)
    return buffer.getvalue(), random.getstate(), np.random.get_state()[1].tobytes()


def everything():
    """A step with dropout, checkpoints, autocast, a scaler, clipping, accumulation and a schedule."""
    it = Training(Deep(each_block, blocks=2, dropout=0.3), optimizer=torch.optim.AdamW)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    scheduler = lr_scheduler.CosineAnnealingLR(it.optimizer, 8)
    losses = []

    def step():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse(it.model, it.next()) / 2 + 0.01 * random.random() * np.random.rand()
        scaler.scale(loss).backward()
        losses.append(loss.item())
        if it.micro % 2:
            return
        scaler.unscale_(it.optimizer)
        clip_grad_norm_(it.model.parameters(), 0.05)
        clip_grad_value_(it.model.parameters(), 0.01)
        before = scaler.get_scale()
        scaler.step(it.optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        it.optimizer.zero_grad()

    return step, (it.model, it.optimizer, scaler, scheduler), losses


def seeded(run):
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    step, things, losses = everything()
    run(step)
    return losses, state_of(*things)


def test_the_steps_are_the_same_bit_for_bit():
    def without(step):
        for _ in range(12):
            step()

    assert seeded(without) == seeded(lambda step: audit(step, calls=12, keep=True))


@pytest.mark.parametrize(
    "make",
    [
        compiled_with_fixed_shapes,
        a_compiled_step,
        fp16_with_a_fused_optimizer,
        checkpointed_blocks,
        checkpointed_reentrant,
        checkpointed_by_a_policy,
        two_networks_against_each_other,
        a_gradient_penalty,
        a_closure_called_often,
        steps_within_backward,
        dropout_without_its_random_state,
        a_branch_on_data,
        zero_grad_between_backward_and_step,
    ],
)
def test_other_steps_are_the_same_bit_for_bit(make):
    def after(run):
        torch.manual_seed(0)
        step = make()
        run(step)
        return state_of(*found_in(step))

    assert after(lambda step: [step() for _ in range(5)]) == after(lambda step: audit(step, calls=5, keep=True))


def test_afterwards_everything_is_as_it_was():
    step, things, _ = everything()
    for _ in range(5):
        step()
    before = state_of(*things)
    report = audit(step, calls=6)
    assert report.names == () and report.steps == 3
    assert state_of(*things) == before


def patched():
    """Everything of PyTorch that an audit replaces for its time."""
    kinds = [lr_scheduler.LRScheduler, *lr_scheduler.LRScheduler.__subclasses__()]
    cells = [each.__closure__[0].cell_contents for each in (clip_grad_norm_, clip_grad_value_)]
    autocast = torch.amp.autocast_mode.autocast
    return [
        torch.autograd._engine_run_backward,
        torch.optim.Optimizer.step,
        torch.optim.Optimizer.zero_grad,
        *(getattr(torch.amp.GradScaler, name) for name in ("scale", "unscale_", "step", "update")),
        *cells,
        torch.nn.utils.clip_grad._clip_grads_with_norm_.__closure__[0].cell_contents,
        *(vars(kind).get("step") for kind in kinds),
        autocast.__init__,
        autocast.__enter__,
        autocast.__exit__,
        checkpoints._checkpoint_hook,
        checkpoints._CheckpointFrame.save_inputs,
        vars(checkpoints.CheckpointFunction).get("apply"),
        dict(optimizers._global_optimizer_pre_hooks),
        dict(optimizers._global_optimizer_post_hooks),
    ]


class OurError(Exception):
    pass


@pytest.mark.parametrize("when", ("forward", "backward", "step", "micro"))
def test_an_error_of_the_step_passes_and_leaves_nothing_behind(when):
    step, things, _ = everything()
    step()
    before, functions = state_of(*things), patched()

    def fail(*_):
        raise OurError(when)

    model, optimizer = things[:2]
    handles = [
        model.last.register_forward_hook(fail) if when == "forward" else None,
        model.last.weight.register_hook(fail) if when == "backward" else None,
        optimizer.register_step_post_hook(fail) if when == "step" else None,
    ]
    calls = []

    def failing():
        calls.append(step())
        if when == "micro" and len(calls) == 3:
            fail()

    with pytest.raises(OurError, match=when):
        audit(failing, calls=24, state=things)
    for handle in handles:
        if handle:
            handle.remove()
    assert state_of(*things) == before
    assert patched() == functions
    assert audit(step, calls=2).backwards == 2


def test_after_an_audit_every_function_is_the_old_one():
    functions = patched()
    audit(plain_training())
    assert patched() == functions


def test_kept_training_goes_on():
    it = Training()
    before = state_of(it.model)
    assert audit(plain(it), calls=3, keep=True).steps == 3
    assert state_of(it.model) != before and it.optimizer.state


def test_a_generator_trains_what_it_was_given():
    it = Training()
    step = plain(it)

    def loop(model, optimizer, rounds):
        for _ in range(rounds):
            step()
            yield

    before = state_of(it.model, it.optimizer)
    report = audit(loop(it.model, it.optimizer, 100), calls=5)
    assert (report.calls, report.backwards, report.steps) == (5, 5, 5)
    whole = audit(loop=loop(it.model, it.optimizer, 3))
    assert (whole.calls, whole.steps) == (3, 3) and "window left over" in whole.not_seen
    assert state_of(it.model, it.optimizer) == before
    short = audit(lambda: loop(it.model, it.optimizer, 3))
    assert short.backwards == 0  # such a function only makes a generator


def test_a_generator_function_is_run():
    it = Training()
    step = plain(it)

    def loop():
        for _ in range(4):
            step()
            yield

    assert audit(loop=loop).steps == 4


def test_a_step_that_trains_nothing():
    report = audit(lambda: None, calls=2)
    assert report.findings == () and report.not_seen == ()
    assert repr(report).splitlines() == [
        "Watched 2 calls: 0 backward passes, 0 optimizer steps.",
        "Nothing was seen to train: no backward pass ran.",
    ]


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "said"),
    [
        ((), {}, ValueError, "one of step and loop= is expected"),
        ((print,), {"loop": print}, ValueError, "one of step and loop= is expected"),
        ((3,), {}, TypeError, "a function, or an iterable that trains, is expected, got int"),
        ((print,), {"calls": 0}, ValueError, "calls: a whole number of 1 or more is expected, got 0"),
        ((print,), {"calls": True}, ValueError, "calls"),
        ((print,), {"calls": 2.5}, ValueError, "calls"),
        ((print,), {"state": [3]}, TypeError, "state="),
    ],
)
def test_bad_input_is_told(arguments, options, kind, said):
    with pytest.raises(kind, match=said):
        audit(*arguments, **options)


def test_a_report_tells_evidence_and_what_to_do():
    report = audit(no_zero_grad(), calls=3)
    first, finding, advice, *rest = repr(report).splitlines()
    assert first == "Watched 3 calls: 3 backward passes, 3 optimizer steps."
    assert finding == (
        "gradients pile up: 2 of 3 steps of AdamW used gradients again: in call 2 those of backward 2 lay on top of "
        "those of backward 1, which an earlier step had used"
    )
    assert advice == "  Call optimizer.zero_grad() after each step."
    assert rest[0].startswith("Not seen: gradients cleared inside the window, ")
    assert any(line.startswith("Not looked for: window left over (") for line in rest)
    assert not any("fine" in line for line in rest)
    assert labsupport.audit is audit


def test_the_numbers_are_those_of_the_case():
    clipped = audit(clip_before_unscale(), calls=2).findings[0].evidence
    assert "to 1 that were scaled by 1024, so in truth to 0.000977" in clipped
    sizes = audit(odd_dimensions(), calls=2, target="cuda").findings[0].evidence
    assert "table.num_embeddings 50257 -> 50304" in sizes and "head.out_features 1001 -> 1008" in sizes
    assert "64" not in sizes.replace("50304", "")
    report = audit(scheduler_for_each_micro_batch(), calls=8)
    assert "8 steps for 2 of AdamW" in report.findings[0].evidence
    whole = audit(one_checkpoint_around_everything(), calls=2).findings[0].evidence
    assert "Sequential is the only one" in whole
    blind = audit(a_reentrant_checkpoint_on_the_batch(), calls=2).findings[0].evidence
    assert "2 parameters got none: first.0.bias, first.0.weight" in blind


def test_what_was_not_looked_for_says_why():
    report = audit(plain_training(), calls=2)
    assert set(report.not_looked_for) == {
        "window left over",
        "recompiled for a shape",
        "graph breaks",
        "checkpoint saves nothing",
        "checkpoint without gradients",
        "checkpoint with other randomness",
        "dimensions off the tensor cores",
    }
    assert set(report.not_seen) | set(report.not_looked_for) == set(FAULTS)


class Rounds:
    """An iterable that names nothing."""

    def __init__(self, step):
        self.rounds = (step() for _ in range(9))

    def __iter__(self):
        return self.rounds


MODEL = net()
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 0.1)


def train_global(batch):
    OPTIMIZER.zero_grad()
    mse(MODEL, batch).backward()
    OPTIMIZER.step()


def rounds_of_globals(batches):
    for batch in batches:
        train_global(batch)
        yield


def test_a_generator_that_trains_globals_is_put_back():
    batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(9)]
    before = state_of(MODEL, OPTIMIZER)
    for training in (rounds_of_globals(batches), (train_global(batch) for batch in batches)):
        report = audit(training, calls=3)
        assert report.steps == 3 and not report.not_put_back
        assert state_of(MODEL, OPTIMIZER) == before


def test_what_could_not_be_put_back_is_named():
    it = Training()
    step = plain(it)
    report = audit(Rounds(step), calls=3)
    assert report.not_put_back == "0.bias, 0.weight, 2.bias and 1 more"
    assert "Trained and not put back: 0.bias" in repr(report)
    before = state_of(it.model, it.optimizer)
    report = audit(Rounds(step), calls=3, state=[it.model, it.optimizer])
    assert report.not_put_back == "" and state_of(it.model, it.optimizer) == before
