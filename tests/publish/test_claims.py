"""The claims ledger: every decided claim can turn out either way, and only records can turn it."""

import tomllib
from contextlib import suppress
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labsupport.publish.claims import (
    STATUSES,
    Claim,
    claims_markdown,
    claims_text,
    decide,
    load_claims,
    verdicts,
)
from labsupport.publish.predicates import parse_predicate
from labsupport.publish.records import Record

BUSY = {"busy_product": 1, "busy_addition": 1, "busy_tiny": 0.9}
BUSY |= {"mfu_product": 1, "mfu_addition": 0.03, "mfu_tiny": 0.01}
ZERO_WRONG = {"08/zero_inside_error": 0.7, "08/zero_never_error": 1}
BURSTY = {"01/bursty_busy": 0.3, "01/bursty_samples_per_s": 100, "01/steady_busy": 1}
PAYS_LITTLE = {"07/two_saved": 0.2, "07/two_more_compute": 0.2, "07/small_saved": 0}
# Made-up records under which each decided claim holds, and under which it does not.
FLIPS: dict[str, list[dict[str, float]]] = {
    "batch-affine": [
        {"03/ratio_16_8": 1.5, "03/ratio_64_32": 1.5, "03/ratio_1024_512": 1.5},
        {"03/ratio_16_8": 1.0, "03/ratio_64_32": 1.1, "03/ratio_1024_512": 1.3},
    ],
    "memory-80-90": [{"03/enough_memory": 0.85}, {"03/enough_memory": 0.3}],
    "batch-search-loop": [
        {"03/loop_share": 1, "03/loop_tensors_changed": 0, "03/text_matches": 1},
        {"03/loop_share": 0.7, "03/loop_tensors_changed": 9, "03/text_matches": 1},
    ],
    "bigger-batch-faster": [{"03/gain_early": 2, "03/gain_late": 2}, {"03/gain_early": 1, "03/gain_late": 1}],
    "checkpoint-30-40": [
        {**PAYS_LITTLE, "07/best_saved": 0.35, "07/best_more_compute": 0.25},
        {**PAYS_LITTLE, "07/best_saved": 0.66, "07/best_more_compute": 0.32},
    ],
    "checkpoint-reentrant": [
        {"07/lost_reentrant": 2, "07/lost_not_reentrant": 0, "07/lost_flag_left_out": 2},
        {"07/lost_reentrant": 0, "07/lost_not_reentrant": 0, "07/lost_flag_left_out": 0},
    ],
    "memory-thrift": [
        {"07/deep_thrift": 0.2, "07/deep_small": 0.4, "07/deep_gain": 1.2},
        {"07/deep_thrift": 1.2, "07/deep_small": 1.1, "07/deep_gain": 1.2},
    ],
    "alloc-reserved": [
        {"02/cuda_reserved_over_allocated": 1.5, "02/cuda_used_over_reserved": 1.01},
        {"02/cuda_reserved_over_allocated": 1.5, "02/cuda_used_over_reserved": 1.4},
    ],
    "memory-parts": [{"02/temporary_share": 0.01}, {"02/temporary_share": 0.1}],
    "attention-long-seq": [
        {"02/attention_growth": 50, "02/fused_growth": 8},
        {"02/attention_growth": 8, "02/fused_growth": 8},
    ],
    "profiler-memory": [{"02/cuda_profile_rows": 3}, {"02/cuda_profile_rows": 0}],
    "cpu-ram": [{"00/host_copy_bandwidth": 50e9}, {"00/host_copy_bandwidth": 100.1e9}],
    "cores-hundreds": [{"00/gpu_over_cpu_matmul": 100}, {"00/gpu_over_cpu_matmul": 99.9}],
    "sync-needed": [{"01/cuda_seen_share": 0.01}, {"01/cuda_seen_share": 0.9}],
    "util-not-efficiency": [
        {f"01/{name}": value for name, value in BUSY.items()},
        {f"01/{name}": value for name, value in (BUSY | {"mfu_addition": 0.2}).items()},
    ],
    "benchmark-loop": [
        {"01/steps_run": 10, "01/steps_credited": 10, "01/steps_run_on_short_loader": 10, "01/startup_bias": 1},
        {"01/steps_run": 11, "01/steps_credited": 10, "01/steps_run_on_short_loader": 10, "01/startup_bias": 1},
    ],
    "throughput-north-star": [
        {"01/rate_gain": 4, "01/target_gain": 4, "01/samples_needed": 1},
        {"01/rate_gain": 4, "01/target_gain": 1, "01/samples_needed": 4},
    ],
    "one-change": [
        {"01/groups_gain": 4, "01/both_gain": 2, "01/runs_flagged": 1},
        {"01/groups_gain": 4, "01/both_gain": 4, "01/runs_flagged": 1},
    ],
    "accum-identical": [
        {"08/groupnorm_error": 1e-16, "08/batchnorm_error": 1e-16, "08/tokens_error": 1e-16},
        {"08/groupnorm_error": 1e-16, "08/batchnorm_error": 0.04, "08/tokens_error": 0.7},
    ],
    "accum-lr": [{"08/sgd_update": 4, "08/adam_update": 4}, {"08/sgd_update": 4, "08/adam_update": 1}],
    "accum-zero": [
        {**ZERO_WRONG, "08/zero_after_error": 0, "08/zero_last_error": 0},
        {**ZERO_WRONG, "08/zero_after_error": 0, "08/zero_last_error": 0.7},
    ],
    "accum-window": [
        {"08/left_at_128": 0, "08/left_at_256": 0, "08/leak_factor": 1},
        {"08/left_at_128": 3, "08/left_at_256": 0, "08/leak_factor": 1.67},
    ],
    "lr-linear": [
        {"08/accuracy_16": 0.95, "08/accuracy_linear_64": 0.95, "08/accuracy_linear_1024": 0.94},
        {"08/accuracy_16": 0.95, "08/accuracy_linear_64": 0.95, "08/accuracy_linear_1024": 0.1},
    ],
    "big-batch-generalisation": [
        {"08/behind_epochs": 0.4, "08/behind_steps": 0.05},
        {"08/behind_epochs": 0.4, "08/behind_steps": 0.003},
    ],
    "accum-speed": [
        {"08/window_memory": 1.01, "08/whole_memory": 7},
        {"08/window_memory": 1.5, "08/whole_memory": 7},
    ],
    "accum-goyal": [{"08/saved_cheap": 2, "08/saved_costly": 2}, {"08/saved_cheap": 1, "08/saved_costly": 2}],
    "low-util-fine": [
        {**BURSTY, "01/steady_samples_per_s": 99},
        {**BURSTY, "01/steady_samples_per_s": 101},
    ],
    "compile-20-40": [
        {"09/gain_cnn": 1.3, "09/gain_mlp": 1.2, "09/gain_late": 1.4},
        {"09/gain_cnn": 1.1, "09/gain_mlp": 1.0, "09/gain_late": 0.5},
    ],
    "compile-once": [
        {"09/ragged": 1, "09/ragged_dropped": 1, "09/modes": 1},
        {"09/ragged": 2, "09/ragged_dropped": 1, "09/modes": 3},
    ],
    "compile-fallback": [
        {"09/raises_without_compiler": 0, "09/gain_logged": 1, "09/gain_late": 1},
        {"09/raises_without_compiler": 0, "09/gain_logged": 1, "09/gain_late": 0.5},
    ],
    "compile-overhead": [
        {"09/cuda_default_gain": 2, "09/cuda_graphs_gain": 5},
        {"09/cuda_default_gain": 1, "09/cuda_graphs_gain": 1},
    ],
    "compile-old-gpu": [
        {"09/old_gpu_capability": 7.0, "09/old_gpu_gain": 0.8},
        {"09/old_gpu_capability": 6.1, "09/old_gpu_gain": 0},
    ],
}
AMP = {"06/mlp_gain": 2, "06/conv_gain": 1.6, "06/tiny_gain": 1.5, "06/casts_gain": 1.2}
AMP |= {"06/conv_activations": 0.55, "06/wide_activations": 0.6, "06/clip_share": 1}
STATE = {"06/conv_model_state": 0.5, "06/wide_model_state": 0.6}
STATE |= {"06/conv_activations": 0.6, "06/wide_activations": 12}
DIGITS = {"06/plain_fp32": 0.94, "06/plain_bf16": 0.95, "06/plain_fp16": 0.93, "06/seed_spread": 0.011}
NO_MAGIC = {"06/elementwise_gain": 1, "06/tiny_gain": 0.5, "06/casts_gain": 0.3, "06/starved_gain": 1.05}
FLIPS |= {
    "amp-speed": [AMP, AMP | {"06/tiny_gain": 0.6}],
    "amp-low-risk": [AMP, AMP | {"06/wide_activations": 12}],
    "amp-memory": [STATE, STATE | {"06/conv_model_state": 1, "06/wide_model_state": 1}],
    "amp-convergence": [DIGITS, DIGITS | {"06/plain_fp16": 0.9}],
    "scaler-transparent": [
        {"06/clip_share": 1, "06/rate_guarded": 0.125, "06/rate_unguarded": 0.125},
        {"06/clip_share": 1, "06/rate_guarded": 0.125, "06/rate_unguarded": 0.03125},
    ],
    "amp-api": [{"06/old_names_deprecated": 0}, {"06/old_names_deprecated": 2}],
    "bf16-more": [{"06/cuda_bf16_over_fp16": 1.2}, {"06/cuda_bf16_over_fp16": 1}],
    "amp-not-magic": [NO_MAGIC, NO_MAGIC | {"06/starved_gain": 2}],
    "fp32-baseline": [
        {"06/tf32_convolutions": 1, "06/cuda_tf32_gain": 1},
        {"06/tf32_convolutions": 1, "06/cuda_tf32_gain": 3},
    ],
    "amp-older-gpus": [{"06/cuda_older_gain": 1.5}, {"06/cuda_older_gain": 3}],
    "amp-grows-with-model": [
        {"06/narrow_gain": 0.6, "06/broad_gain": 2.5},
        {"06/narrow_gain": 0.6, "06/broad_gain": 0.02},
    ],
    "autocast-keeps-fp32": [
        {"06/losses_in_fp32": 4, "06/norms_in_fp32": 4},
        {"06/losses_in_fp32": 4, "06/norms_in_fp32": 0},
    ],
    "fp16-alone": [
        {"06/plain_fp16_alone": 0.1, "06/tiny_fp16_alone": 0.1},
        {"06/plain_fp16_alone": 0.94, "06/tiny_fp16_alone": 0.1},
    ],
}
CLAIMS = {claim.id: claim for claim in load_claims()}
DECIDED = {id_: claim for id_, claim in CLAIMS.items() if claim.holds}
HEAD = '[sources]\nT = "a tutorial"\n'
BODY = 'topic = "Memory"\nsource = ["T"]\nclaim = "a | b"\nknown = "measure"\n'


