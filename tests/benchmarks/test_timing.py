"""The timing benchmark's own arithmetic, and README's tables against the committed records. Nothing is timed."""

import json
from collections import Counter
from statistics import NormalDist
from types import SimpleNamespace

import pytest
import timing
import timing_tables as tables
import timing_tools as tools
from readme import still_to_do
from timing import Cell, Phase, Trial
from torch.utils.benchmark import Measurement
from torch.utils.benchmark.utils.common import TaskSpec

QUIET = Phase((Cell("compare", "same", 4), Cell("naive", "planted", 2, 0.03)))


def test_readme_has_the_tables_of_the_committed_records():
    readme = (timing.HERE / "README.md").read_text()
    assert tables.SECTION.with_blocks(readme, tables.SECTION.made_from(timing.HERE)) == readme, (
        "python benchmarks/timing.py --table"
    )


# The plan.


def test_what_is_promised_comes_first():
    first = Counter(trial.cell for trial in timing.trials_of(timing.PLAN[0]))
    assert first == {Cell("compare", "same", 200): 200, Cell("compare", "planted", 100, 0.03): 100}


def test_trials_have_names_of_their_own():
    keys = [trial.key for phase in timing.PLAN for trial in timing.trials_of(phase)]
    assert len(set(keys)) == len(keys)


def test_tools_and_effects_are_interleaved_the_same_way_every_time():
    for phase in timing.PLAN:
        tried = timing.trials_of(phase)
        assert tried == timing.trials_of(phase)
        # Beginning and end see the same mixture: each has at least a quarter of what is tried most.
        half = len(tried) // 2
        (most, n), *_ = Counter(trial.cell for trial in tried).most_common()
        assert n / 4 <= sum(trial.cell == most for trial in tried[:half]) <= 3 * n / 4


def test_scale_changes_counts_and_keeps_every_cell():
    assert len(timing.trials_of(QUIET, 10)) == 60
    assert Counter(trial.cell for trial in timing.trials_of(QUIET, 0)) == dict.fromkeys(QUIET.cells, 1)


def test_plan_fits_an_hour():
    assert timing.minutes(timing.PLAN, 0) < timing.minutes(timing.PLAN, 1) < 60


# Going on where a run stopped.


def made(trial, disturbed=False):
    return {"trial": trial.key, "disturbed": disturbed}


def test_what_is_done_is_not_done_again():
    one, *rest = timing.trials_of(QUIET)
    assert still_to_do([one, *rest], [made(one)], "trial", timing.TRIES) == rest


