"""What people have in files of their own: `train.py:workload`."""

import difflib
import runpy
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def named_in_file(spec: str, kind: type[T]) -> T:
    """The object of that kind that `FILE.py:NAME` means: one at the top of the file, or what a function there returns.

    The file runs as when it is imported, with its own folder first on the path; what it prints goes to stderr.
    Raises ValueError that says what was given, what is there, and what to do.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"{spec!r}: FILE.py:NAME is expected, as in train.py:workload")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"there is no file {file}")
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):
            found = _run(path)
            if name not in found:
                raise ValueError(f"{file} has no {name!r}; {_offers(found, kind, name)}")
            thing = found[name]
            return thing if isinstance(thing, kind) else _made(spec, thing, kind)
    finally:
        sys.path.remove(folder)


def _run(path: Path) -> dict[str, object]:
    try:
        return runpy.run_path(str(path), run_name=path.stem)
    except Exception as error:
        raise ValueError(f"{path} ends with an error of its own:\n{_own_part(error, path)}") from error


def _made(spec: str, thing: object, kind: type[T]) -> T:
    if not callable(thing) or isinstance(thing, type):
        raise ValueError(
            f"{spec} is a {type(thing).__name__}: a {kind.__name__} is expected, or a function that returns one"
        )
    try:
        made = thing()
    except Exception as error:
        raise ValueError(f"{spec}() ends with an error of its own:\n{_own_part(error, Path(spec))}") from error
    if not isinstance(made, kind):
        raise ValueError(f"{spec}() returned a {type(made).__name__}: a {kind.__name__} is expected")
    return made


def _offers(found: dict[str, object], kind: type, name: str) -> str:
    names = [key for key, value in found.items() if isinstance(value, kind)]
    near = difflib.get_close_matches(name, [key for key in found if not key.startswith("_")], n=1)
    there = f"its {kind.__name__}s are {', '.join(names)}" if names else f"it has no {kind.__name__} at its top"
    return there + (f"; did you mean {near[0]}?" if near else "")


def _own_part(error: BaseException, path: Path) -> str:
    """The end of the traceback, without our own frames."""
    frames = [
        each for each in traceback.extract_tb(error.__traceback__) if each.filename not in (__file__, runpy.__file__)
    ]
    frames = [each for each in frames if "runpy" not in each.filename]
    return "".join(traceback.format_list(frames[-3:]) + traceback.format_exception_only(error)).rstrip()
