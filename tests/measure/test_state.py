"""A step changes much; put back, everything is as it was, to the bit, and where it was."""

import copy
import functools
import random
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labsupport.measure import KeptState
from labsupport.measure.state import found_in, share_state

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
}


class Training:
    """A small model with everything that a step changes: buffers, dropout, a learning rate, draws of three kinds."""

    def __init__(self, optimizer="momentum"):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def step(self, training=True, set_to_none=False):
        self.model.train(training)
        x = torch.randn(8, 3) + random.random() * np.random.rand()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.param_groups[0]["weight_decay"] += 0.01
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none) if set_to_none is not None else None

    def things(self):
        return [self.model, self.optimizer, self.scheduler]

    def everything(self):
        return {
            "states": copy.deepcopy([thing.state_dict() for thing in self.things()]),
            "modes": [module.training for module in self.model.modules()],
            "gradients": copy.deepcopy([p.grad for p in self.model.parameters()]),
            "random": (torch.get_rng_state(), np.random.get_state(), random.getstate()),
        }

    def places(self):
        states = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [(id(t), t.data_ptr()) for t in (*self.model.state_dict(keep_vars=True).values(), *states, *gradients)]


def same(a, b):
    """Equal to the bit, all the way down."""
    if isinstance(a, torch.Tensor | np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


SOME_STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from([True, False, None])), max_size=3)
AT_LEAST_ONE = st.lists(st.tuples(st.booleans(), st.sampled_from([True, False, None])), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(OPTIMIZERS)), SOME_STEPS, AT_LEAST_ONE, st.integers(1, 3))
def test_everything_is_put_back_to_the_bit_and_to_its_place(optimizer, before, meanwhile, times):
    training = Training(optimizer)
    for step in before:
        training.step(*step)
    kept, was, places = KeptState(training.things()), training.everything(), training.places()
    for _ in range(times):
        for step in meanwhile:
            training.step(*step)
        assert not same(training.everything(), was)
        kept.put_back()
        assert same(training.everything(), was)
        assert training.places() == places


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(OPTIMIZERS)), SOME_STEPS, AT_LEAST_ONE)
def test_training_goes_on_as_if_nothing_had_been(optimizer, before, meanwhile):
    def train(disturb):
        training = Training(optimizer)
        for step in before:
            training.step(*step)
        if disturb:
            kept = KeptState(training.things())
            for step in meanwhile:
                training.step(*step)
            kept.put_back()
        for _ in range(3):
            training.step()
        return training.everything()

    assert same(train(disturb=True), train(disturb=False))


def test_keeping_alone_changes_nothing():
    training = Training()
    was = training.everything()
    KeptState(training.things())
    assert same(training.everything(), was)


@pytest.mark.parametrize("optimizer", ["momentum", "Adam", "AdamW"])
def test_an_optimizers_state_that_did_not_exist_is_gone_again(optimizer):
    training = Training(optimizer)
    kept = KeptState(training.things())
    training.step()
    assert training.optimizer.state
    kept.put_back()
    assert not training.optimizer.state


def test_what_was_thrown_away_meanwhile_is_there_again():
    training = Training("Adam")
    training.step()
    kept, was = KeptState(training.things()), training.everything()
    training.optimizer.state.clear()
    training.optimizer.param_groups.clear()
    kept.put_back()
    assert same(training.everything(), was)


def test_a_group_of_parameters_added_meanwhile_is_gone_again():
    """The model warms up first, a layer is unfrozen later."""
    model, head = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = KeptState([optimizer])
    optimizer.add_param_group({"params": head.parameters()})
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))
    kept.put_back()
    assert [group["params"] for group in optimizer.param_groups] == [[model.weight, model.bias]]


