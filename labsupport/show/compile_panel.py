"""The compile panel: a sequence of batch sizes, and which of the calls compile, reuse a graph, or run eager."""

from collections.abc import Sequence
from dataclasses import dataclass

from labsupport.show.svg import BLUE, GREY, TEXT, pattern, rect, svg, text
from labsupport.show.widgets import Panel, Values, choice, slider

SEQUENCES = {
    "full batches": (32,) * 10,
    "a ragged end": (32,) * 9 + (5,),
    "two epochs, ragged": ((32,) * 4 + (5,)) * 2,
    "a batch of 1 at the end": ((32,) * 4 + (1,)) * 2,
    "growing": tuple(range(16, 96, 8)),
}
AUTOMATIC, STATIC, DYNAMIC, MARKED = "dynamic=None", "dynamic=False", "dynamic=True", "mark_dynamic"
SETTINGS = (AUTOMATIC, STATIC, DYNAMIC, MARKED)
LIMITS = [1, 2, 4, 8]
LIMIT = 8  # PyTorch's own, torch._dynamo.config.recompile_limit
COMPILED, REUSED, EAGER = "compiled", "reused", "eager, past the limit"
WIDTH, HEIGHT, LEFT = 760, 250, 24
# What a call is: its colour, the ink of the size on it, and lines that say the same without colour.
STYLES = {
    COMPILED: ("#E69F00", TEXT, "//"),
    REUSED: (BLUE, "#ffffff", ""),
    EAGER: ("#cccccc", TEXT, "\\\\"),
}


@dataclass(frozen=True)
class Call:
    """One call: its batch size, what it was, and how many compilations there have been with it."""

    size: int
    kind: str
    compilations: int


def calls_of(sizes: Sequence[int], setting: str, limit: int = LIMIT) -> tuple[Call, ...]:
    """What each call of a compiled layer is, by the rules of `torch.compile` (tests run the real one beside it).

    A graph is for one size, or for all sizes from 2 on; 0 and 1 always get one of their own. With `dynamic=None` the
    first graph is for one size, and from the first *other* size on they are for all. A call that finds no graph
    compiles one until there are `limit`; then it runs eager, and the graphs that there are go on being used. Raises
    ValueError for a setting that is none.
    """
    if setting not in SETTINGS:
        raise ValueError(f"setting: one of {', '.join(SETTINGS)} is expected, got {setting!r}")
    graphs: list[int | None] = []  # the size that a graph is for; None for all from 2 on
    calls = []
    for size in sizes:
        if size in graphs or (None in graphs and size >= 2):
            kind = REUSED
        elif len(graphs) >= limit:
            kind = EAGER
        else:
            kind = COMPILED
            for_all = setting in (DYNAMIC, MARKED) or (setting == AUTOMATIC and bool(graphs))
            graphs.append(None if for_all and size >= 2 else size)
        calls.append(Call(size, kind, len(graphs)))
    return tuple(calls)


class CompilePanel(Panel):
    """A sequence of batch sizes, how sizes are compiled, and the limit, against what each call then is.

    It calculates; nothing is compiled.
    """

    def __init__(self, sequence: str = "two epochs, ragged", setting: str = AUTOMATIC, limit: int = LIMIT) -> None:
        controls = {
            "sizes": choice("batch sizes", list(SEQUENCES), sequence),
            "setting": choice("sizes are", list(SETTINGS), setting),
            "limit": slider("recompile limit", LIMITS, limit),
        }
        super().__init__(
            "compilations",
            controls,
            lambda values: picture(_calls(values), _title(values)),
            lambda values: "\n".join(lines(values)),
        )


def _calls(values: Values) -> tuple[Call, ...]:
    return calls_of(SEQUENCES[values["sizes"]], values["setting"], values["limit"])


def _title(values: Values) -> str:
    calls = _calls(values)
    return f"{values['sizes']}, {values['setting']}: {_count(calls[-1].compilations, 'compilation')}"


def lines(values: Values) -> tuple[str, ...]:
    """The picture in words: how many calls are what, and which ones compile."""
    calls = _calls(values)
    counts = {kind: sum(call.kind == kind for call in calls) for kind in STYLES}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    at = ", ".join(f"{number} (size {call.size})" for number, call in enumerate(calls, 1) if call.kind == COMPILED)
    return f"{_title(values)} in {_count(len(calls), 'call')}", told, f"it compiles at call {at}", _meaning(calls)


def _meaning(calls: Sequence[Call]) -> str:
    """What that means for a run."""
    if any(call.kind == EAGER for call in calls):
        return "some sizes run eager for the rest of the run: a warning says so once, the clock each time"
    half = len(calls) // 2
    if any(call.kind == COMPILED for call in calls[half:]):
        return "it compiles again late in this sequence: that call takes as long as the first"
    if calls[-1].compilations == 1:
        return "paid once"
    return "paid more than once, and then no more"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def picture(calls: Sequence[Call], title: str) -> str:
    """The calls in order as boxes with their sizes, and below them the compilations so far; an SVG on white."""
    pitch = (WIDTH - 2 * LEFT) / len(calls)
    body = [_patterns(), text(LEFT, 28, title, size=16, weight="bold")]
    body.append(text(LEFT, 58, "calls in order, each with its batch size", size=13))
    for index, call in enumerate(calls):
        x, (color, ink, hatch) = LEFT + index * pitch, STYLES[call.kind]
        body.append(_box(x, 68, pitch - 6, 62, color))
        if hatch:
            body.append(_box(x, 68, pitch - 6, 62, f"url(#c-{_id(call.kind)})"))
        halo = "none" if call.kind == REUSED else color
        center = x + (pitch - 6) / 2
        body.append(text(center, 105, str(call.size), size=17, anchor="middle", fill=ink, halo=halo, weight="bold"))
        body.append(text(center, 178, str(call.compilations), size=15, anchor="middle"))
    body.append(text(LEFT, 154, "compilations so far", size=13))
    place = float(LEFT)
    for kind, (color, _, hatch) in STYLES.items():
        body.append(_box(place, 206, 16, 16, color))
        if hatch:
            body.append(_box(place, 206, 16, 16, f"url(#c-{_id(kind)})"))
        count = sum(call.kind == kind for call in calls)
        body.append(text(place + 23, 219, f"{kind}: {count}", size=13))
        place += 64 + 7.5 * len(kind)
    return svg(WIDTH, HEIGHT, title, body)


def _patterns() -> str:
    made = (pattern(f"c-{_id(kind)}", hatch, width=1.6) for kind, (_, _, hatch) in STYLES.items() if hatch)
    return f"<defs>{''.join(made)}</defs>"


def _id(kind: str) -> str:
    return kind.split(",")[0]


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return rect(x, y, width, height, fill, stroke=GREY, radius=3)
