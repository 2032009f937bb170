"""The batch-size benchmark: README's tables against the committed records, its arithmetic, and each tool on a tiny
workload."""

import json

import batch_size
import batch_size_subject as subjects
import batch_size_tables as tables
import batch_size_tools as tools
import pytest
import torch
from batch_size import Cell
from readme import load, still_to_do

TINY = ("MLP, SGD", "4MiB")
LARGEST = 212


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("LABS_PROFILE", "cpu")


def test_readme_has_the_tables_of_the_committed_records():
    readme = (batch_size.HERE / "README.md").read_text()
    assert tables.SECTION.with_blocks(readme, tables.SECTION.made_from(batch_size.HERE)) == readme, (
        "python benchmarks/batch_size.py --table"
    )


def committed():
    for path in batch_size.HERE.glob("records/batch_size-*.jsonl"):
        head, *records = load(path)
        assert head["schema"] == batch_size.SCHEMA and head["machine"]["family"] in path.name
        yield records


def test_every_committed_record_is_of_a_cell_of_the_plan():
    cells = {cell.key for cell in batch_size.PLAN}
    for records in committed():
        assert {record["cell"] for record in records} <= cells


def test_what_is_promised_of_ours_holds_in_the_committed_records():
    for records in committed():
        for record in tables.with_truth(records):
            if record["tool"] in tools.OURS:
                assert record["found"] == record["largest"] and record["trains"] and not record["changed"]
                assert len(record["trials"]) <= (2 if record["tool"] == tools.OURS[0] else 6)


# The plan.


def test_cells_have_names_of_their_own_and_fit_twelve_minutes():
    for plan in (batch_size.PLAN, batch_size.QUICK):
        assert len({cell.key for cell in plan}) == len(plan)
    assert batch_size.minutes(batch_size.PLAN) < 12


def test_each_workload_has_a_truth_and_every_tool():
    for workload, budget in batch_size.BUDGETS.items():
        cells = [cell for cell in batch_size.PLAN if (cell.workload, cell.budget) == (workload, budget)]
        assert [cell.kind for cell in cells] == ["truth", *["search"] * len(tools.TOOLS)]


# Going on where a run stopped.


def made(cell, disturbed=False):
    return {"cell": cell.key, "disturbed": disturbed}


