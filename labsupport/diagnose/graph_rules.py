"""Faults that the graph shows: compilation, checkpoints, precision, and what gets no gradient.

Each rule gives the evidence of what it has found, or None where it could not look.
"""

import math
import re
from collections import Counter
from typing import Any

from labsupport.diagnose.gradients import digest
from labsupport.diagnose.seen import Seen

Evidence = list[str] | None

SHAPES = re.compile(r"size|shape|stride")
MEANT = re.compile(r"\.backward\(|\.step\(|zero_grad\(|graph_break\(")  # breaks of a whole step that is compiled
SAVES_NOTHING, SAVES_LITTLE = 0.05, 0.2  # of the bytes that autograd would save
ZEROS, SMALL = 0.01, 0.1  # of float16 gradients: shares of exact zeros, and of small values among the others
UNCHANGED = 0.5  # of half-precision weights that have a gradient
DIVISOR, SMALLEST, VOCABULARY = 8, 64, 16384  # of 16-bit tensor cores; narrower layers cost little; a table's rows
SIZES = ("in_features", "out_features", "in_channels", "out_channels", "num_embeddings", "embedding_dim")


def recompiled(seen: Seen) -> Evidence:
    if not seen.watch.compilations.count:
        return None
    wrong = [(call, why) for call, why in seen.watch.compilations.again if SHAPES.search(why)]
    return [f"{len(wrong)} times, the first in call {call}: {why}" for call, why in wrong[:1]]


def graph_breaks(seen: Seen) -> Evidence:
    if not seen.watch.compilations.count:
        return None
    lines = Counter(each for each in seen.watch.compilations.breaks if not MEANT.search(each))
    return [f"{lines.total()} in what was compiled, at {'; at '.join(list(lines)[:3])}"] if lines else []


def saves_nothing(seen: Seen) -> Evidence:
    if not seen.checkpoints:
        return None
    told = [each for each in seen.checkpoints if each.kept_bytes and each.saved_bytes]
    useless = [each for each in told if each.saved_bytes <= (1 + SAVES_NOTHING) * each.kept_bytes]
    found = [
        f"{len(useless)} of {len(told)} keep as much as they spare: {each.block} keeps {each.kept_bytes} B of inputs "
        f"in the place of {each.saved_bytes} B"
        for each in useless[:1]
    ]
    alone = [each.graph for each in seen.backwards.values() if len(each.graph.checkpoints) == 1]
    outside = {number: graph.outside_bytes for graph in alone for number in graph.checkpoints}
    whole = [each for each in told if outside.get(each.number, math.inf) <= SAVES_LITTLE * each.saved_bytes]
    return found + [
        f"{each.block} is the only one, and holds nearly everything: the backward pass has its {each.saved_bytes} B "
        f"all at once again, and outside of it there are at most {outside[each.number]} B"
        for each in whole[:1]
        if each not in useless
    ]


def blind_checkpoint(seen: Seen) -> Evidence:
    if not seen.checkpoints:
        return None
    blocks = [each.block for each in seen.checkpoints if any(id(p) in seen.blind for p in each.blind)]
    return [
        f"no input of {blocks[0]} needs a gradient (so {len(blocks)} times), and with use_reentrant=True "
        f"{len(seen.blind)} parameters got none: {seen.names(seen.blind)}"
        for _ in blocks[:1]
    ]


def other_randomness(seen: Seen) -> Evidence:
    if not seen.checkpoints:
        return None
    wrong = [each for each in seen.checkpoints if each.random and not each.preserves]
    return [
        f"{len(wrong)} times {each.block} drew random numbers with preserve_rng_state=False: it draws others in the "
        "backward pass, so gradients belong to another sample than the loss"
        for each in wrong[:1]
    ]


