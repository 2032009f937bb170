"""Making a run the published one: bands, what is refused, what is written, and that a second time changes nothing."""

import errno
import json
from pathlib import Path

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labsupport.machine import Machine
from labsupport.publish import release, replay
from labsupport.publish.catalogue import Book, UsageError
from labsupport.publish.published import Entry, Published, PublishedError, load_all
from labsupport.publish.records import METADATA_KEY, SAY_MIME, SUMMARY_MIME, Record
from labsupport.publish.release import band_of, labs_table, staged, with_table, write_all
from labsupport.publish.run import Run, executed_copy, result_file

MACHINE = {
    "device": "cpu",
    "profile": "cpu",
    "compute_capability": None,
    "device_memory_bytes": None,
    "driver": None,
    "cuda": None,
    "cudnn": None,
    "torch": "2.14.1",
    "python": "3.11.7",
    "os": "Linux 6",
    "cpu_model": "A CPU",
    "isa": "avx2",
    "isa_flags": ["avx2"],
    "cores": 2,
    "threads": 2,
    "memory_bytes": 2**34,
    "tf32": "ieee",
    "cudnn_benchmark": False,
    "family": "one",
}
WIDGET = "application/vnd.jupyter.widget-view+json"
README = f"# Labs\n\n{release.TABLE[0]}old\n{release.TABLE[1]}\n\nMore.\n"


def records_of(exact=4096, ratio=2.0):
    return {
        "e": Record(name="e", value=exact, unit="B", kind="exact"),
        "r": Record(name="r", value=ratio, unit="x", kind="ratio"),
    }


def notebook_of(records, machine=MACHINE, lab="00"):
    """An executed copy as papermill and widgets leave it."""
    about = {METADATA_KEY: {"lab": lab, "machine": machine}}
    banner = Machine.from_dict(machine).describe()
    view = {WIDGET: {"model_id": "0a1b"}, "text/plain": "Panel"}
    cells = [
        new_markdown_cell(f"# {lab} Ask a question", id="title", metadata={"collapsed": True, "tags": []}),
        new_code_cell("lab = Lab()", id="session"),
        new_code_cell("panel", id="panel", metadata={"jupyter": {"source_hidden": True}}),
        new_code_cell("record()", id="record", metadata={"tags": ["hard"]}),
        new_code_cell("lab.say('It is {e}.')", id="say"),
        new_code_cell("mine", id="mine", metadata={"tags": ["your-model"]}),
        new_code_cell("lab.summary()", id="summary"),
    ]
    outputs = [
        [new_output("display_data", {"text/plain": f"{banner} (measured)"}, metadata=about)],
        [new_output("display_data", view)],
        [new_output("display_data", data, metadata=meta) for data, meta in (r.bundle() for r in records.values())],
        [new_output("display_data", {SAY_MIME: {"text": "It is {e}."}, "text/markdown": "It is 4.00 KiB."})],
        [new_output("stream", name="stdout", text="the reader's own")],
        [new_output("display_data", {SUMMARY_MIME: {"lab": lab}, "text/plain": "with my guess"})],
    ]
    for count, (cell, found) in enumerate(zip(cells[1:], outputs, strict=True), start=1):
        cell |= {"outputs": found, "execution_count": count}
        cell["metadata"] |= {"papermill": {"duration": 1.5}, "execution": {"iopub.execute_input": "2026-11-30"}}
    found = new_notebook(cells=cells)
    found["metadata"] = nbformat.from_dict(
        {
            METADATA_KEY: {"seconds": 20, "hardware": "CPU"},
            "papermill": {"start_time": "2026"},
            "widgets": {"application/vnd.jupyter.widget-state+json": {"state": {"0a1b": {}}}},
            "kernelspec": {"name": "mine", "display_name": "Mine"},
            "language_info": {"name": "python", "version": "3.11.7"},
        }
    )
    return found


