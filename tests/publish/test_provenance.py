"""What made a number: which edits make which records stale, and which make none."""

import ast
import json
import shutil
from pathlib import Path

import pytest

import labsupport
from labsupport.publish.provenance import dump, record_hashes
from labsupport.publish.records import Record

ROOT = Path(labsupport.__file__).parents[1]
UNHASHED = {"setup", "predict", "exercise", "solution", "your-model"}

# A small package: b leans on machine, machine on units; what a and b offer can be had from three places.
PACKAGE = {
    "__init__.py": '_EXPORTS = {"Lab": "labsupport.publish.lab", "of_a": "labsupport.measure.a"}\n',
    "machine.py": "from labsupport.units import scale\n\n\ndef threads():\n    return scale(2)\n",
    "units.py": "def scale(x):\n    return 1 * x\n",
    "cli.py": "code = 1\n",
    "publish/__init__.py": "",
    "publish/lab.py": "class Lab:\n    code = 1\n",
    "show/__init__.py": "from labsupport.show.plots import plot\n",
    "show/plots.py": "def plot(x):\n    return 1\n",
    "measure/__init__.py": "from labsupport.measure.a import of_a\nfrom .b import of_b as of_b\n",
    "measure/a.py": '"""A."""\n\n\ndef of_a(x):\n    """Of a."""\n    return 1  # one\n',
    "measure/b.py": "from ..machine import threads\n\n\ndef of_b(x):\n    return 1 + threads()\n",
    "train/__init__.py": "",
    "train/data.py": "def load(x):\n    return 1\n",
}
IMPORTS = """import torch
from labsupport import Lab, of_a
from labsupport.measure import of_b
from labsupport.measure.a import of_a as direct_a
from labsupport.show import plot
from labsupport.train import data
"""
# Cell -> source; records are named after the cell that makes them.
CELLS = {
    "setup": "import labsupport",
    "imports": IMPORTS,
    "session": 'lab = Lab("00")',
    "parameters": "size = 3",
    "helper": 'def helper(x):\n    """Help."""\n    return of_b(x)',
    "predict": 'lab.predict("exported", guess=None)',
    "exported": 'lab.record("exported", of_a(size))',
    "direct": 'reading = direct_a(size)\nlab.record("direct", reading)\nlab.say("It is {direct}.")',
    "measure": "value = helper(size)",
    "helped": 'lab.record("helped", value)',
    "re_exported": 'lab.record("re_exported", of_b(size))',
    "by_module": 'torch.manual_seed(0)\nlab.record("by_module", data.load(size))',
    "drawn": 'plot(size)\nlab.record("drawn", 1)',
    "plain": 'lab.record("plain", size)',
    "cores": 'lab.record("cores", lab.machine.cores)',
    "exercise": 'answer = None\nlab.check("exercise", answer, 1)',
    "your-model": "my_model = None",
    "solution": "answer = 1",
}
RECORDS = ("exported", "direct", "helped", "re_exported", "by_module", "drawn", "plain", "cores")


def cell_of(source, name="", record=""):
    outputs = []
    if record:
        data, metadata = Record(name=record, value=1).bundle()
        outputs = [{"output_type": "display_data", "data": data, "metadata": metadata}]
    tags = [name] if name in UNHASHED | {"parameters"} else []
    return {"cell_type": "code", "metadata": {"tags": tags}, "source": source, "outputs": outputs}


def notebook_of(cells, records=RECORDS):
    return {"cells": [cell_of(source, name, name if name in records else "") for name, source in cells.items()]}


def small(*sources):
    """A notebook whose last cell makes the record `a`; the session is there."""
    first = cell_of('import labsupport\nfrom labsupport import Lab\nlab = Lab("00")')
    return {"cells": [first, *map(cell_of, sources[:-1]), cell_of(sources[-1], record="a")]}


def changed(before, after):
    return {name for name in before | after if before.get(name) != after.get(name)}


@pytest.fixture
def package(tmp_path):
    for name, text in PACKAGE.items():
        path = tmp_path / "labsupport" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "labsupport"


@pytest.fixture
def stale(package):
    """Which records an edit of one file makes stale, of the small notebook or another."""

    def after(file, old, new, notebook=None):
        notebook = notebook or notebook_of(CELLS)
        before, text = record_hashes(notebook, package), (package / file).read_text()
        assert text.count(old) == 1, (file, old)
        (package / file).write_text(text.replace(old, new))
        return changed(before, record_hashes(notebook, package))

    return after


