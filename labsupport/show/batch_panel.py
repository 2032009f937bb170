"""The batch panel: what a batch needs against what there is, how fast it is, and a button that runs it."""

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from labsupport.devices import choose_device
from labsupport.measure.budget import is_out_of_memory
from labsupport.show.batch_picture import Shown, picture
from labsupport.show.widgets import Panel, Values, choice, slider
from labsupport.train.batch_size import ceiling_of
from labsupport.train.checkpointing import blocks_of
from labsupport.train.plan import MemoryPlan, plan_memory
from labsupport.train.recipe import Recipe
from labsupport.train.rooms import rooms
from labsupport.train.throughput import Throughput, Timing, measure_throughput
from labsupport.train.workload import Workload
from labsupport.units import format_bytes

PRECISIONS = ["fp32", "bf16", "fp16"]  # tf32 takes the bytes of fp32
BATCHES = [2**power for power in range(13)]
HERE, OWN = "this machine", "its own"
Optimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
}
RUN = "run it"


@dataclass(frozen=True)
class Run:
    """What a press of the button found: predicted and measured."""

    predicted_bytes: int
    timing: Timing

    @property
    def peak_bytes(self) -> int:
        return self.timing.peak_bytes

    @property
    def seconds(self) -> float:
        return self.timing.seconds

    @property
    def samples_per_s(self) -> float:
        return self.timing.samples_per_s