def no_autocast(seen: Seen) -> Evidence:
    graphs = [each.graph for each in seen.backwards.values()]
    if any(graph.half for graph in graphs):
        return []
    products: Counter[Any] = Counter()
    for graph in graphs:
        for (region, _), count in graph.products.items():
            products[region] += count
    hidden = {region for graph in graphs for region in graph.hidden}
    found = []
    for region in dict.fromkeys(region for graph in graphs for region in graph.operations):
        where = f"autocast({region.device!r})" if region else ""
        if region and products[region] and region not in hidden:
            found.append(
                f"{products[region]} matrix products on the {seen.target} ran within {where}, none in {_kind(region)}"
            )
        elif region and products[None] and not products[region] and not hidden:
            found.append(
                f"no matrix product ran within {where}, and {products[None]} outside of it, none in {_kind(region)}"
            )
    return found


def _kind(region: Any) -> str:
    return str(region.dtype).removeprefix("torch.")


def lost_fp16(seen: Seen) -> Evidence:
    wrong = [each for each in seen.backwards.values() if each.zeros >= ZEROS and each.small >= SMALL]
    return [
        f"{len(wrong)} times: in call {each.call}, without a GradScaler, {each.zeros:.1%} of the gradients were "
        f"exactly 0, and {each.small:.1%} of the others below 2**-20, where float16 has four bits or fewer"
        for each in wrong[:1]
    ]


def coarse_weights(seen: Seen) -> Evidence:
    found = []
    for name, steps in seen.by_optimizer.items():
        wanted, unchanged = sum(each.wanted for each in steps), sum(each.unchanged for each in steps)
        if wanted and unchanged >= UNCHANGED * wanted:
            found.append(
                f"{unchanged / wanted:.1%} of {name}'s half-precision weights were after a step what they had been "
                "before, though they had a gradient"
            )
    return found


def graphs_kept(seen: Seen) -> Evidence:
    found = []
    alive = [each.alive for each in seen.steps]
    if len(alive) > 2 and _grows(alive):
        found.append(f"after each step more losses kept their graphs: {', '.join(map(str, alive[:8]))}")
    old = [each.old for each in seen.backwards.values()][1:]
    if len(old) > 2 and _grows(old):
        found.append(f"each backward pass ran through more nodes of earlier steps: {', '.join(map(str, old[:8]))}")
    retained = [each for each in seen.backwards.values() if each.retains and each.number < max(seen.backwards)]
    if retained and not any(each.reused for each in retained):
        found.append(
            f"retain_graph=True in {len(retained)} backward passes, and no other pass ran through their graphs "
            f"({retained[0].source})"
        )
    return found


def _grows(counts: list[int]) -> bool:
    return all(after > before for before, after in zip(counts, counts[1:], strict=False))


def without_gradient(seen: Seen) -> Evidence:
    found = []
    for name, steps in seen.by_optimizer.items():
        if any(each.touched for each in steps) or all(each.skipped for each in steps):
            continue
        gradients = [seen.watch.gradients[key] for key in seen.watch.owners[name]]
        wanting = {id(each.parameter) for each in gradients if each.parameter.requires_grad}
        never = {key for key in wanting - seen.blind if not seen.got(key) and not seen.watch.gradients[key].held}
        if never:
            found.append(f"{len(never)} of {len(wanting)} of {name} never got one: {seen.names(never)}")
    return found


def without_optimizer(seen: Seen) -> Evidence:
    held = seen.in_optimizers()
    getting = {key: each for key, each in seen.watch.gradients.items() if each.got}
    idle = [key for key, each in getting.items() if key not in held and digest(each.parameter) == each.first]
    if not idle or not seen.steps:
        return []
    return [f"{len(idle)} of {len(getting)} parameters that get gradients are in no optimizer: {seen.names(idle)}"]


def odd_dimensions(seen: Seen) -> Evidence:
    if seen.target != "cuda" or not any(each.graph.half for each in seen.backwards.values()):
        return None
    odd = []
    for name, module in seen.modules():
        for what in SIZES:
            size = getattr(module, what, None)
            if isinstance(size, int) and size >= SMALLEST and size % DIVISOR:
                multiple = 64 if size >= VOCABULARY else DIVISOR
                odd.append(f"{name or type(module).__name__}.{what} {size} -> {-(-size // multiple) * multiple}")
    return [", ".join(odd[:6]) + (f" and {len(odd) - 6} more" if len(odd) > 6 else "")] if odd else []
