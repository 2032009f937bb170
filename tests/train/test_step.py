import pytest
import torch
from torch import nn

from labsupport.train import Recipe, Workload, build_step


def workload(**changes):
    parts = {
        "name": "tiny",
        "model": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        "batch": lambda n, device: torch.ones(n, 4, device=device),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }
    return Workload(**(parts | changes))


def gradients(step):
    torch.manual_seed(0)
    step()
    return [p.grad.clone() for p in step.model.parameters()]


def test_a_step_trains():
    step = build_step(workload(), Recipe(batch_size=3), "cpu")
    losses = [step().item() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert step.batch.shape == (3, 4)
    assert not step().requires_grad


def test_it_is_the_plain_loop():
    torch.manual_seed(0)
    step = build_step(workload(), Recipe(batch_size=3), "cpu")
    torch.manual_seed(0)
    model = workload().model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = step()
        optimizer.zero_grad()
        expected = model(torch.ones(3, 4)).square().mean()
        expected.backward()
        optimizer.step()
        assert torch.equal(loss, expected.detach())
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), model.parameters(), strict=True))


def test_a_sum_and_a_count_are_their_mean():
    weighed = workload(loss=lambda model, batch: (model(batch).square().sum(), len(batch)))
    torch.manual_seed(0)
    a = build_step(weighed, Recipe(batch_size=3), "cpu")
    torch.manual_seed(0)
    b = build_step(workload(), Recipe(batch_size=3), "cpu")
    for left, right in zip(gradients(a), gradients(b), strict=True):
        torch.testing.assert_close(left, right)


def test_checkpointing_gives_the_same_gradients_bit_for_bit_and_leaves_the_modules():
    torch.manual_seed(0)
    plain = build_step(workload(), Recipe(batch_size=3), "cpu")
    torch.manual_seed(0)
    saving = build_step(workload(), Recipe(batch_size=3, checkpointing=True), "cpu")
    for left, right in zip(gradients(plain), gradients(saving), strict=True):
        assert torch.equal(left, right)
    assert not any("forward" in vars(module) for module in saving.model.modules())


def test_modules_are_put_back_when_the_loss_raises():
    def loss(model, batch):
        model(batch)
        raise KeyError("mine")

    step = build_step(workload(loss=loss), Recipe(checkpointing=True), "cpu")
    own = lambda x: x  # noqa: E731
    step.model[1].forward = own
    with pytest.raises(KeyError, match="mine"):
        step()
    assert [vars(module).get("forward") for module in step.model] == [None, own, None]


def test_a_block_that_stands_twice_is_put_back_too():
    shared = nn.Linear(4, 4)
    step = build_step(
        workload(model=lambda: nn.Sequential(shared, nn.Tanh(), shared)), Recipe(checkpointing=True), "cpu"
    )
    step()
    assert "forward" not in vars(shared)


def test_bf16_is_autocast_the_parameters_stay():
    seen = []

    def loss(model, batch):
        out = model(batch)
        seen.append(out.dtype)
        return out.float().square().mean()

    step = build_step(workload(loss=loss), Recipe(precision="bf16"), "cpu")
    step()
    assert seen == [torch.bfloat16]
    assert (
        {p.dtype for p in step.model.parameters()} == {torch.float32} == {p.grad.dtype for p in step.model.parameters()}
    )


def test_live_objects_are_the_ones_that_train():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    step = build_step(workload(model=lambda: model, optimizer=lambda _: optimizer), device="cpu")
    step()
    assert step.model is model and step.optimizer is optimizer
    assert not torch.equal(before, model.weight)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 0}, "1 or more"),
        ({"precision": "fp8"}, "one of fp32, tf32, bf16, fp16"),
    ],
)
def test_settings_that_make_no_sense(changes, said):
    with pytest.raises(ValueError, match=said):
        Recipe(**changes)
    with pytest.raises(ValueError, match=said):
        Recipe().but(**changes)


@pytest.mark.parametrize("changes", [{"batch_size": 2.0}, {"batch_size": True}, {"checkpointing": "3"}, {"lr": 1}])
def test_settings_of_the_wrong_type(changes):
    with pytest.raises(TypeError):
        Recipe().but(**changes)


def test_recipes_say_what_differs():
    recipe = Recipe(batch_size=8)
    assert recipe.but(precision="bf16").diff(recipe) == {"precision": ("bf16", "fp32")}
    assert recipe.diff(recipe) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": lambda: 3}, "a Module is expected, got int"),
        ({"optimizer": lambda p: None}, "a Optimizer is expected|an Optimizer is expected"),
        ({"batch": lambda n, device: [1, 2]}, "tensors, or mappings"),
        ({"loss": lambda model, batch: model(batch)}, r"one value is expected.*shape \(32, 1\)"),
        ({"loss": lambda model, batch: 1.0}, "one value is expected.*float"),
    ],
)
def test_parts_that_give_something_else(changes, said):
    with pytest.raises(TypeError, match=said):
        build_step(workload(**changes), device="cpu")()


def test_a_model_instead_of_a_function_is_told_what_to_write():
    with pytest.raises(TypeError, match="lambda"):
        workload(model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="samples"):
        workload(samples=0)


def test_no_blocks_to_compute_again():
    with pytest.raises(ValueError, match="no Sequential or ModuleList"):
        build_step(workload(model=lambda: nn.Linear(4, 1)), Recipe(checkpointing=True), "cpu")
