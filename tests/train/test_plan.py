"""A plan is held against real steps under a ledger, byte for byte."""

import json
import random

import pytest
import torch
from torch import nn
from workloads import WORKLOADS

from labsupport.measure import MemoryLedger
from labsupport.train import CannotPlan, Recipe, Workload, build_step, plan_memory
from labsupport.train.plan import MemoryPlan, Moment, Size
from labsupport.train.traces import trace

SGD = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731


def measured(workload, batch, recipe=None):
    """The ledger's parts at the peak of two real steps."""
    step = build_step(workload, (recipe or Recipe()).but(batch_size=batch), "cpu")
    with MemoryLedger(step.model, step.optimizer, inputs=step.batch) as ledger:
        step()
        step()
    return ledger.at_peak()


SMALL = [name for name in WORKLOADS if "224" not in name and "ResNet-50" not in name]


@pytest.mark.parametrize("name", SMALL)
def test_zero_bytes_off(name):
    plan = plan_memory(WORKLOADS[name])
    for batch in (2, 5, 32, 129):
        assert plan.at_peak(batch) == measured(WORKLOADS[name], batch)
        assert sum(plan.at_peak(batch).values()) == plan.peak_bytes(batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MLP, SGD", "CNN, AdamW", "encoder, AdamW", "embedding, SGD"])
def test_zero_bytes_off_at_1000_samples(name):
    assert plan_memory(WORKLOADS[name]).at_peak(1000) == measured(WORKLOADS[name], 1000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ResNet-50, 32 px, AdamW", "ResNet-18, 224 px, SGD", "ResNet-50, 224 px, SGD"])
def test_zero_bytes_off_for_large_models(name):
    plan = plan_memory(WORKLOADS[name])
    for batch in (3, 8):
        assert plan.at_peak(batch) == measured(WORKLOADS[name], batch)
    traced = trace(WORKLOADS[name], Recipe(batch_size=1000), "cpu")  # 1000 real samples would take up to 90 GB
    assert plan.peak_bytes(1000) == traced.changes.cumsum().max()


@pytest.mark.parametrize("name", ["encoder, SGD", "encoder, AdamW"])
@pytest.mark.parametrize("recipe", [Recipe(checkpointing=True), Recipe(precision="bf16")])
def test_zero_bytes_off_with_knobs(name, recipe):
    plan = plan_memory(WORKLOADS[name], recipe)
    for batch in (2, 17, 100):
        assert plan.at_peak(batch) == measured(WORKLOADS[name], batch, recipe)


def test_one_sample():
    plan = plan_memory(WORKLOADS["MLP, AdamW"])
    assert plan.at_peak(1) == measured(WORKLOADS["MLP, AdamW"], 1)
    with pytest.raises(ValueError, match="1 sample.*Expected more than 1 value per channel"):
        plan_memory(plain(model=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))).peak_bytes(1)


def plain(**changes):
    parts = {
        "name": "plain",
        "model": lambda: nn.Linear(8, 1),
        "batch": lambda n, device: torch.randn(n, 8, device=device),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": SGD,
    }
    return Workload(**(parts | changes))


def test_tied_weights_and_live_objects():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(64, 8)
    live = plain(model=lambda: model, optimizer=lambda _: optimizer, batch=lambda n, device: batch[:n], samples=64)
    build_step(live, Recipe(batch_size=4), "cpu")()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    state = {name: value.clone() for name, value in optimizer.state[model[0].weight].items()}
    torch.manual_seed(3)
    state_of_torch = torch.get_rng_state()
    plan = plan_memory(live)
    assert torch.equal(state_of_torch, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(old, p.grad) for old, p in zip(gradients, model.parameters(), strict=True))
    assert all(torch.equal(old, optimizer.state[model[0].weight][name]) for name, old in state.items())
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert plan.at_peak(9) == measured(live, 9)


PLACES = torch.randn(1, 8)
WEIGHTS = torch.rand(8)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: model(x + PLACES).square().mean(),
        lambda model, x: torch.nn.functional.cross_entropy(model[0](x), torch.zeros(len(x)).long(), weight=WEIGHTS),
        lambda model, x: (model(x) * torch.tensor([2.0])).mean(),
    ],
)
def test_tensors_from_outside_count(loss):
    outside = plain(model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), loss=loss)
    plan = plan_memory(outside)
    for batch in (2, 33, 130):
        assert plan.at_peak(batch) == measured(outside, batch)


def test_a_branch_by_chance_is_noticed():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) if random.random() < 0.5 else x
            return x

    state = random.getstate()
    with pytest.raises(CannotPlan):
        plan_memory(plain(model=Drops))
    assert random.getstate() == state


def test_a_batch_in_pieces_is_noticed():
    chunks = plain(loss=lambda model, x: torch.cat([model(part) for part in x.split(64)]).square().mean())
    with pytest.raises(CannotPlan, match="256"):
        plan_memory(chunks)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": lambda model, x: 1.0}, "one value is expected"),
        ({"loss": lambda model, x: model(x)}, "one value is expected"),
        ({"model": lambda: None}, "a Module is expected"),
        ({"optimizer": lambda parameters: []}, "Optimizer is expected"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    ],
)
def test_a_workload_that_gives_something_else(changes, said):
    with pytest.raises(TypeError, match=said):
        plan_memory(plain(**changes))
    with pytest.raises(TypeError, match=said):
        build_step(plain(**changes), device="cpu")()


# What cannot be planned says so.