def claim_of(holds="", conditions="", says="", records=("00/a", "01/b")):
    return Claim(
        id="x",
        topic="Memory",
        source=("T",),
        claim="a | b",
        known="measure",
        records=records,
        holds=holds,
        conditions=conditions,
        says=says,
    )


def test_the_ledger_has_every_claim_once():
    assert len(load_claims()) == len(CLAIMS) == 84
    assert len({claim.topic for claim in CLAIMS.values()}) == 9


def test_no_verdict_is_typed_in():
    found = tomllib.loads((files("labsupport") / "claims.toml").read_text(encoding="utf-8"))
    keys = {key for entry in found["claims"].values() for key in entry}
    assert not keys & {"verdict", "status", "result", "outcome", "value", "holds_on"}
    assert not {claim.known for claim in CLAIMS.values()} & set(STATUSES)


def test_every_decided_claim_ships_records_that_flip_it():
    assert set(FLIPS) == set(DECIDED)


@pytest.mark.parametrize("id_", DECIDED)
def test_records_flip_the_verdict(id_):
    first, second = (decide(CLAIMS[id_], records) for records in FLIPS.get(id_, [{}, {}]))
    assert first.status != second.status
    assert {first.status, second.status} <= {"holds", "holds under conditions", "does not hold"}


@pytest.mark.parametrize("value", [49.9e9, 100.1e9])
def test_memory_outside_the_claimed_range_does_not_hold(value):
    assert decide(CLAIMS["cpu-ram"], {"00/host_copy_bandwidth": value}).status == "does not hold"


