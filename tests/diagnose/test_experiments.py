"""The experiment log: what a run changed, what it warns of, and what it does when a file or a disk fails."""

import json
import math
import os
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from labsupport.diagnose import NOT_SET, ExperimentLog


@dataclass(frozen=True)
class Recipe:
    batch_size: int = 32
    precision: str = "fp32"
    shape: tuple[int, ...] = (1, 2)


@pytest.fixture
def log(tmp_path):
    return ExperimentLog(tmp_path / "runs.jsonl")


@pytest.mark.parametrize(
    ("new", "changed"),
    [
        ({"a": 2, "o": {"lr": 0.1}}, {"a": (1, 2)}),
        ({"a": 1, "o": {"lr": 0.2}}, {"o.lr": (0.1, 0.2)}),
        ({"a": 1, "o": {"lr": 0.1}, "b": None}, {"b": (NOT_SET, None)}),
        ({"o": {"lr": 0.1}}, {"a": (1, NOT_SET)}),
        ({"o": {"lr": 0.1}, "a": 1.0}, {}),
    ],
)
def test_changed_is_what_differs_from_the_parent(log, new, changed):
    log.add("base", {"a": 1, "o": {"lr": 0.1}}, 1.0)
    assert log.add("next", new, 1.0).changed == changed


@pytest.mark.parametrize(
    ("recipe", "machine", "warned"),
    [
        (Recipe(), "A", ("nothing changed: an A/A run, its gain is noise",)),
        (Recipe(batch_size=64), "A", ()),
        (Recipe(64, "bf16"), "A", ("two changes at once: batch_size, precision",)),
        (Recipe(64, "bf16", (3,)), "A", ("3 changes at once: batch_size, precision, shape",)),
        (Recipe(), "B", ("another machine than its parent: family A / B",)),
        (Recipe(), None, ("another machine than its parent: family A / not recorded",)),
    ],
)
def test_warnings_say_why_a_gain_may_not_be_the_changes(log, recipe, machine, warned):
    assert log.add("base", Recipe(), 1.0, machine={"family": "A", "host": 1}).warnings == ()
    run = log.add("next", recipe, 1.0, machine=machine and {"family": machine, "host": 2})
    assert run.warnings == warned


def test_machines_without_a_family_differ_by_what_differs(log):
    log.add("base", {}, 1.0, machine={"cores": 2, "cpu": "x"})
    assert log.add("next", {}, 1.0, machine={"cores": 4, "cpu": "x"}).warnings == (
        "another machine than its parent: cores 2 / 4",
    )


def test_a_machine_object_is_stored_with_its_family(log):
    machine = SimpleNamespace(to_dict=lambda: {"cores": 2}, family="A")
    assert log.add("base", {}, 1.0, machine=machine).machine == {"cores": 2, "family": "A"}


def test_a_measurement_brings_its_statistics_and_its_machine(log):
    measured = SimpleNamespace(median_s=0.5, iqr_s=0.1, n=7, machine={"family": "A"})
    run = log.add("base", Recipe(), measured)
    assert run.results == {"median_s": 0.5, "iqr_s": 0.1, "n": 7}
    assert run.machine == {"family": "A"}


def test_a_bare_number_carries_its_unit(log):
    assert log.add("base", {}, 12, unit="samples/s").results == {"value [samples/s]": 12}


def test_the_parent_is_the_run_before_unless_named(log):
    first = log.add("first", {"a": 1}, 1.0)
    assert first.parent is None
    assert log.add("second", {"a": 2}, 1.0).parent == "first"
    assert log.add("by name", {"a": 3}, 1.0, parent="first").changed == {"a": (1, 3)}
    assert log.add("by run", {"a": 3}, 1.0, parent=first).parent == "first"
    root = log.add("root", {"a": 9}, 1.0, parent=None)
    assert (root.parent, root.changed, root.warnings) == (None, {}, ())


