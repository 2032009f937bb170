"""What a measurement says of its samples, and what survives a file."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import CPU

from labsupport.measure import Measurement
from labsupport.measure.measurement import SCHEMA
from labsupport.measure.statistics import Stalls, Warmup, paired_interval

SECONDS = st.floats(1e-9, 1e6)
CALM = Measurement(
    label="forward",
    samples_s=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
    dropped_s=(60.0,),
    wall_s=(),
    warmup=Warmup(1, "took 12x of a steady one"),
    others_cores=0.0,
    machine=CPU,
)
EVEN = replace(CALM, samples_s=(0.25,) * 100)
GPU = replace(CPU, device="NVIDIA H200", profile="cuda", threads=1, torch="2.14.1+cu130")


def test_figures_by_hand():
    assert (CALM.n, CALM.total_s, CALM.median_s, CALM.iqr_s, CALM.spread) == (9, 45.0, 5.0, 4.0, 0.8)
    assert (CALM.percentile_s(0), CALM.percentile_s(100), CALM.percentile_s(99)) == (1.0, 9.0, pytest.approx(8.92))
    assert (CALM.steps_per_s, CALM.value, CALM.unit) == (0.2, 5.0, "s")
    assert CALM.interval == paired_interval(CALM.samples_s)


def test_stalls_count_in_the_rate_and_not_in_the_median():
    stalled = replace(EVEN, samples_s=(0.25,) * 99 + (25.25,))
    assert (stalled.median_s, stalled.steps_per_s) == (0.25, 2.0)
    assert stalled.stalls == Stalls(steps=(99,), count=1, period=None, share=0.5, worst=101.0)


@pytest.mark.parametrize(
    "samples_s",
    [(), (1.0,) * 5, (1.0,) * 6 + (0.0,), (1.0,) * 6 + (-1.0,), (1.0,) * 6 + (math.nan,), (1.0,) * 6 + (math.inf,)],
    ids=["none", "five", "zero", "negative", "nan", "inf"],
)
def test_at_least_six_positive_times_are_expected(samples_s):
    with pytest.raises(ValueError, match="at least 6 positive step times are expected"):
        replace(CALM, samples_s=samples_s)


def test_nothing_to_warn_of():
    assert EVEN.warnings == ()


@pytest.mark.parametrize(
    "changes, warning",
    [
        ({"warmup": Warmup(3, "took 2x", steady=False)}, "the step did not get steady: took 2x"),
        ({"samples_s": CALM.samples_s}, "the middle half of the steps spreads over 80% of the median"),
        ({"samples_s": (0.25,) * 97 + (0.5,)}, "1 step stalls (up to 2x the median), 1.0% of the time"),
        ({"wall_s": (0.25, 0.3)}, "the wall clock took 10% more than the events"),
        ({"wall_s": (0.5,)}, "the wall clock took 100% more than the events"),
    ],
)
def test_a_warning_for_each_thing_to_know(changes, warning):
    (found,) = replace(EVEN, **changes).warnings
    assert found.startswith(warning)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples_s": (0.955,) * 30 + (1.0,) * 40 + (1.045,) * 30},
        {"samples_s": (0.25,) * 199 + (0.5,)},
        {"wall_s": (0.27, 0.27)},
        {"wall_s": (0.1,)},
    ],
    ids=["spread of 9 %", "stalls of half a percent", "wall 8 % more", "events take longer than the wall"],
)
def test_less_is_no_warning(changes):
    assert replace(EVEN, **changes).warnings == ()


@pytest.mark.parametrize("others_cores, warns", [(0.39, False), (0.41, True)])
def test_other_processes_on_more_than_a_tenth_of_the_cores(others_cores, warns):
    found = replace(EVEN, others_cores=others_cores, machine=replace(EVEN.machine, cores=4)).warnings
    assert found == (("other processes kept 0.4 cores busy",) if warns else ())


def test_the_repr_says_median_spread_n_and_where():
    assert repr(CALM).splitlines() == [
        "forward: median 5.00 s, IQR 4.00 s (80.0%), p99 8.92 s, n = 9 (measured)",
        "  dropped 1 of 10 steps: took 12x of a steady one (measured)",
        "  warnings: the middle half of the steps spreads over 80% of the median (measured)",
        "  AMD EPYC 9V74 (avx512_bf16), 2 threads, torch 2.14.1+cpu (measured)",
    ]


def test_the_repr_on_a_gpu_names_the_gpu():
    assert repr(replace(EVEN, machine=GPU)).endswith("\n  NVIDIA H200, 1 thread, torch 2.14.1+cu130 (measured)")


@pytest.mark.parametrize("changes", [{}, {"warmup": Warmup(0, "drifts", steady=False)}, {"machine": GPU}])
def test_every_line_ends_in_measured(changes):
    """Committed outputs are compared line by line, and such lines are let pass."""
    assert all(line.endswith(" (measured)") for line in repr(replace(CALM, **changes)).splitlines())


def test_a_notebook_shows_the_repr():
    shown = CALM._repr_mimebundle_(include=None, exclude=None)
    assert shown["text/plain"] == repr(CALM)
    assert shown["application/vnd.labsupport.measurement+json"] == {"label": "forward"}


@settings(deadline=None, max_examples=30)
@given(st.lists(SECONDS, min_size=6, max_size=20), st.lists(SECONDS, max_size=3), st.text(max_size=9), st.booleans())
def test_a_file_gives_back_the_very_same(tmp_path_factory, samples_s, wall_s, label, steady):
    path = tmp_path_factory.mktemp("saved") / "step.json"
    warmup = Warmup(2, label, steady)
    saved = replace(
        CALM, samples_s=tuple(samples_s), wall_s=tuple(wall_s), label=label, warmup=warmup, others_cores=1.5
    )
    saved.save(path)
    assert Measurement.load(path) == saved


def test_what_a_later_version_adds_is_ignored(tmp_path):
    path = tmp_path / "step.json"
    path.write_text(json.dumps({**CALM.to_dict(), "joules": 3}))
    assert Measurement.load(str(path)) == CALM


ANY = CALM.to_dict()


@pytest.mark.parametrize(
    "text, fault",
    [
        ("", "Expecting value"),
        ("\x00\x01", "Expecting value"),
        ("[1, 2]", f"its schema is not '{SCHEMA}'"),
        (json.dumps({**ANY, "schema": "labsupport measurement 2"}), f"its schema is not '{SCHEMA}'"),
        (
            json.dumps({"schema": SCHEMA, "label": "x"}),
            "it lacks samples_s, dropped_s, wall_s, warmup, others_cores, machine",
        ),
        (json.dumps({**ANY, "samples_s": []}), "at least 6 positive step times"),
        (json.dumps({**ANY, "samples_s": [1.0] * 6 + [math.nan]}), "at least 6 positive step times"),
        (json.dumps({**ANY, "samples_s": [1.0] * 6 + [None]}), "float"),
        (json.dumps({**ANY, "samples_s": [10**400] * 6}), "too large"),
        (json.dumps({**ANY, "samples_s": "123456"}), "of another type than expected: samples_s"),
        (json.dumps({**ANY, "label": 1, "machine": None}), "of another type than expected: label, machine"),
        (json.dumps({**ANY, "others_cores": "two"}), "of another type than expected: others_cores"),
        (json.dumps({**ANY, "warmup": {"dropped": 1}}), "reason"),
        (json.dumps({**ANY, "warmup": {**ANY["warmup"], "more": 1}}), "more"),
        (json.dumps({**ANY, "machine": {"device": "cpu"}}), "not a machine's fingerprint: it lacks profile"),
    ],
)
def test_another_file_is_refused_by_name_and_fault(tmp_path, text, fault):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no measurement that `Measurement.save` wrote: ") as refused:
        Measurement.load(path)
    assert str(path) in str(refused.value) and fault in str(refused.value)


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"\x80\x02\xff")
    with pytest.raises(ValueError, match="model.pt is no measurement"):
        Measurement.load(tmp_path / "model.pt")


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Measurement.load(tmp_path / "none.json")
