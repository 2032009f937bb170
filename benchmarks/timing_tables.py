"""README.md's tables, from the records that timing.py made. Nothing is timed here."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from readme import Records, Section, percent, table

TURNS = (1, 4, 16, 64)
WINDOW_S = 2.0


def wilson(count: int, n: int) -> tuple[float, float]:
    """A 95 % interval of a share, of which `count` in `n` were seen (Wilson, 1927)."""
    z = 1.959964
    middle = (count + z * z / 2) / (n + z * z)
    reach = z / (n + z * z) * math.sqrt(count * (n - count) / n + z * z / 4)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def turn_ratios(series_s: Sequence[float], turn: int, untimed: int) -> np.ndarray:
    """The median ratios of `WINDOW_S` seconds each that two identical steps would have had in these seconds.

    The series is cut into rounds of two turns, A and B, then B and A; of each turn the first `untimed` steps only
    pass the time.
    """
    whole = 2 * (turn + untimed)
    rounds = len(series_s) // whole
    turns = np.reshape(series_s[: rounds * whole], (rounds, 2, turn + untimed))[:, :, untimed:].mean(axis=-1)
    ratios = turns[:, 0] / turns[:, 1]
    ratios[1::2] = 1 / ratios[1::2]
    fits = max(1, int(WINDOW_S / (float(np.mean(series_s)) * whole)))
    return np.array([np.median(ratios[i : i + fits]) for i in range(0, rounds - fits + 1, fits)])


def kept(records: Records) -> list[dict]:
    return [record for record in records if not record["disturbed"]]


def by_rule(records: Iterable[dict]) -> dict[tuple[str, float, str, str], list[tuple[str, dict]]]:
    """(condition, effect, kind, rule) -> the verdicts by that rule, each with its record; in the order of the plan."""
    found: dict[tuple[str, float, str, str], list[tuple[str, dict]]] = {}
    for record in records:
        for rule, verdict in record.get("verdicts", {}).items():
            cell = record["condition"], record["effect"], record["kind"], rule
            found.setdefault(cell, []).append((verdict, record))
    return dict(sorted(found.items(), key=lambda item: _place(*item[0])))


def _place(condition: str, effect: float, kind: str, rule: str) -> tuple:
    """Quiet before loaded, one step twice before two builds, ours before the others."""
    return condition[0] != "q", condition, effect, kind != "same", not rule.startswith("compare"), rule


def is_false(verdict: str, truth: str) -> bool:
    """Faster or slower, and it is not."""
    return verdict in ("faster", "slower") and verdict != truth


def seconds_of(trials: Sequence[tuple[str, dict]]) -> tuple[str, str]:
    seconds = [record["seconds"] for _, record in trials]
    return f"{np.median(seconds):.1f} s", f"{np.percentile(seconds, 95):.1f} s"


def false_verdicts(records: Records) -> str:
    """Two equal steps: how often each rule called one of them faster."""
    rows = []
    for (condition, effect, kind, rule), trials in by_rule(kept(records)).items():
        if effect or rule == "compare, unsettled":
            continue
        verdicts, n = [verdict for verdict, _ in trials], len(trials)
        false = sum(is_false(verdict, "same") for verdict in verdicts)
        pair = {"same": "one step, twice", "builds": "two builds"}[kind]
        ratios = [record["ratio"] for _, record in trials]
        counts = false, percent(wilson(false, n)[1]), verdicts.count("same"), verdicts.count("cannot tell")
        worst = percent(max(abs(ratio - 1) for ratio in ratios))
        rows.append((condition, pair, rule, n, *counts, percent(float(np.std(ratios)), 2), worst, *seconds_of(trials)))
    columns = (
        "condition | pair | tool | n | false | at most (95 %) | same | cannot tell | sd of ratio | worst ratio off by"
        " | time, median | time, 95th percentile"
    )
    return table(columns, rows) + "\n\n" + _left_out(records)


def _left_out(records: Records) -> str:
    left_out = [record for record in records if record["disturbed"]]
    given_up = {record["trial"] for record in left_out} - {record["trial"] for record in kept(records)}
    verdicts = [(verdict, record) for record in left_out for verdict in record.get("verdicts", {}).values()]
    false = sum(is_false(verdict, record["truth"]) for verdict, record in verdicts)
    return (
        f"Left out, because other processes kept cores busy meanwhile: {len(left_out)} of {len(records)} trials of all "
        f"kinds, with {len(verdicts)} verdicts, {false} of them false. All but {len(given_up)} were made again."
    )


def planted_differences(records: Records) -> str:
    """Steps that are truly slower: how often each rule said so."""
    rows = []
    for (condition, effect, _, rule), trials in by_rule(kept(records)).items():
        if not effect:
            continue
        right = sum(verdict == record["truth"] for verdict, record in trials)
        opposite = sum(is_false(verdict, record["truth"]) for verdict, record in trials)
        verdicts = [verdict for verdict, _ in trials]
        share = float(np.median([record["share"] for _, record in trials]))
        counts = f"{right} ({percent(right / len(trials), 0)})", verdicts.count("same"), opposite
        rest = verdicts.count("cannot tell"), *seconds_of(trials)
        rows.append((condition, percent(share, 2), rule, len(trials), *counts, *rest))
    return table(
        "condition | truly slower by | tool | n | seen | called same | opposite | cannot tell | time, median | "
        "time, 95th percentile",
        rows,
    )


def planting(records: Records) -> str:
    """What an idle turn does to the work that follows it."""
    rows = [
        (f"{100 * r['effect']:g} %", percent(r["share"], 3), _interval(r["work"]), r["work"]["n"])
        for r in sorted(kept(records), key=lambda record: record["effect"])
        if r["tool"] == "spin"
    ]
    return table("planted | reached | work after an idle turn / work after none | n", rows)


def _interval(found: dict) -> str:
    return f"{found['ratio']:.4f} [{found['low']:.4f}, {found['high']:.4f}]"


def overhead(records: Records) -> str:
    rows = [
        (name, f"{1e3 * found['step_s']:.3f} ms", _interval(found), found["n"])
        for record in kept(records)
        if record["tool"] == "overhead"
        for name, found in record["overhead"].items()
    ]
    return table("step | bare | through the stopwatch / bare | n", rows)


def length_of_turn(records: Records) -> str:
    rows = []
    for record in kept(records):
        if record["tool"] == "series":
            series = 1e-6 * np.array(record["series_us"])
            for turn in TURNS:
                ratios = [turn_ratios(series, turn, untimed) for untimed in (0, 1)]
                sds = [percent(float(np.std(each)), 2) for each in ratios]
                rows.append((turn, f"{1e3 * turn * float(np.median(series)):.0f} ms", *sds, *map(len, ratios)))
    return table(
        "steps a turn | a turn takes | sd of a 2 s ratio | the same, first step of a turn untimed | n | n, untimed",
        rows,
    )


def settling(records: Records) -> str:
    """`compare` on two builds, with the untimed step after each switch and without."""
    rows = []
    for (_, effect, kind, rule), trials in by_rule(kept(records)).items():
        if effect or kind != "builds" or not rule.startswith("compare"):
            continue
        false = sum(is_false(verdict, "same") for verdict, _ in trials)
        ratios = np.array([record["ratio"] for _, record in trials])
        name = {"compare": "one or two untimed steps"}.get(rule, "none")
        worst = percent(float(np.abs(ratios - 1).max()))
        bound, sd = percent(wilson(false, len(trials))[1]), percent(float(ratios.std()), 2)
        rows.append((name, len(trials), false, bound, sd, worst, seconds_of(trials)[0]))
    return table(
        "after each switch | n | false | at most (95 %) | sd of ratio | worst ratio off by | time, median", rows
    )


def runs_apart(records: Records) -> str:
    medians = [record["median_s"] for record in kept(records) if record["tool"] == "process"]
    rows = []
    if medians:
        low, high = min(medians), max(medians)
        rows.append((len(medians), f"{1e3 * low:.2f} ms", f"{1e3 * high:.2f} ms", percent(high / low - 1)))
    return table("processes | fastest median | slowest median | slowest over fastest", rows)


TABLES: dict[str, Callable[[Records], str]] = {
    "false verdicts": false_verdicts,
    "planted differences": planted_differences,
    "planting": planting,
    "overhead": overhead,
    "length of turn": length_of_turn,
    "settling": settling,
    "runs apart": runs_apart,
}


def about(header: dict) -> str:
    """The machine that made a table."""
    machine, versions = header["machine"], header["versions"]
    return (
        f"{machine['cpu_model']} ({machine['isa']}), {machine['cores']:g} cores, torch {machine['torch']}, "
        f"pyperf {versions['pyperf']}; the step takes {1e3 * header['step_s']:.2f} ms; margin "
        f"{percent(header['margin'], 0)}; records of `{machine['family']}`:"
    )


SECTION = Section("timing", about, TABLES)
