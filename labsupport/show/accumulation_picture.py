"""The picture of the accumulation panel: an epoch's micro-batches in their windows, and what their samples weigh."""

from collections.abc import Sequence
from dataclasses import dataclass

from labsupport.show.svg import BLUE, GREEN, GREY, RED, TEXT, line, rect, svg, text
from labsupport.train.accumulation import Epoch

WIDTH, HEIGHT = 760, 306
LEFT, RIGHT = 44, 736
TOP, BOTTOM = 78, 218  # of the bars: what a sample weighs
BOX = 22  # height of the box of a micro-batch, under its bar
GAP = 16.0  # between windows
MOST_BOXES = 120  # thinner than this they are no boxes any more
ORANGE, PALE = "#B35900", "#BFE6D8"
# Kind of micro-batch -> colour and label. Its height says the same as the colour.
KINDS = {
    "fair": (BLUE, "its share"),
    "light": (ORANGE, "less than its share"),
    "heavy": (RED, "more than its share"),
    "lost": ("#BBBBBB", "in no update"),
    "next": (GREEN, "left for the next epoch"),
}


@dataclass(frozen=True)
class Box:
    """A micro-batch: its samples, and what each weighs over its share in a mean of its update. `carried` ones are from
    the epoch before."""

    size: int
    share: float
    kind: str
    carried: bool = False


@dataclass(frozen=True)
class Group:
    """Boxes that one optimizer step takes (`steps`), or that are left."""

    boxes: tuple[Box, ...]
    steps: bool


def groups_of(epoch: Epoch) -> list[Group]:
    """One group an update, and one of what is left."""
    found = []
    for each in epoch.updates:
        kinds = ["light" if s < 1 - 1e-9 else "heavy" if s > 1 + 1e-9 else "fair" for s in each.shares]
        carried = [index < each.carried for index in range(len(kinds))]
        boxes = (Box(*parts) for parts in zip(each.sizes, each.shares, kinds, carried, strict=True))
        found.append(Group(tuple(boxes), True))
    if epoch.left:
        kind = "next" if epoch.leaks and epoch.updates else "lost"
        found.append(Group(tuple(Box(size, 0.0, kind) for size in epoch.left), False))
    return found


def picture(epoch: Epoch, title: str) -> str:
    """An SVG on a white ground, for light and dark pages. Of many windows it shows the first and the last."""
    groups = groups_of(epoch)
    shown, hidden = _chosen(groups)
    boxes = [box for group in shown for box in group.boxes]
    width = (RIGHT - LEFT - GAP * (len(shown) - 1) - (90 if hidden else 0)) / len(boxes)
    width, highest = min(width, 46.0), max(1.3, *(box.share * 1.08 for box in boxes))
    body, at = _axis(highest), float(LEFT + 8)
    for index, group in enumerate(shown):
        if hidden and index == hidden[0]:
            body.append(text(at + 38, BOTTOM + 15, f"... {hidden[1]} more ...", anchor="middle"))
            at += 90
        body += _group(group, at, width, highest)
        at += width * len(group.boxes) + GAP
    return svg(WIDTH, HEIGHT, title, [text(24, 28, title, size=16, weight="bold"), *body, *_legend(boxes)])


def _chosen(groups: Sequence[Group]) -> tuple[list[Group], tuple[int, int] | None]:
    """The groups to draw, and (where the gap is, how many are in it)."""
    for first in (len(groups), 3, 2, 1):
        last = 2 if first < len(groups) else 0
        if first + last > len(groups):
            continue
        shown = [*groups[:first], *groups[len(groups) - last :]]
        if sum(len(group.boxes) for group in shown) <= MOST_BOXES or first == 1:
            return shown, (first, len(groups) - len(shown)) if len(shown) < len(groups) else None
    return list(groups), None  # two groups, however wide


def _axis(highest: float) -> list[str]:
    fair = _y(1, highest)
    return [
        text(24, TOP - 22, "what a sample weighs in its update, over its share in a mean of that update"),
        line(LEFT, BOTTOM, RIGHT, BOTTOM, GREY),
        line(LEFT, fair, RIGHT, fair, TEXT, dash="5 4"),
        text(LEFT - 6, fair + 4, "1x", anchor="end"),
        text(LEFT - 6, BOTTOM + 4, "0", anchor="end"),
        *([text(LEFT - 6, TOP + 4, f"{highest:.2g}x", anchor="end")] if fair - TOP > 24 else []),
    ]


def _y(share: float, highest: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * share / highest


def _group(group: Group, at: float, width: float, highest: float) -> list[str]:
    out = []
    for index, box in enumerate(group.boxes):
        x, color, top = at + index * width, KINDS[box.kind][0], _y(box.share, highest)
        thick = width - min(2.0, width / 4)
        out.append(rect(x, top, thick, BOTTOM - top, color))
        fill, stroke = (PALE, GREEN) if box.carried else ("white", color)
        out.append(rect(x, BOTTOM + 2, thick, BOX, fill, stroke=stroke))
        if width > 25:
            out.append(text(x + thick / 2, BOTTOM + 18, str(box.size), size=10, anchor="middle"))
    end = at + width * len(group.boxes)
    out.append(line(at, BOTTOM + BOX + 8, end - 2, BOTTOM + BOX + 8, GREY, width=2))
    middle, low = (at + end) / 2, BOTTOM + BOX + 12
    if group.steps:
        out.append(f'<path d="M{end - 2:.1f} {low} l-5 11 h10 z" fill="{TEXT}" class="step"/>')
    elif group.boxes[0].kind == "next":
        out.append(f'<path d="M{end + 2:.1f} {BOTTOM + 7} l12 6 l-12 6 z" fill="{GREEN}" class="leak"/>')
    else:
        out.append(text(middle, low + 11, "no step", anchor="middle", fill=RED))
    return out


def _legend(boxes: Sequence[Box]) -> list[str]:
    row, place = HEIGHT - 18, 24.0
    out = [f'<path d="M{place + 6} {row - 11} l-5 11 h10 z" fill="{TEXT}"/>', text(place + 18, row, "optimizer step")]
    place += 132
    for kind, (color, label) in KINDS.items():
        if any(box.kind == kind for box in boxes):
            out.append(rect(place, row - 11, 14, 13, color))
            out.append(text(place + 19, row, label))
            place += 36 + 6.6 * len(label)
    if any(box.carried for box in boxes):
        out.append(rect(place, row - 11, 14, 13, PALE, stroke=GREEN))
        out.append(text(place + 19, row, "of the epoch before"))
    return out
