"""The benchmark of batch-size finders: README's tables against the committed records, and one small workload."""

import batch_size
import batch_size_tables as tables
import batch_size_tools as tools
import pytest
import torch
from readme import load


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("LABS_PROFILE", "cpu")


def committed():
    for path in batch_size.HERE.glob("records/batch_size-*.jsonl"):
        head, *records = load(path)
        assert head["schema"] == batch_size.SCHEMA and head["machine"]["family"] in path.name
        yield records


def test_readme_has_the_tables_of_the_committed_records():
    readme = (batch_size.HERE / "README.md").read_text()
    made = tables.SECTION.with_blocks(readme, tables.SECTION.made_from(batch_size.HERE))
    assert made == readme, "python benchmarks/batch_size.py --table"


def test_the_records_are_of_the_plan_and_ours_are_exact():
    for records in committed():
        found = tables.of_kind(records, "found")
        pairs = [(record["workload"], record["finder"]) for record in found]
        assert pairs == [(name, finder) for name in batch_size.PLAN for finder in tools.FINDERS]
        for record in found:
            if record["finder"].startswith("find_batch_size"):
                assert record["found"] == record["true"] and record["tested"] and record["survives"]
                assert record["sizes"] <= (6 if "no plan" in record["finder"] else 2) and not record["left"]
        assert all(record["exact"] for record in tables.of_kind(records, "planned"))


@pytest.fixture(scope="module")
def true():
    return tools.true_maximum("CNN, SGD", 4 << 20)


@pytest.mark.parametrize("finder", tools.FINDERS)
def test_every_finder_runs(finder, true):
    if finder == "Accelerate, from 4096":
        pytest.skip("the same as from 128, and long")
    if finder.startswith("Lightning"):
        pytest.importorskip("pytorch_lightning")
    found = tools.found_by(finder, "CNN, SGD", "4MiB")
    assert not found["error"] and 0 < found["found"] <= true and found["survives"]
    assert found["samples"] > 0 and found["sizes"] > 0
    if finder.startswith("find_batch_size"):
        assert found["found"] == true and not found["left"] and found["refused"] == 1


def test_what_is_left_changed_is_seen():
    live = tools.Live("CNN, SGD")
    before = live.state()
    assert tools.changed(before, live.state()) == []
    live.step(2, live.optimizer, steps=1)
    assert {"parameters", "buffers", "gradients", "random"} <= set(tools.changed(before, live.state()))
    assert live.sizes == [2]


def test_a_wrong_truth_is_refused(monkeypatch):
    monkeypatch.setattr(tools, "fits", lambda name, size, budget: True)
    with pytest.raises(RuntimeError, match="is not the largest batch of a plain loop"):
        tools.true_maximum("CNN, SGD", 4 << 20)


def test_an_error_of_a_finder_is_a_result(monkeypatch):
    def fails(live, budget):
        torch.zeros(2) @ torch.zeros(3)

    monkeypatch.setitem(tools.FINDERS, "fails", fails)
    found = tools.found_by("fails", "CNN, SGD", "4MiB")
    assert found["found"] == 0 and found["error"].startswith("RuntimeError") and not found["survives"]
