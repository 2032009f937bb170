"""A memory budget: where exactly it ends, what is left after it did, and which errors are out of memory."""

import sys
import weakref

import pytest
import torch
from torch import nn

from labsupport.measure import MemoryLedger, cuda_memory, is_out_of_memory, memory_budget
from labsupport.measure.allocations import StorageLog


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("LABS_PROFILE", "cpu")


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def train(model, batch, optimizer=None):
    model.zero_grad()
    model(torch.ones(batch, 64)).square().mean().backward()
    if optimizer:
        optimizer.step()


def peak_of(model, batch):
    with MemoryLedger(model) as ledger:
        train(model, batch)
    model.zero_grad()
    return ledger.peak_bytes


def size(model):
    return sum(p.nbytes for p in model.parameters())


def no_hooks():
    module, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    return not (
        module._global_forward_hooks
        or module._global_forward_pre_hooks
        or optimizer._global_optimizer_pre_hooks
        or optimizer._global_optimizer_post_hooks
        or torch.utils._python_dispatch._get_current_dispatch_mode()
    )


# Where it ends.


def test_a_budget_of_the_peak_fits_and_one_byte_less_does_not(model):
    peak = peak_of(model, 32)
    with memory_budget(peak, model) as ledger:
        train(model, 32)
    assert ledger.peak_bytes == peak
    model.zero_grad()
    with (
        pytest.raises(torch.OutOfMemoryError, match="^Emulated CUDA out of memory") as caught,
        memory_budget(peak - 1, model),
    ):
        train(model, 32)
    assert isinstance(caught.value, RuntimeError)
    assert is_out_of_memory(caught.value)
    assert caught.value.ledger.peak_bytes < peak
    position, refused = caught.value.ledger.log.refused
    assert caught.value.ledger.timeline().total[position] + refused.nbytes == peak
    assert no_hooks()


@pytest.mark.parametrize("batch", [1, 7, 32, 200])
def test_every_budget_below_the_peak_is_passed_at_some_operation(model, batch):
    peak = peak_of(model, batch)
    for budget in range(size(model), peak, max(1, (peak - size(model)) // 7)):
        with pytest.raises(torch.OutOfMemoryError), memory_budget(budget, model) as ledger:
            train(model, batch)
        assert ledger.peak_bytes <= budget
        model.zero_grad()


@pytest.mark.parametrize(
    ("budget", "fits"), [(1000, 250), ("1000 B", 250), ("1KiB", 256), ("2 kb", 500), ("0.5KiB", 128)]
)
def test_sizes_are_numbers_and_text(budget, fits):
    with memory_budget(budget):
        torch.empty(fits)
    with pytest.raises(torch.OutOfMemoryError), memory_budget(budget):
        torch.empty(fits + 1)


@pytest.mark.parametrize("budget", [-1, "512M", "", "much", 1.5, True, None, "-1 B"])
def test_what_is_not_a_size_is_refused(budget):
    with pytest.raises(ValueError, match="is not a size"), memory_budget(budget):
        pass


def test_what_lives_before_the_block_counts_from_its_start_where_it_is_given(model):
    optimizer, x = torch.optim.Adam(model.parameters()), torch.ones(32, 64)
    train(model, 4, optimizer)  # parameters, gradients, and the state of twice their size
    live = 4 * size(model) + 4 * 4 + x.nbytes
    with memory_budget(live, model, optimizer, inputs=[{"x": x}]) as ledger:
        assert ledger.live_bytes == live
    with memory_budget(4) as ledger:
        torch.ones(1)  # nothing was given, and nothing else was used
    for given in ({"model": model}, {"optimizer": optimizer}, {"inputs": x}):
        with pytest.raises(torch.OutOfMemoryError, match="^Emulated CUDA out of memory"), memory_budget(4, **given):
            raise AssertionError("entered")
        assert no_hooks()
    model(x)


def test_the_smaller_of_nested_budgets_wins():
    for outer, inner in ((1000, 4000), (4000, 1000)):
        with memory_budget(outer) as outside, memory_budget(inner) as inside:
            held = torch.empty(250)
            with pytest.raises(torch.OutOfMemoryError, match="budget of 1000 B"):
                torch.empty(1)
            assert outside.live_bytes == inside.live_bytes == held.nbytes == 1000


# After it did.


def test_a_smaller_batch_fits_in_the_same_block(model):
    with memory_budget(peak_of(model, 32), model) as ledger:
        for batch in (64, 48, 33):
            with pytest.raises(torch.OutOfMemoryError):
                train(model, batch)
        train(model, 32)
        train(model, 32)
    assert ledger.at_end()["gradient"] == size(model)


def test_the_memory_of_a_failed_step_is_freed(model):
    gone = []

    def step():
        x = torch.ones(512, 64)
        out = model(x)
        gone.extend(weakref.ref(each) for each in (x, out))
        out.square().mean().backward()

    with MemoryLedger(model) as ledger:
        before = ledger.live_bytes
        try:
            with memory_budget(size(model) + 512 * (64 + 128 + 128 + 64) * 4, model):
                step()
        except torch.OutOfMemoryError as error:
            assert [ref() for ref in gone] == [None, None]  # while the error is still held
            assert error.ledger is not None
            model.zero_grad()
            assert ledger.live_bytes == before
        assert ledger.peak_bytes > before + 512 * (64 + 128 + 128) * 4
        train(model, 8)


def test_an_error_in_the_optimizer_leaves_some_parameters_changed(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    train(model, 4)
    before = [p.detach().clone() for p in model.parameters()]
    first = model[0].weight.nbytes  # the momentum of the first parameter fits, that of the second does not
    with pytest.raises(torch.OutOfMemoryError), memory_budget(2 * size(model) + first, model, optimizer):
        optimizer.step()
    assert [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)] == [False, True, True, True]
    assert no_hooks()
    optimizer.step()


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("shape"), ValueError("v")])
def test_other_errors_pass_unchanged(model, error):
    with pytest.raises(type(error)) as caught, memory_budget("1MiB", model):
        train(model, 4)
        raise error
    assert caught.value is error
    assert not hasattr(error, "ledger")
    assert no_hooks()


