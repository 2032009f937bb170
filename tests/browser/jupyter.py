"""A JupyterLab of its own for one test, and the browser to look at it with."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "labs"
# Every cell is in the page, whether in sight or not; and nothing is asked of the world outside.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# Colab's ipywidgets in the JupyterLab of its time. Named one by one, since what that JupyterLab asks for to edit
# together (jupyter_server_ydoc, on y-py) has no wheel for Python 3.13, and nothing here edits together.
OLD = ("jupyterlab==3.6.8",)
OLD_NEEDS = (
    "ipywidgets==7.7.1",
    "jupyterlab_widgets<2",
    "ipykernel<7",
    "jupyter_server<3",
    "jupyterlab_server>=2.19,<3",
    "nbclassic",
    "notebook<7",
    "setuptools<81",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser_path() -> str | None:
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@contextmanager
def server(python: Path, notebook: Path, home: Path) -> Iterator[str]:
    """JupyterLab of that Python, with one notebook, its outputs cleared; the notebook's address. Ended surely."""
    folder = home / "notebooks"
    folder.mkdir(parents=True)
    book = nbformat.read(notebook, as_version=4)
    for cell in book.cells:
        if cell.cell_type == "code":  # else what was published would pass for what ran
            cell.outputs, cell.execution_count = [], None
    nbformat.write(book, folder / notebook.name)
    for name, setting in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(setting))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    private = {f"JUPYTER_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "IPYTHON", "LABS_"))
    }
    environment |= {
        **private,
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "HOME": str(home),
        "LABS_PROFILE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    options = ("--no-browser", "--allow-root", f"--port={port}", "--port-retries=0", "--ip=127.0.0.1")
    options += (f"--ServerApp.token={TOKEN}", "--ServerApp.open_browser=False")
    options += (f"--ServerApp.root_dir={folder}",)
    log = (home / "server.log").open("w")
    process = subprocess.Popen(
        [str(python), "-m", "jupyterlab", *options],
        cwd=folder,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/api/status?token={TOKEN}", process, home / "server.log")
        yield f"{address}/lab/tree/{notebook.name}?token={TOKEN}&reset"
    except BaseException:
        print((home / "server.log").read_text()[-5000:])  # pytest shows it with the failure
        raise
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, kind)
                process.wait(timeout=10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        log.close()


def _wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError:
            time.sleep(0.25)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


def old_python() -> Path:
    """A Python with JupyterLab 3.6 and ipywidgets 7.7.1 (Colab's); everything else is from here.

    Made once, in this environment's folder, and with it made anew; PyTorch is taken from here by a path file, so
    nothing large is installed.
    """
    folder = Path(sys.prefix) / "jupyterlab-3"
    python, done = folder / "bin" / "python", folder / "installed"
    made = "\n".join((*OLD, *OLD_NEEDS, sys.version))
    if not done.is_file() or done.read_text() != made:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *OLD_NEEDS], check=True)
        subprocess.run([*pip, "--no-deps", *OLD], check=True)
        there = next(folder.glob("lib/python*/site-packages"))
        (there / "from_here.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # a path file's folders come last
        done.write_text(made)
    return python
