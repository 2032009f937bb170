"""The labs of a checkout: finding it, choosing from it, and the parameters of a lab."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labsupport.publish import catalogue
from labsupport.publish.catalogue import Book, UsageError, all_books, find_root, parse_parameters, select

DEFAULTS = 'price = 2.0\nworkers = 4\nfast = True\nmodel = "mlp"\nsizes = [1, 2]\nseed = None\nshift = -1\n'


def write_lab(root, stem, parameters="", title="A question", metadata=None):
    cells = [new_markdown_cell(f"Before.\n# {stem[:2]} {title}\n## More")]
    if parameters:
        cells.append(new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    found = new_notebook(cells=cells, metadata={"labsupport": metadata} if metadata else {})
    nbformat.write(found, root / "notebooks" / f"{stem}.ipynb")


@pytest.fixture
def root(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "labsupport"\n')
    for stem in ("01_second", "00_first", "10_third"):
        write_lab(tmp_path, stem, DEFAULTS if stem != "10_third" else "workers = 1")
    (tmp_path / "notebooks" / "scratch.ipynb").write_text("")
    return tmp_path


@pytest.fixture
def lab(root):
    return select(root, ["00"])


@pytest.mark.parametrize("below", [".", "notebooks", "a/b/c"])
def test_the_root_is_found_from_anywhere_below(root, below):
    (root / below).mkdir(parents=True, exist_ok=True)
    assert find_root(root / below) == root


def test_the_root_is_found_from_the_current_folder(root, monkeypatch):
    monkeypatch.chdir(root / "notebooks")
    assert find_root() == root


def test_elsewhere_it_is_the_checkout_of_this_package(tmp_path, root, monkeypatch):
    monkeypatch.setattr(catalogue, "__file__", str(root / "labsupport" / "publish" / "catalogue.py"))
    assert find_root(tmp_path.parent) == root


@pytest.mark.parametrize("project", [None, '[project]\nname = "other"\n'], ids=["none", "another project"])
def test_without_a_checkout_it_says_where_it_looked(tmp_path, monkeypatch, project):
    (tmp_path / "notebooks").mkdir()
    if project:
        (tmp_path / "pyproject.toml").write_text(project)
    monkeypatch.setattr(catalogue, "__file__", "/nowhere/a/b/catalogue.py")
    with pytest.raises(UsageError, match=f"no labs in {tmp_path} or above it: clone the project"):
        find_root(tmp_path)


def test_all_books_are_the_numbered_notebooks_in_order(root):
    assert [book.id for book in all_books(root)] == ["00", "01", "10"]


@pytest.mark.parametrize(
    "wanted, ids",
    [
        ([], ["00", "01", "10"]),
        (["00"], ["00"]),
        (["0"], ["00"]),
        (["1"], ["01"]),
        (["10"], ["10"]),
        (["00_first"], ["00"]),
        (["10", "0", "00"], ["00", "10"]),
    ],
    ids=str,
)
def test_labs_are_chosen_by_number_or_name_once_and_in_order(root, wanted, ids):
    assert [book.id for book in select(root, wanted)] == ids


@pytest.mark.parametrize("wanted", [["7"], ["00", "first"], [""], ["00_first.ipynb"]], ids=str)
def test_an_unknown_lab_is_named_with_those_that_are_there(root, wanted):
    with pytest.raises(UsageError, match=f"no lab {wanted[-1]}; there are 00, 01, 10"):
        select(root, wanted)


def test_a_book_says_of_itself_what_its_metadata_says(root):
    write_lab(root, "02_quick", metadata={"seconds": 5, "timing": False})
    quick, other = Book("02", root / "notebooks" / "02_quick.ipynb"), select(root, ["00"])[0]
    assert (quick.timing, quick.metadata["seconds"], quick.title) == (False, 5, "A question")
    assert (other.timing, other.metadata, Book("10", root / "notebooks" / "10_third.ipynb").parameters) == (
        True,
        {},
        {"workers": 1},
    )


def test_a_book_without_heading_or_parameters_has_its_files_name_and_none(root):
    nbformat.write(new_notebook(), root / "notebooks" / "03_bare.ipynb")
    book = Book("03", root / "notebooks" / "03_bare.ipynb")
    assert (book.title, book.parameters) == ("03_bare", {})


LIST = pytest.param("[]")


@pytest.mark.parametrize("text", ["", "{", "{}", '{"nbformat": 4, "nbformat_minor": 5}', LIST], ids=repr)
def test_a_file_that_is_no_notebook_is_named(root, text):
    path = root / "notebooks" / "04_broken.ipynb"
    path.write_text(text)
    with pytest.raises(UsageError, match="04_broken.ipynb cannot be read as a notebook"):
        _ = Book("04", path).title


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(UsageError, match="05_gone.ipynb cannot be read"):
        _ = Book("05", tmp_path / "05_gone.ipynb").notebook


@pytest.mark.parametrize(
    "pair, name, value",
    [
        ("price=3.2", "price", 3.2),
        ("price=3", "price", 3.0),
        ("price=-1e3", "price", -1000.0),
        ("workers=8", "workers", 8),
        ("shift=-2", "shift", -2),
        ("fast=False", "fast", False),
        ("model=resnet", "model", "resnet"),
        ("model=3", "model", "3"),
        ("model=a=b", "model", "a=b"),
        ("model=", "model", ""),
        ("sizes=[4, 8]", "sizes", [4, 8]),
        ("seed=7", "seed", 7),
        ("seed=text", "seed", "text"),
    ],
)
def test_a_value_has_the_type_of_the_labs_default(lab, pair, name, value):
    found = parse_parameters(lab, [pair])
    assert found == {name: value} and type(found[name]) is type(value)


@pytest.mark.parametrize(
    "pair, kind",
    [
        ("price=cheap", "float"),
        ("price=True", "float"),
        ("price=", "float"),
        ("workers=2.0", "int"),
        ("workers=True", "int"),
        ("workers=many", "int"),
        ("fast=1", "bool"),
        ("fast=true", "bool"),
        ("sizes=4", "list"),
        ("sizes=(4, 8)", "list"),
        ("workers=__import__('os').getpid()", "int"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_default(lab, pair, kind):
    with pytest.raises(UsageError, match=f"a value of type {kind} is expected, like"):
        parse_parameters(lab, [pair])


@pytest.mark.parametrize("pair", ["workers", "", "workers 4"])
def test_a_parameter_is_name_and_value(lab, pair):
    with pytest.raises(UsageError, match="name=value is expected"):
        parse_parameters(lab, [pair])


@pytest.mark.parametrize("name", ["worker", "Workers", ""])
def test_an_unknown_parameter_is_named_with_those_of_the_lab(lab, name):
    with pytest.raises(UsageError, match=f"-p {name}: lab 00 has no such parameter; it has price, workers, fast"):
        parse_parameters(lab, [f"{name}=1"])


def test_a_parameter_must_be_one_of_every_chosen_lab(root):
    books = select(root, [])
    assert parse_parameters(books, ["workers=3"]) == {"workers": 3}
    with pytest.raises(UsageError, match="lab 10 has no such parameter; it has workers"):
        parse_parameters(books, ["price=3.0"])


def test_of_a_parameter_given_twice_the_last_counts(lab):
    assert parse_parameters(lab, ["workers=1", "price=1.0", "workers=2"]) == {"workers": 2, "price": 1.0}


@pytest.mark.parametrize("source", ["size = 2 * 1024", "%matplotlib inline\nsize = 1", "size = 1e3 if True else 2"])
def test_a_parameters_cell_with_more_than_literals_is_told(root, source):
    write_lab(root, "00_first", source)
    with pytest.raises(UsageError, match="00"):
        _ = select(root, ["00"])[0].parameters


def test_an_annotated_default_is_a_parameter_too(root):
    write_lab(root, "00_first", "rate: float = 0.1\nworkers = 2")
    assert select(root, ["00"])[0].parameters == {"rate": 0.1, "workers": 2}