def test_a_real_allocation_failure_is_raised_on_with_its_ledger():
    with pytest.raises(RuntimeError, match="allocate") as caught, memory_budget(2**62) as ledger:
        torch.empty(2**57)
    assert is_out_of_memory(caught.value)
    assert caught.value.ledger is ledger


# What counts.

C20 = [
    (torch.OutOfMemoryError("no room"), True),
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"), True),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x9 and 8x16)"), False),
    (RuntimeError("CUDA error: invalid configuration argument"), False),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    (RuntimeError("CUDA error: device-side assert triggered"), False),
    (MemoryError(), True),
    (ValueError("CUDA out of memory"), False),
]


@pytest.mark.parametrize(("error", "expected"), C20, ids=lambda each: str(each)[:40])
def test_c20_what_is_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


# The errors of the ledger, which a budget has too.


def test_entering_twice_is_refused():
    ledger = MemoryLedger()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="make a new MemoryLedger"), ledger, ledger:
            pass
        assert no_hooks()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("how", ["torch.compile", "compile", "a part"])
def test_compiled_modules_are_refused_with_the_reason(how):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    plain = model(x)
    compiled = torch.compile(model, backend="eager") if how == "torch.compile" else model
    if how != "torch.compile":
        (model[0] if how == "a part" else model).compile(backend="eager")
    with pytest.raises(RuntimeError, match="silently runs eager"), MemoryLedger(compiled):
        compiled(x)
    assert no_hooks()
    assert torch.equal(compiled(x), plain)
    torch._dynamo.reset()


WRONG = {"model": "m"}, {"model": [nn.ReLU(), 3]}, {"model": 3}, {"optimizer": nn.ReLU()}


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_types_are_refused(wrong):
    with pytest.raises(TypeError, match=f"{next(iter(wrong))}: a torch"):
        MemoryLedger(**wrong)


def test_an_error_inside_leaves_no_hooks_and_the_numbers():
    model, x = nn.Linear(8, 16), torch.randn(4, 9)
    with pytest.raises(RuntimeError, match="shapes"), MemoryLedger(model, inputs=x) as ledger:
        model(x)
    assert no_hooks()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert ledger.live_bytes == sum(ledger.at_end().values()) == size(model) + x.nbytes


def test_growth_in_place_passes_no_ceiling():
    with pytest.raises(torch.OutOfMemoryError), memory_budget("1MiB"):
        torch.empty(1).resize_(10_000_000)


# CUDA, without a device.


@pytest.fixture
def cuda(monkeypatch):
    """What was called: the device has 1000 bytes, and the process may have 0.75 of them."""
    calls = []

    def set_fraction(fraction, device):
        calls.append(fraction)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.75)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    return calls


def test_on_cuda_the_process_gets_that_share(cuda):
    with memory_budget(250, device="cuda") as ledger:
        assert cuda == ["empty_cache", 0.25]
    assert ledger is None
    assert cuda[-1] == 0.75


@pytest.mark.parametrize("error", [KeyError("x"), torch.OutOfMemoryError("CUDA out of memory")])
def test_on_cuda_the_share_is_restored_after_an_error(cuda, error):
    with pytest.raises(type(error)) as caught, memory_budget("250 B", device=torch.device("cuda", 0)):
        raise error
    assert caught.value is error
    assert [each for each in cuda if each != "empty_cache"] == [0.25, 0.75]


def test_on_cuda_a_budget_above_the_device_is_refused(cuda):
    with memory_budget(1000, device="cuda"):
        pass
    cuda.clear()
    with pytest.raises(ValueError, match="1001 B is more than the 1000 B of cuda"), memory_budget(1001, device="cuda"):
        pass
    assert cuda == []


def test_sizes_are_rounded_as_cudas_allocator_rounds():
    log = StorageLog(torch.device("cuda"))
    assert [log._rounded(n) for n in (0, 1, 512, 513, 1025)] == [0, 512, 512, 1024, 1536]
    assert StorageLog(torch.device("cpu"))._rounded(513) == 513


def test_c68_three_numbers_that_are_taken_for_one_another(monkeypatch):
    held = {"memory_allocated": 256, "max_memory_allocated": 300, "memory_reserved": 320, "max_memory_reserved": 400}
    for name, number in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1900))
    found = cuda_memory("cuda:0")
    assert found == {"allocated": 256, "peak_allocated": 300, "reserved": 320, "peak_reserved": 400, "used": 900}
    assert found["allocated"] <= found["reserved"] <= found["used"]