@pytest.mark.parametrize(
    ("claim", "records", "status"),
    [
        (claim_of(records=()), {"00/a": 1}, "not yet decided"),
        (claim_of("a > 1 and b > 1"), {"00/a": 9}, "not measurable here"),
        (claim_of("a > 1 and b > 1"), {"00/b": 9, "01/a": 9}, "not measurable here"),
        (claim_of("a > b", "a > b / 2"), {"00/a": 3, "01/b": 2}, "holds"),
        (claim_of("a > b", "a > b / 2"), {"00/a": 3, "01/b": 4}, "holds under conditions"),
        (claim_of("a > b", "a > b / 2"), {"00/a": 3, "01/b": 9}, "does not hold"),
    ],
)
def test_every_status(claim, records, status):
    assert decide(claim, records).status == status


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({"00/a": 1, "01/b": 0}, "claim 'x'.*a / b > 1.*division"),
        ({"00/a": float("nan"), "01/b": 1}, "'00/a' is nan"),
    ],
)
def test_a_value_that_decides_nothing_is_an_error(records, message):
    with pytest.raises(ValueError, match=message):
        decide(claim_of("a / b > 1"), records)


@pytest.mark.parametrize(
    ("expression", "true"),
    [
        ("1 < a < 3 <= b", True),
        ("1 < a < 3 <= b < 3", False),
        ("not a > b", True),
        ("a > b or -a + abs(-b) * 2 == 4", True),
        ("b != 0 and a / b < 1", True),
        ("min(a, b, 9) == 2 and max(a, b) == 3", True),
    ],
)
def test_predicates(expression, true):
    assert parse_predicate(expression, {"a", "b"}).test({"a": 2, "b": 3}) is true


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("a >", "not an expression"),
        ("a", "'a' is not a comparison"),
        ("True", "not a comparison"),
        ("2 > 1", "uses no record"),
        ("a > c", "'c' is not among the records"),
        ("a > True", "not a number"),
        ("a > '1'", "not a number"),
        ("a ** 2 > 1", "not a number"),
        ("a > (b := 1)", "not a number"),
        ("a.real > 1", "not a number"),
        ("a[0] > 1", "not a number"),
        ("a in (1, 2)", "not a comparison"),
        ("a is b", "not a comparison"),
        ("max(a) > 1", "two numbers or more"),
        ("max(*a) > 1", "two numbers or more"),
        ("max(a, b, key=abs) > 1", "not a number"),
        ("abs(a, b) > 1", "one number"),
        ("(lambda: a)() > 1", "not a number"),
        ("__import__('os') > a", "not a number"),
        ("a > 1 if b else a > 2", "not a comparison"),
        ("(" * 300 + "a" + ")" * 300 + " > 1", "not an expression"),
    ],
)
def test_anything_else_is_refused_naming_claim_and_expression(expression, message):
    with pytest.raises(ValueError, match=message) as caught:
        claim_of(expression)
    assert "claim 'x'" in str(caught.value)
    assert repr(expression) in str(caught.value)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # "1and a" is one to the parser
