"""The memory ledger against arithmetic, autograd's saved tensors and torch.profiler, and what may go on around it."""

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from measure.allocator import allocator_peak
from torch import nn
from torch.optim import SGD, Adam, AdamW, SparseAdam
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from labsupport.measure import MemoryLedger, graph_nodes
from labsupport.measure.storages import tensors_in

SCALARS = 64  # Python's numbers are tensors for a moment, which no operation makes
MOMENTUM = partial(SGD, momentum=0.9)
random_models = settings(max_examples=25, deadline=None, derandomize=True)
LAYERS = [
    lambda n: nn.Linear(n, n, bias=False),
    lambda n: nn.Sequential(nn.Linear(n, n), nn.ReLU(inplace=True)),
    *(nn.LayerNorm, lambda n: nn.GELU(), lambda n: nn.ReLU(), lambda n: nn.Dropout(0.3)),
    nn.BatchNorm1d,  # the last, because it refuses a batch of one
]


@st.composite
def cases(draw, convolutions=True):
    """A model, and a batch for it."""
    batch, layers, width = draw(st.integers(1, 8)), [], draw(st.integers(1, 64))
    x = torch.randn(batch, width)
    if convolutions and draw(st.booleans()):
        channels, size = draw(st.integers(1, 4)), draw(st.integers(2, 6))
        x = torch.randn(batch, channels, size, size)
        for out in draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)):
            layers += [nn.Conv2d(channels, out, 3, padding=1), draw(st.sampled_from([nn.BatchNorm2d(out), nn.ReLU()]))]
            channels = out
        layers, width = [*layers, nn.Flatten()], channels * size * size
    for out in draw(st.lists(st.integers(1, 64), min_size=1, max_size=3)):
        layers.append(nn.Linear(width, out))
        width = out
        kinds = st.sampled_from(LAYERS if batch > 1 else LAYERS[:-1])
        layers += [make(out) for make in draw(st.lists(kinds, max_size=3))]
    return nn.Sequential(*layers), x


def nbytes(tensors):
    return sum(each.nbytes for each in tensors)


def mlp(*sizes):
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*sum(layers, [])[:-1])


def trainer(model, x, make=lambda p: SGD(p, lr=0.01)):
    optimizer = make(model.parameters())

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, optimizer


def peaks(model, x):
    """Of a step that begins without gradients: the allocator's, and the ledger's beyond its start."""
    step, optimizer = trainer(model, x)
    step(), optimizer.zero_grad()
    truth = allocator_peak(step)
    optimizer.zero_grad()
    with MemoryLedger(model, optimizer, inputs=x) as ledger:
        before = ledger.live_bytes
        step()
    return truth, ledger.peak_bytes - before, ledger


def at_backward(ledger):
    """Bytes by category when the last backward begins."""
    return ledger.timeline().at([at for at, phase in ledger.timeline().phases if phase == "backward"][-1])


@random_models
@given(cases(), st.data())
def test_categories_sum_to_the_bytes_of_the_log_at_every_position(case, data):
    step, optimizer = trainer(*case, Adam)
    with MemoryLedger(case[0], optimizer, inputs=case[1]) as ledger:
        step(), step()
    timeline = ledger.timeline()
    assert (timeline.total == np.cumsum([0, *(change for _, change in ledger.log.events)])).all()
    assert (sum(timeline.bytes_of.values()) == timeline.total).all()
    assert all((values >= 0).all() for values in timeline.bytes_of.values())
    assert sum(ledger.at_peak().values()) == ledger.peak_bytes == timeline.total.max()
    assert sum(ledger.at_end().values()) == ledger.live_bytes == timeline.total[-1]
    at = data.draw(st.integers(0, len(timeline.total) - 1))
    assert sum(each.nbytes for each in ledger.largest(10**6, at=at)) == timeline.total[at]
    assert sum(sum(parts.values()) for parts in ledger.by_module(at=at).values()) == timeline.total[at]


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize(("kind", "copies", "scalar"), [(SGD, 0, 0), (MOMENTUM, 1, 0), (Adam, 2, 4), (AdamW, 2, 4)])
@settings(random_models, max_examples=6)
@given(cases())
def test_parameters_gradients_and_state_are_the_analytic_bytes(kind, copies, scalar, how, case):
    model, x = case
    step, optimizer = trainer(model, x, lambda p: kind(p, lr=0.01, **how))
    with MemoryLedger(model, optimizer, inputs=x) as ledger:
        step()
    size, end = nbytes(model.parameters()), ledger.at_end()
    assert (end["parameter"], end["gradient"], end["buffer"]) == (size, size, nbytes(model.buffers()))
    assert end["optimizer state"] == copies * size + scalar * len(list(model.parameters()))
    assert end["input"] == x.nbytes