class Nested(torch.optim.Optimizer):
    """Its state lies deeper, and one entry of it belongs to no parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.state["steps"] = 0

    def step(self):
        self.state["steps"] += 1
        for parameter in self.param_groups[0]["params"]:
            inner = self.state[parameter].setdefault("inner", {"history": [], "sums": {"of": torch.zeros(2)}})
            inner["sums"]["of"] += 1
            inner["history"].append(torch.ones(2))
            inner[f"new {self.state['steps']}"] = 1


def test_nested_state_of_an_optimizer():
    weight = nn.Parameter(torch.ones(2))
    optimizer = Nested([weight])
    optimizer.step()
    kept, was = KeptState([optimizer]), copy.deepcopy(optimizer.state[weight])
    place = optimizer.state[weight]["inner"]["sums"]["of"]
    for _ in range(2):
        optimizer.step(), optimizer.step()
        kept.put_back()
        assert optimizer.state["steps"] == 1
        assert same(optimizer.state[weight], was)
        assert optimizer.state[weight]["inner"]["sums"]["of"] is place


def test_lbfgs_with_its_lists_of_tensors():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4))
    optimizer = torch.optim.LBFGS([weight], max_iter=3)

    def loss():
        optimizer.zero_grad()
        (value := (weight**4).sum()).backward()
        return value

    optimizer.step(loss)
    kept, was = KeptState([optimizer]), copy.deepcopy((optimizer.state_dict(), weight, weight.grad))
    optimizer.step(loss)
    kept.put_back()
    assert same((optimizer.state_dict(), weight, weight.grad), was)


class Averaged(nn.Module):
    """Buffers that each call replaces by new tensors, one of them empty at first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("last", None, persistent=False)

    def forward(self, x=1.0):
        self.average = 0.9 * self.average + x
        self.last = self.average.clone()


def test_buffers_that_were_replaced_are_the_old_ones_again():
    model = Averaged()
    kept, average = KeptState([model]), model.average
    model()
    model.register_buffer("more", torch.ones(1))
    kept.put_back()
    assert model.average is average and same(average, torch.zeros(2)) and model.last is None
    assert [name for name, _ in model.named_buffers()] == ["average"]


def test_a_parameter_that_was_replaced_is_the_old_one_again():
    model = nn.Linear(2, 2)
    kept, weight = KeptState([model]), model.weight
    model.weight = nn.Parameter(torch.zeros(2, 2))
    kept.put_back()
    assert model.weight is weight


def test_a_buffer_made_in_inference_mode():
    model = Averaged()
    with torch.inference_mode():
        model()
        kept = KeptState([model])
        model.average += 1
    kept.put_back()
    assert same(model.average.clone(), torch.ones(2))


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        model = nn.Linear(2, 2)
        kept, was = KeptState([model]), model.weight.tolist()
        model.weight.add_(1)
    kept.put_back()
    assert model.weight.tolist() == was


def test_a_model_that_was_converted_is_what_it_was():
    model = nn.Linear(2, 2)
    kept, weight = KeptState([model]), model.weight.detach().clone()
    model.bfloat16()
    for _ in range(2):
        kept.put_back()
        assert same(model.weight.detach(), weight)
        model.weight.data += 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_model_in_torchscript():
    model = torch.jit.script(nn.BatchNorm1d(2))
    kept, was = KeptState([model]), copy.deepcopy(model.state_dict())
    model(torch.rand(4, 2))
    assert not same(dict(model.state_dict()), dict(was))
    kept.put_back()
    assert same(dict(model.state_dict()), dict(was))


def test_layers_frozen_meanwhile_train_again():
    model = nn.Linear(2, 2)
    kept = KeptState([model])
    model.requires_grad_(False)
    kept.put_back()
    assert model.weight.requires_grad and model.bias.requires_grad


def test_sparse_gradients():
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    kept, was = KeptState([model]), model.weight.grad.to_dense()
    model(torch.tensor([2, 4])).sum().backward()
    kept.put_back()
    assert same(model.weight.grad.to_dense(), was)