def test_what_is_done_is_not_done_again_and_what_was_disturbed_is():
    one, *rest = batch_size.QUICK
    assert still_to_do(batch_size.QUICK, [made(one)], "cell", batch_size.TRIES) == rest
    tries = [made(one, disturbed=True)] * batch_size.TRIES
    assert still_to_do([one], tries[1:], "cell", batch_size.TRIES) == [one]
    assert still_to_do([one], tries, "cell", batch_size.TRIES) == []


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A file of records with a header, some records and half a line, and the benchmark that made it."""
    head = {"code": {"ours": "o", "tools": "t"}, "versions": {"torch": "2"}, "machine": {"cpu_model": "c"}}
    monkeypatch.setattr(batch_size, "header", lambda: head)
    path = tmp_path / "batch_size-x.jsonl"
    records = [
        {"cell": "a", "kind": "truth"},
        {"cell": "b", "kind": "search", "tool": tools.OURS[0]},
        {"cell": "c", "kind": "search", "tool": "Lightning power"},
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in (head, *records)) + '{"ce')
    return path


def test_half_a_line_is_dropped(begun):
    assert [record["cell"] for record in batch_size.resumed(begun)[1:]] == ["a", "b", "c"]
    assert begun.read_text().endswith('"tool": "Lightning power"}\n')


def test_if_only_our_search_has_changed_the_peers_records_stay(begun, monkeypatch):
    head = batch_size.header()
    monkeypatch.setattr(batch_size, "header", lambda: head | {"code": {"ours": "new", "tools": "t"}})
    there, *kept = batch_size.resumed(begun)
    assert there["code"]["ours"] == "new" and [record["cell"] for record in kept] == ["c"]


@pytest.mark.parametrize(
    "change",
    [{"code": {"ours": "o", "tools": "u"}}, {"versions": {}}, {"machine": {"cpu_model": "d"}}],
    ids=str,
)
def test_records_of_other_tools_or_another_machine_are_not_mixed_in(begun, monkeypatch, change):
    before, head = begun.read_text(), batch_size.header()
    monkeypatch.setattr(batch_size, "header", lambda: head | change)
    with pytest.raises(SystemExit, match="move it away"):
        batch_size.resumed(begun)
    assert begun.read_text() == before


def test_only_the_seconds_of_searches_are_disturbed(monkeypatch):
    monkeypatch.setattr(batch_size, "OtherProcesses", lambda: type("Busy", (), {"cores": lambda self: 1.0})())
    for name in ("truth", "search"):
        monkeypatch.setattr(batch_size, name, lambda *_: {})
    found = [batch_size.carry_out(Cell(kind, *TINY, "AutoBatch's rule"))["disturbed"] for kind in ("truth", "search")]
    assert found == [False, True]


# The subject.


def test_a_loaders_batch_counts_once_and_the_data_set_does_not():
    subject = subjects.Subject(*TINY)
    (batch, *_) = subject.data.loader(300)
    with subject.trial(300, torch.nn.Identity()) as ledger:
        torch.nn.functional.relu_(batch[0])
    assert ledger.peak_bytes == batch[0].nbytes == 300 * 256 * 4
    assert len(subject.data) == subjects.SAMPLES


def test_trials_and_samples_are_counted():
    subject = subjects.Subject(*TINY)
    with subject.trial(8):
        subjects.train(subject, 8)
    with pytest.raises(torch.OutOfMemoryError), subject.trial(300):
        subjects.train(subject, 300)
    assert subject.tried == [(8, True), (300, False)] and subject.samples == 3 * 8 + 300


def test_every_kind_of_state_is_seen_to_change():
    subject = subjects.Subject("CNN, AdamW", "1GiB")
    before = subjects.state_of(subject)
    assert subjects.changed(before, subjects.state_of(subject)) == []
    subject.model.eval()
    subject.optimizer.param_groups[0]["lr"] = 1.0
    assert subjects.changed(before, subjects.state_of(subject)) == ["optimizer options", "modes"]
    subject.model.train()
    subjects.train(subject, 4)
    torch.rand(1)
    assert subjects.changed(before, subjects.state_of(subject)) == [each for each in before if each != "modes"]


def test_one_bit_of_a_parameter_is_a_change():
    subject = subjects.Subject(*TINY)
    before = subjects.state_of(subject)
    with torch.no_grad():
        first = next(subject.model.parameters())
        first[0, 0] = torch.nextafter(first[0, 0], torch.tensor(torch.inf))
    assert subjects.changed(before, subjects.state_of(subject)) == ["parameters"]


# The tools.


def test_the_truth_is_what_real_steps_say():
    assert tools.truth(*TINY) == {"planned": LARGEST, "largest": LARGEST}


def test_a_plan_that_is_one_off_is_no_truth(monkeypatch):
    for wrong in (LARGEST - 1, LARGEST + 1):
        monkeypatch.setattr(tools, "plan_memory", lambda _, n=wrong: type("Plan", (), {"max_batch": lambda s, b: n})())
        with pytest.raises(RuntimeError, match="real steps do not agree"):
            tools.truth(*TINY)


FOUND = {  # size found, sizes tried, sizes that ran out of memory
    "find_batch_size": (LARGEST, 2, 1),
    "find_batch_size, no plan": (LARGEST, 5, 1),
    "Lightning power": (128, 8, 1),
    "Lightning binsearch": (132, 15, 5),
    "Accelerate from 128": (128, 1, 0),
    "Accelerate from 1024": (207, 16, 15),
    "AutoBatch's rule": (16, 5, 4),
}


@pytest.mark.parametrize("tool", tools.TOOLS)
def test_each_tool_on_a_tiny_workload(tool):
    pytest.importorskip(tools.TOOLS[tool].module)
    record = batch_size.carry_out(Cell("search", *TINY, tool))
    assert (record["found"], len(record["trials"]), record["out_of_memory"]) == FOUND[tool]
    assert record["trains"] and record["samples"] >= 31
    if tool in tools.OURS:
        assert record["changed"] == []
    truth = {"cell": "t", "kind": "truth", "workload": TINY[0], "budget": TINY[1], "planned": LARGEST}
    records = [truth | {"largest": LARGEST, "disturbed": False, "others": 0.0}, json.loads(json.dumps(record))]
    assert f" {tool} |" in tables.searches(records) and f" {tool} |" in tables.summary(records)


def test_lightning_leaves_no_file(tmp_path, monkeypatch):
    pytest.importorskip("pytorch_lightning")
    monkeypatch.chdir(tmp_path)
    tools.TOOLS["Lightning power"].find(subjects.Subject(*TINY))
    assert not list(tmp_path.iterdir())


def test_what_does_not_train_is_said():
    assert tools.trains(*TINY, LARGEST) and not tools.trains(*TINY, LARGEST + 1)


@pytest.mark.parametrize(
    "sizes, free, failed, found",
    [
        ((1, 2, 4, 8, 16), 6400.0, [], 64),  # 100 B a sample
        ((1, 2, 4, 8, 16), 6400.0, [1], 64),  # refused for another reason than memory
        ((1, 2, 4), 6400.0, [8, 16], 4),  # not above what ran out of memory
        ((1, 2, 4, 8, 16), 1e6, [], 16),  # beyond 1024
        ((1, 2, 4, 8, 16), 10.0, [], 16),  # less than one
        ((4,), 6400.0, [], 16),
        ((1, 2), -1.0, [], 16),
    ],
)
def test_the_power_law(sizes, free, failed, found):
    assert tools.power_law(list(sizes), [100 * size for size in sizes], free, failed) == found


def test_a_card_is_planned_and_traced(monkeypatch):
    monkeypatch.setattr(tools, "rooms", lambda: {"a card": 8 << 20})
    record = batch_size.carry_out(Cell("card", "MLP, SGD", card="a card"))
    assert record["planned"] == record["traced"] and record["planned"][0] <= 8 << 20 < record["planned"][1]
    assert "| fits, the plan's bytes | does not fit, the plan's bytes |" in tables.cards([record])


# The tables.


def searched(tool, found, trials, *, trains=True, changed=(), samples=100):
    return {
        "cell": tool,
        "kind": "search",
        "workload": "w",
        "budget": "1MiB",
        "tool": tool,
        "found": found,
        "trials": trials,
        "out_of_memory": 0,
        "samples": samples,
        "took_s": 1.0,
        "changed": list(changed),
        "trains": trains,
        "disturbed": False,
        "others": 0.0,
    }


TRUTH = {
    "cell": "t",
    "kind": "truth",
    "workload": "w",
    "budget": "1MiB",
    "planned": 150,
    "largest": 100,
    "disturbed": False,
    "others": 0.0,
}


@pytest.mark.parametrize(
    "found, trials, told",
    [
        (8, [[8, True], [9, False]], "yes"),
        (7, [[8, True], [9, False]], "a larger one"),
        (16, [[8, True]], "no"),
        (8, [[8, False]], "no"),
    ],
)
def test_whether_the_found_size_ran(found, trials, told):
    assert tables.tried(searched("a", found, trials)) == told


def cells_of(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]


def test_a_size_that_does_not_train_stands_out():
    rows = cells_of(tables.searches([TRUTH, searched("a", 200, [[90, True]], trains=False, changed=["gradients"])]))
    assert rows[2][2:7] == ["200", "200 %", "90", "no", "**no**"] and rows[2][-1] == "gradients"


def test_the_summary_counts_over_all_workloads():
    records = [
        TRUTH,
        searched("a", 100, [[100, True], [101, False]], samples=50),
        searched(tables.BINSEARCH, 80, [[84, True]], changed=["gradients"], samples=400),
    ]
    names, _, ours, binsearch = cells_of(tables.summary(records))
    assert dict(zip(names, ours, strict=True)) == {
        "tool": "a",
        "exact": "1 of 1",
        "of the largest": "100.0 %",
        "trials": "2",
        "the found size ran": "1 of 1",
        "it trains": "1 of 1",
        "all as before": "1 of 1",
        "samples of Lightning binsearch over its": "8.0",
        "seconds, all together": "1.00 s",
    }
    assert binsearch[1:3] == ["0 of 1", "80.0 %"] and binsearch[4:7] == ["0 of 1", "1 of 1", "0 of 1"]


def test_the_quietest_record_of_a_cell_is_shown():
    record = searched("a", 1, []) | {"disturbed": True, "others": 0.5}
    quiet = record | {"others": 0.2}
    assert tables.of_kind([record, quiet, record], "search") == [quiet]


def test_what_ends_the_largest_batch_is_said():
    assert "the data set (memory: 150, by the plan)" in tables.tasks([TRUTH])
    assert tables.tasks([TRUTH | {"planned": 100}]).splitlines()[-1].endswith("| memory |")


def test_a_table_without_records_says_so():
    assert all("Nothing recorded" in draw([]) for draw in tables.TABLES.values())