class Checkout:
    """A checkout with labs that ran."""

    def __init__(self, root):
        self.root, self.build, self.published = root, root / "build", root / "labsupport" / "published"
        for folder in (self.build, self.published, root / "notebooks"):
            folder.mkdir(parents=True)
        (root / "README.md").write_text(README)

    def book(self, lab="00"):
        return Book(lab, self.root / "notebooks" / f"{lab}_lab.ipynb")

    def run(self, lab="00", *, machine=MACHINE, status="ok", parameters=None, records=None):
        records = records_of() if records is None else records
        executed, book = notebook_of(records, machine, lab), self.book(lab)
        if not book.path.exists():
            nbformat.write(executed, book.path)
        nbformat.write(executed, executed_copy(book, self.build))
        about = machine | {"present": ["compiler"]}
        more = {"parameters": parameters or {}, "machine": about, "records": records, "error": "no"}
        run = Run(lab=lab, status=status, seconds=1.0, peak_bytes=1, **more)
        result_file(book, self.build).write_text(run.to_json())

    def staged(self, *labs, **how):
        return staged(self.root, [self.book(lab) for lab in labs or ["00"]], self.build, self.machines, **how)

    def publish(self, *labs, **how):
        return write_all(self.staged(*labs, **how))

    @property
    def machines(self):
        return load_all(self.published)

    def entry(self, name, lab="00"):
        return self.machines["one"].labs[lab][name]

    def files(self):
        return {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    found = Checkout(tmp_path)
    monkeypatch.setattr(release, "_values_file", lambda family: found.published / f"{family}.json")
    return found


RATIOS = st.lists(st.floats(0.01, 1000), min_size=5, max_size=12)


@settings(deadline=None)
@given(RATIOS)
def test_a_band_holds_every_value_seen_and_a_tenth_beyond(values):
    low, high = band_of(values)
    assert low <= min(values) / 1.249 and max(values) * 1.249 <= high  # 1.25, in four digits


@settings(deadline=None)
@given(RATIOS)
def test_a_band_is_wider_than_the_range_by_that_range_and_blind_to_order(values):
    low, high = band_of(values)
    assert (low, high) == band_of(sorted(values, reverse=True))
    width = max(values) / min(values)
    assert high / low == pytest.approx(width * max(1.25, width) ** 2, rel=2e-3)


@pytest.mark.parametrize("count", range(5))
def test_a_band_needs_five_runs(count):
    with pytest.raises(ValueError, match=f"at least 5 runs, got {count}"):
        band_of([1.0] * count)


def test_a_run_becomes_the_published_one(checkout):
    checkout.run()
    assert set(checkout.publish()) == {
        checkout.book().path,
        checkout.root / "README.md",
        checkout.published / "one.json",
    }
    assert {name: checkout.entry(name).record for name in "er"} == records_of()
    assert checkout.machines["one"].machine == MACHINE  # what is present is the run's, not the machine's
    assert checkout.book().metadata["published"] == "one"
    assert "[Ask a question](notebooks/00_lab.ipynb)" in (checkout.root / "README.md").read_text()


def test_publishing_the_same_run_twice_changes_nothing(checkout):
    checkout.run()
    checkout.publish()
    assert checkout.publish() == []
    checkout.run()
    assert checkout.publish() == []


def test_a_second_run_changes_its_values_and_no_more(checkout):
    checkout.run()
    checkout.publish()
    before = checkout.book().path.read_text().splitlines()
    checkout.run(records=records_of(ratio=2.5))
    checkout.publish()
    after = checkout.book().path.read_text().splitlines()
    assert len(before) == len(after)
    assert all("2.5" in new for old, new in zip(before, after, strict=True) if old != new)


REFUSED = [
    ({"status": "error"}, "ended with error \\(no\\): only a whole run"),
    ({"parameters": {"workers": 2}}, "ran with {'workers': 2}: only a run with its defaults"),
    ({"records": {}}, "recorded nothing"),
]


@pytest.mark.parametrize("how, why", REFUSED, ids=["status", "parameters", "nothing recorded"])
def test_what_cannot_be_published_is_refused_with_its_reason(checkout, how, why):
    checkout.run(**how)
    before = checkout.files()
    with pytest.raises(UsageError, match=f"lab 00.*{why}"):
        checkout.publish()
    assert checkout.files() == before


def test_a_lab_that_was_not_run_is_refused(checkout):
    with pytest.raises(UsageError, match="lab 00 was not run: labs run 00"):
        checkout.staged()


def test_a_lab_that_has_changed_since_its_run_is_refused(checkout):
    checkout.run()
    path = checkout.book().path
    path.write_text(path.read_text().replace("Ask a question", "Ask another"))
    with pytest.raises(UsageError, match="lab 00 has changed since it ran: labs run 00"):
        checkout.staged()


def test_one_refused_lab_stops_all(checkout):
    checkout.run()
    checkout.run("01", status="timeout")
    before = checkout.files()
    with pytest.raises(UsageError, match="lab 01"):
        checkout.publish("00", "01")
    assert checkout.files() == before


def test_a_cell_that_is_not_plain_python_is_refused(checkout):
    checkout.run()
    for path in (checkout.book().path, executed_copy(checkout.book(), checkout.build)):
        path.write_text(path.read_text().replace("lab = Lab()", "%matplotlib inline"))
    with pytest.raises(UsageError, match="not plain Python"):
        checkout.staged()


def test_a_band_is_set_by_rebase_and_belongs_to_its_record(checkout):
    checkout.run()
    checkout.publish(bands={"00": {"r": (1.5, 3.0)}, "01": {"e": (1.0, 2.0)}})
    assert (checkout.entry("r").band, checkout.entry("e").band) == ((1.5, 3.0), None)


@pytest.mark.parametrize("ratio", [1.5, 2.9, 3.0])
def test_a_band_outlives_a_run_that_lies_in_it(checkout, ratio):
    checkout.run()
    checkout.publish(bands={"00": {"r": (1.5, 3.0)}})
    checkout.run(records=records_of(ratio=ratio))
    checkout.publish()
    assert (checkout.entry("r").record.value, checkout.entry("r").band) == (ratio, (1.5, 3.0))


@pytest.mark.parametrize("ratio", [1.49, 3.1])
@pytest.mark.parametrize("bands", [None, {"00": {"e": (1.0, 2.0)}, "01": {"r": (1.0, 9.0)}}], ids=["none", "others"])
def test_a_ratio_outside_its_band_is_refused_with_its_old_and_new_value(checkout, ratio, bands):
    checkout.run()
    checkout.publish(bands={"00": {"r": (1.5, 3.0)}})
    checkout.run(records=records_of(ratio=ratio))
    before = checkout.files()
    told = rf"lab 00: outside its band: r \(was r = 2\.00x .*, is r = {ratio}.*x .*\)\. .*--rebase 6"
    with pytest.raises(UsageError, match=told):
        checkout.publish(bands=bands)
    assert checkout.files() == before


def test_a_ratio_outside_its_band_is_published_with_a_new_one(checkout):
    checkout.run()
    checkout.publish(bands={"00": {"r": (1.5, 3.0)}})
    checkout.run(records=records_of(ratio=5.0))
    checkout.publish(bands={"00": {"r": (4.0, 6.0)}})
    assert (checkout.entry("r").record.value, checkout.entry("r").band) == (5.0, (4.0, 6.0))


def test_the_band_of_another_machine_refuses_nothing(checkout):
    checkout.run()
    checkout.publish(bands={"00": {"r": (1.5, 3.0)}})
    checkout.run(machine=MACHINE | {"family": "two"}, records=records_of(ratio=5.0))
    checkout.publish(values_only=True)
    assert checkout.machines["two"].labs["00"]["r"].band is None


def test_a_new_band_takes_the_place_of_the_old(checkout):
    checkout.run()
    checkout.publish(bands={"00": {"r": (1.5, 3.0)}})
    checkout.publish(bands={"00": {"r": (1.0, 9.0)}})
    assert checkout.entry("r").band == (1.0, 9.0)


def test_values_only_leaves_the_notebook(checkout):
    checkout.run()
    before = checkout.book().path.read_bytes()
    checkout.publish(values_only=True)
    assert checkout.book().path.read_bytes() == before
    assert set(checkout.machines) == {"one"}


def test_a_second_machine_stands_beside_the_first(checkout):
    checkout.run()
    checkout.publish()
    first = (checkout.published / "one.json").read_bytes()
    checkout.run(machine=MACHINE | {"family": "two"})
    checkout.publish(values_only=True)
    assert (checkout.published / "one.json").read_bytes() == first
    assert "4 on `one`, `two`" in (checkout.root / "README.md").read_text()


def test_values_only_is_refused_on_the_machine_of_the_notebook(checkout):
    checkout.run()
    checkout.publish()
    checkout.run(records=records_of(ratio=2.5))
    with pytest.raises(UsageError):
        checkout.publish(values_only=True)


def test_other_labs_of_the_machine_keep_their_values(checkout):
    checkout.run()
    checkout.publish()
    checkout.run("01", records=records_of(exact=1))
    checkout.publish("01")
    assert checkout.entry("e").record.value == 4096
    assert checkout.entry("e", "01").record.value == 1


@pytest.mark.parametrize("newer", [{"os": "Linux 7"}, {"memory_bytes": 2**35}, {"python": "3.11.8"}], ids=str)
def test_publishing_another_lab_leaves_the_first_consistent(checkout, newer):
    checkout.run()
    checkout.publish()
    checkout.run("01", machine=MACHINE | newer)
    checkout.publish("01")
    assert replay.inconsistencies(checkout.book().notebook, "00", "one", checkout.machines["one"]) == []


def test_only_what_changed_is_written_and_told(tmp_path):
    same, new, deep = tmp_path / "same", tmp_path / "new", tmp_path / "a" / "b" / "deep"
    same.write_text("text")
    written = same.stat().st_mtime_ns
    assert write_all({same: "text", new: "µ\n", deep: ""}) == [new, deep]
    assert (same.stat().st_mtime_ns, new.read_bytes(), deep.read_text()) == (written, "µ\n".encode(), "")
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"same", "new", "deep"}