@pytest.fixture
def stale_by_cell(package):
    """Which records an edit of one cell makes stale."""

    def after(name, old, new):
        assert CELLS[name].count(old) == 1
        edited = CELLS | {name: CELLS[name].replace(old, new)}
        return changed(record_hashes(notebook_of(CELLS), package), record_hashes(notebook_of(edited), package))

    return after


def test_every_record_has_a_hash_and_the_same_one_each_time(package):
    found = record_hashes(notebook_of(CELLS), package)
    assert set(found) == set(RECORDS)
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in found.values())
    assert found == record_hashes(notebook_of(CELLS), package)


LEAN_ON_B = {"helped", "re_exported"}


@pytest.mark.parametrize(
    "file, names",
    [
        ("measure/a.py", {"exported", "direct"}),
        ("measure/b.py", LEAN_ON_B),
        ("machine.py", LEAN_ON_B | {"cores"}),
        ("units.py", LEAN_ON_B | {"cores"}),
        ("train/data.py", {"by_module"}),
        ("publish/lab.py", set()),
        ("show/plots.py", set()),
        ("cli.py", set()),
    ],
)
def test_a_changed_line_of_a_module_makes_stale_what_leans_on_it(stale, file, names):
    old = "scale(2)" if file == "machine.py" else "1"
    assert stale(file, old, f"7 + {old}") == names


@pytest.mark.parametrize("file", ["__init__.py", "measure/__init__.py", "train/__init__.py", "unheard_of.py"])
def test_a_new_line_where_names_only_pass_through_makes_nothing_stale(package, file):
    before = record_hashes(notebook_of(CELLS), package)
    path = package / file
    path.write_text((path.read_text() if path.exists() else "") + "\nunrelated = 1\n")
    assert record_hashes(notebook_of(CELLS), package) == before


def test_a_name_that_comes_from_another_module_makes_its_records_stale(package, stale):
    (package / "measure" / "c.py").write_text("def of_b(x):\n    return 3\n")
    assert stale("measure/__init__.py", "from .b import", "from .c import") == LEAN_ON_B


def test_an_export_that_comes_from_another_module_makes_its_records_stale(stale):
    assert stale("__init__.py", "labsupport.measure.a", "labsupport.measure.b") == {"exported"}


@pytest.mark.parametrize(
    "old, new",
    [("# one", "# the first"), ('"""Of a."""', '"""Changed."""'), ('"""A."""\n', "\n\n"), ("return 1  ", "return (1)")],
    ids=["comment", "docstring", "blank lines", "brackets"],
)
def test_how_a_module_reads_is_not_what_it_does(stale, old, new):
    assert stale("measure/a.py", old, new) == set()


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("helper", '"""Help."""', '"""Help a lot."""'),
        ("helper", "return", "# so\n\n    return"),
        ("direct", "reading = ", "# a reading\n\nreading  =  "),
        ("direct", "It is", "It was"),
        ("direct", '\nlab.say("It is {direct}.")', ""),
        ("direct", "lab.say", 'lab.predict("plain", 3)\nlab.summary()\nlab.check("x", 1, 1)\nlab.say'),
        ("predict", "None", "3"),
        ("exercise", "None", "3"),
        ("your-model", "None", "torch.nn.Linear(1, 1)"),
        ("solution", "1", "2"),
        ("setup", "import", "import sys\nimport"),
    ],
)
def test_comments_sentences_guesses_and_answers_make_no_number(stale_by_cell, name, old, new):
    assert stale_by_cell(name, old, new) == set()


@pytest.mark.parametrize("tag", sorted(UNHASHED))
@pytest.mark.parametrize("place", [0, 6])
def test_a_new_cell_with_such_a_tag_makes_nothing_stale(package, tag, place):
    cells = list(CELLS.items())
    more = notebook_of(CELLS)
    more["cells"].insert(place, cell_of("anything = 1", tag))
    assert record_hashes(more, package) == record_hashes(notebook_of(dict(cells)), package)


def test_markdown_makes_no_number(package):
    more = notebook_of(CELLS)
    more["cells"].insert(3, {"cell_type": "markdown", "metadata": {}, "source": "%magic of 12 ms"})
    assert record_hashes(more, package) == record_hashes(notebook_of(CELLS), package)