def test_what_is_read_back_is_what_was_added(log):
    log.add("base", Recipe(), {"loss": 0.1}, machine={"family": "A"}, note="größer\n")
    log.add("next", {"deep": [{"a": (1, None, True)}]}, {"loss": 2})
    again = ExperimentLog(log.path)
    assert again.runs == log.runs
    assert (len(again), again["next"].parameters) == (2, {"deep": [{"a": [1, None, True]}]})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("x", {"o": {"dtype": object()}}, 1.0), TypeError, r"parameters\.o\.dtype is .*JSON has no object"),
        (("x", {"o": [1, {2}]}, 1.0), TypeError, r"parameters\.o\[1\]"),
        (("x", {3: 1}, 1.0), TypeError, "has the key 3"),
        (("x", [1], 1.0), TypeError, "a mapping or dataclass is expected"),
        (("x", {}, {"loss": "low"}), TypeError, "'loss' is 'low'; a number"),
        (("x", {}, {}), TypeError, "result is {}"),
        (("x", {}, None), TypeError, "result is None"),
        (("", {}, 1.0), TypeError, "name is ''"),
        (("x", {}, math.nan), ValueError, r"'value \[s\]' is nan: JSON has finite numbers only; .*note"),
        (("x", {}, {"loss": -math.inf}), ValueError, "'loss' is -inf: JSON has finite numbers only"),
        (("x", {"o": {"lr": [math.inf]}}, 1.0), ValueError, r"parameters\.o\.lr\[0\] is inf: JSON has finite"),
        (("x", {"lr": math.nan}, 1.0), ValueError, r"parameters\.lr is nan: JSON has finite numbers only"),
        (("base", {}, 1.0), ValueError, "has a run 'base' already: choose another name"),
    ],
)
def test_a_refused_run_writes_nothing(log, arguments, error, message):
    log.add("base", {}, 1.0)
    before = log.path.read_bytes()
    with pytest.raises(error, match=message):
        log.add(*arguments)
    assert log.path.read_bytes() == before
    assert len(log) == 1


def test_unknown_names_are_answered_with_the_known_ones(log):
    log.add("base", {}, 1.0)
    with pytest.raises(KeyError, match="parent 'bse' is not in the log; it has base"):
        log.add("next", {}, 1.0, parent="bse")
    with pytest.raises(KeyError, match="no run 'bse'.*it has base"):
        log["bse"]


def test_every_cut_of_the_last_line_keeps_the_others_and_is_replaced_by_the_next(log):
    log.add("base", {"a": 1}, 1.0)
    whole = log.path.read_bytes()
    log.add("next", {"a": 2}, 1.0)
    line = log.path.read_bytes()[len(whole) :]
    for kept in range(1, len(line) - 1):
        log.path.write_bytes(whole + line[:kept])
        with pytest.warns(UserWarning, match="line 2, was cut"):
            cut = ExperimentLog(log.path)
        assert [run.name for run in cut.runs] == ["base"]
    with pytest.warns(UserWarning, match="was cut"):
        cut.add("next", {"a": 2}, 1.0)
    assert log.path.read_bytes() == whole + line


def test_a_missing_last_newline_loses_nothing(log):
    log.add("base", {}, 1.0)
    log.path.write_bytes(log.path.read_bytes().rstrip(b"\n"))
    ExperimentLog(log.path).add("next", {}, 1.0)
    assert [run.name for run in ExperimentLog(log.path).runs] == ["base", "next"]


LINE = '{"name": "%s", "parent": %s, "parameters": {}, "results": {}, "machine": null, "note": ""}\n'


@pytest.mark.parametrize(
    "second",
    ['{"name": "x", "par\n', "[]\n", "{}\n", "\n", "ours?\n", LINE % ("base", "null"), LINE % ("x", '"y"')],
)
def test_a_corrupt_line_in_the_middle_is_named(log, second):
    log.path.write_text(LINE % ("base", "null") + second + LINE % ("third", "null"))
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 2, is not a run"):
        ExperimentLog(log.path)


def test_another_text_file_is_refused_and_left_alone(log):
    log.path.write_text("my notes, without a last newline")
    with pytest.raises(ValueError, match="line 1, is not a run"):
        ExperimentLog(log.path)
    assert log.path.read_text() == "my notes, without a last newline"


def test_a_disk_that_fails_leaves_the_log_as_it_was(log, monkeypatch):
    log.add("base", {}, 1.0)
    before = log.path.read_bytes()

    def fail(_):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            log.add("next", {}, 1.0)
    assert (log.path.read_bytes(), len(log)) == (before, 1)
    assert log.add("next", {}, 1.0).name == "next"


