"""Rules for every committed lab."""

import re
from pathlib import Path

import nbformat
import pytest

from labsupport.publish.catalogue import Book
from labsupport.publish.published import load_all
from labsupport.publish.records import SAY_MIME, Record, records_in, sentence
from labsupport.show.compile_panel import AUTOMATIC, DYNAMIC, MARKED, STATIC, calls_of

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
TAGS = {"setup", "parameters", "predict", "exercise", "solution", "your-model", "nbval-ignore-output"}
UNITS = (
    r"(?:%|x|ms|us|µs|ns|s|seconds|minutes|[KMGT]i?B(?:/s)?|[GT]?FLOP/s|samples/s|images/s|times (?:as|faster|slower))"
)
# A number with a unit. Quoted claims stand in block quotes; parameters are named in backquotes.
MEASURED = re.compile(rf"(?<![\w.`])\d[\d.,]*\s?{UNITS}(?![\w`])")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


def cells_of(path: Path, kind: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def tags_of(cell: nbformat.NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def test_opens_with_a_question_then_setup_then_parameters(path):
    notebook = nbformat.read(path, as_version=4)
    assert re.match(rf"# {path.stem[:2]} \w+.*\?", notebook.cells[0].source)
    tagged = [tags_of(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert tagged[0] == {"setup"} and tagged[1] == {"parameters"}
    assert sum("parameters" in tags for tags in tagged) == 1


def test_setup_cell_is_the_same_in_every_lab(path):
    first = cells_of(NOTEBOOKS[0], "code")[0].source
    assert cells_of(path, "code")[0].source == first


def test_cells_are_short_and_their_tags_known(path):
    for cell in cells_of(path, "code"):
        assert len(cell.source.splitlines()) <= 25
        assert tags_of(cell) <= TAGS


def test_is_committed_executed_in_order_without_errors(path):
    cells = cells_of(path, "code")
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


def test_is_small_and_carries_no_widget_state(path):
    assert path.stat().st_size < 600_000
    assert "widget-view" not in path.read_text() and "widgets" not in nbformat.read(path, as_version=4).metadata


def test_kernel_is_python3_and_colab_is_asked_for_a_gpu(path):
    metadata = nbformat.read(path, as_version=4).metadata
    assert metadata.kernelspec.name == "python3" and metadata.accelerator == "GPU"


def test_prose_holds_no_measured_number(path):
    for cell in cells_of(path, "markdown"):
        lines = [line for line in cell.source.splitlines() if not line.startswith(">")]
        assert not MEASURED.findall("\n".join(lines))


def test_printed_text_holds_no_number_that_no_record_knows(path):
    for cell in cells_of(path, "code"):
        if "predict" in tags_of(cell):
            continue  # a question's text, the same in every run
        for output in cell.outputs:
            data = output.get("data", {})
            ours = any(mime.startswith("application/vnd.labsupport") or mime == "image/png" for mime in data)
            about_machine = "labsupport" in output.get("metadata", {})
            text = output.get("text", "") if ours or about_machine else output.get("text", data.get("text/plain", ""))
            assert not re.search(r"\d", text), text


def test_says_the_opposite_when_every_ratio_is_inverted(path):
    """No sentence about an outcome is true by construction."""
    outputs = [output for cell in cells_of(path, "code") for output in cell.outputs]
    records = {record.name: record for record in records_in(outputs)}
    inverted = {name: inverse(record) for name, record in records.items()}
    says = [output.data[SAY_MIME] for output in outputs if SAY_MIME in output.get("data", {})]
    outcomes = [say for say in says if "about" in say]
    assert outcomes
    for say in outcomes:
        name = say["about"]
        if (said := branch(say, records)) != "same":
            assert branch(say, inverted) in (OPPOSITE[said], "cannot tell"), name
        for factor, expected in ((4.0, "above"), (0.25, "below")):  # whatever was said, it could have been this
            assert branch(say, records | {name: clear(records[name], factor)}) == expected, name


def stories_of(lab: str) -> list[dict[str, float]]:
    """Record -> value, of the committed outputs and of every machine's published values."""
    (path,) = [path for path in NOTEBOOKS if path.stem.startswith(f"{lab}_")]
    committed = [record for cell in cells_of(path, "code") for record in records_in(cell.outputs)]
    published = [machine.labs[lab] for machine in load_all().values() if lab in machine.labs]
    return [
        {record.name: record.value for record in committed},
        *({name: entry.record.value for name, entry in entries.items()} for entries in published),
    ]


def test_the_numbers_of_lab_00_tell_one_story():
    (path,) = [path for path in NOTEBOOKS if path.stem.startswith("00_")]
    for of in stories_of("00"):
        assert of["fed_speedup"] == pytest.approx(of["fed_samples_per_s"] / of["starved_samples_per_s"], rel=0.1)
        waiting = of["wait_over_compute"] / (1 + of["wait_over_compute"])
        assert of["idle_share"] == pytest.approx(waiting, abs=0.05)
        # The emulated store is a ceiling that no loop can pass: one image a latency, and a worker each.
        given = Book("00", path).parameters
        one_store = 1000 / given["latency_ms"]
        assert of["starved_samples_per_s"] < one_store
        assert of["fed_samples_per_s"] < one_store * given["workers"]
        assert of["batch_bytes"] == 16 * (3 * 64 * 64 * 4 + 8)  # fp32 pictures and int64 labels
        price = given["price_per_hour"]
        assert of["idle_cost"] == pytest.approx(of["idle_share"] * price, rel=1e-5)  # six digits are kept


def test_the_numbers_of_lab_01_tell_one_story():
    for of in stories_of("01"):
        # The tutorial's loop counts one step too few, and all it was asked for on a short loader.
        assert (of["steps_run"], of["steps_credited"], of["steps_run_on_short_loader"]) == (11, 10, 6)
        assert of["seen_share"] == pytest.approx(of["naive_s"] / of["synchronized_s"], rel=1e-4)
        assert of["seen_share"] < 0.1 and of["launch_share_naive"] < 0.1 and of["launch_share_waited"] > 0.9
        assert (of["reported_over_true"], of["reported_over_true_on_short_loader"]) == (0.909, 1.667)
        assert of["first_step_s"] > of["later_step_s"] and of["b_over_a"] > of["b_over_a_other_order"]
        assert of["startup_bias"] > 1 and of["naive_arms"] > 10 * of["true_arms"]
        assert abs(of["aa_ratio"] - 1) < 0.01 and of["planted_ratio"] == pytest.approx(1.03, abs=0.015)
        assert of["stalls_total"] > of["stalls_median"] and of["stalling_p99_s"] > 1.5 * of["step_s"]
        # Two seconds, 320 samples; nine steps at 320 a second and one at 32 / 1.1.
        assert (of["samples_over_time"], of["median_rate"]) == (160, 320)
        assert of["mean_of_rates"] == pytest.approx((9 * 320 + 32 / 1.1) / 10, abs=0.05)
        mfu = [of[f"mfu_{name}"] for name in ("product", "addition", "tiny")]
        assert 0.6 < mfu[0] < 1.1 and max(mfu[1:]) < 0.2
        # Of paired medians only about: seconds = samples * seconds a sample in each run, not in the medians.
        assert of["target_gain"] == pytest.approx(of["rate_gain"] / of["samples_needed"], rel=0.3)
        calls = [of[f"calls_{name}"] for name in ("many_groups", "one_group", "one_group_plain")]
        assert calls == [1202, 212, 1002] and of["runs_flagged"] == 1
        assert of["weights_that_differ_one_group"] == of["weights_that_differ_both_changed"] == 0


def test_the_numbers_of_lab_02_tell_one_story():
    (path,) = [path for path in NOTEBOOKS if path.stem.startswith("02_")]
    given = Book("02", path).parameters
    batch, width = given["batch_size"], given["width"]
    parameters = 4 * (width * width + width) * 4
    tensor = batch * width * 4
    for of in stories_of("02"):
        assert of["parameter_bytes"] == parameters and of["activation_bytes"] == 4 * tensor
        offs = [value for name, value in of.items() if name.endswith("_off")]
        assert len(offs) == 6 and not any(offs)
        # At the peak, Adam has two intermediate results of a matrix, and still one of the bias before it.
        temporary = 2 * width * width * 4 + width * 4
        assert of["peak_bytes"] == 4 * parameters + 8 * 4 + tensor + temporary + 4
        assert of["peak_over_parameters"] == pytest.approx(of["peak_bytes"] / parameters, rel=1e-5)
        assert of["temporary_share"] == pytest.approx(temporary / of["peak_bytes"], rel=1e-5)
        growth = [of[f"growth_{name}"] for name in ("sgd", "momentum", "adam")]
        assert growth == [0, 1, pytest.approx(2, rel=1e-4)]
        assert (of["foreach_false"], of["foreach_true"]) == (pytest.approx(0.5, rel=0.01), pytest.approx(1, rel=0.01))
        assert of["attention_growth"] > 40 and of["fused_growth"] == pytest.approx(8, rel=0.01)
        leaks = [of[f"leak_{name}"] for name in ("validation", "running_loss", "one_row", "features")]
        assert leaks == [2 * 128 * 256 * 4 + 128 * 10 * 4, 0, 128 * 256 * 4, 256 * 4]
        assert of["leak_recurrent"] == 2 * 32 * 64 * 4 and of["leak_penalty"] == 6 * 128 * 128 * 4
        # In units of a MiB: results of conv1 and relu1, maxima and their places; then the same of the other two blocks,
        # save the last pooling, which is still at work.
        assert of["first_block_share"] == pytest.approx((8 + 8 + 2 + 4) / (22 + 4 + 4 + 1 + 2 + 2 + 2), rel=1e-3)
        assert (of["largest_fits"], of["one_more_fits"]) == (1, 0)
        assert of["profiler_over_ledger"] == 1 <= of["allocator_over_ledger"] < 1.2


def test_the_numbers_of_lab_03_tell_one_story():
    for of in stories_of("03"):
        ratios = [of[f"ratio_{2 * small}_{small}"] for small in (8, 32, 128, 512)]
        assert ratios == sorted(ratios) and 1 <= ratios[0] < 1.01 and 1.6 < ratios[-1] < 2
        assert of["plan_off"] == of["panel_off"] == 0
        # A list of doubling sizes finds the largest power of two, times eight.
        assert of["loop_found"] <= of["max_batch"] < 2 * of["loop_found"]
        assert of["loop_share"] == pytest.approx(of["loop_found"] / of["max_batch"], rel=1e-5)
        assert of["loop_samples"] == 512 * sum(8 * 2**power <= of["max_batch"] for power in range(7))
        assert of["search_samples"] == 2 * (2 * of["max_batch"] + 1) < of["loop_samples"]
        assert (of["search_trials"], of["gan_trials"]) == (2, 5)
        assert of["loop_tensors_changed"] == 14 and of["search_tensors_changed"] == 0 and of["text_matches"] == 0
        assert of["steps_survived"] == 1 and 0 < of["half_changed"] < of["half_all"] == 6
        assert of["gain_early"] > 1.5 > of["gain_late"] and 0 < of["enough_memory"] < 1
        assert 1 <= of["recommended_batch"] <= of["max_batch"]


def test_the_numbers_of_lab_06_tell_one_story():
    (path,) = [path for path in NOTEBOOKS if path.stem.startswith("06_")]
    given = Book("06", path).parameters
    for of in stories_of("06"):
        for name, bits in (("float32", (8, 23)), ("bfloat16", (8, 7)), ("float16", (5, 10))):
            highest = 2 ** (bits[0] - 1) - 1
            found = [of[f"{name}_{part}"] for part in ("lowest", "highest", "steps")]
            assert found == [1 - highest, highest, 2 ** bits[1]]
        assert (of["fp16_survivors"], of["bf16_survivors"]) == (2, 5)
        assert (of["weight_in_fp32"], of["weight_in_bf16"]) == (0, 1)
        # Results: only fp16 alone, and only on the tiny loss, is at chance.
        trained = [of[f"{loss}_{name}"] for loss in ("plain", "tiny") for name in ("fp32", "bf16", "fp16")]
        assert min(*trained, of["plain_fp16_alone"]) > 0.9 and of["tiny_fp16_alone"] < 0.2
        assert max(trained) - min(trained) < 0.02
        assert of["lost_at_1"] < of["lost_at_1e3"] < of["lost_at_1e5"] and of["lost_bf16"] == 0
        # What is lost within the backward pass comes on top of the rounding of its results.
        assert of["lost_scaled"] < 0.01 and of["lost_by_rounding"] < of["lost_at_1e5"]
        assert of["panel_zero"] < of["lost_by_rounding"]
        assert of["scaler_off"] == 0 and 1 <= of["skipped_at_start"] <= of["skipped_in_all"] < 30
        # The norm allowed is 1 over a scale of 1024; the gradient has eight parts of 0.2.
        assert of["update_unclipped"] == of["update_unscaled_first"] == pytest.approx(0.2 * 8**0.5, rel=1e-5)
        assert of["update_clipped_first"] == pytest.approx(1 / 1024, rel=1e-3)
        assert (of["rate_unguarded"], of["rate_guarded"]) == (0.5**5, 0.5**3)
        assert (of["warned_unguarded"], of["warned_guarded"]) == (1, 0)
        # Three of the five inner weights, the input and its four successors are kept in bf16.
        kept, batch = 3 * 1024 * 1024 * 2, 32 * 1024 * 2
        extra = of["wide_activation_bytes_bf16"] - kept - 5 * batch
        assert 0 <= extra < 2 * batch and of["wide_activation_bytes"] < 5 * 2 * batch
        assert of["conv_activations"] < 0.7 < 1 < of["wide_activations"]
        assert of["conv_model_state"] == of["wide_model_state"] == 1
        peaks = [of[f"peak_at_{batch}"] for batch in (4, 64, 256, 1024, 4096)]
        assert peaks == [1.122, 1.091, 1.0, 0.792, 0.698]
        for name in ("fp32", "bf16"):
            assert of[f"{name}_micro_batch"] * of[f"{name}_micro_batches"] == given["effective_batch"]
            assert of[f"{name}_micro_batch"] <= of[f"{name}_fits"] and of[f"{name}_peak"] <= 64 * 2**20
        assert of["fp32_micro_batches"] > of["bf16_micro_batches"] and of["fp32_fits"] < of["bf16_fits"]
        if of["product_gain"] > 2:  # bf16 is fast here
            assert of["mlp_gain"] > 1.2 and of["broad_gain"] > of["narrow_gain"] and of["casts_gain"] < of["mlp_gain"]
            assert of["both_gain"] > max(of["layout_gain"], of["conv_gain"]) and of["decision_gain"] > 1
        elif of["product_gain"] < 0.5:
            assert max(of["mlp_gain"], of["broad_gain"], of["decision_gain"]) < 1 and of["break_even_width"] == 0


def test_the_numbers_of_lab_07_tell_one_story():
    (path,) = [path for path in NOTEBOOKS if path.stem.startswith("07_")]
    given = Book("07", path).parameters
    batch, width, depth = given["batch_size"], given["width"], 36
    tensor, norm, gradient = 4 * batch * width, 8 * batch, 4 * (width**2 + 3 * width)
    counts, rest = (2, 4, 6, 9, 12, 18, 36), 40 * batch + 8  # the classifier's probabilities, and two numbers
    for of in stories_of("07"):
        assert not [name for name, value in of.items() if name.startswith("differ_") and value]
        assert of["kept_0"] == depth * (3 * tensor + norm) + rest
        for n in counts:
            assert of[f"kept_{n}"] == (n - 1) * tensor + depth // n * (3 * tensor + norm) + rest
        assert of["kept_off"] == of["panel_off"] == 0
        # The first segment of the chain has the gradients of all others beside it; with one block a segment it is the
        # last that has the peak, for all inputs lie there.
        always = depth * gradient + 8 * (width + 1) * 10 + tensor + 8 * batch + 8
        front = {n: always + tensor + depth // n * (3 * tensor + norm - gradient) + depth * gradient for n in counts}
        back = {n: always + n * tensor + depth // n * (3 * tensor + norm) + 40 * batch for n in counts}
        assert all(of[f"peak_{n}"] == max(front[n], back[n]) for n in counts)
        assert all((front[n] > back[n]) is (n < 36) for n in counts)
        assert (of["best_kept"], of["best_peak"], of["best_peak_gradients_there"]) == (12, 18, 12)
        for name, n in (("two", 2), ("best", 18)):
            assert of[f"{name}_saved"] == pytest.approx(1 - of[f"peak_{n}"] / of["peak_0"], rel=1e-4)
            again = (depth - depth // n) * width / ((3 * depth - 1) * width + 30)
            assert of[f"{name}_more_compute"] == pytest.approx(again, rel=1e-4)
        assert of["last_of_19"] == 18 and of["kept_19"] == 18 * tensor + 18 * (3 * tensor + norm) + rest
        assert of["kept_whole"] < 2 * tensor and of["peak_whole"] >= of["peak_0"] - tensor
        assert of["lone_saved"] == of["small_saved"] == 0 and of["small_saved_squared"] == tensor
        assert of["loss_off_preserved"] == of["gradient_off_preserved"] == of["loss_off_drawn_anew"] == 0
        assert of["gradient_off_drawn_anew"] > 0.5
        lost = [of[f"lost_{name}"] for name in ("reentrant", "flag_left_out", "not_reentrant")]
        assert lost == [2, 2, 0] and of["warnings_flag_left_out"] == 1 + of["warnings_reentrant"]
        assert (of["norm_updates"], of["norm_moved"]) == (2, 1.9)
        assert of["norm_noise"] == pytest.approx(2**0.5, rel=0.15)
        assert of["norm_off"] > 0.01 and of["norm_off_half_momentum"] == of["norm_off_frozen"] == 0
        kept = [of[f"kept_{name}"] // tensor for name in ("each_block", "selective", "0")]
        assert kept == [depth, 2 * depth, 3 * depth]
        assert of["deep_segments_batch"] > of["deep_plain_batch"] and of["wide_segments_batch"] > of["wide_plain_batch"]
        assert of["deep_thrift"] < of["deep_small"] < 1


def test_the_numbers_of_lab_08_tell_one_story():
    for of in stories_of("08"):
        rounding = ("groupnorm_error", "tokens_right_error", "zero_after_error")
        assert max(of[name] for name in rounding) < 1e-12 and of["gradients_off"] == 0
        # Smaller micro-batches have worse statistics, and each moves them once.
        assert 0.01 < of["batchnorm_error"] < of["batchnorm_error_tiny"] and of["tokens_error"] > 0.1
        assert (of["statistics_whole"], of["statistics_parts"]) == (1, 4)
        assert of["sgd_update"] == pytest.approx(4, rel=1e-5) and of["adam_update"] == pytest.approx(1, rel=1e-3)
        # Both places within the window leave the last micro-batch alone; never clearing adds the first step to it.
        assert of["zero_inside_error"] == of["zero_last_error"] > 0.1 and of["wrong_places_equal"] == 1
        assert of["zero_never_error"] == pytest.approx(1, rel=1e-6)
        assert of["loss_right"] < min(of["loss_cleared"], of["loss_undivided"]) / 2
        # 16 micro-batches, the last of 40 samples, are two windows of six and four left over.
        assert (of["steps_an_epoch"], of["samples_late"]) == (2, 3 * 64 + 40)
        assert of["leak_factor"] == pytest.approx(10 / 6, rel=1e-4) and (of["right_steps"], of["right_unseen"]) == (
            3,
            0,
        )
        assert of["right_factor"] == 1 and (of["left_at_128"], of["left_at_256"]) == (391 % 4, 196 % 4)
        assert (of["first_rate"], of["updates_at_zero"], of["updates_at_zero_right"]) == (0.4, 4, 0)
        assert of["boundary_error"] < 1e-5 and of["clipped_each_error"] > 0.01
        # In units of one activation of all rows: ten at once, ten parts of it each, six and the rest for summed losses.
        unit = 2048 * 256 * 4
        assert of["whole_bytes"] == pytest.approx(10 * unit, abs=64)
        assert [of[f"each_bytes_{n}"] for n in (2, 4, 8)] == pytest.approx([10 * unit / n for n in (2, 4, 8)], abs=64)
        summed = [(6 + 4 / n) * unit for n in (2, 4, 8)]
        assert [of[f"summed_bytes_{n}"] for n in (2, 4, 8)] == pytest.approx(summed, rel=1e-3)
        assert of["each_share"] == pytest.approx(1 / 8, rel=1e-4)
        assert of["summed_share"] == pytest.approx(of["summed_bytes_8"] / of["whole_bytes"], rel=1e-5)
        assert 1 <= of["window_memory"] < 1.1 < of["whole_memory"] < 8
        assert of["saved_costly"] > max(1, of["saved_cheap"])
        assert (of["kept_halving"], of["kept_division"], of["kept_divisor"]) == (2, 4, 5)
        assert (of["halved_96"], of["micro_97"]) == (24, 1)
        assert of["micro_batch"] * of["accumulation"] == 256 and of["micro_batch"] <= of["max_batch"]
        accuracies = [of[f"accuracy_fixed_{size}"] for size in (1024, 256, 64)] + [of["accuracy_16"]]
        assert accuracies == sorted(accuracies) and of["accuracy_linear_1024"] < 0.5
        assert of["behind_epochs"] == pytest.approx(of["accuracy_16"] - of["accuracy_fixed_1024"], abs=1e-5)
        assert of["behind_steps"] == pytest.approx(of["accuracy_steps_16"] - of["accuracy_steps_1024"], abs=1e-5)
        steps = [of[f"steps_{size}"] for size in (4, 16, 64, 256, 1024)]
        assert steps[0] > 2 * steps[1] > 2 * steps[2] > 2 * max(steps[3:])
        assert of["early_steps"] == pytest.approx(steps[2] / steps[0], rel=1e-5)
        assert of["late_steps"] == pytest.approx(steps[4] / steps[2], rel=1e-5) and of["early_steps"] < of["late_steps"]
        assert 4 < of["critical_batch"] < 64


def test_the_numbers_of_lab_09_tell_one_story():
    (path,) = [path for path in NOTEBOOKS if path.stem.startswith("09_")]
    given = Book("09", path).parameters
    for of in stories_of("09"):
        assert (of["chain_graphs"], of["chain_operations"], of["chain_runs"]) == (1, 40, 3)
        assert of["raises_without_compiler"] == 1
        assert of["chain_outside"] == of["cnn_outside"] == of["returned_outside"] == 0
        assert max(of["cnn_error_eager"], of["cnn_error_compiled"]) < of["cnn_allowed"]
        functions = ("clean", "with_item", "with_print", "with_if")
        assert [of[f"graphs_{name}"] for name in functions] == [1, 2, 2, 2]
        assert [of[f"breaks_{name}"] for name in functions] == [0, 1, 1, 1]
        assert [of[f"refused_{name}"] for name in functions] == [0, 0, 1, 1]
        assert (of["graphs_logged"], of["graphs_returned"]) == (0, 1)
        # The panel's rule, and one compilation more where the first batch is as large as the layer is wide.
        rule = {name: calls_of((8, 16, 24, 32, 7, 1), setting)[-1].compilations for name, setting in SETTINGS.items()}
        assert rule == {"default": 3, "false": 6, "true_wider": 2, "marked": 2}
        assert {name: of[f"compilations_{name}"] for name in rule} == rule and of["compilations_true"] == 3
        assert (of["limit_graphs"], of["limit_eager"]) == (8, 2)
        ragged = [of[f"ragged{name}"] for name in ("", "_in_epoch_2", "_dropped", "_marked", "_one")]
        assert ragged == [2, 0, 1, 1, 2] and (of["modes"], of["modes_later"]) == (3, 0)
        assert [of[f"lr_{name}"] for name in ("float", "tensor", "constant")] == [2, 1, 1]
        if "gain_chain" not in of:
            continue  # made without a compiler
        assert of["cold_s"] > of["warm_s"]
        assert of["gain_chain"] > 1.5 and of["gain_chain"] > of["gain_mlp"]
        assert of["gain_returned"] > 1.5 * of["gain_logged"] and of["naive_gain"] < of["gain_chain"]
        for name in ("chain", "cnn", "mlp", "late"):
            assert of[f"session_{name}"] < of[f"gain_{name}"]
            assert (of[f"payback_{name}"] == given["horizon"]) >= (of[f"gain_{name}"] <= 1)
        assert of["payback_chain"] < of["payback_mlp"]
        assert of["call_ragged_s"] > 10 * max(of["call_full_s"], of["call_ragged_again_s"])


SETTINGS = {"default": AUTOMATIC, "false": STATIC, "true_wider": DYNAMIC, "marked": MARKED}


OPPOSITE = {"above": "below", "below": "above", "cannot tell": "cannot tell"}


def clear(record: Record, value: float) -> Record:
    return Record.from_dict(record.to_dict() | {"value": value, "interval": (0.95 * value, 1.05 * value)})


def inverse(record: Record) -> Record:
    if record.kind != "ratio":
        return record
    found = record.to_dict() | {"value": 1 / record.value}
    if record.interval:
        found["interval"] = (1 / record.interval[1], 1 / record.interval[0])
    return Record.from_dict(found)


def branch(say: dict, records: dict[str, Record]) -> str:
    said = sentence(say, records)
    branches = {sentence({"text": say[name]}, records): name for name in ("above", "below", "same")}
    assert len(branches) == 3, "the branches of a sentence differ"
    return branches.get(said, "cannot tell")