@given(st.text(alphabet="ab01.<>=+-*/(), andortmixsl[]:'_", max_size=40))
def test_any_text_is_a_predicate_or_a_value_error(text):
    with suppress(ValueError):
        assert parse_predicate(text, {"a", "b"}).names


def _of(pattern, *parts):
    return st.tuples(*parts).map(lambda chosen: pattern.format(*chosen))


NUMBER = st.recursive(
    st.sampled_from(["a", "b", "2", "0.5"]),
    lambda inner: (
        _of("({} {} {})", inner, st.sampled_from("+-*/"), inner)
        | _of("{}({}, {})", st.sampled_from(["min", "max"]), inner, inner)
        | _of("-abs({})", inner)
    ),
    max_leaves=5,
)
COMPARISON = _of("a {0} {1} {0} {2}", st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), NUMBER, NUMBER)
PREDICATE = st.recursive(
    COMPARISON,
    lambda inner: _of("({} {} {})", inner, st.sampled_from(["and", "or"]), inner) | _of("not {}", inner),
)


@given(PREDICATE, st.integers(-3, 3), st.integers(-3, 3))
def test_python_agrees_with_every_predicate(text, a, b):
    values = {"a": a, "b": b}
    with suppress(ZeroDivisionError):
        assert parse_predicate(text, values).test(values) is eval(text, {}, values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"records": ("a",), "holds": "a > 1"}, "lists record 'a'; lab/name"),
        ({"records": ("00/a", "01/a"), "holds": "a > 1"}, "two records of one name"),
        ({"records": ("00/a", "00/c"), "holds": "a > 1"}, "'c' must be both listed in records and used"),
        ({"holds": "a > b", "says": "{c}"}, "'c' must be both"),
        ({"records": ("00/a",)}, "records need holds"),
        ({"records": (), "holds": "1 > 2"}, "records need holds"),
        ({"records": (), "conditions": "1 > 2"}, "records need holds"),
    ],
)
def test_a_claim_that_contradicts_itself_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        claim_of(**arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[claims.x]\n" + BODY + "verdict = 'holds'\n", "'x' has the unknown key 'verdict'"),
        ("[claims.x]\n" + BODY + "[claims.x]\n" + BODY, "x.*twice"),
        ("[claims.x]\n" + BODY.replace("topic", "lab"), "'x' lacks topic"),
        ("[claims.x]\n" + BODY.replace('["T"]', '"T"'), "source is 'T'; a list of strings"),
        ("[claims.x]\n" + BODY.replace('"T"', '"Q"'), "source 'Q' is not described"),
        ("[claims.x]\n" + BODY + "lab = 3\n", "lab is 3; a string is expected"),
        ("[claims.x]\n" + BODY + "records = ['00/a']\nholds = 'a > b'\n", "'a > b': 'b' is not among"),
        ("[claims.x", "Expected"),
    ],
)
def test_a_broken_ledger_is_refused_naming_the_file(tmp_path, text, message):
    path = tmp_path / "claims.toml"
    path.write_text(HEAD + text)
    with pytest.raises(ValueError, match=message) as caught:
        load_claims(path)
    assert str(path) in str(caught.value)


