"""What made a number: a hash of the code that leads to a record, blind to comments, predictions and answers.

A record's hash covers its own cell and the code cells before it, as normalised syntax trees, and the instrument
modules that the record uses. Uses: those behind the names on which the recording cell depends, followed backwards
from cell to cell, with what these modules import of ours. So one changed line in an instrument makes exactly the
records stale that lean on it.
"""

import ast
import builtins
import hashlib
import symtable
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from labsupport.publish.records import records_in

PACKAGE = "labsupport"
# Cells whose text does not make a number: their edits leave records as they are.
IGNORED_TAGS = {"setup", "predict", "exercise", "solution", "your-model"}
# Calls of the session that show or ask, and make no number either.
DISPLAY_CALLS = {"say", "predict", "check", "summary"}
# The wings that show and publish a number do not make it.
NOT_INSTRUMENTS = ("labsupport.publish", "labsupport.show", "labsupport.cli")


def record_hashes(notebook: Mapping[str, Any], package: Path | None = None) -> dict[str, str]:
    """Record name -> hash, for the records in this executed notebook's outputs.

    `package` is the folder of labsupport's sources (default: the running one). Raises ValueError when a cell that
    leads to a record is not plain Python.
    """
    modules = Modules(package or Path(__file__).parents[1])
    code = [raw for raw in notebook["cells"] if raw["cell_type"] == "code"]
    recording = [n for n, raw in enumerate(code, start=1) if any(records_in(raw["outputs"]))]
    cells: list[Cell] = []
    imported: dict[str, set[str]] = {}
    hashes = {}
    for number, raw in enumerate(code[: max(recording, default=0)], start=1):
        ignored = IGNORED_TAGS & set(raw.get("metadata", {}).get("tags", []))
        if ignored and number in recording:
            made = ", ".join(record.name for record in records_in(raw["outputs"]))
            raise ValueError(f"In [{number}] is tagged {', '.join(ignored)}, so it cannot record {made}")
        try:
            cell = Cell.parse("".join(raw["source"]), number)
        except ValueError:
            if ignored:
                continue
            raise
        known = imported.get(PACKAGE, set())
        imported |= dict.fromkeys(cell.imports, set()) | modules.imported_by(cell.tree, "")
        if PACKAGE in imported:
            imported[PACKAGE] = imported[PACKAGE] | known
        if ignored or not cell.tree.body:
            continue
        cells.append(cell)
        names = [record.name for record in records_in(raw["outputs"])]
        if not names:
            continue
        needed = leading_cells(cells, set(imported))
        used = set().union(*(imported.get(name, set()) for cell in needed for name in cell.loads))
        used |= {modules.behind(name) for cell in needed for name in cell.dotted if PACKAGE in imported}
        # The session's fingerprint is an instrument's reading too, though no cell imports it.
        used |= {f"{PACKAGE}.machine"} if any(cell.reads_machine for cell in needed) else set()
        closure = sorted(modules.closure(used))
        parts = [cell.dump for cell in cells] + [modules.dump(module) for module in closure]
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        hashes.update(dict.fromkeys(names, digest))
    return hashes


def leading_cells(cells: list["Cell"], imported: set[str]) -> list["Cell"]:
    """The last cell and those that it depends on, followed back through the names they bind or change.

    A call on an imported module (`torch.manual_seed(0)`) does not count as a change of the module.
    """
    needed = [cells[-1]]
    names = set(cells[-1].loads)
    waiting = cells[:-1]
    # Until nothing is added: a helper may read what a cell after it binds.
    while found := [cell for cell in waiting if (cell.binds | (cell.changes - imported)) & names]:
        needed += found
        names |= {name for cell in found for name in cell.loads}
        waiting = [cell for cell in waiting if cell not in found]
    return needed


class Cell:
    """One code cell: its normalised tree, and the names that it reads, binds, changes by a call, and imports."""

    def __init__(self, tree: ast.Module) -> None:
        tree.body = [node for node in tree.body if not _is_display(node) and not _is_docstring(node)]
        nodes = list(ast.walk(tree))
        self.tree = tree
        self.dump = dump(tree)
        scopes = ast.unparse(_OwnScopes().visit(ast.parse(ast.unparse(tree))))
        self.loads, self.binds = _global_names(symtable.symtable(scopes, "cell", "exec"))
        # `losses.append(x)` as a statement of its own, `a[0] = x` and `fit(model)` change what the name holds.
        changes = {_root_name(call.func) for call in map(_bare_method_call, nodes) if call}
        changes |= {_root_name(n) for n in nodes if isinstance(n, ast.Attribute | ast.Subscript) and _is_store(n)}
        bare = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
        calls = [call for call in bare if _root_name(call.func) not in _HARMLESS]
        changes |= {_root_name(a) for call in calls for a in [*call.args, *(k.value for k in call.keywords)]}
        self.changes = (changes & self.loads) - {"lab"}
        imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        self.imports = {(alias.asname or alias.name).split(".")[0] for alias in imports}
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        self.dotted = {ast.unparse(node) for node in attributes if _root_name(node) == PACKAGE}
        self.reads_machine = any(node.attr == "machine" and _root_name(node) == "lab" for node in attributes)

    @classmethod
    def parse(cls, source: str, number: int) -> "Cell":
        try:
            return cls(ast.parse(source))
        except SyntaxError as error:
            raise ValueError(f"In [{number}] is not plain Python (line {error.lineno}: {error.msg})") from error