@random_models
@given(cases())
def test_activations_are_what_autograd_saved_and_the_output(case):
    model, x = case
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.detach()), lambda _: None):
        saved.append(model(x).detach())
    sizes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in saved}
    for known in (*model.parameters(), *model.buffers(), x):
        sizes.pop(known.untyped_storage()._cdata, None)
    with MemoryLedger(model, inputs=x) as ledger:
        out = model(x)
    assert out.requires_grad
    assert ledger.at_end()["activation"] == sum(sizes.values())


@random_models
@given(cases(convolutions=False))
def test_the_peak_is_the_allocators(case):
    truth, peak, _ = peaks(*case)
    assert peak == pytest.approx(truth, abs=SCALARS)


def test_views_share_a_storage_and_in_place_operations_allocate_nothing():
    x = torch.randn(64, 64)
    with MemoryLedger(inputs=x) as ledger:
        views = x.view(-1), x[0], x.T, x.expand(3, 64, 64), x.detach(), *x.chunk(4), x.unfold(0, 2, 1)
        x.add_(x).relu_(), x[3].zero_()
    assert len(views) == 10
    assert ledger.peak_bytes == ledger.live_bytes == x.nbytes
    assert len(ledger.log.events) == 1


def test_a_storage_may_be_resized_in_place():
    with MemoryLedger() as ledger:
        x, empty = torch.zeros(10), torch.empty(0)
        x.resize_(100)
        assert ledger.live_bytes == ledger.peak_bytes == 400
        empty.resize_(25)
        torch.add(x, x, out=(other := torch.empty(0)))
        assert ledger.live_bytes == 400 + 100 + 400
        del x, empty, other
    assert ledger.live_bytes == 0


def test_tensors_without_elements_and_meta_tensors_have_no_bytes():
    with MemoryLedger() as ledger:
        _ = torch.empty(0), torch.zeros(3, 0) @ torch.zeros(0, 0), torch.empty(1000, device="meta") + 1
        nn.Linear(8, 8, device="meta")(torch.empty(4, 8, device="meta")).sum().backward()
    assert ledger.peak_bytes == 0


def test_a_ledger_keeps_nothing_alive():
    model, x = mlp(8, 8), torch.randn(4, 8)
    step, optimizer = trainer(model, x)
    with MemoryLedger(model, optimizer, inputs=x) as ledger:
        step()
        gone = [weakref.ref(each) for each in (model, optimizer, x, *model.parameters())]
        del model, optimizer, x, step
        gc.collect()
        assert [ref() for ref in gone] == [None] * 5
        assert ledger.live_bytes == 0
    assert ledger.at_peak()["parameter"] == (8 + 1) * 8 * 4


def test_a_module_at_the_address_of_a_dead_one_is_new():
    with MemoryLedger() as ledger:
        for _ in range(5):
            model = nn.BatchNorm1d(64)
            model(torch.randn(4, 64))
            assert (ledger.at_end()["buffer"], ledger.at_end()["parameter"]) == (520, 512)
            del model


def test_autocast_copies_of_weights_are_seen_and_freed():
    model, x = nn.Linear(64, 32), torch.randn(4, 64)
    size = nbytes(model.parameters())
    with MemoryLedger(model, inputs=x) as ledger:
        before = ledger.live_bytes
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            copy = next(each for each in ledger.largest(at=-1) if each.op == "aten._to_copy.default")
            assert (copy.dtype, copy.shape) == (torch.bfloat16, (32, 64))
            assert ledger.live_bytes - before == size // 2 + x.nbytes // 2 + out.nbytes
        assert ledger.live_bytes - before == x.nbytes // 2 + out.nbytes  # the backward needs no weight here
        out.float().sum().backward()
        del out
    assert ledger.live_bytes - before == ledger.at_end()["gradient"] == size