class BatchPanel(Panel):
    """Batch, precision, optimizer, checkpointing and accelerator, against a plan of the workload's memory.

    `budget` is what this machine has for tensors (default: as for `find_batch_size`). `throughput` was measured for
    the workload as it is, with `recipe`; for other settings there is no curve until they are run. A plan of each
    setting is built when it is first looked at, which takes a second or so; after that an answer takes microseconds.
    A plan copies the workload's live objects, and a run trains them: neither begins before the other has ended.
    """

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe | None = None,
        *,
        budget: int | str | None = None,
        throughput: Throughput | None = None,
    ) -> None:
        self._workload, self._recipe = workload, recipe or Recipe()
        self._device, self._budget_given = choose_device().device, budget is not None
        self._rooms = {HERE: ceiling_of(budget, self._device)[0], **rooms()}
        self._plans: dict[tuple[Any, ...], MemoryPlan | str] = {}
        self._planning = threading.RLock()
        self._throughput = {self._setting(self._recipe, OWN): throughput} if throughput else {}
        self._runs: dict[tuple[Any, ...], Run] = {}
        self._refused: dict[tuple[Any, ...], str] = {}
        controls = {
            "batch": slider("batch", BATCHES, self._nearest(self._recipe.batch_size)),
            "precision": choice("precision", PRECISIONS, self._recipe.precision),
            "optimizer": choice("optimizer", [OWN, *OPTIMIZERS], OWN),
            "checkpointing": choice("checkpointing", [("off", False), ("on", True)], self._recipe.checkpointing),
            "accelerator": choice("accelerator", list(self._rooms), HERE),
        }
        super().__init__(
            f"batch of {workload.name}",
            controls,
            lambda values: picture(self.shown(values)),
            lambda values: "\n".join(self.lines(values)),
            actions={RUN: self._run},
        )

    def run(self) -> Run:
        """What the button does, at the present setting. Raises ValueError where it is refused, RuntimeError while it
        runs already."""
        found = self.press(RUN)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def largest(self, values: Values) -> int | None:
        """The largest batch at a setting; None where memory does not rise, or cannot be planned."""
        plan = self._plan(values)
        return None if isinstance(plan, str) else plan.max_batch(self._rooms[values["accelerator"]])

    def shown(self, values: Values) -> Shown:
        """Everything that the picture tells."""
        plan, batch = self._plan(values), values["batch"]
        try:
            with self._planning if batch == 1 else nullcontext():  # a plan traces one sample when it is asked for
                parts, problem = ({}, plan) if isinstance(plan, str) else (plan.at_peak(batch), "")
        except ValueError as error:  # one sample that a model does not take
            parts, problem = {}, str(error)
        run = self._runs.get(self._key(values))
        here = values["accelerator"] == HERE
        return Shown(
            batch=batch,
            parts=parts,
            ceiling=self._rooms[values["accelerator"]],
            place=values["accelerator"],
            largest=self.largest(values),
            throughput=self._throughput.get(self._setting(self._recipe_of(values), values["optimizer"]))
            if here
            else None,
            measured_bytes=run.peak_bytes if run and here else None,
            measured_rate=run.samples_per_s if run and here else None,
            remark="" if here else f" on {values['accelerator']} (an estimate)",
            why_no_curve=f"not measured at this setting: press '{RUN}'" if here else "measured on this machine only",
            problem=problem,
        )

    def lines(self, values: Values) -> tuple[str, ...]:
        """The same in words. Those with measured numbers end with "(measured)"."""
        shown = self.shown(values)
        estimate = " (an estimate)" if self._target(values) == "cuda" else ""
        if shown.problem:
            return (shown.problem,)
        free = values["accelerator"] == HERE and not self._budget_given  # how much that is differs from run to run
        mark = " (measured)" if free else ""
        need = "sample needs" if shown.batch == 1 else "samples need"
        said = [
            f"{shown.batch} {need} {format_bytes(shown.needed)} of {format_bytes(shown.ceiling)} on "
            f"{shown.place}{estimate}: {'it fits' if shown.fits else 'it does not fit'}{mark}",
            f"largest batch here: {'any' if shown.largest is None else shown.largest}{mark}",
        ]
        if curve := shown.throughput:
            said.append(f"knee: {curve.knee:.0f} samples, {curve.asymptote:.0f} samples/s at most (measured)")
        elif shown.measured_rate is None:
            said.append(f"throughput: {shown.why_no_curve}")
        if run := self._runs.get(self._key(values)):
            off = run.peak_bytes - run.predicted_bytes
            said.append(
                f"run on this machine: peak {format_bytes(run.peak_bytes)}, {off:+,} B off the prediction, "
                f"{run.samples_per_s:.0f} samples/s (measured)"
            )
        if said_no := self._refused.get(self._key(values)):
            said.append(said_no)
        return tuple(said)

    def _run(self, values: Values) -> Run | str:
        """What was measured, or why nothing was."""
        key, here = self._key(values), {**values, "accelerator": HERE}
        with self._planning:
            self._refused.pop(key, None)
            if isinstance(self._plan(here), str):  # a cell that trained the same model meanwhile may have been why
                del self._plans[self._plan_key(here)]
            found = self._measured(self._plan(here), here)
            if isinstance(found, str):
                self._refused[key] = found
            else:
                self._runs[key] = found
        return found

    def _measured(self, plan: MemoryPlan | str, values: Values) -> Run | str:
        batch = values["batch"]
        if isinstance(plan, str):
            return f"not run: {plan}"
        try:
            predicted = plan.peak_bytes(batch)
        except ValueError as error:  # one sample that a model does not take
            return f"not run: {error}"
        if predicted > self._rooms[HERE]:
            most = plan.max_batch(self._rooms[HERE])
            return f"not run: {batch} samples do not fit on this machine: at most {most} do"
        try:
            timed = measure_throughput(
                self._workload_of(values),
                self._recipe_of(values),
                [batch],
                budget=self._rooms[HERE],
                device=self._device,
                seconds=1.0,
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return f"out of memory: {batch} samples need more than the plan says ({format_bytes(predicted)}) (measured)"
        return Run(predicted, timed.timings[0])

    def _workload_of(self, values: Values) -> Workload:
        own = values["optimizer"] == OWN
        return self._workload if own else replace(self._workload, optimizer=OPTIMIZERS[values["optimizer"]])

    def _recipe_of(self, values: Values) -> Recipe:
        return self._recipe.but(
            batch_size=values["batch"], precision=values["precision"], checkpointing=values["checkpointing"]
        )

    def _setting(self, recipe: Recipe, optimizer: str) -> tuple[Any, ...]:
        return recipe.but(batch_size=1), optimizer

    def _key(self, values: Values) -> tuple[Any, ...]:
        """A run is one of this machine, whatever accelerator is looked at."""
        return tuple(value for name, value in values.items() if name != "accelerator")

    def _plan_key(self, values: Values) -> tuple[Any, ...]:
        return *self._setting(self._recipe_of(values), values["optimizer"]), self._target(values)

    def _target(self, values: Values) -> str:
        return self._device.type if values["accelerator"] == HERE else "cuda"

    def _plan(self, values: Values) -> MemoryPlan | str:
        """The plan of a setting, or why there is none."""
        recipe, key = self._recipe_of(values), self._plan_key(values)
        if (known := self._plans.get(key)) is not None:  # also while something runs
            return known
        with self._planning:
            if key not in self._plans:
                try:
                    if recipe.checkpointing:
                        blocks_of(self._workload.model())
                    self._plans[key] = plan_memory(self._workload_of(values), recipe, target=self._target(values))
                except Exception as error:  # whatever it is, it has to be said in the panel
                    self._plans[key] = f"this setting cannot be planned: {error}"
            return self._plans[key]

    def _nearest(self, batch: int) -> int:
        return min(BATCHES, key=lambda each: abs(each - batch))
