"""What each byte is for: categories, decided from the log of allocations."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from labsupport.measure.allocations import BACKWARD, FORWARD, StorageLog
from labsupport.measure.storages import Storage

PARAMETER, GRADIENT, STATE, BUFFER = "parameter", "gradient", "optimizer state", "buffer"
INPUT, ACTIVATION, TEMPORARY, KEPT, UNTRACKED = "input", "activation", "temporary", "kept", "untracked"
CATEGORIES = (PARAMETER, GRADIENT, STATE, BUFFER, INPUT, ACTIVATION, TEMPORARY, KEPT, UNTRACKED)
Span = list[tuple[int, str]]


def spans_of(log: StorageLog) -> list[Span]:
    """For each storage, from which position on it is what."""
    born, freed = _lives(log)
    ends = np.array([position for position, what in log.marks if what in ("returned", BACKWARD)])
    begins = np.array([position for position, what in log.marks if what == FORWARD])
    spans = []
    for number, storage in enumerate(log.storages):
        birth, death = born[number], freed[number]
        if storage.role:
            spans.append([(0, storage.role)])
            continue
        end, begin = (_first_after(birth, positions) for positions in (ends, begins))
        first = _first_category(storage, outlives_forward=end is not None and end <= death)
        if begin is None and first == TEMPORARY and not storage.recording and end is not None:
            begin = _first_after(end, ends)  # no backward will come: the next forward tells
        span = [(0, first)]
        still_an_input = first == INPUT and (storage.found or storage.last_step > storage.step)
        if begin is not None and begin <= death and not still_an_input:
            span.append((begin, ACTIVATION if storage.freed_in_backward else KEPT))
        spans.append(span)
    return spans


def _lives(log: StorageLog) -> tuple[list[int], list[int]]:
    """For each storage the number of events before it was made, and before it was freed (or of all)."""
    born: list[int] = []
    freed: list[int] = []
    sizes: list[int] = []
    for position, (number, change) in enumerate(log.events):
        if number == len(born):
            born.append(position)
            freed.append(len(log.events))
            sizes.append(0)
        sizes[number] += change
        if not sizes[number]:
            freed[number] = position
    return born, freed


def changes_of(log: StorageLog) -> Iterator[tuple[int, str, int]]:
    """(events before it, category, change in bytes): the events, and what changes its category meanwhile."""
    categories = spans_of(log)
    sizes = [0] * len(categories)
    turns = deque(sorted((start, number) for number, span in enumerate(categories) for start, _ in span[1:]))
    now = [span[0][1] for span in categories]
    for position, (number, change) in enumerate([*log.events, (-1, 0)]):
        while turns and turns[0][0] <= position:
            _, turning = turns.popleft()
            yield position - 1, now[turning], -sizes[turning]
            now[turning] = categories[turning][1][1]
            yield position - 1, now[turning], sizes[turning]
        if number >= 0:
            sizes[number] += change
            yield position, now[number], change


def _first_category(storage: Storage, *, outlives_forward: bool) -> str:
    if storage.found:
        return PARAMETER if storage.needs_grad else INPUT
    of_forward = storage.phase == FORWARD or storage.inside  # inside a module during a backward: recomputed
    if not (of_forward and outlives_forward):
        return TEMPORARY
    if not storage.inside and not storage.needs_grad:
        return INPUT
    return ACTIVATION if storage.recording or storage.freed_in_backward else TEMPORARY


def _first_after(birth: int, positions: np.ndarray) -> int | None:
    index = int(np.searchsorted(positions, birth, side="right"))
    return int(positions[index]) if index < len(positions) else None
