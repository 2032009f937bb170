"""The batch panel says what the plan says, runs what it shows, and leaves live objects alone."""

import copy
import re
import threading
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn

from labsupport.show import batch_panel
from labsupport.show.batch_panel import BATCHES, HERE, OPTIMIZERS, OWN, RUN, BatchPanel
from labsupport.show.widgets import png_of
from labsupport.train import Recipe, Workload, plan_memory
from labsupport.train.throughput import Throughput, Timing
from labsupport.units import format_bytes

CURVE = Throughput(tuple(Timing(n, 0.01 + 0.001 * n, 0.1, 9, 1) for n in (2, 16, 128)), 0.01, 0.001, (80.0, 100.0))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("LABS_PROFILE", "cpu")


def workload(model=None):
    model = model or nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(
        "MLP",
        lambda: model,
        lambda n, device: (torch.randn(n, 64), torch.randint(10, (n,))),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        lambda _: own,
    )


@pytest.fixture
def panel():
    return BatchPanel(workload(), budget="1MiB", throughput=CURVE)


def html(panel):
    return panel.box.children[-1].value


def words(svg):
    return " ".join(re.findall(r">([^<>]+)</text>", svg))


@pytest.mark.parametrize("batch", [2, 64, 1024, 4096])
def test_it_says_what_the_plan_says_to_the_byte(panel, batch):
    panel.set(batch=batch)
    plan = plan_memory(workload())
    peak, largest = plan.peak_bytes(batch), plan.max_batch("1MiB")
    verdict = "it fits" if peak <= 1 << 20 else "it does not fit"
    assert panel.text.splitlines()[0] == f"{batch} samples need {format_bytes(peak)} of 1.00 MiB on {HERE}: {verdict}"
    assert f"largest batch here: {largest}" in panel.text and f"largest batch here: {largest}" in words(panel.svg)
    assert format_bytes(peak) in words(panel.svg) and verdict in words(panel.svg)
    assert sum(panel.shown(panel.values).parts.values()) == peak and not panel.errors


