"""The memory of a training step at any batch size, without running it.

One step is traced on fake tensors at two batch sizes. Where both do the same, every allocation is
`fixed + per_sample * batch`, and so is the running sum after it; the peak is the largest of those sums, which at any
batch size is one of the few lines of their upper hull.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np

from labsupport.measure.allocations import CUDA_ROUNDING
from labsupport.measure.categories import CATEGORIES
from labsupport.train.recipe import Recipe
from labsupport.train.traces import CannotPlan, Trace, model_of, trace
from labsupport.train.workload import Workload
from labsupport.units import format_bytes, parse_bytes

TARGETS = ("cpu", "cuda")
TRACED = (2, 3)  # not 1, which BatchNorm refuses
CHECKED = 256  # a third size, which the two have to predict; a smaller one where its batch would be large
CHECKED_BYTES = 128 << 20
NOT_IN_A_CUDA_PLAN = ("kernels' workspaces", "the CUDA context", "NCCL's buffers", "fragmentation and cached blocks")


@dataclass(frozen=True, order=True)
class Size:
    """`count` live tensors of `fixed + per_sample * batch` bytes each."""

    category: str
    fixed: int
    per_sample: int
    count: int


@dataclass(frozen=True)
class Moment:
    """One moment of the step: what is live then, `fixed + per_sample * batch` bytes in all, and what happens."""

    fixed: int
    per_sample: int
    sizes: tuple[Size, ...]
    what: str


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """The predicted ledger of a workload, at any batch size.

    `moments` are those of the step that are its peak at some batch size, by rising `per_sample`. On a CPU the bytes
    are those of MemoryLedger around a steady step. A plan for "cuda" is an estimate; `not_in_it` lists what it
    does not see.
    """

    workload: str
    recipe: Recipe
    target: str
    moments: tuple[Moment, ...]
    not_in_it: tuple[str, ...] = ()
    _trace_one: Callable[[], Moment] | None = field(default=None, repr=False, compare=False)

    def peak_bytes(self, batch: int) -> int:
        """The peak of a steady step with that many samples. Raises ValueError for less than 1 sample, and for 1
        where the model does not take it."""
        return self._bytes(self.moment(batch), batch)

    def at_peak(self, batch: int) -> dict[str, int]:
        """Bytes by category at that peak; they sum to `peak_bytes(batch)`."""
        parts = dict.fromkeys(CATEGORIES, 0)
        for size in self.moment(batch).sizes:
            parts[size.category] += size.count * self._rounded(size.fixed + size.per_sample * batch)
        return parts

    def max_batch(self, budget: int | str) -> int | None:
        """The largest batch whose peak is at most `budget` bytes ("512MiB", or a number): 0 if not one sample fits,
        None if the peak does not rise with the batch."""
        ceiling = parse_bytes(budget)
        rising = [each for each in self.moments if each.per_sample]
        if any(each.fixed > ceiling for each in self.moments):
            return 0
        if not rising:
            return None
        most = min((ceiling - each.fixed) // each.per_sample for each in rising)
        if most == 0 or self._fits(most, ceiling):
            return most
        fits, fails = 0, most  # rounding takes its part
        while fails - fits > 1:
            tried = (fits + fails) // 2
            if self._fits(tried, ceiling):
                fits = tried
            else:
                fails = tried
        return fits

    def moment(self, batch: int) -> Moment:
        """The moment of the peak with that many samples."""
        if isinstance(batch, bool) or not hasattr(batch, "__index__") or batch < 1:
            raise ValueError(f"batch: a whole number of samples, 1 or more, is expected, got {batch!r}")
        if batch == 1 and self._trace_one is not None:
            return self._trace_one()
        return max(self.moments, key=lambda each: self._bytes(each, batch))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything that an answer needs."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    @property
    def lines(self) -> tuple[str, ...]:
        """For people: what the peak is made of, from which batch size on."""
        said = [f"peak of {self.workload}, {'estimated for CUDA' if self.target == 'cuda' else 'on a CPU'}"]
        for index, each in enumerate(self.moments):
            since = f"from {self._first(index)} samples: " if index else ""
            said.append(f"{since}{format_bytes(each.fixed)} + {format_bytes(each.per_sample)} a sample, at {each.what}")
        return tuple(said + ([f"not in it: {', '.join(self.not_in_it)}"] if self.not_in_it else []))

    def __repr__(self) -> str:
        return "\n".join(self.lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"application/vnd.labsupport.memory+json": {"plan": self.workload}, "text/plain": repr(self)}

    def _first(self, index: int) -> int:
        """The batch size from which on a moment is the peak."""
        before, after = self.moments[index - 1 : index + 1]
        return (before.fixed - after.fixed) // (after.per_sample - before.per_sample) + 1

    def _fits(self, batch: int, ceiling: int) -> bool:
        try:
            return self.peak_bytes(batch) <= ceiling
        except ValueError:  # one sample, which the model does not take
            return False

    def _rounded(self, nbytes: int) -> int:
        return nbytes if self.target == "cpu" else -(-nbytes // CUDA_ROUNDING) * CUDA_ROUNDING

    def _bytes(self, moment: Moment, batch: int) -> int:
        if self.target == "cpu":
            return moment.fixed + moment.per_sample * int(batch)
        return sum(size.count * self._rounded(size.fixed + size.per_sample * int(batch)) for size in moment.sizes)


def plan_memory(workload: Workload, recipe: Recipe | None = None, *, target: str | None = None) -> MemoryPlan:
    """Predict the memory of a workload's steady step at any batch size; the recipe's own is not used.

    Nothing of the workload is run on real memory but its `model`, once, and its `batch`, at a few small sizes. A
    model that this machine cannot hold may be built `with torch.device("meta")`. Live objects, and all random states,
    are as before. `target` is "cpu", the default, for what MemoryLedger counts there; or "cuda", an
    estimate: sizes rounded as its allocator does, foreach optimizers, its dropout masks and attention kernels.

    Raises CannotPlan where the step is no line in the batch: shapes that depend on data, control flow on the batch,
    bytes that rise with its square; it names the first operation. It looks at batches of 2, 3 and up to 256 samples:
    what only larger ones do differently, it does not see. Raises TypeError for a workload that gives something else
    than it should.
    """
    recipe = recipe or Recipe()
    target = target or "cpu"
    if target not in TARGETS:
        raise ValueError(f"target: one of {', '.join(TARGETS)} is expected, got {target!r}")
    model = model_of(workload)
    first, second = (trace(workload, recipe.but(batch_size=size), target, model) for size in TRACED)
    fixed, per_sample = _line(first, second)
    checked = min(CHECKED, workload.samples or CHECKED, CHECKED_BYTES * TRACED[-1] // second.batch_bytes)
    if checked > TRACED[-1]:
        _check(first, trace(workload, recipe.but(batch_size=checked), target, model), fixed, per_sample)

    @cache
    def of_one() -> Moment:
        try:
            one = trace(workload, recipe.but(batch_size=1), target, model)
        except CannotPlan as error:
            raise ValueError(f"batch: {workload.name} cannot be planned with 1 sample: {error}") from error
        return _moment(one, one.changes, 0 * one.changes, int(np.argmax(one.changes.cumsum())))

    moments = [_moment(first, fixed, per_sample, position) for position in _hull(fixed.cumsum(), per_sample.cumsum())]
    not_in_it = NOT_IN_A_CUDA_PLAN if target == "cuda" else ()
    return MemoryPlan(workload.name, recipe, target, tuple(moments), not_in_it, of_one)


def _line(first: Trace, second: Trace) -> tuple[np.ndarray, np.ndarray]:
    """For each event the bytes that are fixed, and those per sample."""
    _same_events(first, second)
    per_sample, rest = np.divmod(second.changes - first.changes, second.batch - first.batch)
    fixed = first.changes - per_sample * first.batch
    sign = np.sign(first.changes)
    odd = np.flatnonzero(rest | (fixed * sign < 0) | (per_sample * sign < 0))
    if odd.size:
        raise CannotPlan(
            f"{first.event(odd[0])} takes {_bytes_of(first, odd[0])} and {_bytes_of(second, odd[0])}: that is no fixed "
            "part and so much a sample. Memory that rises with the square of the batch cannot be planned"
        )
    return fixed, per_sample


def _check(first: Trace, other: Trace, fixed: np.ndarray, per_sample: np.ndarray) -> None:
    _same_events(first, other)
    odd = np.flatnonzero(fixed + per_sample * other.batch != other.changes)
    if odd.size:
        expected = abs(int(fixed[odd[0]] + per_sample[odd[0]] * other.batch))
        raise CannotPlan(
            f"{first.event(odd[0])}: a line through {TRACED[0]} and {TRACED[1]} samples has {format_bytes(expected)} "
            f"at {other.batch}, and the step takes {_bytes_of(other, odd[0])}"
        )


def _bytes_of(traced: Trace, index: int) -> str:
    return f"{abs(int(traced.changes[index])):,} B with {traced.batch} samples"


def _same_events(a: Trace, b: Trace) -> None:
    for index, (here, there) in enumerate(zip(a.keys, b.keys, strict=False)):
        if here != there:
            raise CannotPlan(
                f"the step does not do the same at every batch size: operation {index} is {a.event(index)} with "
                f"{a.batch} samples, and {b.event(index)} with {b.batch}"
            )
    if len(a.keys) != len(b.keys):
        longer, n = (a, len(b.keys)) if len(a.keys) > len(b.keys) else (b, len(a.keys))
        raise CannotPlan(f"only with {longer.batch} samples does the step go on with {longer.event(n)}")


def _hull(fixed: np.ndarray, per_sample: np.ndarray) -> list[int]:
    """The positions of those sums that are the largest at some batch size of 1 or more, by rising slope."""
    best: dict[int, int] = {}
    for position in np.lexsort(
        (np.arange(len(fixed))[::-1], fixed)
    ):  # the highest of each slope, the earliest of those
        best[int(per_sample[position])] = int(position)
    hull: list[int] = []
    for _, new in sorted(best.items()):
        while hull and fixed[new] + per_sample[new] >= fixed[hull[-1]] + per_sample[hull[-1]]:
            hull.pop()  # never above it, from one sample on
        while len(hull) > 1 and _crossing(fixed, per_sample, hull[-1], new) <= _crossing(fixed, per_sample, *hull[-2:]):
            hull.pop()
        hull.append(new)
    return hull


def _crossing(fixed: np.ndarray, per_sample: np.ndarray, a: int, b: int) -> float:
    """The batch size at which the steeper b reaches a."""
    return float(fixed[a] - fixed[b]) / float(per_sample[b] - per_sample[a])


def _moment(traced: Trace, fixed: np.ndarray, per_sample: np.ndarray, position: int) -> Moment:
    live: dict[int, tuple[int, int]] = {}
    for number, a, b in zip(traced.numbers[: position + 1], fixed, per_sample, strict=False):
        before = live.get(number, (0, 0))
        live[number] = (before[0] + int(a), before[1] + int(b))
    counts = Counter((traced.category(number, position + 1), *size) for number, size in live.items() if any(size))
    sizes = tuple(Size(*key, count) for key, count in sorted(counts.items()))
    total = sum(size.fixed * size.count for size in sizes), sum(size.per_sample * size.count for size in sizes)
    return Moment(*total, sizes, traced.event(position))
