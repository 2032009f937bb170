"""A notebook's session: what it records, says, predicts and checks, and how it compares with the published run."""

import math
import os
from numbers import Real
from typing import Any

from labsupport import machine
from labsupport.publish import published
from labsupport.publish.records import (
    METADATA_KEY,
    SAY_MIME,
    Record,
    absent_bundle,
    fields_of,
    said_text,
)
from labsupport.publish.summary import NO_GUESSES, Diary, summary_bundle

# What a result object tells of its value, beside `.value` and `.unit`.
MEASURED = ("n", "spread", "interval")


class Lab:
    """The session of one lab: `lab = Lab("00")`.

    `device` is where the lab's tensors live, `machine` the fingerprint that travels with every number. The
    session keeps nothing outside the notebook, except the reader's own guesses (in `~/.labsupport`, never while
    `labs run` executes).
    """

    def __init__(self, lab: str) -> None:
        choice = machine.choose_device()
        self.id = lab
        self.device = choice.device
        self.machine = machine.fingerprint(choice.device)
        self.records: dict[str, Record] = {}
        self.absent: dict[str, str] = {}  # record -> what it needs and this machine lacks
        self.guesses: dict[str, float | None] = {}
        self._lacks: set[str] = set()
        self.answers: dict[str, bool | None] = {}  # exercise -> right, wrong, or None for unanswered
        text = f"Lab {lab} runs on the {self.profile.upper()}: {choice.reason} (measured)\n"
        text += f"{self.machine.describe()} (measured)"
        present = [need for need in machine.NEEDS if machine.has(need)]
        about = self.machine.to_dict() | {"family": self.machine.family, "present": present}
        _show({"text/plain": text}, {METADATA_KEY: {"lab": lab, "machine": about}})

    @property
    def profile(self) -> str:
        """ "cpu" or "cuda": which settings and which published numbers apply."""
        return self.machine.profile

    def scale(self, *, cpu: Any, cuda: Any) -> Any:
        """The setting for this profile: a CPU runs the same code on less."""
        return {"cpu": cpu, "cuda": cuda}[self.profile]

    def record(self, name: str, value: Any, unit: str = "", *, kind: str = "info", **details: Any) -> None:
        """Show a value and put it on record.

        `value` is a number, a result with `.value` and `.unit` (a `Ceiling`, a `PairedRatio`), whose n, spread and
        interval are taken along, or a function that gives one. `details` are those of `Record`: tolerance, n,
        spread, interval, seed, needs, at_least, bound_applies. With `needs` ("cuda", "2 GPUs", "compiler", "root")
        a machine without it records nothing, calls nothing, and says so. Raises ValueError for a name already
        taken, an unknown kind or need, a value that is not finite. In a reader's hands a cell may run again:
        there a record replaces the one before.
        """
        if name in self.records and _published_run():
            raise ValueError(f"{name!r} is on record already ({self.records[name].text}): choose another name")
        needs = details.get("needs")
        asked_for_cpu = needs in ("cuda", "2 GPUs") and self.profile == "cpu"  # a GPU may be there all the same
        if needs and (asked_for_cpu or needs in self._lacks or not machine.has(needs)):
            Record(name=name, value=1, unit=unit, kind=kind, **details)  # what is wrong is wrong here too
            self.absent[name] = needs
            _show(*absent_bundle(name, unit, kind, needs))
            return
        if callable(value):
            value = value()
        if hasattr(value, "value"):
            details = {key: getattr(value, key) for key in MEASURED if hasattr(value, key)} | details
            unit, value = unit or value.unit, value.value
        record = Record(name=name, value=value, unit=unit, kind=kind, **details)
        self.records[name] = record
        _show(*record.bundle())

    def lacks(self, need: str) -> None:
        """Records that need this are skipped from here on: it is there, and a try has shown that it does not work."""
        machine.has(need)  # an unknown need is told
        self._lacks.add(need)

    def say(
        self,
        text: str = "",
        *,
        about: str = "",
        above: str = "",
        below: str = "",
        same: str = "",
        margin: float = 0.05,
    ) -> None:
        """A sentence with recorded numbers in it; one that says how something turned out has its branches.

        `say("It took {step_s}.")`, or `say(about="speedup", above="Faster: {speedup}.", below="Slower.",
        same="No difference.")`: see `records.sentence`. Raises ValueError for a record that is not there, and
        for an outcome without its other side (a sentence about a ratio could be false on another machine).
        Where a record was skipped for what it needs, so is the sentence, and says so.
        """
        if bool(text) == bool(about) or (text and (above or below or same)):
            raise ValueError("lab.say takes a text, or about= with above=, below=, same=")
        said: dict[str, Any] = {"text": text}
        if about:
            said = {"about": about, "above": above, "below": below, "same": same, "margin": margin}
        templates = [part for part in said.values() if isinstance(part, str)]
        used = {field for part in templates for field in fields_of(part)} | ({about} if about else set())
        skipped = {name for name in used if name in self.absent and name not in self.records}
        if missing := sorted(used - set(self.records) - skipped):
            raise ValueError(f"lab.say uses {', '.join(missing)}, not on record; there are {_listed(self.records)}")
        if skipped and not (about and not (above and below and same)):
            needs = " and ".join(sorted({self.absent[name] for name in skipped}))
            _show({SAY_MIME: said, "text/markdown": f"*Not here*: this needs {needs}. <small>(measured)</small>"})
            return
        if about and (not (above and below and same) or self.records[about].kind != "ratio"):
            raise ValueError(f"lab.say about {about!r}: a record of kind 'ratio' and above, below, same are expected")
        ratios = sorted(name for name in used if self.records[name].kind == "ratio")
        if not about and ratios:
            raise ValueError(f"{ratios[0]!r} may turn out the other way: use about=, above=, below=, same=")
        _show({SAY_MIME: said, "text/markdown": said_text(said, self.records)})

    def predict(
        self,
        name: str,
        guess: float | None = None,
        *,
        question: str = "",
        between: tuple[float, float] = (-math.inf, math.inf),
    ) -> None:
        """Take the reader's guess of a record that is still to come. Unanswered is fine, and says so.

        A guess that is no number, or not `between` the bounds that make sense, is told and not taken.
        """
        if name in self.records and _published_run():
            raise ValueError(f"{name!r} is measured already ({self.records[name].text}): predict before you measure")
        low, high = between
        if guess is None:
            answer = "no guess yet: put a number for guess="
        elif not _is_finite(guess):
            guess, answer = None, f"{guess!r} is not taken: a number is expected"
        elif not low <= guess <= high:
            guess, answer = None, f"{guess:g} is not taken: a number from {low:g} to {high:g} is expected"
        else:
            answer = f"your guess is {guess:g}"
        self.guesses[name] = guess
        _show({"text/plain": f"{question or name}\n  {answer}"})

    def check(
        self, name: str, answer: float | None, expected: float, *, tolerance: float = 0.05, hint: str = ""
    ) -> None:
        """Compare an exercise's answer; `tolerance` is relative. A wrong answer is told, and fails nothing."""
        self.answers[name] = None
        if answer is None:
            _show({"text/plain": f"{name}: unanswered. Put your answer in the place of None."})
            return
        try:
            right = math.isclose(float(answer), float(expected), rel_tol=tolerance)
        except (TypeError, ValueError, OverflowError):
            self.answers[name] = False
            _show({"text/plain": f"{name}: got {answer!r}, a number is expected (measured)"})
            return
        self.answers[name] = right
        verdict = "right" if right else "not yet"
        tail = "" if right or not hint else f"\n  {hint}"
        _show({"text/plain": f"{name}: {verdict}: got {float(answer):.4g} / expected {expected:.4g} (measured){tail}"})

    def summary(self) -> None:
        """Yours beside the published, the claims this lab touches, and how far off your guesses were."""
        guesses = {name: guess for name, guess in self.guesses.items() if name in self.records}
        try:
            machines = published.load_all()
        except published.PublishedError as error:  # a reader has done nothing wrong
            machines = {}
            _show({"text/plain": f"nothing to compare with: {error}"})
        _show(summary_bundle(self.id, self.records, machines, self.machine.family, guesses))
        diary = None if _published_run() else Diary.of_reader()
        if diary:
            diary.keep(self.id, {n: (g, self.records[n].value) for n, g in guesses.items() if g is not None})
        _show({"text/plain": diary.text if diary else NO_GUESSES})


def _published_run() -> bool:
    """Whether `labs run` executes this: then a name taken twice is a mistake, not a cell run again."""
    return bool(os.environ.get("LABS_RUN"))


def _is_finite(guess: Any) -> bool:
    """Whether this is a number that a float can hold, of Python's or numpy's."""
    try:
        return isinstance(guess, Real) and not isinstance(guess, bool) and math.isfinite(guess)
    except OverflowError:  # 10**400
        return False


def _listed(names: Any) -> str:
    return ", ".join(names) or "none yet"


def _show(data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """Display a bundle; outside IPython (a test, a script) print its text."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = None
    if get_ipython is None or get_ipython() is None:
        print(data.get("text/plain") or data.get("text/markdown"))
    else:
        display(data, raw=True, metadata=metadata or {})
