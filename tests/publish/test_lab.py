"""A lab's session outside a notebook: what it records, says, asks and checks, and the reader's diary."""

import json
import pwd
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport import machine
from labsupport.measure import PairedRatio
from labsupport.publish import published
from labsupport.publish.lab import Lab
from labsupport.publish.published import Entry, Published
from labsupport.publish.records import Record, said_text
from labsupport.publish.summary import Diary, summary_bundle

BRANCHES = {"above": "Faster: {speedup}.", "below": "Slower.", "same": "No difference."}
GOOD = {"00": {"a": [1.0, 2.0]}}


@dataclass
class Reading:
    """A result object, as instruments return them."""

    value: float = 2.0
    unit: str = "B/s"
    n: int = 9
    spread: float = 0.04


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of its own, no published values, and a reader at work (no `labs run`)."""
    monkeypatch.setenv("LABS_PROFILE", "cpu")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LABS_RUN", raising=False)
    (tmp_path / "published").mkdir()
    monkeypatch.setattr(published, "folder", lambda: tmp_path / "published")
    return tmp_path


@pytest.fixture
def lab(capsys):
    session = Lab("00")
    capsys.readouterr()
    return session


@pytest.fixture
def shown(capsys):
    return lambda: capsys.readouterr().out


def diary_of(home):
    return Diary(home / ".labsupport" / "guesses.json")


def test_a_session_opens_with_its_device_and_machine(capsys):
    session = Lab("07")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Lab 07 runs on the CPU: The profile cpu was asked for")
    assert session.machine.describe() in lines[1]
    assert all(line.endswith("(measured)") for line in lines)
    assert (session.device.type, session.profile, session.records) == ("cpu", "cpu", {})


def test_scale_takes_the_setting_of_this_profile(lab):
    assert lab.scale(cpu=1, cuda=2) == 1
    with pytest.raises(TypeError):
        lab.scale(1, 2)


def test_a_recorded_number_is_kept_and_shown(lab, shown):
    lab.record("a", 12897484, "B", kind="exact")
    assert lab.records["a"] == Record(name="a", value=12897484, unit="B", kind="exact")
    assert shown() == "a = 12.3 MiB (exact)\n"


def test_a_result_brings_its_unit_n_and_spread(lab):
    lab.record("a", Reading())
    assert lab.records["a"] == Record(name="a", value=2.0, unit="B/s", n=9, spread=0.04)


def test_a_paired_ratio_brings_its_interval_too(lab):
    ratio = PairedRatio((1.0, 1.1, 1.2, 1.3, 1.4, 1.5))
    lab.record("a", ratio, kind="ratio", at_least=0.5)
    kept = lab.records["a"]
    assert (kept.value, kept.interval, kept.n, kept.unit, kept.at_least) == (1.25, (1.0, 1.5), 6, "x", 0.5)


def test_what_the_cell_says_goes_before_what_the_result_says(lab):
    lab.record("a", Reading(), "FLOP/s", n=3)
    assert (lab.records["a"].unit, lab.records["a"].n, lab.records["a"].spread) == ("FLOP/s", 3, 0.04)


@pytest.mark.parametrize("value", [lambda: 2.0, lambda: Reading(2.0)], ids=["number", "result"])
def test_a_function_is_called_for_its_value(lab, value):
    lab.record("a", value, "B/s")
    assert lab.records["a"].value == 2.0


def test_a_name_is_taken_once_in_a_published_run(lab, monkeypatch):
    monkeypatch.setenv("LABS_RUN", "1")
    lab.record("a", 1.0)
    with pytest.raises(ValueError, match="'a' is on record already .*a = 1 .*choose another name"):
        lab.record("a", 2.0)
    assert lab.records["a"].value == 1.0


def test_a_reader_may_run_a_cell_again(lab, shown):
    lab.record("a", 1, kind="exact")
    lab.record("a", 2, kind="exact")
    assert lab.records["a"].value == 2
    assert shown() == "a = 1 (exact)\na = 2 (exact)\n"


@pytest.mark.parametrize(
    "value, details, error",
    [
        (float("nan"), {}, ValueError),
        (1.0, {"kind": "fuzzy"}, ValueError),
        (1.0, {"kind": "close"}, ValueError),
        (1.0, {"needs": "a friend"}, ValueError),
        (None, {}, TypeError),
        (1.0, {"colour": "red"}, TypeError),
    ],
    ids=str,
)
def test_a_refused_record_is_neither_kept_nor_shown(lab, shown, value, details, error):
    with pytest.raises(error):
        lab.record("a", value, **details)
    assert lab.records == {} and shown() == ""


def test_an_absent_need_calls_nothing_and_records_nothing(lab, shown):
    lab.record("a", lambda: pytest.fail("called"), "B/s", needs="cuda")
    assert lab.records == {}
    assert shown() == "a: not here, it needs cuda (measured)\n"


def test_a_present_need_is_kept_with_the_record(lab, monkeypatch):
    monkeypatch.setattr(machine, "has", lambda need: need == "compiler")
    lab.record("a", lambda: 3, needs="compiler")
    assert lab.records["a"].needs == "compiler"


def test_what_a_lab_found_not_to_work_is_lacking(lab, shown, monkeypatch):
    monkeypatch.setattr(machine, "has", lambda need: True)
    lab.lacks("compiler")
    lab.record("speedup", lambda: pytest.fail("called"), "x", kind="ratio", needs="compiler")
    lab.record("b", 1, needs="root")
    assert list(lab.records) == ["b"]
    shown()
    lab.say(about="speedup", **BRANCHES)
    lab.say("{speedup} and {b}.")
    assert shown() == 2 * "*Not here*: this needs compiler. <small>(measured)</small>\n"
    with pytest.raises(ValueError, match="not on record"):
        lab.say("{speedup} and {c}.")
    with pytest.raises(ValueError, match="above, below, same"):
        lab.say(about="speedup", above="Faster.")


@pytest.mark.parametrize("name, kind", [("a", "fuzzy"), ("Not A Name", "info")])
def test_a_wrong_record_is_refused_also_where_its_need_is_absent(lab, name, kind):
    with pytest.raises(ValueError):
        lab.record(name, lambda: 1.0, kind=kind, needs="cuda")


def test_a_sentence_shows_recorded_numbers_and_that_they_were_measured(lab, shown):
    lab.record("step_s", 0.0123, "s")
    lab.record("count", 3, kind="exact")
    shown()
    lab.say("It took {step_s}.")
    lab.say("There are {count}.")
    assert shown() == "It took 12.3 ms. <small>(measured)</small>\nThere are 3.\n"


@pytest.mark.parametrize("value, expected", [(2.0, "Faster: 2.00x."), (0.5, "Slower."), (1.0, "No difference.")])
def test_a_sentence_about_a_ratio_takes_its_side(lab, shown, value, expected):
    lab.record("speedup", value, "x", kind="ratio")
    shown()
    lab.say(about="speedup", **BRANCHES)
    assert shown() == f"{expected} <small>(measured)</small>\n"


def test_a_sentence_about_a_ratio_is_measured_even_when_it_names_no_number():
    ratio = Record(name="speedup", value=2.0, kind="ratio")
    said = {"about": "speedup", "margin": 0.05} | dict.fromkeys(BRANCHES, "so")
    assert said_text(said, {"speedup": ratio}) == "so <small>(measured)</small>"


def test_a_sentence_with_a_number_that_is_not_there_names_it_and_those_that_are(lab):
    with pytest.raises(ValueError, match="uses speedup, not on record; there are none yet"):
        lab.say(about="speedup", **BRANCHES)
    lab.record("a", 1.0)
    with pytest.raises(ValueError, match="uses b, c, not on record; there are a"):
        lab.say("{a} {b} {c:.1f}")


@pytest.mark.parametrize("missing", sorted(BRANCHES))
def test_an_outcome_needs_all_its_sides(lab, missing):
    lab.record("speedup", 2.0, kind="ratio")
    with pytest.raises(ValueError, match="above, below, same are expected"):
        lab.say(about="speedup", **{side: text for side, text in BRANCHES.items() if side != missing})


def test_only_a_ratio_can_turn_out_either_way(lab):
    lab.record("speedup", 2.0)
    with pytest.raises(ValueError, match="a record of kind 'ratio'"):
        lab.say(about="speedup", **BRANCHES)


def test_a_plain_sentence_may_not_use_a_ratio(lab):
    lab.record("speedup", 2.0, kind="ratio")
    with pytest.raises(ValueError, match="'speedup' may turn out the other way"):
        lab.say("It is {speedup} as fast.")


@pytest.mark.parametrize("said", [BRANCHES, {"about": "speedup", "text": "And: "} | BRANCHES, {}], ids=str)
def test_no_given_sentence_vanishes(lab, said):
    lab.record("speedup", 2.0, kind="ratio")
    with pytest.raises((ValueError, TypeError)):
        lab.say(**said)


@pytest.mark.parametrize(
    "guess, answer", [(None, "no guess yet"), (3, "your guess is 3"), (0.25, "your guess is 0.25")]
)
def test_a_guess_is_taken_or_said_to_be_missing(lab, shown, guess, answer):
    lab.predict("a", guess, question="How many?")
    assert lab.guesses == {"a": guess}
    assert shown().startswith(f"How many?\n  {answer}")


def test_one_predicts_before_one_measures_in_a_published_run(lab, monkeypatch):
    monkeypatch.setenv("LABS_RUN", "1")
    lab.record("a", 1.0)
    with pytest.raises(ValueError, match="'a' is measured already .*predict before you measure"):
        lab.predict("a", 1.0)


def test_a_guess_may_be_changed_until_then(lab):
    lab.predict("a", 1.0)
    lab.predict("a", 2.0)
    assert lab.guesses == {"a": 2.0}


def test_a_reader_may_predict_again_after_measuring(lab):
    lab.record("a", 1.0)
    lab.predict("a", 2.0)
    assert lab.guesses == {"a": 2.0}


@pytest.mark.parametrize("guess", ["3", True, [3], 3j, float("inf"), float("-inf"), float("nan")], ids=repr)
def test_a_guess_that_is_no_finite_number_is_told_and_not_taken(lab, shown, guess):
    lab.predict("a", guess)
    assert shown() == f"a\n  {guess!r} is not taken: a number is expected\n"
    assert lab.guesses == {"a": None}


@pytest.mark.parametrize("guess, taken", [(0, True), (0.5, True), (1, True), (-0.01, False), (90, False)])
def test_a_guess_lies_between_the_bounds_that_make_sense(lab, shown, guess, taken):
    lab.predict("a", guess, between=(0, 1))
    told = f"your guess is {guess:g}" if taken else f"{guess:g} is not taken: a number from 0 to 1 is expected"
    assert shown() == f"a\n  {told}\n"
    assert lab.guesses == {"a": guess if taken else None}


@pytest.mark.parametrize(
    "answer, verdict, right",
    [
        (10, "right: got 10 / expected 10 (measured)", True),
        (10.4, "right: got 10.4 / expected 10 (measured)", True),
        ("10", "right: got 10 / expected 10 (measured)", True),
        (torch.tensor(10), "right: got 10 / expected 10 (measured)", True),
        (11, "not yet: got 11 / expected 10 (measured)\n  a hint", False),
        (float("nan"), "not yet: got nan / expected 10 (measured)\n  a hint", False),
        ("ten", "got 'ten', a number is expected (measured)", False),
        ([10], "got [10], a number is expected (measured)", False),
        (torch.ones(2), "got tensor([1., 1.]), a number is expected (measured)", False),
        (..., "got Ellipsis, a number is expected (measured)", False),
    ],
    ids=repr,
)
def test_an_answer_is_judged_and_none_of_them_fails(lab, shown, answer, verdict, right):
    lab.check("x", answer, 10, tolerance=0.05, hint="a hint")
    assert (shown(), lab.answers) == (f"x: {verdict}\n", {"x": right})


def test_an_unanswered_exercise_says_so_and_counts_as_neither(lab, shown):
    lab.check("x", None, 10)
    assert shown().startswith("x: unanswered.") and lab.answers == {"x": None}


def test_an_answer_that_float_cannot_hold_fails_nothing_either(lab):
    lab.check("x", 10**400, 10)
    assert lab.answers == {"x": False}


def published_of(value):
    entry = Entry(Record(name="a", value=value, unit="s"), "0" * 16)
    return Published({"profile": "cpu", "torch": "2.14.1"}, {"00": {"a": entry}})


def test_the_summary_sets_yours_beside_the_published_own_family_first():
    records = {"a": Record(name="a", value=2.0, unit="s"), "b": Record(name="b", value=3)}
    machines = {"other": published_of(4.0), "own": published_of(1.0)}
    bundle = summary_bundle("00", records, machines, "own", {"a": 1.0})
    rows = [[part.strip() for part in line.split("  ") if part] for line in bundle["text/plain"].splitlines()]
    assert rows[0][:4] == ["record", "yours", "published: own", "published: other"]
    assert rows[1][:5] == ["a", "2.00 s", "1.00 s", "4.00 s", "1, off by 2x (measured)"]
    assert rows[2][2:5] == ["not published", "not published", "none"]
    assert all(line.endswith("(measured)") for line in bundle["text/plain"].splitlines())


def test_the_summarys_html_escapes_what_it_is_given():
    machines = {"<b>": published_of(1.0)}
    html = summary_bundle("00", {"a": Record(name="a", value=2.0)}, machines, "own", {})["text/html"]
    assert "published: &lt;b&gt;" in html and "<b>" not in html


def test_a_corrupt_published_file_does_not_stop_a_learner(lab, home, shown):
    (home / "published" / "x.json").write_text('{"machine": ')
    lab.record("a", 1.0)
    lab.summary()
    assert "a " in shown()


def test_guesses_are_kept_in_the_readers_home(lab, home, shown):
    lab.predict("a", 4)
    lab.predict("b")
    lab.predict("c", "4")
    lab.predict("never_measured", 1)
    for name in "abc":
        lab.record(name, 1.0)
    lab.summary()
    assert diary_of(home).read() == {"00": {"a": [4, 1.0]}}
    assert "lab 00  a " in shown()


def test_other_labs_and_earlier_questions_stay_in_the_diary(home):
    diary = diary_of(home)
    diary.keep("00", {"a": (1.0, 2.0)})
    diary.keep("01", {"a": (3.0, 4.0)})
    diary.keep("00", {"b": (5.0, 6.0)})
    assert diary.read() == {"00": {"a": [1.0, 2.0], "b": [5.0, 6.0]}, "01": {"a": [3.0, 4.0]}}


def test_a_run_neither_reads_nor_writes_the_diary(lab, home, shown, monkeypatch):
    diary_of(home).keep("03", {"mine": (1.0, 2.0)})
    before = diary_of(home).path.read_text()
    monkeypatch.setenv("LABS_RUN", "1")
    lab.predict("a", 4)
    lab.record("a", 1.0)
    lab.summary()
    assert diary_of(home).path.read_text() == before
    assert "mine" not in shown()


@pytest.mark.parametrize("broken", ["file in its place", "no home", "folder in its place"])
def test_a_home_that_cannot_be_written_is_tolerated(lab, home, shown, monkeypatch, broken):
    if broken == "no home":
        monkeypatch.setenv("HOME", str(home / "gone"))
    elif broken == "file in its place":
        (home / ".labsupport").write_text("")
    else:
        diary_of(home).path.mkdir(parents=True)
    lab.predict("a", 4)
    lab.record("a", 1.0)
    lab.summary()
    assert "No guesses yet" in shown()


def test_a_user_without_a_home_is_tolerated(lab, monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    lab.summary()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'"text"'], ids=repr)
def test_a_corrupt_diary_is_tolerated_and_replaced(home, content):
    diary_of(home).path.parent.mkdir()
    diary_of(home).path.write_bytes(content)
    assert "No guesses yet" in diary_of(home).text
    diary_of(home).keep("00", {"a": (1.0, 2.0)})
    assert diary_of(home).read() == GOOD


@pytest.mark.parametrize("content", ["3", "[1]", '{"00": 3}', '{"00": {"a": 3}}', '{"00": {"a": ["x", 1]}}'])
def test_a_diary_of_another_shape_is_tolerated(home, content):
    diary_of(home).path.parent.mkdir()
    diary_of(home).path.write_text(content)
    assert isinstance(diary_of(home).text, str)
    diary_of(home).keep("00", {"a": (1.0, 2.0)})


@settings(deadline=None)
@given(st.floats(1e-6, 1e9), st.floats(1e-6, 1e9))
def test_a_guess_of_half_has_the_bar_of_a_guess_of_twice(guess, value):
    class Kept(Diary):
        def read(self):
            return {"00": {"a": [guess, value], "b": [value, guess]}}

    _, first, second = Kept(Path()).text.splitlines()
    assert first.count("#") == second.count("#") <= 20


def test_a_right_guess_has_no_bar(home):
    diary_of(home).path.parent.mkdir()
    diary_of(home).path.write_text(json.dumps({"00": {"a": [2, 2], "b": [-1, 2]}}))
    _, right, wrong = diary_of(home).text.splitlines()
    assert "= 2, off by 1x" in right
    assert f"{'#' * 20} -1, off by 3" in wrong