# Calls that leave their arguments as they are.
_HARMLESS = {"lab", *dir(builtins)}


def _is_store(node: ast.Attribute | ast.Subscript) -> bool:
    return not isinstance(node.ctx, ast.Load)


class _OwnScopes(ast.NodeTransformer):
    """Comprehensions as generators: since Python 3.12 symtable gives only those a scope of their own."""

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(node.elt, node.generators)

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        self.generic_visit(node)
        return ast.GeneratorExp(ast.Tuple([node.key, node.value], ast.Load()), node.generators)


def _global_names(table: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """The cell's own names that it reads and those it binds; a function's local names are not among them."""
    symbols = [s for s in table.get_symbols() if table.get_type() == "module" or s.is_global()]
    loads = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    binds = {symbol.get_name() for symbol in symbols if symbol.is_assigned() and not symbol.is_imported()}
    for child in table.get_children():
        more = _global_names(child)
        loads |= {symbol.get_name() for symbol in child.get_symbols() if symbol.is_imported()}
        loads, binds = loads | more[0], binds | more[1]
    return loads, binds


def _is_display(node: ast.stmt) -> bool:
    call = _bare_method_call(node)
    return call is not None and _root_name(call.func) == "lab" and call.func.attr in DISPLAY_CALLS  # type: ignore[attr-defined]


def _bare_method_call(node: ast.AST) -> ast.Call | None:
    """The call, where a statement is nothing but a call of a method."""
    call = node.value if isinstance(node, ast.Expr) else None
    return call if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None


def _root_name(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def dump(node: Any) -> str:
    """A syntax tree as text, without positions and docstrings, the same on Python 3.11 to 3.13 (ast.dump is not)."""
    if isinstance(node, ast.AST):
        parts = []
        for field, value in ast.iter_fields(node):
            if field == "body" and isinstance(value, list) and not isinstance(node, ast.Lambda):
                value = value[1:] if value and _is_docstring(value[0]) else value
            if isinstance(node, ast.JoinedStr):  # Python 3.12.0 to 3.12.3 leave empty parts behind
                value = [part for part in value if not (isinstance(part, ast.Constant) and part.value == "")]
            if field in ("ctx", "type_comment", "type_params", "kind") or value is None or value == []:
                continue
            parts.append(f"{field}={dump(value)}")
        return f"{type(node).__name__}({','.join(parts)})"
    if isinstance(node, list):
        return f"[{','.join(map(dump, node))}]"
    return ascii(node)  # repr depends on this Python's Unicode


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Modules:
    """labsupport's own modules as syntax trees, and which of them import which."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.tree = lru_cache(maxsize=None)(self._tree)

    def path(self, module: str) -> Path | None:
        """The file of a module, or None when there is none of that name."""
        base = self.package.joinpath(*module.split(".")[1:])
        return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)

    def _tree(self, module: str) -> ast.Module:
        path = self.path(module)
        assert path is not None, module
        return ast.parse(path.read_text(encoding="utf-8"))

    def dump(self, module: str) -> str:
        return f"{module}:{dump(self.tree(module))}"

    def imported_by(self, tree: ast.AST, inside: str) -> dict[str, set[str]]:
        """Name bound by an import -> our modules behind it. `inside` is the importing module ("" for a cell)."""
        found: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == PACKAGE:
                        found.setdefault(alias.asname or PACKAGE, set()).add(alias.name)
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node, inside)
                if origin.split(".")[0] == PACKAGE:
                    for alias in node.names:
                        found[alias.asname or alias.name] = {self.home(origin, alias.name)}
        return {name: {m for m in modules if self.path(m)} for name, modules in found.items()}

    def _origin(self, node: ast.ImportFrom, inside: str) -> str:
        if not node.level:
            return node.module or ""
        path = self.path(inside)
        steps = node.level - (1 if path is not None and path.name == "__init__.py" else 0)
        parent = inside.split(".")[: len(inside.split(".")) - steps]
        return ".".join([*parent, *([node.module] if node.module else [])])

    def home(self, module: str, name: str) -> str:
        """The module in which `from module import name` is at home: a submodule, or followed through re-exports."""
        if self.path(f"{module}.{name}"):
            return f"{module}.{name}"
        path = self.path(module)
        if path is None or path.name != "__init__.py":
            return module
        tree = self.tree(module)
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and any(name in (a.asname, a.name) for a in node.names):
                return self.home(self._origin(node, module), name)
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_EXPORTS":
                return ast.literal_eval(node.value).get(name, module)
        return module

    def behind(self, dotted: str) -> str:
        """The module behind `labsupport.measure.a.of_a`, spelt out."""
        module, *rest = dotted.split(".")
        for part in rest:
            if not self.path(f"{module}.{part}"):
                return self.home(module, part)
            module = f"{module}.{part}"
        return module

    def closure(self, modules: set[str]) -> set[str]:
        """These instrument modules and all they import of ours."""
        found: set[str] = set()
        waiting = [module for module in modules if not module.startswith(NOT_INSTRUMENTS)]
        while waiting:
            module = waiting.pop()
            if module in found:
                continue
            found.add(module)
            for imported in self.imported_by(self.tree(module), module).values():
                waiting += [m for m in imported if not m.startswith(NOT_INSTRUMENTS)]
        return found
