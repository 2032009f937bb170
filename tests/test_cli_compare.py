"""`labs compare`: two saved measurements, one text or one JSON object; anything else is refused in one line."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from samples import CPU

from labsupport.cli import main
from labsupport.measure import Measurement
from labsupport.measure.statistics import Warmup

STEPS = (1.00e-3, 1.01e-3, 1.02e-3, 1.01e-3, 1.00e-3, 1.01e-3) * 10


def made(factor=1.0, label="step", machine=CPU):
    samples = tuple(factor * step for step in STEPS)
    return Measurement(label, samples, (3e-3,), (), Warmup(1, "took 3x of a steady one"), 0.0, machine)


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Runs `labs compare` in a folder that is no checkout, which holds before.json and after.json."""
    monkeypatch.chdir(tmp_path)
    made().save("before.json")
    made(0.5).save("after.json")

    def run(*arguments):
        return CliRunner().invoke(main, ["compare", *arguments])

    return run


def test_prints_verdict_numbers_and_machine(compare):
    done = compare("before.json", "after.json")
    assert done.exit_code == 0 and done.stderr == ""
    first, *rest = done.output.splitlines()
    assert first.startswith("step after is faster than step before: time of step before / time of step after = 2.000x")
    assert first.endswith("margin 5.0%, NOT INTERLEAVED")
    assert rest[0].strip().startswith("step before: median 1.01 ms, IQR") and rest[0].endswith("n = 60")
    assert (
        "  warnings: not interleaved: all that changed between the two runs is in the ratio, not only the step" in rest
    )
    assert rest[-1] == "  AMD EPYC 9V74 (avx512_bf16), 2 threads, torch 2.14.1+cpu"
    assert "(measured)" not in done.output


@pytest.mark.parametrize(
    "factor, verdict", [(0.5, "faster"), (2.0, "slower"), (1.0001, "same"), (1 / 1.05, "cannot tell")]
)
def test_the_exit_code_is_0_whatever_the_verdict(compare, factor, verdict):
    made(factor).save("after.json")
    done = compare("before.json", "after.json", "--json")
    assert (done.exit_code, json.loads(done.output)["verdict"]) == (0, verdict)


def test_json_is_one_object_with_what_the_text_says(compare):
    found = json.loads(compare("before.json", "after.json", "--json", "--margin", "0.1").output)
    low, high = found.pop("interval")
    assert low <= found["ratio"] <= high
    assert found == {
        "names": ["step before", "step after"],
        "ratio": pytest.approx(2),
        "total_ratio": pytest.approx(2),
        "margin": 0.1,
        "verdict": "faster",
        "interleaved": False,
        "n": 60,
        "warnings": ["not interleaved: all that changed between the two runs is in the ratio, not only the step"],
    }


def test_the_margin_decides_what_counts_as_the_same(compare):
    made(1.1).save("after.json")
    verdicts = [
        json.loads(compare("before.json", "after.json", "--json", *margin).output)["verdict"]
        for margin in ([], ["--margin", "0.3"])
    ]
    assert verdicts == ["slower", "same"]


def test_what_changed_between_the_runs_is_a_warning(compare):
    made(machine=replace(CPU, torch="2.11.0")).save("after.json")
    assert "; between the runs, torch 2.14.1+cpu -> 2.11.0" in compare("before.json", "after.json").output


def test_unlike_machines_are_refused(compare):
    made(machine=replace(CPU, threads=4)).save("after.json")
    done = compare("before.json", "after.json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "labs: compare before.json after.json: 'step' and 'step' were measured on unlike machines (threads 2 -> 4): "
        "measure both on one machine, best with compare()\n"
    )


@pytest.mark.parametrize("name, why", [("gone.json", "No such file or directory"), (".", "Is a directory")])
def test_what_cannot_be_read_is_named(compare, name, why):
    done = compare("before.json", name)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"labs: {name} cannot be read: {why}; give a file that measure(step).save(path) wrote\n"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\0", '{"schema": "labsupport measurement 1"}'], ids=repr)
@pytest.mark.parametrize("place", [0, 1], ids=["before", "after"])
def test_a_file_that_is_no_measurement_is_named_in_one_line(compare, tmp_path, text, place):
    (tmp_path / "other.json").write_text(text)
    names = ["before.json", "before.json"]
    names[place] = "other.json"
    done = compare(*names)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("labs: other.json is no measurement that `Measurement.save` wrote: ")
    assert line.endswith("; give a file that measure(step).save(path) wrote")


@pytest.mark.parametrize("margin", ["0", "-1", "1", "nan", "inf", "wide"])
def test_a_margin_lies_between_0_and_1(compare, margin):
    done = compare("before.json", "after.json", "--margin", margin)
    assert done.exit_code == 2 and "margin" in done.stderr and done.stdout == ""


def test_a_measurement_compared_with_itself_is_told(compare, tmp_path):
    (tmp_path / "copy.json").write_bytes((tmp_path / "before.json").read_bytes())
    for other in ("before.json", "copy.json"):
        warning = "both files hold the same measurement: the ratio says nothing"
        assert f"  warning: {warning}" in compare("before.json", other).output.splitlines()
        found = json.loads(compare("before.json", other, "--json").output)
        assert found["warnings"][-1] == warning and found["verdict"] == "same"


def test_help_says_how_to_save_one(compare):
    done = compare("--help")
    assert done.exit_code == 0 and 'measure(step).save("before.json")' in done.output
    assert "labs compare before.json after.json" in done.output
