"""The accumulation panel: window, partial window and loss scale, and what they make of each sample."""

from labsupport.show.accumulation_picture import picture
from labsupport.show.widgets import Panel, Values, choice, slider
from labsupport.train.accumulation import DROPPED, LEAKS, STEPPED, WEIGHED, Epoch, epoch_of

SAMPLES = [64, 100, 128, 256, 400, 1000, 1437, 10_000, 50_000]
MICRO_BATCHES = [2**power for power in range(10)]
WINDOWS = [1, 2, 3, 4, 6, 8, 12, 16, 32]
ENDS = {
    "dropped: zero_grad at the epoch's start": DROPPED,
    "stepped, loss / window": STEPPED,
    "stepped, weighed by what is there": WEIGHED,
    "leaks into the next epoch": LEAKS,
}
LOSSES = {"divided by the window": True, "not divided": False}


class AccumulationPanel(Panel):
    """Samples, micro-batch, window, the treatment of the last window and of the loss: who counts how much?

    Nothing is measured here: it is counting, the same on every machine.
    """

    def __init__(self, samples: int = 1000, micro_batch: int = 64, window: int = 6, *, end: str = STEPPED) -> None:
        controls = {
            "samples": slider("samples", SAMPLES, samples),
            "micro_batch": slider("micro-batch", MICRO_BATCHES, micro_batch),
            "window": slider("window", WINDOWS, window),
            "end": choice("last window", list(ENDS.items()), end),
            "divided": choice("loss", list(LOSSES.items()), True),
        }
        super().__init__(
            "window, partial window and loss scale",
            controls,
            lambda values: picture(shown(values), title_of(values)),
            lambda values: "\n".join(lines(values)),
        )


def shown(values: Values) -> Epoch:
    """The epoch that the controls describe."""
    return epoch_of(
        values["samples"], values["micro_batch"], values["window"], end=values["end"], divided=values["divided"]
    )


def title_of(values: Values) -> str:
    epoch = shown(values)
    if not epoch.updates:
        return "no optimizer step at all: the window is longer than the epoch"
    return f"{_counted(len(epoch.updates), 'optimizer step')} an epoch, {_verdict(epoch)}"


def _verdict(epoch: Epoch) -> str:
    light, heavy = epoch.off()
    if epoch.lost:
        return f"{_counted(epoch.lost, 'sample')} lost"
    if epoch.leaks:
        return f"{_counted(sum(epoch.left), 'sample')} in the wrong epoch"
    if light or heavy:
        return f"{_counted(sum(size for size, _ in light + heavy), 'sample')} out of proportion"
    return "every sample has its share"


def lines(values: Values) -> tuple[str, ...]:
    """The same in words."""
    samples, size, window = values["samples"], values["micro_batch"], values["window"]
    epoch, count = shown(values), -(-samples // size)
    ragged = f", the last of {samples % size}" if samples % size else ""
    left = f", and {_counted(count % window, 'micro-batch')} left" if count % window else ""
    said = [
        f"{samples:,} samples in micro-batches of {size}: {count:,}{ragged}; "
        f"{_counted(count // window, 'full window')} of {window}{left}",
        title_of(values),
    ]
    if not epoch.updates:
        return tuple(said)
    light, heavy = epoch.off()
    for what, found, extreme in (("less", light, min), ("more", heavy, max)):
        if found:
            many = _counted(sum(size for size, _ in found), "sample")
            far = extreme(share for _, share in found)
            said.append(f"{what} than its share in its update: {many}, at the worst {far:.3g}x")
    said.append(f"SGD steps as with the learning rate times {_factors(epoch)}")
    if epoch.leaks:
        many = _counted(len(epoch.left), "micro-batch")
        said.append(f"the next epoch's first update has {many} of this one in it")
    return tuple(said)


def _factors(epoch: Epoch) -> str:
    """Only the first update may have too much in it, and only the last one too little."""
    first, last = epoch.updates[0].factor, epoch.updates[-1].factor
    if abs(first - last) < 1e-6:
        return f"{first:.3g}"
    usual, odd, where = (last, first, "first") if epoch.leaks else (first, last, "last")
    return f"{usual:.3g}, and {odd:.3g} in the {where} update"


def _counted(count: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{count:,} {what}{'' if count == 1 else plural}"