class Checkpointed(nn.Module):
    def __init__(self, again, reentrant):
        super().__init__()
        self.linear, self.body = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid())
        self.again, self.reentrant = again, reentrant

    def forward(self, x):
        run = self.body if self.again == "module" else lambda x: self.linear(x).tanh().sigmoid()
        return checkpoint(run, x, use_reentrant=self.reentrant, preserve_rng_state=False)


@pytest.mark.parametrize("again", ["module", "function"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, again):
    x = torch.randn(512, 64, requires_grad=True)
    truth, peak, ledger = peaks(Checkpointed(again, reentrant), x)
    assert peak == pytest.approx(truth, abs=SCALARS)
    assert at_backward(ledger)["activation"] < 2 * x.nbytes
    tanhs = [each.phase for each in ledger.log.storages if each.op == "aten.tanh.default"]
    assert tanhs == ["forward", "backward"]
    assert ledger.timeline().bytes_of["activation"].max() >= 2 * x.nbytes


def test_sparse_gradients():
    model, index = nn.Embedding(1000, 8, sparse=True), torch.tensor([1, 5, 5, 7])
    optimizer = SparseAdam(model.parameters())
    with MemoryLedger(model, optimizer, inputs=index) as ledger:
        model(index).sum().backward()
        grad = model.weight.grad
        assert (grad._values().nbytes, grad._indices().nbytes) == (4 * 8 * 4, 4 * 8)
        assert ledger.at_end()["gradient"] == 4 * 8 * 4 + 4 * 8
        assert ledger.live_bytes == nbytes([model.weight, grad._values(), grad._indices(), index])
        optimizer.step()
        assert ledger.at_end()["optimizer state"] == nbytes(tensors_in(optimizer.state[model.weight]))


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("view", "after"), [(False, [1, 2, 1]), (True, [1, 1, 1])])
def test_c57_buckets_of_distributed_data_parallel(one_rank, view, after):
    model, x = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))), torch.randn(4, 256)
    optimizer, size = SGD(model.parameters(), lr=0.1), nbytes(model.parameters())
    with MemoryLedger(model, optimizer, inputs=x) as ledger:
        before, live, gradient = ledger.live_bytes, [], []
        # init_sync would broadcast a copy of all parameters, which gloo's thread may hold on to for a moment longer.
        parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view, init_sync=False)
        for _ in range(2):
            live.append(ledger.live_bytes - before)
            parallel(x).square().mean().backward()
            live.append(ledger.live_bytes - before)
            gradient.append(ledger.at_end()["gradient"])
            optimizer.step()
            gradient.append(ledger.at_end()["gradient"])
            optimizer.zero_grad()
            live.append(ledger.live_bytes - before)
    assert [each / size for each in live] == after * 2
    assert gradient == [size] * 4


def test_what_hooks_and_names_hold_is_kept():
    model, x, stored, outs = mlp(8, 16, 4), torch.randn(32, 8), [], []
    model[0].register_forward_hook(lambda module, args, out: stored.append(out.detach()))
    with MemoryLedger(model, inputs=x) as ledger:
        for i in range(3):
            outs.append(model(x))
            assert ledger.at_end()["kept"] == i * 32 * (16 + 4) * 4
            outs[-1].sum().backward()
    assert sorted(each.module for each in ledger.largest(20, at=-1) if each.category == "kept") == ["0", "0", "2", "2"]


def test_accumulation_holds_one_gradient_and_one_micro_batch():
    model, x = mlp(32, 32, 32), torch.randn(8, 32)

    model(x).mean().backward()
    with MemoryLedger(model, inputs=x) as ledger:
        peaks = [model(x).mean().backward() or ledger.at_peak() for _ in range(5)]
    assert peaks == [peaks[0]] * 5
    assert ledger.at_end()["gradient"] == peaks[0]["gradient"] == nbytes(model.parameters())


