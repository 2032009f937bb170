"""The memory benchmark: README's tables against the committed records, its arithmetic, and one small cell."""

import json

import memory
import memory_tables as tables
import memory_tools as tools
import pytest
import torch
from memory import Cell
from readme import load, still_to_do


def test_readme_has_the_tables_of_the_committed_records():
    readme = (memory.HERE / "README.md").read_text()
    assert tables.SECTION.with_blocks(readme, tables.SECTION.made_from(memory.HERE)) == readme, (
        "python benchmarks/memory.py --table"
    )


def test_every_committed_record_is_of_a_cell_of_the_plan():
    cells = {cell.key for cell in memory.PLAN}
    for path in memory.HERE.glob("records/memory-*.jsonl"):
        head, *records = load(path)
        assert head["schema"] == memory.SCHEMA and head["machine"]["family"] in path.name
        assert {record["cell"] for record in records} <= cells


# The plan.


def test_cells_have_names_of_their_own_and_fit_ten_minutes():
    for plan in (memory.PLAN, memory.QUICK):
        assert len({cell.key for cell in plan}) == len(plan)
    assert memory.minutes(memory.PLAN) < 10


def test_sixteen_batch_sizes_from_2_to_1000():
    assert len(set(memory.SIZES)) == 16 and memory.SIZES[0] == 2 and memory.SIZES[-1] == 1000
    assert memory.SIZES[1] == 3, "the line goes through the two smallest"


# Going on where a run stopped.


def made(cell, disturbed=False):
    return {"cell": cell.key, "disturbed": disturbed}


