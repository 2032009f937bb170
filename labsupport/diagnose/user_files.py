"""What people have in files of their own: `train.py:workload`."""

import difflib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch

T = TypeVar("T")

OURS = Path(__file__).resolve().parents[1]


@contextmanager
def named_in_file(spec: str, kind: type[T]) -> Iterator[T]:
    """The object of that kind that `FILE.py:NAME` means: one at the top of the file, or what a function there returns.

    The file runs as when it is imported. Within the block, as while `python FILE.py` runs, its folder is the first on
    the path (its functions may import their neighbours late), its name is all of sys.argv, and it is a module (its
    classes can be pickled); what it prints goes to stderr. Afterwards all of that is as before.

    Raises ValueError that says what was given, what is there, and what to do. An error of the user's own code, in the
    block too, becomes one with its place in their files; errors of memory, and ours, leave as they are.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file).resolve()
    if path.suffix != ".py" or not name.isidentifier():
        raise ValueError(f"{spec!r}: FILE.py:NAME is expected, as in train.py:workload")
    if not path.is_file():
        raise ValueError(f"there is no file {file}")
    with _as_module(path) as module, redirect_stdout(sys.stderr):
        try:
            exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
            if name not in vars(module):
                raise ValueError(f"{file} has no {name!r}; {_offers(vars(module), kind, name)}")
            yield _made(spec, vars(module)[name], kind)
        except torch.OutOfMemoryError:
            raise
        except (Exception, SystemExit) as error:
            own = _own_part(error, path.parent)
            if not own:
                raise
            ends = "ends the program" if isinstance(error, SystemExit) else "ends with an error of its own"
            advice = '\nWhat only a script does belongs under if __name__ == "__main__":' if "program" in ends else ""
            raise ValueError(f"{file} {ends}:\n{own}{advice}") from error


@contextmanager
def _as_module(path: Path) -> Iterator[ModuleType]:
    kept_path, kept_argv, kept_module = sys.path[:], sys.argv, sys.modules.get(path.stem)
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path)]
    sys.modules[path.stem] = module
    try:
        yield module
    finally:
        sys.path[:], sys.argv = kept_path, kept_argv
        if kept_module is None:
            sys.modules.pop(path.stem, None)
        else:
            sys.modules[path.stem] = kept_module


def _made(spec: str, thing: object, kind: type[T]) -> T:
    if isinstance(thing, kind):
        return thing
    if not callable(thing) or isinstance(thing, type):
        raise ValueError(
            f"{spec} is of type {type(thing).__name__}: a {kind.__name__} is expected, or a function that returns one"
        )
    made = thing()
    if not isinstance(made, kind):
        raise ValueError(f"{spec}() returned the type {type(made).__name__}: a {kind.__name__} is expected")
    return made


def _offers(found: dict[str, object], kind: type, name: str) -> str:
    names = [key for key, value in found.items() if isinstance(value, kind)]
    near = difflib.get_close_matches(name, [key for key in found if not key.startswith("_")], n=1)
    there = f"its {kind.__name__}s are {', '.join(names)}" if names else f"it has no {kind.__name__} at its top"
    return there + (f"; did you mean {near[0]}?" if near else "")


def _own_part(error: BaseException, folder: Path) -> str:
    """The lines of the traceback that are in the user's folder, and the last; nothing for an error that is ours.
    Where a library's functions are all that the user named, the library's lines."""
    frames = list(traceback.extract_tb(error.__traceback__))
    paths = [Path(frame.filename) for frame in frames]
    # Their environment may lie in their folder, and so may this package.
    theirs = [
        frame
        for frame, path in zip(frames, paths, strict=True)
        if path.is_relative_to(folder) and not path.is_relative_to(OURS) and "site-packages" not in path.parts
    ]
    in_file = isinstance(error, SyntaxError)  # no line of it has run
    if not theirs and not in_file and paths[-1].is_relative_to(OURS):
        return ""
    theirs = theirs or [frame for frame, path in zip(frames, paths, strict=True) if not path.is_relative_to(OURS)]
    shown = theirs[-3:] + ([] if in_file or frames[-1] in theirs[-1:] else frames[-1:])
    return "".join(traceback.format_list(shown) + traceback.format_exception_only(error)).rstrip()
