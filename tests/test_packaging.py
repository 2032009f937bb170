"""The frame: pins in one voice, imports that need no extras, commands that exist."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = PROJECT["optional-dependencies"]["pinned"]
# What only running, testing and publishing needs. Colab ships none of it.
EXTRAS_ONLY = (
    "papermill",
    "nbval",
    "nbclient",
    "nbconvert",
    "hypothesis",
    "importlinter",
    "pynvml",
    "pytest",
    "click",
    "tqdm",
    "resvg_py",
    "jupyterlab",
    "playwright",
)


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def test_conda_environment_has_the_pins_of_pyproject():
    found = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in found if isinstance(entry, dict))
    assert [pin for pin in pip if "==" in pin] == PINNED
    assert any(str(entry).startswith("python=3.1") for entry in found)


def test_every_direct_dependency_is_pinned():
    direct = [
        *PROJECT["dependencies"],
        *(entry for extra in ("run", "test", "bench") for entry in PROJECT["optional-dependencies"][extra]),
    ]
    assert {name_of(requirement) for requirement in direct} <= {name_of(pin) for pin in PINNED}


def test_installed_set_is_the_pinned_one():
    from importlib.metadata import version

    wrong = [pin for pin in PINNED if version(name_of(pin)).split("+")[0] != pin.split("==")[1]]
    assert not wrong


def test_ranges_allow_the_oldest_torch_we_support():
    assert "torch>=2.9" in PROJECT["dependencies"] and PROJECT["requires-python"] == ">=3.11,<3.14"


def test_labs_import_without_the_extras(lab_notebooks):
    """What Colab has is enough for a learner: each lab's setup and import cells run with the extras hidden."""
    for path, notebook in lab_notebooks.items():
        setup, *cells = [ast.parse(cell.source).body for cell in notebook.cells if cell.cell_type == "code"]
        found = [each for body in cells for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
        imports = "\n".join(map(ast.unparse, [*setup, *found]))
        hide = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS_ONLY}, None))\n"
        done = subprocess.run([sys.executable, "-c", hide + imports], cwd=path.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_command_line_starts_without_torch():
    code = "import sys, labsupport.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def lines_of_code(text):
    """Lines that do something: not blank, no comment, no docstring. Explaining must not cost."""
    told = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for number, line in lines if line.strip() and not line.strip().startswith("#") and number not in told)


# Of each wing, in lines of code: what a person can read in an afternoon. The last is the machine, the units and cli.py.
MOST = {"measure": 2000, "train": 2000, "diagnose": 2000, "show": 2000, "publish": 2200, "labsupport": 800}


def test_each_wing_is_small():
    texts = {path: path.read_text() for path in (ROOT / "labsupport").rglob("*.py")}
    code = dict.fromkeys(MOST, 0)
    for path, text in texts.items():
        folders = path.relative_to(ROOT / "labsupport").parts[:-1]
        code[folders[0] if folders else "labsupport"] += lines_of_code(text)
    assert not {name: lines for name, lines in code.items() if lines >= MOST[name]}
    assert not [path.name for path, text in texts.items() if len(text.splitlines()) > 300]


def test_no_path_of_one_machine_is_tracked():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    texts = {name: (ROOT / name).read_text(errors="ignore") for name in tracked if (ROOT / name).is_file()}
    assert not [name for name, text in texts.items() if re.search(r"/(?:root|work|home/\w+|Users/\w+)/", text)]


def test_what_readme_shows_runs(tmp_path, monkeypatch, capsys):
    timing, memory, knobs, faults = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    matrix = torch.ones(384, 384)
    exec(timing, {"step": lambda: matrix @ matrix, "changed_step": lambda: matrix @ matrix @ matrix})
    assert "n = " in capsys.readouterr().out and (tmp_path / "before.json").is_file()
    made = {
        "make_model": lambda: torch.nn.Linear(4, 1),
        "make_batch": lambda n, device: torch.ones(n, 4, device=device),
    }
    names = {"torch": torch, "loss_of": lambda model, batch: model(batch).mean(), **made}
    exec(memory, names)
    said = capsys.readouterr().out
    exec(knobs, names)
    assert names["recipe"].effective_batch == 256 and names["step"].model.weight.grad is not None
    exec(faults, names)
    assert "Not seen: gradients pile up" in capsys.readouterr().out
    assert "samples (one more): does not fit" in said
    assert said.startswith("peak ") and "gradient 20 B" in said and "Linear" in said


def test_readme_has_the_generated_table_of_labs():
    from labsupport.publish import published, release
    from labsupport.publish.catalogue import all_books

    readme = (ROOT / "README.md").read_text()
    assert release.with_table(readme, release.labs_table(all_books(ROOT), published.load_all())) == readme