def test_what_is_done_is_not_done_again_and_what_was_disturbed_is():
    one, *rest = memory.QUICK
    assert still_to_do(memory.QUICK, [made(one)], "cell", memory.TRIES) == rest
    tries = [made(one, disturbed=True)] * memory.TRIES
    assert still_to_do([one], tries[1:], "cell", memory.TRIES) == [one]
    assert still_to_do([one], tries, "cell", memory.TRIES) == []


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A file of records with a header, one record and half a line, and the benchmark that made it."""
    head = {"code": "c", "versions": {"torch": "2"}, "machine": {"cpu_model": "c"}}
    monkeypatch.setattr(memory, "header", lambda: head)
    path = tmp_path / "memory-x.jsonl"
    path.write_text(json.dumps(head) + '\n{"cell": "a"}\n{"ce')
    return path


def test_half_a_line_is_dropped(begun):
    assert [record["cell"] for record in memory.resumed(begun)[1:]] == ["a"]
    assert begun.read_text().endswith('{"cell": "a"}\n')


@pytest.mark.parametrize("change", [{"code": "d"}, {"versions": {}}, {"machine": {"cpu_model": "d"}}], ids=str)
def test_records_of_other_code_or_another_machine_are_not_mixed_in(begun, monkeypatch, change):
    before, head = begun.read_text(), memory.header()
    monkeypatch.setattr(memory, "header", lambda: head | change)
    with pytest.raises(SystemExit, match="move it away"):
        memory.resumed(begun)
    assert begun.read_text() == before


def test_only_times_are_disturbed(monkeypatch):
    monkeypatch.setattr(memory, "OtherProcesses", lambda: type("Busy", (), {"cores": lambda self: 1.0})())
    for name in ("peaks", "overhead"):
        monkeypatch.setattr(memory, name, lambda *_: {})
    found = [memory.carry_out(Cell(kind, "MLP, SGD", 4), quick=True)["disturbed"] for kind in ("peak", "overhead")]
    assert found == [False, True]


# The tools.


def test_a_storage_counts_once():
    step = tools.seeded("MLP, SGD", 4)
    size = sum(p.nbytes for p in step.model.parameters())
    batch = sum(each.nbytes for each in step.batch)
    assert tools.live_bytes(step) == size + batch
    step()
    assert tools.live_bytes(step) == 2 * size + batch
    step.batch = (step.batch[0], step.batch[0][:2])
    assert tools.live_bytes(step) == 2 * size + step.batch[0].nbytes


def test_the_truth_is_what_the_allocator_was_asked_for():
    step = tools.seeded("MLP, SGD", 4)
    with tools.Profiler(step) as tool:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.empty(3 << 20, dtype=torch.uint8)
        del a, b
        torch.empty(2 << 20, dtype=torch.uint8)
    assert tool.peak() - tools.live_bytes(step) == 4 << 20


@pytest.mark.slow
def test_a_small_cell_of_peaks():
    record = memory.carry_out(Cell("peak", "MLP, AdamW", 32), quick=True)
    for found in record["peaks"].values():
        for tool in ("MemoryLedger", "MemTracker"):
            assert found[tool] == pytest.approx(found["truth"], rel=1e-3)
    assert record["peaks"][tools.FRESH]["torch.profiler"] == record["peaks"][tools.FRESH]["truth"]
    assert "before step 3" in tables.peaks([json.loads(json.dumps(record))])


@pytest.mark.parametrize("tool", tools.TOOLS)
def test_a_small_cell_of_times(tool):
    record = memory.carry_out(Cell("overhead", "MLP, SGD", 2, tool), quick=True)
    assert record["around"]["n"] == record["inside"]["n"] == 6
    assert f" {tool} |" in tables.overhead([record])


def test_a_small_plan(monkeypatch):
    monkeypatch.setattr(tools, "accelerates", lambda name: 1000)
    record = memory.carry_out(Cell("plan", "MLP, SGD", sizes=(2, 3, 8), most_bytes=0), quick=True)
    assert all(row["plan"] == row["truth"] and not row["real"] for row in record["rows"])
    assert [row["line"] == row["truth"] for row in record["rows"][:2]] == [True, True]
    assert "3 of 3" in tables.plan([record]) and "µs" in tables.asking([record])


def test_accelerates_estimate_is_four_times_the_model():
    pytest.importorskip("accelerate")
    model = tools.WORKLOADS["MLP, SGD"].model()
    assert tools.accelerates("MLP, SGD") == 4 * sum(p.nbytes for p in model.parameters())


# The tables.


@pytest.mark.parametrize(
    "said, truth, told",
    [
        (100, 100, "0 B"),
        (999_988, 1_000_000, "-12 B"),
        (990_000, 1_000_000, "-10,000 B (-1.00 %)"),
        (3_000_000, 1_000_000, "2,000,000 B (200.00 %)"),
    ],
)
def test_an_error_in_bytes_and_as_a_share(said, truth, told):
    assert tables.off(said, truth) == told


def test_the_worst_batch_is_named():
    rows = [{"batch": n, "truth": 100, "line": said} for n, said in ((2, 100), (5, 110), (9, 60))]
    assert tables.worst(rows, "line") == "-40.0 % at 9"
    assert tables.worst(rows[:1], "line") == "0 B"


def test_the_quietest_record_of_a_cell_is_shown():
    record = {"cell": "a", "kind": "overhead", "disturbed": True, "others": 0.5}
    quiet = record | {"others": 0.2}
    assert tables.of_kind([record, quiet, record], "overhead") == [quiet]
    assert tables.of_kind([record, quiet, record | {"disturbed": False}], "overhead")[0]["disturbed"] is False


def test_a_block_is_renewed_in_place_and_needs_its_marks():
    mark = tables.SECTION.start("plan")
    renewed = tables.SECTION.with_blocks(f"a\n{mark}old\n{tables.SECTION.end}\nb", {"plan": "new"})
    assert renewed == f"a\n{mark}\nnew\n\n{tables.SECTION.end}\nb"
    with pytest.raises(ValueError, match="no place for the block 'plan'"):
        tables.SECTION.with_blocks("# Benchmarks\n", {"plan": "| a |"})