@pytest.mark.parametrize("name", ["session", "parameters", "helper", "direct", "measure", "plain"])
def test_a_changed_cell_makes_stale_its_own_record_and_those_after_it(stale_by_cell, name):
    order = list(CELLS)
    old = CELLS[name].splitlines()[-1] if name != "direct" else "reading = direct_a(size)"
    later = {record for record in RECORDS if order.index(record) >= order.index(name)}
    assert stale_by_cell(name, old, f"{old}; other = 1") == later


def test_an_attribute_of_the_session_that_is_no_reading_leans_on_no_module(stale):
    notebook = small('lab.record("a", lab.scale(cpu=1, cuda=2))')
    assert stale("machine.py", "scale(2)", "scale(3)", notebook) == set()


def test_a_local_import_in_a_function_counts(stale):
    notebook = small("def f():\n    from labsupport.train.data import load\n    return load(1)", 'lab.record("a", f())')
    assert stale("train/data.py", "1", "2", notebook) == {"a"}


@pytest.mark.parametrize(
    "change",
    ["state.append(load(1))", "state = load(1)", "for _ in range(2):\n    state.append(load(1))", "state += load(1)"],
)
def test_a_cell_that_binds_or_changes_a_name_leads_to_its_records(stale, change):
    notebook = small("from labsupport.train.data import load\nstate = []", change, 'lab.record("a", len(state))')
    assert stale("train/data.py", "1", "2", notebook) == {"a"}


@pytest.mark.parametrize("change", ["state[0] = load(1)", "state.x = load(1)", "state[0] += load(1)"])
def test_a_cell_that_stores_into_a_name_leads_to_its_records(stale, change):
    notebook = small("from labsupport.train.data import load\nstate = make()", change, 'lab.record("a", state.x)')
    assert stale("train/data.py", "1", "2", notebook) == {"a"}


@pytest.mark.parametrize("change", ["load(state)", "data.load(state, 1)", "load(x=state)"])
def test_a_cell_that_hands_a_name_to_a_call_leads_to_its_records(stale, change):
    imports = "from labsupport.train import data\nfrom labsupport.train.data import load\nstate = make()"
    assert stale("train/data.py", "1", "2", small(imports, change, 'lab.record("a", state.x)')) == {"a"}


def test_what_a_helper_reads_leads_to_a_record_also_when_bound_after_the_helper(stale):
    imports = "from labsupport.train.data import load"
    notebook = small(imports, "def f():\n    return state", "state = load(1)", 'lab.record("a", f())')
    assert stale("train/data.py", "1", "2", notebook) == {"a"}


@pytest.mark.parametrize("local", ["def g():\n    x = load(1)\n    return x", "y = [load(x) for x in (1, 2)]"])
def test_a_local_name_is_not_the_name_outside(stale, local):
    notebook = small("from labsupport.train.data import load", "x = 1", local, 'lab.record("a", x)')
    assert stale("train/data.py", "1", "2", notebook) == set()


def test_two_imports_of_whole_modules_both_count(stale):
    notebook = small(
        "import labsupport.train.data", "import labsupport.units", 'lab.record("a", labsupport.train.data.load(1))'
    )
    assert stale("train/data.py", "1", "2", notebook) == {"a"}


@pytest.mark.parametrize("name", ["labsupport.of_a(1)", "labsupport.measure.a.of_a(1)"])
def test_an_attribute_of_the_package_is_followed_to_its_module(stale, name):
    assert stale("measure/a.py", "return 1", "return 2", small(f'lab.record("a", {name})')) == {"a"}


@pytest.mark.parametrize("source", ["", "# only a comment", 'lab.say("A sentence.")', '"""Text."""'], ids=repr)
def test_a_new_cell_that_does_nothing_makes_nothing_stale(package, source):
    before, after = small("x = 1", 'lab.record("a", x)'), small("x = 1", source, 'lab.record("a", x)')
    assert record_hashes(after, package) == record_hashes(before, package)


@pytest.mark.parametrize("source", ["%matplotlib inline", "!nvidia-smi", "x = = 1", "%%bash\nls"])
def test_a_cell_that_is_not_plain_python_is_named(package, source):
    with pytest.raises(ValueError, match=r"In \[2\] is not plain Python"):
        record_hashes(small(source, 'lab.record("a", 1)'), package)


