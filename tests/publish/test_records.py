"""A record: what it accepts, how it is shown, how it travels in an output, and what a sentence makes of it."""

import json
import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from labsupport.publish.records import (
    KINDS,
    METADATA_KEY,
    RECORD_MIME,
    Record,
    absent_bundle,
    fields_of,
    records_in,
    sentence,
)

BY_KIND = {"exact": {}, "close": {"tolerance": 1e-3}, "ratio": {}, "info": {}}
SAY = {"about": "speedup", "above": "above", "below": "below", "same": "same", "margin": 0.05}


def record_of(kind="info", value=12.5, name="a", **details):
    return Record(name=name, value=value, kind=kind, **BY_KIND[kind] | details)


def output_of(record):
    data, metadata = record.bundle()
    return {"output_type": "display_data", "data": data, "metadata": metadata}


def said(low, high, *, margin=0.05):
    ratio = record_of("ratio", math.sqrt(low * high), "speedup", interval=(low, high))
    text = sentence(SAY | {"margin": margin}, {"speedup": ratio})
    return "cannot tell" if text.startswith("*Cannot tell*") else text


@pytest.mark.parametrize("name", ["", "A", "1a", "_a", "a-b", "a b", "a\n", "ä"])
def test_a_name_is_lower_case_letters_digits_and_underscores(name):
    with pytest.raises(ValueError, match="lower-case"):
        record_of(name=name)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'fuzzy'; expected one of exact, close, ratio, info"):
        Record(name="a", value=1, kind="fuzzy")


@pytest.mark.parametrize("value", [None, True, np.bool_(True), "3", 1j, [1.0], np.ones(2)], ids=repr)
def test_only_numbers_are_values(value):
    with pytest.raises(TypeError, match="a number is expected"):
        record_of(value=value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_finite_numbers_are_values(kind, value):
    with pytest.raises(ValueError, match="only finite values"):
        record_of(kind, value)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"close"}))
def test_a_tolerance_belongs_to_close_and_close_has_one(kind):
    with pytest.raises(ValueError, match="a tolerance belongs to kind 'close'"):
        record_of(kind, tolerance=0.1)
    with pytest.raises(ValueError, match="a tolerance belongs to kind 'close'"):
        record_of("close", tolerance=None)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"ratio"}))
def test_a_bound_belongs_to_ratios(kind):
    with pytest.raises(ValueError, match="at_least belongs to kind 'ratio'"):
        record_of(kind, at_least=1.5)


@pytest.mark.parametrize("value", [0, -1.5])
def test_a_ratio_is_positive(value):
    with pytest.raises(ValueError, match="a ratio is positive"):
        record_of("ratio", value)


@pytest.mark.parametrize("interval", [(math.nan, 2.0), (1.0, math.inf), (2.0, 1.0)], ids=str)
def test_an_interval_is_finite_and_in_order(interval):
    with pytest.raises(ValueError):
        record_of("ratio", 1.5, interval=interval)


@pytest.mark.parametrize(
    "kind, value, kept",
    [
        ("info", 1234567.0, 1234570.0),
        ("info", 25276514304, 25276500000),
        ("close", 0.63230712345, 0.632307),
        ("ratio", 1.23456789, 1.23457),
        ("exact", 25276514304, 25276514304),
        ("exact", 0.1234567891, 0.1234567891),
    ],
)
def test_six_digits_are_kept_and_all_of_an_exact_value(kind, value, kept):
    assert record_of(kind, value).value == kept


def test_interval_and_spread_are_rounded():
    record = record_of("ratio", 1.5, interval=(1.23456789, 1.98765432), spread=0.123456)
    assert (record.interval, record.spread) == ((1.23457, 1.98765), 0.12)


@pytest.mark.parametrize("value, type_", [(np.int64(7), int), (np.float32(0.5), float), (7, int), (7.0, float)])
def test_values_become_what_json_knows(value, type_):
    assert type(record_of(value=value).value) is type_


@settings(deadline=None)
@given(st.floats(1e-300, 1e300), st.sampled_from(["info", "close", "ratio"]))
def test_rounding_again_changes_nothing(value, kind):
    once = record_of(kind, value)
    assert record_of(kind, once.value) == once
    assert math.isclose(once.value, value, rel_tol=5.1e-6)


@pytest.mark.parametrize(
    "record, text",
    [
        (record_of("exact", 12897484, unit="B"), "a = 12.3 MiB (exact)"),
        (record_of("info", 0.0123, unit="s"), "a = 12.3 ms (measured, n=1)"),
        (record_of("close", 0.5, n=3), "a = 0.500 (measured, n=3)"),
        (record_of(value=0.5, unit="s", n=9, spread=0.04), "a = 500 ms (measured, n=9, spread 4 %)"),
        (
            record_of("ratio", 5.3, unit="x", n=6, interval=(5.0, 5.5)),
            "a = 5.30x (measured, n=6, 95 % interval 5.00x to 5.50x)",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Record) else "",
)
def test_the_text_shows_value_unit_and_how_it_was_measured(record, text):
    assert record.text == text


@pytest.mark.parametrize("kind", KINDS)
def test_only_an_exact_value_is_data_and_every_value_is_metadata(kind):
    data, metadata = record_of(kind, 123456, n=3).bundle()
    assert data[RECORD_MIME].get("value") == (123456 if kind == "exact" else None)
    assert metadata[METADATA_KEY]["value"] == 123456
    assert ("(measured" in data["text/plain"]) == (kind != "exact")


def test_what_a_record_promises_is_data_and_what_was_measured_is_not():
    data, _ = record_of("ratio", 2, at_least=1.5, needs="cuda", n=6, spread=0.1, interval=(1, 3)).bundle()
    assert data[RECORD_MIME] == {"name": "a", "kind": "ratio", "unit": "", "needs": "cuda", "at_least": 1.5}


@st.composite
def any_records(draw):
    kind = draw(st.sampled_from(sorted(KINDS)))
    details = {"unit": st.sampled_from(["", "B", "s", "x"]), "n": st.integers(1, 99), "seed": st.integers(0, 9)}
    details |= {"spread": st.floats(0, 9), "needs": st.sampled_from(["cuda", "root"]), "bound_applies": st.booleans()}
    details["interval"] = st.tuples(st.floats(0.1, 1), st.floats(1, 9))
    if kind == "ratio":
        details["at_least"] = st.floats(0.1, 9)
    chosen = draw(st.fixed_dictionaries({}, optional=details))
    value = draw(st.floats(1e-9, 1e12) | st.integers(1, 10**15))
    return record_of(kind, value, draw(st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)), **chosen)


