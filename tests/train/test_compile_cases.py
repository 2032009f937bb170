"""Real cases of torch.compile whose right values are known, from issue threads that the comments name.

No code is generated: a backend counts what Dynamo gives it. The values are those of torch 2.14; the lab has them too.
"""

import math

import pytest
import torch
from measure.fakes import FakeClock
from torch import nn

from labsupport.measure import compare, measure


class Counting:
    """A backend that keeps the graphs and counts their runs; with a clock, making and running them takes time."""

    def __init__(self, clock=None, compile_s=0.0, run_s=0.0):
        self.graphs, self.runs = [], 0
        self.clock, self.compile_s, self.run_s = clock or FakeClock(), compile_s, run_s

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        self.clock.now += self.compile_s

        def run(*arguments):
            self.runs += 1
            self.clock.now += self.run_s
            return graph.forward(*arguments)

        return run


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


def counts_of(sizes, *, mark=False, width=8, **options):
    """How many graphs there are after each call."""
    torch._dynamo.reset()
    backend = Counting()
    layer, counts = nn.Sequential(nn.Linear(width, width), nn.ReLU()), []
    compiled = torch.compile(layer, backend=backend, **options)
    for size in sizes:
        batch = torch.randn(size, width)
        if mark:
            torch._dynamo.mark_dynamic(batch, 0)
        compiled(batch)
        counts.append(len(backend.graphs))
    return counts


@pytest.mark.parametrize(
    ("sizes", "options", "counts"),
    [
        ((32, 32, 32, 32), {}, [1, 1, 1, 1]),  # drop_last
        ((32, 32, 5) * 2, {}, [1, 1, 2, 2, 2, 2]),
        ((32, 32, 5) * 2, {"dynamic": False}, [1, 1, 2, 2, 2, 2]),
        ((32, 32, 5) * 2, {"dynamic": True}, [1] * 6),
        ((32, 32, 5) * 2, {"mark": True}, [1] * 6),
        ((32, 32, 1), {}, [1, 1, 2]),
        ((32, 32, 1), {"mark": True}, [1, 1, 2]),
        ((8, 16, 24, 32, 7, 1), {}, [1, 2, 2, 2, 2, 3]),
        ((8, 16, 24, 32, 7, 1), {"dynamic": False}, [1, 2, 3, 4, 5, 6]),
        ((8, 16, 24, 32, 7, 1), {"mark": True}, [1, 1, 1, 1, 1, 2]),
        (tuple(range(2, 12)), {}, [1] + [2] * 9),
        (tuple(range(2, 12)), {"dynamic": False}, [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]),  # recompile_limit, then eager
    ],
)
def test_c46_the_ragged_last_batch_compiles_again_once(sizes, options, counts):
    """Lightning-AI/litgpt#794, pytorch/pytorch#188150: the end of the first epoch is slow."""
    assert counts_of(sizes, **options) == counts


@pytest.mark.parametrize(("width", "last"), [(8, 3), (12, 2)])
def test_a_first_batch_as_large_as_the_layer_is_wide_is_taken_for_the_same_number(width, last):
    """With dynamic=True Dynamo gives equal sizes one symbol, and the layer's weight pins it."""
    assert counts_of((8, 16, 24, 32, 7, 1), dynamic=True, width=width)[-1] == last
    assert counts_of((8, 16, 24, 32, 7, 1), mark=True, width=width)[-1] == 2


FIRST, SECOND = nn.Linear(8, 8), nn.Linear(8, 8)


def clean(x):
    return SECOND(FIRST(x).relu())


def with_item(x):
    hidden = FIRST(x).relu()
    return SECOND(hidden / hidden.max().item())


def with_print(x):
    hidden = FIRST(x).relu()
    print("half way")
    return SECOND(hidden)


def with_if(x):
    hidden = FIRST(x).relu()
    return SECOND(2 * hidden if hidden.sum() > 0 else hidden)


@pytest.mark.parametrize(
    ("function", "graphs", "breaks", "refused"),
    [(clean, 1, 0, False), (with_item, 2, 1, False), (with_print, 2, 1, True), (with_if, 2, 1, True)],
)
def test_c47_a_graph_breaks_and_fullgraph_does_not_tell_of_item(function, graphs, breaks, refused):
    """isayevlab/aimnetcentral#109, sgl-project/SpecForge#222: compiled is as slow as eager."""
    batch = torch.randn(4, 8)
    told = torch._dynamo.explain(function)(batch)
    assert (told.graph_count, told.graph_break_count) == (graphs, breaks)
    torch._dynamo.reset()
    whole = torch.compile(function, backend=Counting(), fullgraph=True)
    if refused:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            whole(batch)
    else:
        torch.testing.assert_close(whole(batch), function(batch))