def test_two_models_two_optimizers_and_a_fake_batch_used_twice():
    generator, critic, real = mlp(8, 16, 32), mlp(32, 16, 1), torch.randn(64, 32)
    adams = [Adam(each.parameters()) for each in (generator, critic)]
    size = nbytes([*generator.parameters(), *critic.parameters()])

    def iteration():
        fake = generator(torch.randn(64, 8))
        adams[1].zero_grad()
        (critic(real).mean() - critic(fake.detach()).mean()).backward()
        adams[1].step()
        adams[0].zero_grad()
        critic(fake).mean().backward()
        adams[0].step()
        return ledger.at_end()["kept"], fake.nbytes

    with MemoryLedger([generator, critic], adams, inputs=real) as ledger:
        for _ in range(3):
            kept, fake = iteration()
            assert kept == fake  # by the name; what else the generator made is freed by its backward
    end = ledger.at_end()
    assert (end["parameter"], end["gradient"], end["optimizer state"]) == (size, size, 2 * size + 8 * 4)
    assert (end["activation"], end["kept"], end["temporary"]) == (0, 0, 0)
    assert len(ledger.timeline().steps) == 6


def test_without_a_model_all_is_recognised_once_the_optimizer_stepped():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)), torch.randn(32, 8)
    step, optimizer = trainer(model, x, Adam)
    step()
    ledgers = MemoryLedger(), MemoryLedger(model, optimizer, inputs=x)
    for ledger in ledgers:
        with ledger:
            step(), step()
    assert ledgers[0].at_peak() == ledgers[1].at_peak()
    assert ledgers[0].at_end() == ledgers[1].at_end()


# for the optimizer's, and what it saves for "temporary"
@pytest.mark.parametrize("how", ["inside", "after an error"])
def test_a_closure_is_a_forward_and_a_backward(how):
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(512, 8)
    optimizer = SGD([weight])

    def closure():
        (x @ weight).tanh().sum().backward()

    with MemoryLedger(optimizer=optimizer, inputs=x) as ledger:
        if how == "inside":
            optimizer.step(closure)
        else:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
            closure()
    assert at_backward(ledger)["activation"] == x.nbytes + 4  # the tanh's output, and the loss


def test_modules_names_and_source_lines_also_in_the_backward():
    model, x = nn.Sequential(nn.Linear(64, 128), nn.Sequential(nn.ReLU(), nn.Linear(128, 64))), torch.randn(512, 64)
    with MemoryLedger(model, inputs=x) as ledger:
        out = model(x)
        loss = out.sigmoid().mean()
        forward = len(ledger.log.events)
        loss.backward()
    table, tensors = ledger.by_module(at=forward), ledger.largest(20, at=forward)
    assert table["0"] == {"parameter": (64 + 1) * 128 * 4}  # the ReLU saves its output, not this one's
    assert table["1.0"] == {"activation": 512 * 128 * 4}
    assert table["1.1"] == {"parameter": (128 + 1) * 64 * 4, "activation": out.nbytes}
    assert table[""] == {"input": x.nbytes, "activation": out.nbytes + 4}
    assert [each.source for each in tensors if each.module == "1.0"][0].endswith(": out = model(x)")
    weight = next(each for each in tensors if each.name == "1.1.weight")
    assert (weight.category, weight.shape, weight.nbytes) == ("parameter", (64, 128), 32_768)
    backward = [each for each in ledger.largest(20) if each.phase == "backward"]
    assert {each.file for each in backward} == {__file__}
    assert all("test_memory.py line" in each.source and "loss.backward()" in each.source for each in backward)
    assert {each.module for each in backward} >= {"1.0", "1.1"}


@pytest.mark.parametrize("leaks", [False, True])
def test_growth(leaks):
    x, kept = torch.randn(32, 8), []
    step, optimizer = trainer(mlp(8, 16, 4), x, Adam)
    with MemoryLedger(None, optimizer, inputs=x) as ledger:
        for _ in range(5):
            if leaks:
                kept.append(x.cos())
            step()
    found = ledger.growth(since=1)
    expected = [(4 * x.nbytes, 4, "aten.cos.default", (32, 8))] if leaks else []
    assert [(each.nbytes, each.count, each.op, each.shape) for each in found] == expected
    assert all(each.source.endswith(": kept.append(x.cos())") for each in found)
    for wrong in (5, -1):
        with pytest.raises(ValueError, match="one of the 5 iterations"):
            ledger.growth(since=wrong)