@pytest.mark.parametrize("tag", ["your-model", "exercise", ""])
def test_magic_that_leads_to_no_record_is_tolerated(package, tag):
    notebook = small('lab.record("a", 1)')
    notebook["cells"].append(cell_of("!nvidia-smi", tag))  # after the last record, or the reader's own
    assert set(record_hashes(notebook, package)) == {"a"}


@pytest.mark.parametrize("tag", sorted(UNHASHED))
def test_a_record_from_a_cell_that_makes_no_number_is_refused(package, tag):
    with pytest.raises(ValueError, match="a"):
        record_hashes({"cells": [cell_of('lab.record("a", 1)', tag, record="a")]}, package)


SYNTAX = '''
import torch
from labsupport.units import scale


@torch.no_grad()
async def f(a, /, b: int = 1, *args, c=None, **kwargs) -> str:
    """Gone."""
    match a:
        case {"x": [1, *rest], **others} if rest:
            return f"{a!r:>8} {b=} {{c}} \\u00b5"
        case str() | None:
            await g(lambda x, *, y=...: (x, y, -1e400, 0x10, b"b", 2j, "two" "parts"))
    with open(a) as one, one as two:
        del two[1:, ::2]
    return [x async for x in a if (z := x)] or {**kwargs, 1: {2}}


class C(dict, metaclass=type):
    """Only this."""


try:
    global g
    assert not g <= 1 < 2, "no"
except* (ValueError, TypeError) as e:
    raise e from None
finally:
    while True:
        break
lab.record("a", scale(3))
'''


def test_the_hash_is_the_same_on_every_python(package):
    assert record_hashes(small(SYNTAX), package) == {"a": "69dae587c5d69822"}


def test_an_empty_part_of_an_f_string_is_nothing():
    tree = ast.parse('f"{x:>{y}}"')
    before = dump(tree)
    tree.body[0].value.values[0].format_spec.values.append(ast.Constant(""))
    assert dump(tree) == before


def test_a_dump_is_ascii():
    assert dump(ast.parse('x = "\N{MICRO SIGN}s"')).isascii()  # 3.11 writes U+1FAE8 as an escape, 3.12 as itself


@pytest.mark.parametrize(
    "one, other",
    [("x = None", "x = ..."), ("a[1:]", "a[:1]"), ("x = 1", "x = 1.0"), ("x = True", "x = 1"), ("f(a=1)", "f(b=1)")],
)
def test_what_means_something_else_has_another_dump(one, other):
    assert dump(ast.parse(one)) != dump(ast.parse(other))


LAB_00 = json.loads((ROOT / "notebooks" / "00_meet_your_machine.ipynb").read_text(encoding="utf-8"))


@pytest.fixture
def stale_in_lab_00(tmp_path):
    """Which records of the real lab 00 one more line in a module makes stale."""
    shutil.copytree(ROOT / "labsupport", tmp_path / "labsupport", ignore=shutil.ignore_patterns("__pycache__"))
    before = record_hashes(LAB_00, tmp_path / "labsupport")

    def after(file):
        with (tmp_path / "labsupport" / file).open("a") as module:
            module.write("\none_more_line = 1\n")
        return changed(before, record_hashes(LAB_00, tmp_path / "labsupport"))

    return after


CEILINGS = {"matmul_fp32", "matmul_bf16", "matmul_fp16", "host_copy_bandwidth", "disk_read"}
RATIOS = {"wait_over_compute", "free_speedup", "fed_speedup", "restart_slowdown"}
# Recorded in the same cell as one of these ratios, and a cell is the finest grain there is.
TIMED = RATIOS | {"idle_share", "idle_cost", "starved_samples_per_s", "fed_samples_per_s"}
LOOP = TIMED | {"losses_that_differ", "loss_after_8_steps", "batch_bytes", "parameters"}


@pytest.mark.parametrize(
    "file, names",
    [
        ("measure/roofline.py", CEILINGS),
        ("train/data.py", LOOP),
        ("measure/statistics.py", RATIOS | {"bf16_speedup"}),
        ("machine.py", CEILINGS | {"bf16_speedup", "cores", "memory_allowed"}),
        ("units.py", CEILINGS | {"bf16_speedup", "cores", "memory_allowed"}),
        ("publish/lab.py", set()),
        ("show/plots.py", set()),
        ("diagnose/experiments.py", set()),
    ],
)
def test_a_changed_instrument_makes_stale_what_leans_on_it_in_lab_00(stale_in_lab_00, file, names):
    assert stale_in_lab_00(file) == names