def test_c47_a_break_within_a_loop_gives_the_function_up():
    """No graph is left, and nothing is raised: what can be read outside should leave as a tensor."""
    seen = []

    def inside(x):
        for _ in range(4):
            x = x * 1.01
            seen.append(x.mean().item())
        return x

    def outside(x):
        means = []
        for _ in range(4):
            x = x * 1.01
            means.append(x.mean())
        return x, torch.stack(means)

    lost, kept, x = Counting(), Counting(), torch.ones(8)
    torch.compile(inside, backend=lost)(x)
    _, means = torch.compile(outside, backend=kept)(x)
    assert (len(lost.graphs), len(kept.graphs)) == (0, 1)
    assert means.tolist() == seen


@pytest.mark.parametrize(
    ("lr", "scheduled", "counts"),
    [
        (0.01, True, [1, 2, 2, 2, 2, 2, 2, 2]),
        (torch.tensor(0.01), True, [1] * 8),
        (0.01, False, [1] * 8),
    ],
    ids=["a scheduled float", "a scheduled tensor", "a float"],
)
def test_c48_a_scheduled_learning_rate_compiles_once_more_and_not_each_step(lr, scheduled, counts):
    """pytorch/pytorch#107076, #120934: one compilation a step, in the versions of that time."""
    backend, layer = Counting(), nn.Linear(4, 4)
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr.clone() if isinstance(lr, torch.Tensor) else lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    step, found = torch.compile(optimizer.step, backend=backend), []
    for _ in counts:
        layer(torch.ones(2, 4)).sum().backward()
        step()
        if scheduled:
            schedule.step()
        found.append(len(backend.graphs))
    assert found == counts


def test_c49_each_mode_has_a_compilation_once():
    """pytorch/pytorch#110803, huggingface/accelerate#2964: the first validation is slow."""
    backend, net, batch, counts = Counting(), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8), []
    compiled = torch.compile(net, backend=backend)
    for _ in range(4):
        compiled.train()
        compiled(batch).sum().backward()
        compiled.eval()
        with torch.no_grad():
            compiled(batch)
        compiled(batch)
        counts.append(len(backend.graphs))
    assert counts == [3, 3, 3, 3]
    assert compiled.training is net.training is False


def timed(eager_s=0.02, compile_s=1.0, run_s=0.005):
    """An eager step, a compiled one, and the clock by which they take these times."""
    clock = FakeClock()
    backend = Counting(clock, compile_s, run_s)
    compiled = torch.compile(clean, backend=backend)
    batch = torch.randn(4, 8)
    return clock, clock.step([eager_s] * 10_000), lambda: compiled(batch)


def test_c50_the_first_call_compiles_and_spoils_the_mean():
    """pytorch/torchchat#721, pytorch/benchmark#1865: "--compile makes it slower"."""
    clock, eager, compiled = timed()
    assert clock.now == 0  # torch.compile itself does nothing yet

    def seconds_of(step):
        before = clock.now
        step()
        return clock.now - before

    eager_s, compiled_s = [seconds_of(eager) for _ in range(16)], [seconds_of(compiled) for _ in range(16)]
    first_s, later_s = compiled_s[0], compiled_s[-1]
    assert eager_s[-1] / later_s == pytest.approx(4)
    assert sum(eager_s) / sum(compiled_s) == pytest.approx(0.32 / 1.08)
    steps = math.ceil(first_s / (eager_s[-1] - later_s))
    assert steps == 67
    # By then, and not one step before, the run that compiled is ahead.
    ahead = [first_s + (n - 1) * later_s <= n * eager_s[-1] for n in (steps - 1, steps)]
    assert ahead == [False, True]


def test_c50_our_instruments_leave_the_first_call_out():
    clock, _, compiled = timed()
    measured = measure(compiled, min_time_s=0.2, clock=clock)
    assert measured.median_s == pytest.approx(0.005) and max(measured.samples_s) < 0.006
    assert max(measured.dropped_s) > 1
    torch._dynamo.reset()
    clock, eager, compiled = timed()
    compared = compare(eager, compiled, min_time_s=0.2, clock=clock)
    assert compared.ratio == pytest.approx(4) and compared.verdict == "faster"