def test_two_logs_on_one_file_see_each_other(log):
    other = ExperimentLog(log.path)
    log.add("base", {}, 1.0)
    assert other.add("next", {}, 1.0).parent == "base"


def test_one_line_a_run_of_plain_json(log):
    log.add("base", Recipe(), 1.0, note="two\nlines")
    (line,) = log.path.read_text().splitlines()
    assert json.loads(line)["parameters"] == {"batch_size": 32, "precision": "fp32", "shape": [1, 2]}


def test_the_frame_has_a_column_for_each_parameter_and_result(log):
    log.add("base", {"n": 1, "o": {"lr": 0.1}}, {"n": 5, "loss": 2.0})
    log.add("next", {"n": 2}, {"loss": 1.0})
    frame = log.frame()
    assert list(frame.columns) == ["n", "o.lr", "result.n", "loss"]
    assert list(frame.index) == ["base", "next"]
    assert frame.loc["next", "loss"] == 1.0


@pytest.mark.parametrize(("higher", "gains", "in_all"), [(False, [2, 0.5], [1, 2, 1]), (True, [0.5, 2], [1, 0.5, 1])])
def test_the_ladder_gives_gains_on_the_parent_and_on_the_first(log, higher, gains, in_all):
    for name, value in (("base", 4.0), ("amp", 2.0), ("compile", 4.0)):
        log.add(name, {"step": name}, value)
    ladder = log.ladder(higher_is_better=higher)
    assert math.isnan(ladder["gain"][0])
    assert list(ladder["gain"][1:]) == gains
    assert list(ladder["gain_in_all"]) == in_all
    assert list(ladder["changed"]) == ["", "step: base -> amp", "step: amp -> compile"]


@pytest.mark.parametrize(
    "metric, higher",
    [
        ("samples_per_s", True),
        ("bytes/s", True),
        ("value [samples/s]", True),
        ("value [s]", False),
        ("step_s", False),
        ("s_per_step", False),
        ("loss", False),
    ],
)
def test_the_ladder_takes_more_for_better_in_rates_alone(log, metric, higher):
    log.add("base", {"a": 1}, {metric: 1.0})
    log.add("next", {"a": 2}, {metric: 4.0})
    assert log.ladder()["gain"][1] == (4 if higher else 0.25)
    assert log.ladder(higher_is_better=not higher)["gain"][1] == (0.25 if higher else 4)


def test_a_bare_rate_is_better_when_higher(log):
    log.add("base", {"a": 1}, 1.0, unit="samples/s")
    log.add("next", {"a": 2}, 4.0, unit="samples/s")
    assert log.ladder()["gain"][1] == 4


def test_the_ladder_flags_two_changes_and_unlike_machines(log):
    log.add("base", {"a": 1, "b": 1}, 1.0, machine={"family": "A"})
    log.add("both", {"a": 2, "b": 2}, 1.0, machine={"family": "A"})
    log.add("moved", {"a": 3, "b": 2}, 1.0, machine={"family": "B"})
    log.add("there", {"a": 4, "b": 2}, 1.0, machine={"family": "B"})
    assert list(log.ladder()["flag"]) == [
        "",
        "two changes at once: a, b",
        "another machine than its parent: family A / B",
        "another machine than the first run: family A / B",
    ]


def test_the_ladder_gives_no_gain_where_there_is_none(log):
    log.add("base", {}, {"loss": -1.0})
    log.add("other", {}, {"step_s": 1.0})
    assert log.ladder("loss")["gain"].isna().all()
    with pytest.raises(KeyError, match="no run has a result 'x'; there are loss, step_s"):
        log.ladder("x")


def test_a_notebook_shows_the_ladder_marked_and_escaped(log):
    assert "<table" in log._repr_html_()
    log.add("<b>", {"a": 1}, 1.0)
    log.add("next", {"a": 2}, 0.5)
    assert "(measured)" in log._repr_html_()
    assert "<b>" not in log._repr_html_()
    assert repr(log["next"]) == "run 'next', against '<b>': a: 1 -> 2\n  value [s] = 0.5 (measured)"