@pytest.mark.parametrize("ends", ["calls", "steps", "marks"])
def test_iterations_end_at_marks_else_at_steps_else_at_calls_of_the_outermost_module(ends):
    model, x, kept = mlp(8, 16, 4), torch.randn(32, 8), []
    step, optimizer = trainer(model, x)
    step()
    with MemoryLedger(model, optimizer, inputs=x) as ledger, torch.set_grad_enabled(ends != "calls"):
        before = ledger.live_bytes
        for _ in range(3):
            model(x) if ends == "calls" else step()
            kept.append(torch.zeros(10))
            if ends == "marks":
                ledger.mark()
    extra = {"calls": 32 * 4 * 4, "steps": 4, "marks": 40}[ends]  # the output, and the loss, are still there
    assert ledger.iterations == tuple(before + extra + 40 * i for i in range(3))


def test_graph_nodes():
    w = torch.randn(4, requires_grad=True)
    assert graph_nodes(w, torch.ones(3)) == graph_nodes() == 0
    assert graph_nodes((w * 2).sum()) == 3  # with the node that accumulates
    doubled = w * 2
    assert graph_nodes(doubled.sum(), doubled.sum()) == 4


def test_forked_loader_workers_are_not_followed():
    def collate(rows):
        return (torch.zeros(1000) + sum(rows))[:10].clone()

    model, loader = nn.Linear(10, 10), DataLoader(range(8), 4, num_workers=2, collate_fn=collate)
    loader.multiprocessing_context = "fork"
    with MemoryLedger(model) as ledger:
        sums = [model(batch).sum().backward() or batch[0].item() for batch in loader]
    assert sums == [6, 22]
    assert max(each.nbytes for each in ledger.log.storages) < 4000


def test_tensors_of_another_thread_count_from_their_first_use():
    made, model = [], nn.Linear(100, 100)
    with MemoryLedger(model) as ledger:
        before = ledger.live_bytes
        thread = threading.Thread(target=lambda: made.append(model(torch.ones(100)).detach()))
        thread.start(), thread.join(timeout=10)
        assert ledger.live_bytes == before
        made[0].detach()
        assert ledger.live_bytes == before + 400
    assert ledger.iterations == ()


def test_nested_ledgers_are_both_right():
    model, x = mlp(8, 16, 4), torch.randn(32, 8)
    step, optimizer = trainer(model, x)
    step()
    outer, inner, alone = (MemoryLedger(model, optimizer, inputs=x) for _ in range(3))
    with outer:
        with inner:
            step()
        held = torch.zeros(100)
    with alone:
        step()
    assert outer.at_peak() == inner.at_peak() == alone.at_peak()
    assert outer.live_bytes - inner.live_bytes == held.nbytes


def train_cnn(watched=True):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(16 * 36, 10)
    model = nn.Sequential(*layers)
    step, optimizer = trainer(model, torch.randn(16, 3, 8, 8), AdamW)
    with MemoryLedger(model, optimizer) if watched else nullcontext() as ledger:
        losses = [step() for _ in range(3)]
    return losses, ledger


def test_numerics_are_unchanged():
    assert train_cnn(watched=True)[0] == train_cnn(watched=False)[0]


def test_the_same_bytes_in_every_run_and_with_any_number_of_threads():
    threads, runs = torch.get_num_threads(), []
    for n in (1, 2, 2, threads):
        torch.set_num_threads(n)
        runs.append(train_cnn()[1].log.events)
    assert runs == [runs[0]] * 4


def test_the_same_bytes_with_other_kernels():
    code = "import json; from measure.test_memory import train_cnn; print(json.dumps(train_cnn()[1].at_peak()))"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tests, capture_output=True, text=True)
    assert json.loads(done.stdout) == train_cnn()[1].at_peak(), done.stderr


def test_the_parameters_of_a_model_that_has_no_parts_are_its_own():
    model = nn.Linear(8, 8)
    with MemoryLedger(model) as ledger:
        pass
    assert ledger.by_module(at=-1) == {"Linear": {"parameter": 8 * 8 * 4 + 8 * 4}}


def test_what_shrinks_is_no_growth():
    kept = [torch.randn(64), torch.randn(64)]
    with MemoryLedger(inputs=kept) as ledger:
        for _ in range(2):
            ledger.mark()
            kept.pop()
    assert ledger.iterations == (512, 256)
    assert ledger.growth(since=1) == ()


def test_a_tensor_given_by_name_was_there_and_is_not_made():
    a, result = torch.randn(64), torch.empty(64)
    with MemoryLedger() as ledger:
        torch.mul(a, a, out=result)
    assert [(each.found, each.nbytes) for each in ledger.log.storages] == [(True, 256), (True, 256)]