CHANGES = [
    {"batch": 256},
    {"precision": "bf16"},
    {"optimizer": "AdamW"},
    {"checkpointing": True},
    {"accelerator": "T4 (16 GB)"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_each_knob_changes_picture_and_text(panel, change):
    before = html(panel)
    panel.set(**change)
    assert html(panel) != before and not panel.errors
    ET.fromstring(panel.svg)  # well formed


def test_every_setting_can_be_drawn(panel):
    for optimizer in (OWN, *OPTIMIZERS):
        for batch in (BATCHES[0], BATCHES[-1]):
            panel.set(optimizer=optimizer, batch=batch)
            assert png_of(panel.svg).startswith(b"\x89PNG")
    assert not panel.errors


def test_an_accelerator_is_an_estimate_for_cuda(panel):
    panel.set(accelerator="T4 (16 GB)", batch=256)
    room = int(0.9 * 16e9)
    assert "(an estimate)" in panel.text and format_bytes(room) in panel.text
    largest = plan_memory(workload(), target="cuda").max_batch(room)
    assert f"largest batch here: {largest}" in panel.text and "measured on this machine only" in panel.text


def test_the_curve_belongs_to_the_setting_it_was_measured_at(panel):
    assert "knee 90" in words(panel.svg) and "knee: 90 samples, 1000 samples/s at most (measured)" in panel.text
    panel.set(precision="bf16")
    assert "knee" not in words(panel.svg) and f"press '{RUN}'" in panel.text
    panel.set(precision="fp32", batch=8)
    assert "knee 90" in words(panel.svg)


@pytest.mark.parametrize("optimizer", [OWN, "AdamW"])
def test_predict_then_run_it(panel, optimizer):
    panel.set(batch=128, optimizer=optimizer)
    assert "measured" not in words(panel.svg).replace("not measured", "")
    run = panel.run()
    assert run.peak_bytes == run.predicted_bytes == panel.shown(panel.values).needed
    assert run.samples_per_s == pytest.approx(128 / run.seconds)
    assert f"measured {format_bytes(run.peak_bytes)}" in words(panel.svg) and 'class="measured"' in panel.svg
    assert "+0 B off the prediction" in panel.text and "(measured)" in panel.text
    panel.set(batch=64)
    assert 'class="measured"' not in panel.svg
    assert not panel.errors and panel.buttons[RUN].description == RUN


def test_what_does_not_fit_is_not_run(panel):
    panel.set(batch=4096)
    with pytest.raises(ValueError, match="not run: 4096 samples do not fit on this machine: at most"):
        panel.run()
    assert "not run: 4096 samples" in html(panel) and not panel.errors


def test_an_old_error_does_not_hide_a_run(panel):
    panel.errors.append(RuntimeError("an old one"))
    assert panel.run().peak_bytes


def test_more_than_the_plan_says_is_told_in_words(panel, monkeypatch):
    def raises(*_, **__):
        raise torch.OutOfMemoryError("Emulated")

    monkeypatch.setattr("labsupport.show.batch_panel.measure_throughput", raises)
    panel.buttons[RUN].click()
    assert "out of memory: 32 samples need more than the plan says" in html(panel) and not panel.errors
    with pytest.raises(ValueError, match="out of memory: 32 samples"):
        panel.run()


def test_a_knob_moved_while_it_runs_is_planned_after_it(panel, monkeypatch):
    """A plan copies the live model, and would find the gradients of a step that is half done."""
    begun, may_end, order = threading.Event(), threading.Event(), []
    plan, measured = batch_panel.plan_memory, batch_panel.measure_throughput

    def run(*given, **options):
        begun.set()
        may_end.wait(10)
        found = measured(*given, **options)
        order.append("run")
        return found

    monkeypatch.setattr(batch_panel, "measure_throughput", run)
    monkeypatch.setattr(batch_panel, "plan_memory", lambda *a, **o: order.append("plan") or plan(*a, **o))
    runs = threading.Thread(target=panel.run)
    runs.start()
    begun.wait(10)
    panel.set(batch=64)  # of a plan that there is: at once
    assert "64 samples" in html(panel)
    moves = threading.Thread(target=panel.set, kwargs={"checkpointing": True})
    moves.start()
    may_end.set()
    runs.join()
    moves.join()
    assert order == ["run", "plan"] and "cannot be planned" not in panel.text and not panel.errors


def test_what_could_not_be_planned_is_planned_anew_when_it_is_run(panel, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(batch_panel, "plan_memory", lambda *_, **__: 1 / 0)
        panel.set(precision="bf16")
        assert "cannot be planned: division by zero" in panel.text
        panel.redraw()
    assert panel.run().peak_bytes and "cannot be planned" not in panel.text and not panel.errors


def test_a_run_is_of_this_machine_whatever_is_looked_at(panel):
    panel.set(accelerator="T4 (16 GB)")
    panel.run()
    assert "run on this machine: peak" in panel.text and 'class="measured"' not in panel.svg
    panel.set(accelerator=HERE)
    assert 'class="measured"' in panel.svg


def test_free_memory_is_measured_and_a_budget_is_not():
    assert all(line.endswith("(measured)") for line in BatchPanel(workload()).text.splitlines()[:2])
    assert "(measured)" not in BatchPanel(workload(), budget="1MiB").text


def test_live_objects_are_as_before():
    own = workload()
    model, optimizer = own.model(), own.optimizer(None)
    own.loss(model, own.batch(4, None)).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    panel = BatchPanel(own, budget="1MiB")
    for optimizer_name in (OWN, "Adam"):
        panel.set(batch=32, optimizer=optimizer_name)
        panel.run()
    after = model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]
    assert str(before) == str(after)


def test_a_model_that_cannot_be_checkpointed_says_so():
    panel = BatchPanel(workload(nn.Linear(64, 10)), budget="1MiB")
    panel.set(checkpointing=True)
    assert "cannot be planned: checkpointing: Linear has no Sequential" in panel.text and not panel.errors
    with pytest.raises(ValueError, match="not run: this setting cannot be planned"):
        panel.run()


def test_one_sample_that_the_model_refuses_is_told():
    normed = nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10))
    panel = BatchPanel(workload(normed), Recipe(batch_size=1), budget="1MiB")
    assert "1 sample" in panel.text and not panel.errors
    with pytest.raises(ValueError, match="not run: batch: MLP cannot be planned with 1 sample"):
        panel.run()