class Counter:
    """Any object with `state_dict` and `load_state_dict`: one that hands out its own insides."""

    def __init__(self):
        self.state = {"seen": [0]}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_object_with_a_state_dict_is_put_back_as_often_as_needed():
    counter = Counter()
    kept = KeptState([counter])
    for _ in range(2):
        counter.state["seen"].append(1)
        kept.put_back()
        assert counter.state == {"seen": [0]}


def test_a_scaler_that_was_left_between_unscale_and_update():
    model, scaler = nn.Linear(1, 1), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters())
    kept = KeptState([model, optimizer, scaler])
    for _ in range(2):
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.unscale_(optimizer)  # raises where it has been called since the last update
        kept.put_back()


def test_random_draws_are_repeated_with_no_state_at_all():
    def draw():
        return torch.rand(2).tolist(), torch.randn(3).tolist(), np.random.normal(), random.gauss(0, 1)

    kept, drawn = KeptState([]), draw()
    assert draw() != drawn
    kept.put_back()
    assert draw() == drawn


def test_a_thing_given_twice_is_kept_once():
    model = nn.Linear(1, 1)
    kept = KeptState(iter([model, model]))
    model.weight.data += 1
    was = model.weight.item() - 1
    kept.put_back()
    assert model.weight.item() == pytest.approx(was)


@pytest.mark.parametrize(
    "odd", ["model", torch.zeros(1), None, nn.Linear(1, 1).state_dict()], ids=lambda x: type(x).__name__
)
def test_what_has_no_state_dict_cannot_be_kept(odd):
    with pytest.raises(
        TypeError, match="cannot keep the state of .*: modules, optimizers, and objects with state_dict"
    ):
        KeptState([nn.Linear(1, 1), odd])


@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)], ids=["parameter", "buffer"])
def test_a_lazy_module_has_to_be_called_first(lazy):
    with pytest.raises(ValueError, match="call it once, then measure"):
        KeptState([lazy])
    lazy(torch.ones(2, 3))
    KeptState([lazy])


MODEL, OTHER = nn.Linear(2, 2), nn.Linear(2, 2)
RUNNING = [nn.Linear(1, 1), "no model"]
NAMED = {"a": nn.Linear(1, 1)}


def ids(things):
    return sorted(map(id, things))


class Run:
    def __init__(self):
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.network = nn.Linear(1, 1)
        self.name = "run"

    def step(self):
        pass

    def other_step(self):
        return OTHER

    def __call__(self):
        return MODEL


class Slotted:
    __slots__ = ("model", "optimizer")

    def __init__(self):
        self.model, self.optimizer = nn.Linear(1, 1), None

    def step(self):
        pass


def uses_global():
    return MODEL(torch.ones(1, 2))


def calls_another():
    return uses_global()


def calls_itself():
    return calls_itself() + uses_global()


def in_a_generator():
    return sum(MODEL(x) for x in ())


def in_a_comprehension():
    return [[MODEL(x) for x in y] for y in ()]


def in_an_inner_function():
    def loss():
        return MODEL(torch.ones(1, 2))

    return loss


def by_default(model=MODEL, *, x=None):
    return model(x)


def by_keyword_default(*, model=MODEL):
    return model


@torch.no_grad()
def decorated():
    return MODEL


@functools.lru_cache
def cached():
    return MODEL


@functools.wraps(uses_global)
def wrapper():
    return None


def with_an_attribute_of_that_name(run=None):
    return run.MODEL


def names_a_class():
    return Counter, Wrapper


OF_A_FILE = ModuleType("training")
OF_A_FILE.model = MODEL


def names_a_module():
    return nn, torch, OF_A_FILE


@pytest.mark.parametrize(
    "step",
    [uses_global, calls_another, calls_itself, in_a_generator, in_a_comprehension, in_an_inner_function, by_default]
    + [by_keyword_default, decorated, cached, wrapper, lambda: uses_global(), functools.partial(calls_another), MODEL]
    + [functools.partial(MODEL, 1), functools.partial(print, MODEL), functools.partial(print, end=MODEL), MODEL.forward]
    + [functools.partial(functools.partial(lambda *a, m: a, MODEL), m=1), MODEL.__call__],
)  # fmt: skip
def test_a_model_is_found_where_the_step_names_it(step):
    assert found_in(step) == [MODEL]