PUBLISHED = {
    "cpu": {"00/a": Record(name="a", value=60e9, unit="B/s")},
    "gpu": {"00/a": Record(name="a", value=2, unit="B/s"), "00/other": Record(name="other", value=1)},
    "bare": {},
}
LEDGER = (claim_of("a > 5", records=("00/a",), says="it moves {a}"), claim_of(records=()))


def test_verdicts_are_given_for_every_claim_and_machine():
    rows = verdicts(PUBLISHED, LEDGER)
    statuses = [[verdict.status for verdict in row.verdicts.values()] for row in rows]
    assert statuses == [["holds", "does not hold", "not measurable here"], ["not yet decided"] * 3]


def test_the_markdown_table_shows_verdict_and_measured_value():
    assert claims_markdown(PUBLISHED, LEDGER).splitlines() == [
        "**Memory**",
        "",
        "| id | claim | source | cpu | gpu | bare |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `x` | a \\| b | T | holds: it moves 60.0 GB/s | does not hold: it moves 2.00 B/s "
        "| not measurable here (no 00/a) |",
        "| `x` | a \\| b | T | not yet decided | not yet decided | not yet decided |",
    ]


def test_a_claim_without_a_sentence_names_its_values():
    shown = claims_markdown({"cpu": PUBLISHED["cpu"]}, (claim_of("a > 5", records=("00/a",)),))
    assert "holds: a = 60.0 GB/s" in shown


def test_the_text_ends_with_a_count_of_each_status():
    lines = claims_text(PUBLISHED, LEDGER).splitlines()
    assert lines[-1] == (
        "bare: 0 holds, 0 holds under conditions, 0 does not hold, 1 not measurable here, 1 not yet decided"
    )
    assert "      gpu: does not hold: it moves 2.00 B/s" in lines
    assert claims_text({}, LEDGER).endswith("no machine has published results yet")


def test_the_whole_ledger_renders():
    shown = claims_markdown(PUBLISHED)
    assert all(f"| `{id_}` |" in shown for id_ in CLAIMS)