def test_memory_that_rises_with_the_square_of_the_batch():
    contrast = plain(loss=lambda model, x: (lambda z: (z @ z.T).logsumexp(1).mean())(model(x)))
    with pytest.raises(CannotPlan, match=r"aten.mm.*16 B with 2 samples and 36 B with 3.*square"):
        plan_memory(contrast)


def test_control_flow_on_the_batch():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 1)

        def forward(self, x):
            return self.a(x.sigmoid() if len(x) > 2 else x)

    with pytest.raises(CannotPlan, match="sigmoid"):
        plan_memory(plain(model=Branches))


def test_control_flow_that_only_larger_batches_see():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 1)

        def forward(self, x):
            return self.a(x.sigmoid() if len(x) > 20 else x)

    with pytest.raises(CannotPlan, match="sigmoid.*256"):
        plan_memory(plain(model=Branches))


def test_shapes_that_depend_on_data():
    picked = plain(loss=lambda model, x: model(x[x[:, 0] > 0]).square().mean())
    with pytest.raises(CannotPlan, match=r"depend on data"):
        plan_memory(picked)
    with pytest.raises(CannotPlan, match=r"value at test_plan.py line \d+: .*item"):
        plan_memory(plain(loss=lambda model, x: model(x).mean() * x.sum().item()))


def test_an_error_of_the_workload_is_told_with_its_line():
    def loss(model, x):
        raise KeyError("labels")

    with pytest.raises(CannotPlan, match=r"KeyError at test_plan.py line \d+: raise KeyError.*labels"):
        plan_memory(plain(loss=loss))


def test_a_lazy_model():
    with pytest.raises(CannotPlan, match="lazy"):
        plan_memory(plain(model=lambda: nn.LazyLinear(1)))


@pytest.mark.parametrize("batch", [0, -1, 2.5, "8", True, None])
def test_batches_that_are_none(batch):
    with pytest.raises(ValueError, match="whole number of samples"):
        plan_memory(plain()).peak_bytes(batch)


def test_a_target_that_is_none():
    with pytest.raises(ValueError, match="cpu, cuda"):
        plan_memory(plain(), target="tpu")


# Questions.


@pytest.mark.parametrize("name", ["MLP, SGD", "CNN, AdamW", "encoder, momentum"])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_largest_batch_fits_and_one_more_does_not(name, target):
    plan = plan_memory(WORKLOADS[name], target=target)
    for budget in ("20MiB", "64MiB", "1GiB"):
        largest = plan.max_batch(budget)
        ceiling = {"20MiB": 20 << 20, "64MiB": 64 << 20, "1GiB": 1 << 30}[budget]
        assert plan.peak_bytes(largest) <= ceiling < plan.peak_bytes(largest + 1)
    assert plan.max_batch(1000) == 0


def test_memory_that_does_not_rise_with_the_batch():
    assert (
        MemoryPlan("flat", Recipe(), "cpu", (Moment(100, 0, (Size("parameter", 100, 0, 1),), ""),)).max_batch(200)
        is None
    )


def test_only_moments_that_are_a_peak_somewhere_are_kept():
    plan = plan_memory(WORKLOADS["ResNet-18, 32 px, AdamW"])
    assert 1 < len(plan.moments) < 10
    for moment in plan.moments:
        assert any(plan.moment(batch) is moment for batch in range(2, 5000))
    assert len(json.dumps(plan.as_dict())) < 50_000


def test_for_cuda_it_is_an_estimate_that_says_what_is_not_in_it():
    cpu, cuda = (plan_memory(WORKLOADS["encoder, AdamW"], target=target) for target in ("cpu", "cuda"))
    assert "fragmentation" in str(cuda) and "estimated" in str(cuda)
    assert not cpu.not_in_it
    assert all(nbytes % 512 == 0 for nbytes in cuda.at_peak(7).values())
    assert cuda.peak_bytes(64) < cpu.peak_bytes(64)  # dropout masks of one byte an element
    wide = plain(model=lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(300))), optimizer=torch.optim.Adam)
    temporary = [plan_memory(wide, target=target).at_peak(2)["temporary"] for target in ("cpu", "cuda")]
    assert temporary[1] > 100 * temporary[0]  # foreach: of all parameters at once


class Attends(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention, self.options = (
            nn.MultiheadAttention(32, 4, batch_first=True, **options),
            {"need_weights": False},
        )

    def forward(self, x):
        return self.attention(x, x, x, **self.options)[0]


def test_cudas_kernels_are_taken_within_torchs_own_modules():
    padded = plain(model=lambda: Attends(dropout=0.1), batch=lambda n, device: torch.randn(n, 40, 32, device=device))
    cpu, cuda = (plan_memory(padded, target=target) for target in ("cpu", "cuda"))
    scores = 64 * 4 * 40 * 40 * 4
    assert cpu.at_peak(64)["activation"] - cuda.at_peak(64)["activation"] > scores  # with dropout a CPU writes them out


def test_a_dropout_that_drops_nothing_costs_nothing():
    drops = plain(model=lambda: nn.Sequential(nn.Linear(8, 512), nn.Dropout(0.0)))
    plain_one = plain(model=lambda: nn.Sequential(nn.Linear(8, 512)))
    assert plan_memory(drops, target="cuda").peak_bytes(64) == plan_memory(plain_one, target="cuda").peak_bytes(64)


def test_the_largest_batch_where_rounding_takes_most():
    tiny = Moment(0, 4, (Size("activation", 0, 1, 4),), "")
    plan = MemoryPlan("tiny", Recipe(), "cuda", (tiny,))
    largest = plan.max_batch(1 << 20)
    assert plan.peak_bytes(largest) <= 1 << 20 < plan.peak_bytes(largest + 1)