@pytest.mark.parametrize("failing", range(3))
def test_where_one_file_cannot_be_written_nothing_changes(tmp_path, monkeypatch, failing):
    paths = [tmp_path / name for name in "abc"]
    for path in paths[:2]:
        path.write_text("old")
    open_ = Path.open

    def full(path, *args, **kwargs):
        if path.name == f"{'abc'[failing]}.new":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return open_(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(UsageError, match="nothing was published: .*No space left on device"):
        write_all(dict.fromkeys(paths, "new"))
    monkeypatch.undo()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old", "b": "old"}


def test_a_disk_that_is_full_only_at_the_end_changes_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(release.os, "fsync", full)
    with pytest.raises(UsageError, match="nothing was published: .*a: No space"):
        write_all({tmp_path / "a": "new"})
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_where_one_file_cannot_be_put_in_place_nothing_changes(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()  # a folder where a file is to be
    with pytest.raises(UsageError):
        write_all({tmp_path / "a": "new", tmp_path / "b": "new"})
    assert (tmp_path / "a").read_text() == "old"


def test_the_table_goes_between_its_marks_and_nowhere_else():
    assert with_table(README, "| new |") == README.replace("old", "| new |")
    assert with_table(with_table(README, "| new |"), "| new |") == with_table(README, "| new |")


@pytest.mark.parametrize("text", ["", "# Labs\n", release.TABLE[0], release.TABLE[1]], ids=repr)
def test_a_text_without_both_marks_stays_as_it_is(text):
    assert with_table(text, "| new |") == text


def test_the_table_of_labs_has_a_line_a_lab(checkout):
    checkout.run()
    nbformat.write(new_notebook(), checkout.book("01").path)
    machine = Published(MACHINE, {"00": {"e": Entry(records_of()["e"], "0")}})
    lines = labs_table([checkout.book(), checkout.book("01")], {"one": machine, "none": Published(MACHINE, {})})
    assert lines.splitlines()[2:] == [
        "| 00 | [Ask a question](notebooks/00_lab.ipynb) | 20 s | CPU | 1 on `one` |",
        "| 01 | [01_lab](notebooks/01_lab.ipynb) | ? s | CPU or GPU | 0 on no machine yet |",
    ]


@pytest.fixture
def normal():
    published = Published(MACHINE, {"00": {n: Entry(record, "0") for n, record in records_of().items()}})
    return lambda notebook=None: replay.normalised(notebook or notebook_of(records_of()), "00", "one", published)


@pytest.mark.parametrize("trace", ["papermill", "widget-", "2026", "iopub", "collapsed", '3.11.7"}', "Mine", "0a1b"])
def test_a_committed_notebook_has_no_trace_of_how_it_was_run(normal, trace):
    assert trace in json.dumps(notebook_of(records_of()))
    assert trace not in json.dumps(normal())


def test_a_committed_notebook_has_its_cells_tags_and_outputs(normal):
    cells = {cell["id"]: cell for cell in normal()["cells"]}
    assert [cell["source"] for cell in cells.values()] == [c["source"] for c in notebook_of({})["cells"]]
    assert cells["title"]["metadata"] == {} and cells["record"]["metadata"] == {"tags": ["hard"]}
    assert cells["panel"]["metadata"] == {"jupyter": {"source_hidden": True}}
    assert cells["panel"]["outputs"][0]["data"] == {"text/plain": "Panel"}
    assert [len(cells[name]["outputs"]) for name in ("session", "record", "say")] == [1, 2, 1]


def test_the_readers_own_output_and_guesses_are_not_committed(normal):
    cells = {cell["id"]: cell for cell in normal()["cells"]}
    assert cells["mine"]["outputs"] == []
    assert "my guess" not in json.dumps(cells["summary"])
    assert "4.00 KiB" in cells["summary"]["outputs"][0]["data"]["text/plain"]


def test_normalising_again_changes_nothing_and_the_given_notebook_stays(normal):
    executed = notebook_of(records_of())
    before = json.dumps(executed)
    once = normal(executed)
    assert json.dumps(executed) == before
    assert normal(once) == once
    assert replay.notebook_text(normal(once)) == replay.notebook_text(once)


def test_a_normalised_run_agrees_with_the_published_values_and_with_itself(normal):
    published = Published(MACHINE, {"00": {n: Entry(record, "0") for n, record in records_of().items()}})
    assert replay.inconsistencies(normal(), "00", "one", published) == []
    assert replay.differences(normal(), normal()) == []


def test_a_published_file_comes_back_whole():
    record = Record(name="r", value=2.0, kind="ratio", n=6, interval=(1.5, 2.5), spread=0.1, at_least=1.5, needs="cuda")
    one = Published(MACHINE, {"00": {"r": Entry(record, "0a", (1.0, 3.0))}, "01": {}})
    assert Published.from_json(one.to_json(), "here") == one
    assert (one.profile, one.torch_minor, one.records("00"), one.records("02")) == ("cpu", "2.14", {"r": record}, {})


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"machine": {}, "labs": {}}', '{"machine": {"profile": "cpu", "torch": 2}, "labs": {}}']
    + [
        json.dumps({"machine": MACHINE, "labs": {"00": {"e": entry}}})
        for entry in (
            {},
            {"value": 1},
            {"hash": "0"},
            {"value": "1", "hash": "0"},
            [],
            {"value": 1, "hash": "0", "band": 1},
        )
    ],
)
def test_a_spoiled_published_file_is_named_with_what_to_do(tmp_path, text):
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(PublishedError, match=r"one\.json is not a published file .*git checkout.*labs publish"):
        load_all(tmp_path)


def test_a_published_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "one.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PublishedError, match=r"one\.json cannot be read"):
        load_all(tmp_path)
