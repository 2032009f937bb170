"""Whose gradients are in a parameter: those of which backward passes, and whether a step has used them."""

from collections.abc import Iterable

import torch

from labsupport.measure.storages import parts_of

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SMALL = 2.0**-20  # below it float16 has four bits or fewer: its smallest step is 2 ** -24
BY_HAND = 0  # stands where the number of a backward pass would

Digest = tuple[tuple[int, ...], bool]


def values_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Dense tensors that hold its values; of a distributed one those of this rank."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    dense = (tensor,) if tensor.layout == torch.strided else parts_of(tensor)[-1:]
    return tuple(each for each in dense if each.device.type != "meta")


def digest(tensor: torch.Tensor | None) -> Digest | None:
    """What tells whether values changed, and whether all are finite; None if there are none, or only zeros."""
    values = () if tensor is None else values_of(tensor)
    real = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each.contiguous() for each in values]
    bits = [each.view(BITS[each.element_size()]) for each in real]
    if not any(bool(each.any()) for each in bits):
        return None
    finite = all(bool(each.isfinite().all()) for each in real if each.dtype in FLOATS)
    return tuple(int(each.sum()) for each in bits), finite


class Gradient:
    """One parameter's. It is looked at, not listened to: who cleared or changed it, and how, does not matter.

    `held`: backward pass -> the factor that its loss was scaled by; `used`: backward pass -> step; `lost`: backward
    passes that were cleared before any step had them; `touched`: changed by neither backward nor PyTorch's own;
    `zero`: a backward pass made it so.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.held: dict[int, float] = {}
        self.used: dict[int, int] = {}
        self.lost: set[int] = set()
        self.got = self.touched = self.zero = False
        self.now = digest(parameter.grad)
        self.first = self.weights = digest(parameter)
        if self.now:
            self.held[BY_HAND] = 1.0

    @property
    def moved(self) -> bool:
        """Whether the parameter itself has changed since it was first seen."""
        return digest(self.parameter) != self.first

    def look(self, *, expected: bool = False) -> set[int]:
        """See what has become of it; the backward passes that code of the user's own has used. `expected`: PyTorch
        may have changed the values just now, and they still mean the same."""
        before, self.now = self.now, digest(self.parameter.grad)
        self.zero = self.zero and self.now is None and before is None and self.parameter.grad is not None
        by_hand: set[int] = set()
        if self.now is None:
            if before is not None and before[1]:
                by_hand = set(self.held) if digest(self.parameter) != self.weights else by_hand
                self.lost |= set(self.held) - set(self.used) - by_hand - {BY_HAND}
            self.held, self.used, self.touched = {}, {}, False
        elif self.now != before and not expected:
            self.touched = True
            if set(self.held) <= set(self.used):  # changed after the step: what it holds now is the user's affair
                self.held, self.used = {BY_HAND: 1.0}, {}
        return by_hand

    def fill(self, number: int, scale: float, *, reached: bool) -> bool:
        """After a backward pass: whether it added to this one. `reached`: this is one of its leaves."""
        before, self.now = self.now, digest(self.parameter.grad)
        self.got = self.got or self.parameter.grad is not None
        self.zero = self.zero or reached
        if self.now is None:  # it came and is gone: a step within the backward pass
            self.held, self.used = {}, {}
            return False
        if self.now == before:
            return False
        self.held[number], self.weights = scale, digest(self.parameter)
        return True

    def use(self, step: int) -> tuple[set[int], set[int]]:
        """For a step: the backward passes that are new to it, and those that an earlier step has used, if newer
        ones were added to them."""
        held, fresh = set(self.held), set(self.held) - set(self.used)
        again = {each for each in held - fresh if self.used[each] < step} if fresh else set()
        self.used.update(dict.fromkeys(fresh, step))
        return fresh - {BY_HAND}, again


def norm_of(gradients: Iterable[torch.Tensor]) -> float:
    norms = [torch.linalg.vector_norm(part.abs().double()) for each in gradients for part in values_of(each)]
    return float(torch.linalg.vector_norm(torch.stack([each.cpu() for each in norms]))) if norms else 0.0


def shares_of(gradients: Iterable[torch.Tensor | None]) -> tuple[float, float]:
    """Which share of the values is exactly zero, and which of the others is small."""
    values = [part.abs() for each in gradients if each is not None for part in values_of(each)]
    count, rest = sum(each.numel() for each in values), sum(int((each != 0).sum()) for each in values)
    small = sum(int(((each != 0) & (each < SMALL)).sum()) for each in values)
    return (count - rest) / max(1, count), small / max(1, rest)