@settings(deadline=None)
@given(any_records())
def test_a_record_comes_back_whole_from_json_and_from_an_output(record):
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    assert list(records_in([json.loads(json.dumps(output_of(record)))])) == [record]


def test_from_dict_passes_over_what_it_does_not_know():
    assert Record.from_dict({"name": "a", "value": 1, "hash": "0", "band": [1, 2]}) == Record(name="a", value=1)


def test_other_outputs_carry_no_record():
    stream = {"output_type": "stream", "name": "stdout", "text": "a = 1 (exact)"}
    picture = {"output_type": "display_data", "data": {"image/png": ""}, "metadata": {}}
    assert list(records_in([stream, picture])) == []


@pytest.mark.parametrize("metadata", [{}, {METADATA_KEY: {}}, {METADATA_KEY: {"name": "b", "value": 1}}], ids=str)
def test_a_stripped_output_is_an_error_that_names_the_record(metadata):
    with pytest.raises(ValueError, match="record 'a' has lost its value: run and publish"):
        list(records_in([output_of(record_of()) | {"metadata": metadata}]))


@pytest.mark.parametrize("edited", [{"name": "a"}, {"name": "a", "value": None}], ids=str)
def test_an_output_without_its_value_is_a_value_error(edited):
    with pytest.raises(ValueError, match="'a'"):
        list(records_in([output_of(record_of()) | {"metadata": {METADATA_KEY: edited}}]))


def test_an_absent_need_leaves_the_same_data_without_a_value():
    data, metadata = absent_bundle("a", "B/s", "info", "cuda")
    there, _ = record_of("info", 1, unit="B/s", needs="cuda").bundle()
    assert data[RECORD_MIME] == there[RECORD_MIME]
    assert data["text/plain"] == "a: not here, it needs cuda (measured)"
    assert list(records_in([{"data": data, "metadata": metadata}])) == []


@pytest.mark.parametrize(
    "interval, expected",
    [
        ((1.06, 1.2), "above"),
        ((1.05, 1.2), "cannot tell"),  # not wholly beyond the margin
        ((0.8, 0.95), "below"),
        ((0.8, 1 / 1.05), "cannot tell"),
        ((0.96, 1.04), "same"),
        ((1.0, 1.05), "same"),
        ((0.9, 1.2), "cannot tell"),
        ((1.01, 1.2), "cannot tell"),  # above 1, and too near to it
    ],
)
def test_the_branch_follows_the_whole_interval_beyond_the_margin(interval, expected):
    assert said(*interval) == expected


@pytest.mark.parametrize("value, expected", [(1.2, "above"), (0.8, "below"), (1.02, "same")])
def test_without_an_interval_the_value_alone_decides(value, expected):
    assert sentence(SAY, {"speedup": record_of("ratio", value, "speedup")}) == expected


def test_cannot_tell_shows_the_interval():
    ratio = record_of("ratio", 1.1, "speedup", interval=(0.912, 1.234))
    assert "speedup lies between 0.912 and 1.23" in sentence(SAY, {"speedup": ratio})


OPPOSITE = {"above": "below", "below": "above", "same": "same", "cannot tell": "cannot tell"}
RATIOS = st.floats(0.01, 100) | st.floats(0.8, 1.25)


@settings(deadline=None)
@given(RATIOS, RATIOS, st.sampled_from([0.01, 0.05, 0.25]))
@example(2.0, 3.0, 0.05)
@example(0.9, 1.2, 0.05)
@example(0.98, 1.03, 0.05)
def test_an_inverted_ratio_says_the_opposite(first, second, margin):
    low, high = sorted([first, second])
    # Records keep six digits: nearer than that to the margin's edge, the two roundings may differ.
    assume(all(abs(bound / edge - 1) > 1e-4 for bound in (low, high) for edge in (1 + margin, 1 / (1 + margin))))
    assert said(1 / high, 1 / low, margin=margin) == OPPOSITE[said(low, high, margin=margin)]


@pytest.mark.parametrize(
    "text, shown",
    [
        ("it took {step_s}", "it took 12.3 ms"),
        ("{share:.0%} idle", "86% idle"),
        ("{step_s:.4f} and {step_s}", "0.0123 and 12.3 ms"),
        ("no field, {} and {{", "no field, {} and {{"),
    ],
)
def test_fields_are_filled_by_unit_or_by_their_own_format(text, shown):
    records = {"step_s": record_of(value=0.0123, name="step_s", unit="s"), "share": record_of(value=0.857)}
    assert sentence({"text": text}, records) == shown


def test_fields_of_a_template_are_the_records_it_names():
    assert fields_of("{a} {b:.0%} {a:,} {} {{c}} {not a name}") == {"a", "b", "c"}
