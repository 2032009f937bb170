"""Faults of the window: of what happens between a backward pass and the optimizer's step.

Each rule gives the evidence of what it has found, or None where it could not look.
"""

import math

from labsupport.diagnose.events import Backward, Scheduled, Step
from labsupport.diagnose.seen import Seen, passes

Evidence = list[str] | None


def piled_up(seen: Seen) -> Evidence:
    found = []
    for name, steps in seen.by_optimizer.items():
        wrong = [each for each in steps if each.again]
        if wrong:
            first = wrong[0]
            found.append(
                f"{len(wrong)} of {len(steps)} steps of {name} used gradients again: in call {first.call} those of "
                f"{passes(first.used)} lay on top of those of {passes(first.again)}, which an earlier step had used"
            )
    return found


def cleared_in_window(seen: Seen) -> Evidence:
    found = []
    for name, steps in seen.by_optimizer.items():
        lost = [seen.unused(each.lost) for each in steps]
        if all(lost) and all(each.used and not each.touched for each in steps):
            found.append(
                f"in each of {len(steps)} steps of {name}: in call {steps[0].call} it used {passes(steps[0].used)}, "
                f"and the gradients of {passes(lost[0])} had been cleared"
            )
    return found


def cleared_before_step(seen: Seen) -> Evidence:
    return [
        f"{name} found no gradient in any of its {len(steps)} steps; those of {passes(lost)} had been cleared"
        for name, steps in seen.by_optimizer.items()
        if not _too_early(seen, name) and _found_none(steps)
        if (lost := seen.unused(number for each in steps for number in each.lost))
    ]


def step_before_backward(seen: Seen) -> Evidence:
    return [
        f"{name} stepped before its first backward pass, and found no gradient in any of its {len(steps)} steps"
        for name, steps in seen.by_optimizer.items()
        if _too_early(seen, name) and _found_none(steps)
    ]


def _found_none(steps: list[Step]) -> bool:
    return not any(each.found or each.skipped for each in steps)


def _too_early(seen: Seen, name: str) -> bool:
    """Whether its first step came before the first backward pass that made gradients for it."""
    keys = seen.watch.owners[name]
    filled = [at for at, each in enumerate(seen.events) if isinstance(each, Backward) and each.filled & keys]
    return bool(filled) and seen.events.index(seen.by_optimizer[name][0]) < filled[0]


def clipped_while_scaled(seen: Seen) -> Evidence:
    # Who multiplies the limit by the scale clips well. Between a usual limit, and that times the scale, is its root.
    wrong = [each for each in seen.clipped if each.limit < math.sqrt(each.scale)]
    return [
        f"{len(wrong)} times: in call {each.call} {each.function} clipped gradients to {each.limit:g} that were scaled "
        f"by {each.scale:g}, so in truth to {each.limit / each.scale:.3g}"
        for each in wrong[:1]
    ]


def mixed_scales(seen: Seen) -> Evidence:
    wrong = [each for each in seen.backwards.values() if each.mixed]
    return [
        f"{len(wrong)} times: in call {each.call} backward {each.number} added gradients of scale {each.scale:g} to "
        f"others of scale {next(scale for scale in each.mixed if scale != each.scale):g}"
        for each in wrong[:1]
    ]


def scheduled_in_window(seen: Seen) -> Evidence:
    found = []
    for name, steps in seen.by_optimizer.items():
        gaps = hits = scheduled = 0
        waiting = moved = False
        for each in seen.events:
            if isinstance(each, Backward) and each.filled & seen.watch.owners[name]:
                gaps, hits = gaps + waiting, hits + (waiting and moved)
                waiting, moved = True, False
            elif isinstance(each, Step) and each.optimizer == name:
                waiting = False
            elif isinstance(each, Scheduled) and each.optimizer == name:
                scheduled, moved = scheduled + 1, True
        # More than half: an epoch that ends within a window may move the scheduler there.
        if 2 * hits > gaps and scheduled > len(steps):
            found.append(
                f"the scheduler made {scheduled} steps for {len(steps)} of {name}, and {hits} of them between two "
                "backward passes of one window"
            )
    return found


def scheduled_at_skipped(seen: Seen) -> Evidence:
    found = []
    for name in seen.by_optimizer:
        events = [each for each in seen.events if isinstance(each, Backward) or getattr(each, "optimizer", "") == name]
        pairs = zip(events, events[1:], strict=False)
        steps = [(each, isinstance(after, Scheduled)) for each, after in pairs if isinstance(each, Step)]
        skipped = [each for each, _ in steps if each.skipped]
        # After each step: a scheduler that moves once an epoch may meet a skipped one by chance.
        if skipped and len(steps) > 1 and all(moved for _, moved in steps):
            found.append(
                f"the GradScaler skipped {len(skipped)} of {len(steps)} steps of {name}, the first in call "
                f"{skipped[0].call}, and the scheduler moved on each time"
            )
    return found


def left_over(seen: Seen) -> Evidence:
    if not seen.ended:
        return None
    held = seen.in_optimizers()
    waiting = (each for key, each in seen.watch.gradients.items() if key in held)
    left = seen.unused(number for each in waiting for number in set(each.held) - set(each.used))
    return [f"the loop ended after {passes(left)}, whose gradients no step has used"] if left else []


def undivided(seen: Seen) -> Evidence:
    found = []
    for name, steps in seen.by_optimizer.items():
        several = [each for each in steps if len(each.used) > 1 and not each.skipped]
        windows = [seen.micro_batches(each) for each in several if not each.touched]
        wrong = [w for w in windows if w and all(each.graph.mean and not each.hooked for each in w)]
        if wrong and len(wrong) == len(several):
            first = wrong[0]
            found.append(
                f"{len(wrong)} steps of {name} used sums: the first of {len(first)} backward passes, each of a mean "
                f"({first[0].graph.mean}) that nothing divides; the gradient's norm was {first[0].norm:.3g} after one "
                f"and {first[-1].norm:.3g} after all"
            )
    return found


def batch_norm(seen: Seen) -> Evidence:
    windows = [seen.micro_batches(each) for each in seen.steps]
    wrong = [each for each in windows if each and all(one.graph.batch_norms for one in each)]
    return [
        f"{each[0].graph.batch_norms} BatchNorm layers in training normalised each of {len(each)} micro-batches of a "
        "window by itself, and moved their statistics each time"
        for each in wrong[:1]
    ]
