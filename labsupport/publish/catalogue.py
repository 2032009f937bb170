"""The labs of a checkout: where they lie, what their notebooks say of themselves, and the parameters they take."""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from labsupport.publish.records import METADATA_KEY


class UsageError(Exception):
    """A request that cannot be met: what was given, what was expected, what to do. Nothing was run or changed."""


@dataclass(frozen=True)
class Book:
    """One lab's notebook. Its own metadata (`labsupport`) says: seconds, hardware, timing."""

    id: str
    path: Path

    @cached_property
    def notebook(self) -> Any:
        import nbformat

        try:
            return nbformat.read(self.path, as_version=4)
        except (OSError, ValueError, nbformat.ValidationError, nbformat.reader.NotJSONError, AttributeError) as error:
            raise UsageError(f"{self.path} cannot be read as a notebook: {error}") from error

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.notebook.get("metadata", {}).get(METADATA_KEY, {})

    @property
    def title(self) -> str:
        """The first heading, without its mark and number."""
        lines = (line for cell in self.notebook["cells"] for line in "".join(cell["source"]).splitlines())
        heading = next((line for line in lines if line.startswith("# ")), f"# {self.path.stem}")
        return heading.removeprefix("# ").removeprefix(f"{self.id} ")

    @property
    def timing(self) -> bool:
        """Whether the lab times things, and so must run alone."""
        return bool(self.metadata.get("timing", True))

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """Name -> default, from the cell tagged `parameters`."""
        for cell in self.notebook["cells"]:
            if "parameters" in cell.get("metadata", {}).get("tags", []):
                try:
                    body = ast.parse("".join(cell["source"])).body
                    pairs = [(node.targets[0], node.value) for node in body if isinstance(node, ast.Assign)]
                    pairs += [
                        (node.target, node.value) for node in body if isinstance(node, ast.AnnAssign) and node.value
                    ]
                    return {name.id: ast.literal_eval(value) for name, value in pairs if isinstance(name, ast.Name)}
                except (SyntaxError, ValueError) as error:
                    text = f"{self.path}: a cell tagged parameters has plain values only, as in steps = 12 ({error})"
                    raise UsageError(text) from error
        return {}


def find_root(start: Path | None = None) -> Path:
    """The checkout above `start` (default: here), else the one this package is installed from.

    Raises UsageError when there is neither.
    """
    here = (start or Path.cwd()).resolve()
    for folder in [here, *here.parents, Path(__file__).resolve().parents[2]]:
        project = folder / "pyproject.toml"
        if (folder / "notebooks").is_dir() and project.is_file() and 'name = "labsupport"' in project.read_text():
            return folder
    raise UsageError(f"no labs in {here} or above it: clone the project, and call `labs` inside it")


def all_books(root: Path) -> list[Book]:
    """Every lab of this checkout, in order."""
    return [Book(path.stem.split("_")[0], path) for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))]


def select(root: Path, wanted: Iterable[str]) -> list[Book]:
    """The labs of these numbers ("00", "0" or "00_meet_your_machine"), or all. Raises UsageError for an unknown one."""
    books = all_books(root)
    names = {alias: book for book in books for alias in (book.id, book.id.lstrip("0") or "0", book.path.stem)}
    wanted = list(wanted)
    if unknown := [name for name in wanted if name not in names]:
        raise UsageError(f"no lab {', '.join(unknown)}; there are {', '.join(book.id for book in books)}")
    chosen = {names[name].id for name in wanted}
    return [book for book in books if book.id in chosen or not wanted]


def parse_parameters(books: list[Book], pairs: Iterable[str]) -> dict[str, Any]:
    """`name=value` pairs, each value in the type of the lab's own default.

    papermill only warns of a name it does not know, so that is checked here. Raises UsageError for an unknown
    name, a value of the wrong type, or a text without `=`.
    """
    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise UsageError(f"-p {pair!r}: name=value is expected")
        for book in books:
            if name not in book.parameters:
                known = ", ".join(book.parameters) or "none"
                raise UsageError(f"-p {name}: lab {book.id} has no such parameter; it has {known}")
            found[name] = _typed(name, text, book.parameters[name])
    return found


def _typed(name: str, text: str, default: Any) -> Any:
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    kind: type = type(default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if default is not None and type(value) is not kind:
        raise UsageError(f"-p {name}={text}: a value of type {kind.__name__} is expected, like {default!r}")
    return value