def test_a_disturbed_trial_is_made_again_until_it_is_quiet_or_given_up():
    one, *_ = timing.trials_of(QUIET)
    tries = [made(one, disturbed=True)] * timing.TRIES
    assert still_to_do([one], tries[1:], "trial", timing.TRIES) == [one]
    assert still_to_do([one], [*tries[1:], made(one)], "trial", timing.TRIES) == []
    assert still_to_do([one], tries, "trial", timing.TRIES) == []


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A file of records with a header, one record and half a line, and the benchmark that made it."""
    head = {"code": {"compare": "c", "tools": "t"}, "versions": {"torch": "2"}, "machine": {"cpu_model": "c"}}
    monkeypatch.setattr(timing, "header", lambda: head)
    path = tmp_path / "timing-x.jsonl"
    path.write_text(json.dumps(head) + '\n{"trial": "t", "tool": "naive"}\n{"trial": "u", "tool": "compare"}\n{"tri')
    return path


def test_half_a_line_is_dropped(begun):
    assert [record["trial"] for record in timing.resumed(begun)[1:]] == ["t", "u"]
    assert begun.read_text().endswith('"tool": "compare"}\n')


def test_if_only_compare_has_changed_the_peers_records_stay(begun, monkeypatch):
    head = timing.header()
    monkeypatch.setattr(timing, "header", lambda: head | {"code": {"compare": "d", "tools": "t"}})
    there, *kept = timing.resumed(begun)
    assert there["code"]["compare"] == "d" and [record["tool"] for record in kept] == ["naive"]
    assert len(begun.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "change",
    [{"code": {"compare": "c", "tools": "u"}}, {"versions": {"torch": "3"}}, {"machine": {"cpu_model": "d"}}],
    ids=str,
)
def test_records_of_other_tools_or_another_machine_are_not_mixed_in(begun, monkeypatch, change):
    before, head = begun.read_text(), timing.header()
    monkeypatch.setattr(timing, "header", lambda: head | change)
    with pytest.raises(SystemExit, match="move it away"):
        timing.resumed(begun)
    assert begun.read_text() == before


@pytest.mark.parametrize("loaded, busy, disturbed", [(False, 0.1, False), (False, 0.2, True), (True, 0.2, False)])
def test_the_neighbours_load_alone_says_what_is_disturbed(monkeypatch, loaded, busy, disturbed):
    monkeypatch.setitem(timing.TOOLS, "naive", lambda a, b, seconds: tools.Answer(0.9, {"naive": "slower"}))
    monkeypatch.setattr(timing, "OtherProcesses", lambda: SimpleNamespace(cores=lambda: busy))
    trial = Trial(Phase((), loaded=loaded), Cell("naive", "planted", 2, 0.03), 0)
    record = timing.carry_out(trial, quick=True)
    assert record["disturbed"] is disturbed and record["truth"] == "slower"


@pytest.mark.parametrize("index, truth, shares", [(0, "slower", (0.0, 0.03)), (1, "faster", (0.03, 0.0))])
def test_the_slower_step_is_b_and_a_in_turn(monkeypatch, index, truth, shares):
    given = []
    monkeypatch.setitem(
        timing.TOOLS, "naive", lambda a, b, s: (given.extend([a.share, b.share]), tools.Answer(1.0, {}))[1]
    )
    record = timing.carry_out(Trial(QUIET, Cell("naive", "planted", 2, 0.03), index), quick=True)
    assert (record["truth"], tuple(given)) == (truth, shares)


def test_planted_share_is_of_the_time_the_work_took(monkeypatch):
    now = [0.0]

    def clock():
        now[0] += 1e-4
        return now[0]

    monkeypatch.setattr(tools, "time", SimpleNamespace(perf_counter=clock))
    step = tools.TrainingStep(0.05, width=2, samples=2)
    for work_s in (1.0, 3.0):
        monkeypatch.setattr(step.optimizer, "step", lambda work_s=work_s: now.__setitem__(0, now[0] + work_s))
        step()
    assert step.shares_reached == pytest.approx([0.05, 0.05], abs=5e-4)


# The peers' rules.


@pytest.mark.parametrize(
    "ratio, differs, verdict",
    [
        (1.009, True, "same"),
        (0.991, True, "same"),
        (1.02, True, "faster"),
        (0.98, True, "slower"),
        (0.98, False, "cannot tell"),
    ],
)
def test_all_peers_get_the_margin_and_their_own_rule(ratio, differs, verdict):
    assert tools.peer_verdict(ratio, differs) == verdict


def timed(name, median_s, sd_s):
    times = [NormalDist(median_s, sd_s).inv_cdf((i + 0.5) / 100) for i in range(100)]
    return Measurement(1, times, TaskSpec("step()", "pass", label="step", sub_label=name, description="time"))


@pytest.mark.parametrize(
    "b_s, sd_s, iqrs, shown",
    [
        (4.9e-3, 1e-5, True, True),
        (4.4e-3, 1.5e-3, False, False),  # so wide that Compare prints 4 and 4
        (4.4e-3, 1e-4, False, True),  # 4.3 and 4.4
        (4.31e-3, 1e-6, True, False),  # both within 1 % of the best
    ],
)
def test_torchs_rules(b_s, sd_s, iqrs, shown):
    a, b = timed("A", 4.3e-3, sd_s), timed("B", b_s, sd_s)
    assert tools.iqrs_are_apart(a, b) is tools.iqrs_are_apart(b, a) is iqrs
    assert tools.compare_shows_apart(a, b) is tools.compare_shows_apart(b, a) is shown


@pytest.mark.parametrize(
    "b_ms, significant",
    [([4.5, 4.6, 4.5, 4.7], True), ([4.2, 4.9, 4.3, 4.8], False), ([4.31, 4.32, 4.31, 4.32], False)],
    ids=["apart", "spread", "within the margin"],
)
def test_pyperfs_rule(b_ms, significant):
    pytest.importorskip("pyperf")
    a = [4.3e-3, 4.29e-3, 4.3e-3, 4.31e-3]
    b = [1e-3 * value for value in b_ms]
    assert tools.pyperf_tells_apart(a, b) is tools.pyperf_tells_apart(b, a) is significant


# The tables.


@pytest.mark.parametrize(
    "count, n, low, high",
    # Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval(count, n, low, high):
    assert tables.wilson(count, n) == pytest.approx((low, high), abs=5e-5)


def test_turns_of_equal_steps_have_ratio_one():
    for turn in tables.TURNS:
        assert tables.turn_ratios([0.01] * 1000, turn, 0) == pytest.approx(1)


def test_a_slow_first_step_of_a_turn_is_untimed():
    series = [0.02, 0.01, 0.01, 0.01] * 2 + [0.05, 0.01, 0.01, 0.01] * 2
    assert tables.turn_ratios(series * 20, 3, 1) == pytest.approx(1)


def test_both_sides_of_the_order_are_one_ratio():
    # A, B, B, A with A twice as long: the ratio is 2 in every round.
    assert tables.turn_ratios([0.02, 0.01, 0.01, 0.02] * 300, 1, 0) == pytest.approx(2)


def record(verdict, *, effect=0.0, truth="same", disturbed=False, ratio=1.0, seconds=2.0, kind="same", index=0):
    return {
        "trial": f"{kind} {effect} {index}",
        "condition": "quiet, 1 thread",
        "tool": "compare",
        "kind": kind,
        "effect": effect,
        "truth": truth,
        "verdicts": {"compare": verdict},
        "ratio": ratio,
        "share": effect,
        "seconds": seconds,
        "others": 0.0,
        "disturbed": disturbed,
    }


def cells_of(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]


def test_false_verdicts_are_counted_without_the_disturbed_ones():
    records = [record("same", index=n) for n in range(8)] + [record("faster", ratio=1.05, index=8, seconds=4)]
    records += [record("cannot tell", index=9), record("slower", disturbed=True, index=10)]
    text = tables.false_verdicts(records)
    names, _, row = cells_of(text)
    found = dict(zip(names, row, strict=True))
    assert (found["n"], found["false"], found["same"], found["cannot tell"]) == ("10", "1", "8", "1")
    assert (found["at most (95 %)"], found["worst ratio off by"], found["time, median"]) == ("40.4 %", "5.0 %", "2.0 s")
    assert "1 of 11 trials" in text and "1 of them false" in text and "All but 1" in text


def test_planted_differences_are_counted_by_what_is_true():
    right = [("slower", "slower"), ("faster", "faster")]
    told = [*right, ("faster", "slower"), ("same", "slower"), ("cannot tell", "faster")]
    records = [record(verdict, truth=truth, effect=0.03, kind="planted") for verdict, truth in told]
    names, _, row = cells_of(tables.planted_differences(records))
    found = dict(zip(names, row, strict=True))
    assert (found["n"], found["seen"]) == ("5", "2 (40 %)")
    assert (found["opposite"], found["called same"], found["cannot tell"]) == ("1", "1", "1")
    assert found["truly slower by"] == "3.00 %"


def test_every_table_is_made_from_the_records_of_its_kind():
    work = {"ratio": 1.0, "low": 0.99, "high": 1.01, "n": 20}
    about = {"condition": "quiet, 1 thread", "disturbed": False, "effect": 0.03, "kind": "x"}
    records = [
        {**about, "trial": "1", "tool": "spin", "share": 0.0301, "work": work},
        {**about, "trial": "2", "tool": "overhead", "overhead": {"a step": {**work, "step_s": 1e-3}}},
        {**about, "trial": "3", "tool": "series", "series_us": [4000] * 2000},
        {**about, "trial": "4", "tool": "process", "median_s": 0.004},
        {**about, "trial": "5", "tool": "process", "median_s": 0.005},
    ]
    assert cells_of(tables.planting(records))[2] == ["3 %", "3.010 %", "1.0000 [0.9900, 1.0100]", "20"]
    assert cells_of(tables.overhead(records))[2] == ["a step", "1.000 ms", "1.0000 [0.9900, 1.0100]", "20"]
    assert cells_of(tables.length_of_turn(records))[2][:3] == ["1", "4 ms", "0.00 %"]
    assert cells_of(tables.runs_apart(records))[2] == ["2", "4.00 ms", "5.00 ms", "25.0 %"]


def test_settling_sets_the_two_beside_each_other():
    one = record("same", kind="builds")
    other = one | {"verdicts": {"compare, unsettled": "slower"}, "ratio": 0.95}
    rows = cells_of(tables.settling([one, other]))[2:]
    assert [row[:3] for row in rows] == [["one or two untimed steps", "1", "0"], ["none", "1", "1"]]


def test_a_block_needs_its_marks():
    with pytest.raises(ValueError, match="no place for the block 'overhead'"):
        tables.SECTION.with_blocks("# Benchmarks\n", {"overhead": "| a |"})


def test_a_block_is_renewed_in_place():
    mark = tables.SECTION.start("overhead")
    renewed = tables.SECTION.with_blocks(f"a\n{mark}old\n{tables.SECTION.end}\nb", {"overhead": "new"})
    assert renewed == f"a\n{mark}\nnew\n\n{tables.SECTION.end}\nb"


def test_a_table_without_records_says_so():
    assert "Nothing recorded" in tables.settling([])