@pytest.mark.parametrize(
    "step",
    [with_an_attribute_of_that_name, names_a_class, names_a_module, print, None, torch.mm, torch.zeros(1), lambda: 1]
    + [lambda: nn.functional.relu],
)  # fmt: skip
def test_nothing_is_found_where_none_is_named(step):
    assert found_in(step) == []


@pytest.mark.parametrize(
    "make", [lambda run: run.step, lambda run: lambda: run.step(), lambda run: functools.partial(print, run)]
)
def test_what_an_object_holds_is_found(make):
    run = Run()
    assert ids(found_in(make(run))) == ids([run.model, run.optimizer, run.network])


def test_a_method_and_an_object_that_is_called_are_read_too():
    run = Run()
    assert ids(found_in(run.other_step)) == ids([run.model, run.optimizer, run.network, OTHER])
    assert ids(found_in(run)) == ids([run.model, run.optimizer, run.network, MODEL])


class PassingOn:
    def __init__(self, wrapped):
        self.wrapped = wrapped

    def state_dict(self):
        return self.wrapped.state_dict()

    load_state_dict = state_dict


def test_what_passes_on_a_state_that_is_none_is_not_found():
    empty, full = PassingOn([]), PassingOn(Counter())
    assert ids(found_in(lambda: (empty, full))) == ids([full, full.wrapped])
    with pytest.raises(AttributeError):
        KeptState([empty])  # given, it has to


def test_an_object_with_slots():
    run = Slotted()
    assert found_in(run.step) == [run.model]


def test_what_lists_and_dicts_hold_is_found():
    assert found_in(lambda: RUNNING) == [RUNNING[0]]
    assert found_in(lambda: NAMED["a"]) == [NAMED["a"]]


def test_closures_with_an_optimizer_and_a_scheduler():
    training = Training()
    model, optimizer, scheduler = training.things()

    def step():
        model.train(), optimizer.step(), scheduler.step()

    assert ids(found_in(step)) == ids(training.things())
    assert ids(found_in(lambda: scheduler.step())) == ids([scheduler, optimizer])


def test_a_variable_without_a_value_yet_is_no_hindrance():
    def step():
        return MODEL, later

    assert found_in(step) == [MODEL]
    later = None


def test_functions_of_other_modules_are_not_read():
    foreign = type(uses_global)(uses_global.__code__, {"MODEL": MODEL, "torch": torch})
    foreign.__module__ = "elsewhere"
    assert found_in(lambda: foreign()) == []
    assert found_in(foreign) == [MODEL]


def test_the_advised_loop_around_a_step_finds_what_the_step_uses():
    def many():
        [uses_global() for _ in range(8)]

    assert found_in(many) == [MODEL]


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "some, others, shared",
    [
        ([MODEL], [MODEL], True),
        ([MODEL], [OTHER], False),
        ([MODEL], [Wrapper(MODEL)], True),
        ([Wrapper(MODEL)], [nn.DataParallel(MODEL)], True),
        ([MODEL], [OTHER, sgd(MODEL)], True),
        ([sgd(MODEL)], [sgd(MODEL)], True),
        ([sgd(MODEL)], [sgd(OTHER)], False),
        ([MODEL, sgd(MODEL)], [OTHER, sgd(OTHER)], False),
        ([nn.BatchNorm1d(2, affine=False)], [nn.BatchNorm1d(2, affine=False)], False),
        ([NORM := nn.BatchNorm1d(2, affine=False)], [Wrapper(NORM)], True),
        ([COUNTER := Counter()], [COUNTER], True),
        ([], [MODEL], False),
    ],
)
def test_what_two_steps_share(some, others, shared):
    assert share_state(some, others) is share_state(others, some) is shared
