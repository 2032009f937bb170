"""What is a fault: one function each, from what was seen to the numbers of its evidence (faults.toml has the words)."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from labsupport.diagnose.watching.events import Backward, Scheduled, Step
from labsupport.diagnose.watching.seen import Seen, passes

Evidence = Iterator[dict[str, Any]]

SHAPES = re.compile(r"size|shape|stride")
MEANT = re.compile(r"\.backward\(|\.step\(|zero_grad\(|graph_break\(")  # breaks of a whole step that is compiled
SPARES_NOTHING, SPARES_LITTLE = 0.05, 0.2  # of the bytes that autograd would save
ZEROS, SMALL = 0.01, 0.1  # of float16 gradients: shares of exact zeros, and of small values among the others
UNCHANGED = 0.5  # of half-precision weights that have a gradient
DIVISOR, SMALLEST, VOCABULARY = 8, 64, 16384  # of 16-bit tensor cores; narrower layers cost little; a table's rows
SIZES = ("in_features", "out_features", "in_channels", "out_channels", "num_embeddings", "embedding_dim")


# The window: from the first backward pass to the step.


def piled_up(seen: Seen) -> Evidence:
    for name, steps in seen.by_optimizer.items():
        for each in (wrong := [each for each in steps if each.again])[:1]:
            new, old = passes(each.used), passes(each.again)
            yield {
                "times": len(wrong),
                "steps": len(steps),
                "optimizer": name,
                "call": each.call,
                "new": new,
                "old": old,
            }


def cleared_in_window(seen: Seen) -> Evidence:
    for name, steps in seen.by_optimizer.items():
        lost = [seen.unused(each.lost) for each in steps]
        if all(lost) and all(each.used and not each.touched for each in steps):
            used, call = passes(steps[0].used), steps[0].call
            yield {"steps": len(steps), "optimizer": name, "call": call, "used": used, "lost": passes(lost[0])}


def cleared_before_step(seen: Seen) -> Evidence:
    for name, steps in _in_vain(seen):
        lost = seen.unused(number for each in steps for number in each.lost)
        if lost and not _too_early(seen, name):
            yield {"optimizer": name, "steps": len(steps), "lost": passes(lost)}


def step_before_backward(seen: Seen) -> Evidence:
    for name, steps in _in_vain(seen):
        if _too_early(seen, name):
            yield {"optimizer": name, "steps": len(steps)}


def _in_vain(seen: Seen) -> Iterable[tuple[str, list[Step]]]:
    """Optimizers that never found a gradient."""
    return [
        (n, steps) for n, steps in seen.by_optimizer.items() if not any(each.found or each.skipped for each in steps)
    ]


def _too_early(seen: Seen, name: str) -> bool:
    """Whether its first step came before the first backward pass that made gradients for it."""
    owned = seen.watch.owners[name]
    filled = [at for at, each in enumerate(seen.events) if isinstance(each, Backward) and each.filled & owned]
    return bool(filled) and seen.events.index(seen.by_optimizer[name][0]) < filled[0]


def clipped_while_scaled(seen: Seen) -> Evidence:
    # Who multiplies the limit by the scale clips well. Between a usual limit, and that times the scale, is its root.
    for each in (wrong := [each for each in seen.clipped if each.limit < math.sqrt(each.scale)])[:1]:
        yield {"times": len(wrong), **vars(each), "true": each.limit / each.scale}


def mixed_scales(seen: Seen) -> Evidence:
    for each in (wrong := [each for each in seen.backwards.values() if each.mixed])[:1]:
        other = next(scale for scale in each.mixed if scale != each.scale)
        yield {"times": len(wrong), "call": each.call, "number": each.number, "scale": each.scale, "other": other}


def scheduled_in_window(seen: Seen) -> Evidence:
    for name, steps in seen.by_optimizer.items():
        gaps = within = scheduled = 0
        waiting = moved = False
        for each in seen.events:
            if isinstance(each, Backward) and each.filled & seen.watch.owners[name]:
                gaps, within = gaps + waiting, within + (waiting and moved)
                waiting, moved = True, False
            elif isinstance(each, Step) and each.optimizer == name:
                waiting = False
            elif isinstance(each, Scheduled) and each.optimizer == name:
                scheduled, moved = scheduled + 1, True
        # More than half: an epoch that ends within a window may move the scheduler there.
        if 2 * within > gaps and scheduled > len(steps):
            yield {"scheduled": scheduled, "steps": len(steps), "optimizer": name, "within": within}


def scheduled_at_skipped(seen: Seen) -> Evidence:
    for name in seen.by_optimizer:
        events = [each for each in seen.events if isinstance(each, Backward) or getattr(each, "optimizer", "") == name]
        pairs = zip(events, events[1:], strict=False)
        steps = [(each, isinstance(after, Scheduled)) for each, after in pairs if isinstance(each, Step)]
        skipped = [each for each, _ in steps if each.skipped]
        # After each step: a scheduler that moves once an epoch may meet a skipped one by chance.
        if skipped and len(steps) > 1 and all(moved for _, moved in steps):
            yield {"skipped": len(skipped), "steps": len(steps), "optimizer": name, "call": skipped[0].call}


def left_over(seen: Seen) -> Evidence:
    held = seen.in_optimizers()
    waiting = [each for key, each in seen.watch.gradients.items() if key in held]
    if left := seen.unused(number for each in waiting for number in set(each.held) - set(each.used)):
        yield {"left": passes(left)}


def undivided(seen: Seen) -> Evidence:
    for name, steps in seen.by_optimizer.items():
        several = [each for each in steps if len(each.used) > 1 and not each.skipped]
        windows = [seen.micro_batches(each) for each in several if not each.touched]
        wrong = [w for w in windows if w and all(each.graph.mean and not each.hooked for each in w)]
        if wrong and len(wrong) == len(several):
            first, last = wrong[0][0], wrong[0][-1]
            numbers = {"window": len(wrong[0]), "mean": first.graph.mean, "first": first.norm, "last": last.norm}
            yield {"times": len(wrong), "optimizer": name, **numbers}


def batch_norm(seen: Seen) -> Evidence:
    windows = [seen.micro_batches(each) for each in seen.steps]
    for each in [w for w in windows if w and all(one.graph.batch_norms for one in w)][:1]:
        yield {"layers": each[0].graph.batch_norms, "window": len(each)}


# Compilation, checkpoints, precision.


def recompiled(seen: Seen) -> Evidence:
    wrong = [(call, why) for call, why in seen.watch.compilations.again if SHAPES.search(why)]
    for call, why in wrong[:1]:
        yield {"times": len(wrong), "call": call, "reason": why}


def graph_breaks(seen: Seen) -> Evidence:
    if lines := Counter(each for each in seen.watch.compilations.breaks if not MEANT.search(each)):
        yield {"times": lines.total(), "lines": "; at ".join(list(lines)[:3])}


def spares_nothing(seen: Seen) -> Evidence:
    told = [each for each in seen.checkpoints if each.kept_bytes and each.saved_bytes]
    wrong = [each for each in told if each.saved_bytes <= (1 + SPARES_NOTHING) * each.kept_bytes]
    for each in wrong[:1] if 2 * len(wrong) >= len(told) else ():
        sizes = {"block": each.block, "kept": each.kept_bytes, "saved": each.saved_bytes}
        yield {"times": len(wrong), "checkpoints": len(told), **sizes}


def holds_everything(seen: Seen) -> Evidence:
    graphs = [each.graph for each in seen.backwards.values() if len(each.graph.checkpoints) == 1]
    outside = {number: graph.outside_bytes for graph in graphs for number in graph.checkpoints}
    for each in seen.checkpoints[:1]:
        rest = outside.get(each.number, math.inf)
        if rest <= SPARES_LITTLE * each.saved_bytes and each.saved_bytes > (1 + SPARES_NOTHING) * each.kept_bytes:
            yield {"block": each.block, "saved": each.saved_bytes, "outside": rest}


def blind_checkpoint(seen: Seen) -> Evidence:
    blocks = [each.block for each in seen.checkpoints if any(id(p) in seen.blind for p in each.blind)]
    for block in blocks[:1]:
        yield {"block": block, "times": len(blocks), "count": len(seen.blind), "names": seen.names(seen.blind)}


def other_randomness(seen: Seen) -> Evidence:
    for each in (wrong := [each for each in seen.checkpoints if each.random and not each.preserves])[:1]:
        yield {"times": len(wrong), "block": each.block}


def autocast_in_vain(seen: Seen) -> Evidence:
    for region, products, hidden in _autocasts(seen):
        if products[region] and region not in hidden:
            yield {"inside": products[region], "device": seen.target, "where": region, "dtype": region.kind}


def autocast_elsewhere(seen: Seen) -> Evidence:
    for region, products, hidden in _autocasts(seen):
        if products[None] and not products[region] and not hidden:
            yield {"where": region, "outside": products[None], "dtype": region.kind}


def _autocasts(seen: Seen) -> Iterator[tuple[Any, Counter[Any], set[Any]]]:
    """Regions, with the products in each and those that hide some; none if anything ran in half precision."""
    graphs = [] if seen.half else [each.graph for each in seen.backwards.values()]
    products: Counter[Any] = Counter()
    for graph in graphs:
        for (region, _), count in graph.products.items():
            products[region] += count
    hidden = {region for graph in graphs for region in graph.hidden}
    for region in dict.fromkeys(region for graph in graphs for region in graph.regions if region):
        yield region, products, hidden


def lost_fp16(seen: Seen) -> Evidence:
    for each in (wrong := [b for b in seen.backwards.values() if b.zeros >= ZEROS and b.small >= SMALL])[:1]:
        yield {"times": len(wrong), "call": each.call, "zeros": each.zeros, "small": each.small}


def coarse_weights(seen: Seen) -> Evidence:
    for name, steps in seen.by_optimizer.items():
        wanted, unchanged = sum(each.wanted for each in steps), sum(each.unchanged for each in steps)
        if wanted and unchanged >= UNCHANGED * wanted:
            yield {"share": unchanged / wanted, "optimizer": name}


def odd_dimensions(seen: Seen) -> Evidence:
    odd = []
    for name, module in seen.modules():
        sizes = {what: getattr(module, what, None) for what in SIZES}
        for what, size in sizes.items():
            if isinstance(size, int) and size >= SMALLEST and size % DIVISOR:
                multiple = 64 if size >= VOCABULARY else DIVISOR
                odd.append(f"{name or type(module).__name__}.{what} {size} -> {-(-size // multiple) * multiple}")
    if odd:
        yield {"sizes": ", ".join(odd[:6]) + (f" and {len(odd) - 6} more" if len(odd) > 6 else "")}


# What is kept, and what gets nothing.


def losses_kept(seen: Seen) -> Evidence:
    if _grows(alive := [each.alive for each in seen.steps]):
        yield {"counts": ", ".join(map(str, alive[:8]))}


def graph_grows(seen: Seen) -> Evidence:
    if _grows(old := [each.old for each in seen.backwards.values()][1:]):
        yield {"counts": ", ".join(map(str, old[:8]))}


def _grows(counts: list[int]) -> bool:
    return len(counts) > 2 and all(after > before for before, after in zip(counts, counts[1:], strict=False))


def retained_in_vain(seen: Seen) -> Evidence:
    retained = [each for each in seen.backwards.values() if each.retains and each.number < max(seen.backwards)]
    if retained and not any(each.reused for each in retained):
        yield {"times": len(retained), "source": retained[0].source}


def without_gradient(seen: Seen) -> Evidence:
    for name, steps in seen.by_optimizer.items():
        gradients = {key: seen.watch.gradients[key] for key in seen.watch.owners[name]}
        wanting = {key for key, each in gradients.items() if each.parameter.requires_grad}
        never = {key for key in wanting - seen.blind if not seen.got(key) and not gradients[key].held}
        if never and not any(each.touched for each in steps) and not all(each.skipped for each in steps):
            counts = {"count": len(never), "all": len(wanting), "steps": len(steps)}
            yield {**counts, "optimizer": name, "names": seen.names(never)}


def without_optimizer(seen: Seen) -> Evidence:
    held, getting = seen.in_optimizers(), {key: each for key, each in seen.watch.gradients.items() if each.got}
    idle = [key for key, each in getting.items() if key not in held and not each.moved]
    if idle and seen.steps and not any(each.touched for each in seen.steps):  # nor copied to where they are used
        yield {"count": len(idle), "all": len(getting), "names": seen.names(idle)}
