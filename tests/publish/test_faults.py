"""What goes wrong, and what the command line makes of it: exit code, message, what is left on disk and running."""

import json
import re
import select
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("faults")  # each worker would make the checkout anew

FINE = 'print("fine")'
NEVER_ENDS = "while True:\n    pass"
CHILD = "import subprocess\n\nsubprocess.run(['sleep', '{}'])"
# The child of a shell that ends at once: soon nobody's child.
ORPHAN = "import subprocess\n\nsubprocess.run('sleep {} &', shell=True)"
KILLS_ITSELF = "import os, signal\n\nos.kill(os.getpid(), signal.SIGKILL)"
SWALLOWED = "import ipywidgets\n\nout = ipywidgets.Output()\nwith out:\n    1 / 0\nout"
SLEEPS = "from pathlib import Path\nfrom time import sleep\n\nPath('started').touch()\nsleep(1000)"
COMMANDS = ("list", "run", "check", "publish", "claims")
MEASURED = "(measured"
RECORD = "application/vnd.labsupport.record+json"


def result_of(checkout, lab):
    return json.loads((checkout.build / f"{lab}_tiny.json").read_text())


def rows(text, outcome):
    """The records that a report gives this outcome."""
    return [line.split()[1] for line in text.splitlines() if line.startswith(f"{outcome} ") and "/" in line.split()[1]]


def line_of(text, lab):
    """A lab's line of `labs run`, with those below that say why it failed."""
    return re.search(rf"^{lab}  .*(\n      .*)*", text, re.MULTILINE)[0]


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def commands_of(processes):
    return [" ".join(process.cmdline()) for process in processes]


# --- requests that make no sense


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["99"], ["99", "there are 00, 01"]),
        (["-p", "nonsense=1"], ["nonsense", "no such parameter", "it has steps, rate"]),
        (["00", "-p", "steps=abc"], ["steps=abc", "int is expected, like 12"]),
        (["00", "-p", "steps=1.5"], ["steps=1.5", "int is expected"]),
        (["00", "-p", "rate=fast"], ["rate=fast", "float is expected"]),
        (["00", "-p", "steps"], ["'steps'", "name=value is expected"]),
        (["--timeout", "0"], ["--timeout", "0"]),
        (["--profile", "tpu"], ["tpu", "'cuda'"]),
    ],
    ids=" ".join,
)
def test_a_request_without_sense_runs_nothing(checkout, words, said):
    for lab in ("00", "01"):
        checkout.write_lab(lab, ["steps = 12\nrate = 0.5"], tags={0: ["parameters"]})
    result = checkout.labs("run", *words)
    assert result.code == 2
    assert all(part in result.text for part in said), result.text
    assert "Traceback" not in result.text
    assert not checkout.build.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(checkout, command):
    result = checkout.labs(command, "--help")
    assert result.code == 0
    assert re.search(rf"Examples?:\n +labs {command}", result.text)


def test_help_names_every_command_and_exit_code(checkout):
    result = checkout.labs("--help")
    assert result.code == 0
    assert all(command in result.text for command in COMMANDS)
    assert all(re.search(rf"^ +{code}  ", result.text, re.MULTILINE) for code in (0, 1, 2, 130))


def test_list_shows_each_lab_with_its_parameters(checkout):
    checkout.write_lab("00", ["steps = 12"], tags={0: ["parameters"]})
    result = checkout.labs("list")
    assert (result.code, result.text) == (0, "00  A tiny lab  (5 s, CPU)\n      -p steps=12\n")


def test_claims_without_anything_published(checkout):
    result = checkout.labs("claims")
    assert result.code == 0
    assert "no machine has published" in result.text


@pytest.mark.parametrize("words", [["list"], ["run"], ["check"], ["publish"]], ids=" ".join)
def test_a_broken_notebook_is_named(published, words):
    published.notebook().write_text('{"cells": [')
    result = published.labs(*words)
    assert result.code == 2
    assert "00_tiny.ipynb cannot be read as a notebook" in result.text
    assert "Traceback" not in result.text


@pytest.mark.parametrize("source", ["steps = 3 * 4", "steps = = 3"])
def test_parameters_that_are_no_plain_values_are_explained(checkout, source):
    checkout.write_lab("00", [source], tags={0: ["parameters"]})
    result = checkout.labs("list")
    assert result.code == 2
    assert "00_tiny.ipynb" in result.text
    assert "Traceback" not in result.text


def test_an_annotated_parameter_is_one(checkout):
    checkout.write_lab("00", ["steps: int = 12"], tags={0: ["parameters"]})
    assert "-p steps=12" in checkout.labs("list").text


@pytest.mark.parametrize("place", ["notebooks", "labsupport/publish", "/"])
def test_the_checkout_is_found_from_another_folder(published, place):
    result = published.labs("check", cwd=published.root / place)
    assert result.code == 0, result.text
    assert "5 judged (4 held, 1 present, " in result.text


def test_publish_refuses_a_checkout_that_is_not_the_packages_own(ran, new_checkout):
    other = new_checkout()
    before = other.files()
    result = other.labs("publish", cwd=ran.root)
    assert result.code == 2, result.text
    assert other.files() == before


# --- labs that fail


@pytest.fixture(scope="module")
def troubled(new_checkout):
    """One run of labs that fail, each in its way, and of a fine one at the end; with what it left running."""
    checkout = new_checkout()
    checkout.write_lab("00", [FINE, "1 / 0", FINE])
    checkout.write_lab("01", [FINE, KILLS_ITSELF])
    checkout.write_lab("02", [FINE, SWALLOWED])
    checkout.write_lab("03", [ORPHAN.format("1003"), KILLS_ITSELF])
    checkout.write_lab("04", [CHILD.format("0"), ORPHAN.format("1004")])
    result = checkout.labs("run", "--jobs", "2")
    left = commands_of(checkout.processes())
    checkout.end_all()
    return checkout, result, left


@pytest.mark.slow
def test_failing_labs_do_not_stop_the_others(troubled):
    checkout, result, _ = troubled
    assert result.code == 1
    assert [result_of(checkout, f"0{lab}")["status"] for lab in range(5)] == ["error", "died", "error", "died", "ok"]
    assert "Traceback" not in result.text


@pytest.mark.slow
def test_an_error_is_told_with_file_and_cell(troubled):
    checkout, result, _ = troubled
    line = line_of(result.text, "00")
    assert f"In [2] of {checkout.build / '00_tiny.ipynb'}" in line
    assert "ZeroDivisionError: division by zero" in line


@pytest.mark.slow
def test_an_error_is_shown_by_the_executed_copy_and_its_page(troubled):
    checkout, _, _ = troubled
    for name in ("00_tiny.ipynb", "00_tiny.html"):
        assert "ZeroDivisionError" in (checkout.build / name).read_text()


@pytest.mark.slow
def test_a_killed_kernel_is_told(troubled):
    checkout, result, _ = troubled
    line = line_of(result.text, "01")
    assert f"In [2] of {checkout.build / '01_tiny.ipynb'}" in line
    assert "the kernel died: killed by a signal" in line


@pytest.mark.slow
def test_an_error_that_a_widget_swallows_fails_the_run(troubled):
    """jupyter-widgets/ipywidgets#3208"""
    _, result, _ = troubled
    assert "in a widget: ZeroDivisionError: division by zero" in line_of(result.text, "02")


@pytest.mark.slow
def test_an_error_that_a_widget_swallows_is_told_with_its_cell(troubled):
    _, result, _ = troubled
    assert "In [2] of " in line_of(result.text, "02")


@pytest.mark.slow
@pytest.mark.parametrize("lab", ["03", "04"], ids=["killed kernel", "fine lab"])
def test_nothing_that_a_lab_started_outlives_it(troubled, lab):
    _, _, left = troubled
    assert f"sleep 10{lab}" not in left


@pytest.fixture(scope="module")
def endless(new_checkout):
    checkout = new_checkout()
    checkout.write_lab("00", [FINE, NEVER_ENDS])
    checkout.write_lab("01", [FINE, CHILD.format("1000")])
    result = checkout.labs("run", "--timeout", "8", "--jobs", "2")
    left = commands_of(checkout.processes())
    checkout.end_all()
    return checkout, result, left


@pytest.mark.slow
@pytest.mark.parametrize("lab", ["00", "01"], ids=["busy cell", "waits for its child"])
def test_a_lab_that_does_not_end_is_ended(endless, lab):
    checkout, result, left = endless
    assert result.code == 1
    assert "TIMEOUT" in line_of(result.text, lab)
    assert f"In [2] of {checkout.build / f'{lab}_tiny.ipynb'}" in line_of(result.text, lab)
    assert "not finished after 8 s" in line_of(result.text, lab)
    assert "--timeout" in line_of(result.text, lab)
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_interrupted_it_keeps_what_ran_and_leaves_nothing_running(checkout, name):
    checkout.write_lab("00", [FINE])
    checkout.write_lab("01", [SLEEPS])
    process = checkout.start("run")
    wait_until((checkout.root / "notebooks" / "started").exists)
    process.send_signal(signal.Signals[name])
    text, _ = process.communicate(timeout=60)
    assert checkout.processes() == []
    assert process.returncode == 130
    assert re.search(r"interrupted: labs 00 ran and are kept in \S*build/; nothing is left running", text)
    assert result_of(checkout, "00")["status"] == "ok"
    assert "Traceback" not in text


@pytest.mark.slow
def test_interrupted_it_names_a_lab_that_overtook_another(checkout):
    checkout.write_lab("00", [SLEEPS])
    checkout.write_lab("01", [FINE])
    process = checkout.start("run", "--jobs", "2", "--build", "elsewhere")
    wait_until((checkout.root / "elsewhere" / "01_tiny.json").exists)
    select.select([process.stdout], [], [], 2)  # its line comes with its result
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert checkout.processes() == []
    assert process.returncode == 130
    assert "labs 01 ran and are kept in elsewhere" in text


@pytest.mark.slow
def test_check_ended_while_it_measures_once_more_leaves_nothing_running(published):
    published.set_band(100, 200)
    process = published.start("check")
    wait_until(lambda: any("ipykernel" in command for command in commands_of(published.processes())))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert published.processes() == []
    assert process.returncode == 130


# --- machines that are in the way


def _put_bogus_kernel(folder):
    spec = {"argv": ["/bin/false", "{connection_file}"], "display_name": "Python 3", "language": "python"}
    kernel = folder / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps(spec))


@pytest.mark.slow
@pytest.mark.parametrize(("variable", "below"), [("JUPYTER_PATH", "."), ("HOME", ".local/share/jupyter")])
def test_another_kernel_called_python3_does_not_win(checkout, tmp_path, variable, below):
    _put_bogus_kernel(tmp_path / below)
    checkout.write_lab("00", [FINE])
    # "0" as where Python is no virtual environment: the home folder's kernels go first.
    result = checkout.labs("run", **{variable: str(tmp_path), "JUPYTER_PREFER_ENV_PATH": "0"})
    assert result.code == 0, result.text


def test_a_read_only_build_folder_runs_nothing(checkout, mounted):
    checkout.write_lab("00", [FINE])
    checkout.build.mkdir()
    mounted(checkout.build, read_only=True)
    result = checkout.labs("run")
    assert result.code == 2
    assert f"cannot write to {checkout.build} (Read-only file system)" in result.text
    assert "--build" in result.text


@pytest.mark.slow
def test_a_disk_that_is_full_while_a_lab_runs_is_told(checkout, mounted):
    checkout.write_lab("00", [FINE])
    checkout.build.mkdir()
    mounted(checkout.build, full=True)
    result = checkout.labs("run")
    assert result.code in (1, 2)
    assert "No space left on device" in result.text
    assert "Traceback" not in result.text
    assert checkout.processes() == []


@pytest.mark.parametrize("folder", ["notebooks", "labsupport/published"])
@pytest.mark.parametrize("state", ["full", "read_only"])
def test_what_cannot_be_written_whole_is_not_published_at_all(ran, mounted, folder, state):
    mounted(ran.root / folder, **{state: True})
    before = ran.files()
    result = ran.labs("publish")
    assert result.code == 2
    assert re.search(rf"nothing was published: \S+/{folder}/\S+: (No space left|Read-only)", result.text)
    assert "Traceback" not in result.text
    assert ran.files() == before


def test_a_file_that_cannot_be_replaced_takes_the_others_back(ran, mounted):
    mounted(ran.root / "README.md", bind=True)
    before = ran.files()
    result = ran.labs("publish")
    assert result.code == 2
    assert "nothing was published" in result.text
    assert ran.files() == before


# --- published values that are not what they were


@pytest.mark.parametrize(
    "text",
    [
        '{"machine": {"profile": "cpu"',
        "[]",
        "{}",
        "",
        "\xff",
    ],
)
@pytest.mark.parametrize("command", ["check", "publish", "claims"])
def test_a_corrupt_published_file_is_named_with_what_to_do(published, text, command):
    published.values.write_bytes(text.encode("latin-1"))
    before = published.files()
    result = published.labs(command)
    assert result.code == 2
    assert str(published.values) in result.text
    assert "Traceback" not in result.text
    assert "git checkout" in result.text
    assert published.files() == before


def test_a_missing_published_file_fails_the_check(published):
    published.values.unlink()
    result = published.labs("check")
    assert result.code == 1
    assert re.search(r"lab 00: nothing is published for its machine \S+: labs publish", result.text)


def test_a_record_missing_from_the_published_file_is_new(published):
    published.edit(published.values, lambda found: found["labs"]["00"].pop("loss"))
    result = published.labs("check")
    assert result.code == 1
    assert rows(result.text, "new") == ["00/loss"]


def test_a_published_record_that_no_run_gives_is_missing(published):
    def add(found):
        found["labs"]["00"]["other"] = found["labs"]["00"]["loss"]

    published.edit(published.values, add)
    result = published.labs("check")
    assert result.code == 1
    assert rows(result.text, "missing") == ["00/other"]


def test_another_hash_makes_that_record_stale(published):
    published.edit(published.values, lambda found: found["labs"]["00"]["loss"].update(hash="0" * 16))
    result = published.labs("check")
    assert result.code == 1
    assert rows(result.text, "stale") == ["00/loss"]
    assert "made by other code than stands here now: labs publish" in result.text


def test_a_changed_instrument_makes_exactly_its_records_stale(published):
    with (published.root / "labsupport" / "units.py").open("a") as source:
        source.write("\nEXTRA = 1\n")
    result = published.labs("check")
    assert result.code == 1
    assert rows(result.text, "stale") == ["00/label_length"]


def test_a_comment_in_an_instrument_makes_nothing_stale(published):
    with (published.root / "labsupport" / "units.py").open("a") as source:
        source.write("\n# A comment.\n")
    result = published.labs("check")
    assert (result.code, rows(result.text, "stale")) == (0, [])


# What is edited by hand -> pattern and replacement in the committed notebook, and what the check has to name.
RETOUCHED = {
    "an exact output": (r"weights = 49152 bytes", "weights = 49153 bytes", "In [3]"),
    "an exact output's data": (r'("unit": "bytes",\s+"value": )49152', r"\g<1>49153", "In [3]"),
    "a measured output": (r"step_time = 1", "step_time = 9", "In [6]"),
    "a measured output's value": (r'("name": "step_time",\s+"unit": "s",\s+"value": )1', r"\g<1>9", "step_time"),
    "a count of samples": (r"n=5\)", "n=50)", "In [6]"),
    "an exact sentence": (r"The weights take 49152", "The weights take 49153", "In [9]"),
    "a measured sentence": (r"A step takes 1", "A step takes 9", "In [8]"),
    "the summary's text": (r"(step_time +)1", r"\g<1>9", "In [10]"),
    "the summary's table": (r"(<td>step_time</td><td>)1", r"\g<1>9", "In [10]"),
    "the machine": (r"\d+ cores, threads", "512 cores, threads", "In [1]"),
}


@pytest.mark.parametrize(("pattern", "replacement", "named"), RETOUCHED.values(), ids=RETOUCHED)
def test_a_retouched_digit_in_the_committed_notebook_is_found(published, pattern, replacement, named):
    text, count = re.subn(pattern, replacement, published.notebook().read_text(), count=1)
    assert count == 1
    published.notebook().write_text(text)
    result = published.labs("check")
    assert result.code == 1
    assert re.search(rf"lab 00: .*{re.escape(named)}", result.text)


@pytest.mark.parametrize("record", ["weights", "loss", "step_time", "speedup"])
def test_a_retouched_published_value_is_found(published, record):
    published.edit(published.values, lambda found: found["labs"]["00"][record].update(value=9))
    result = published.labs("check")
    assert result.code == 1
    assert re.search(rf"lab 00: In \[\d+\]: record {record} is not the published", result.text)


def _unexecuted(notebook):
    notebook["cells"][3].update(execution_count=None, outputs=[])


def _stripped(notebook):
    notebook["cells"][6]["outputs"].clear()


@pytest.mark.parametrize("change", [_unexecuted, _stripped])
def test_a_committed_cell_without_its_outputs_is_found(published, change):
    published.edit(published.notebook(), change)
    result = published.labs("check")
    assert result.code == 1
    assert re.search(r"lab 00: In \[[36]\]", result.text)


@pytest.mark.parametrize("change", [_unexecuted, _stripped])
def test_a_committed_cell_without_its_outputs_is_found_on_another_profile_too(published, change):
    _move_to_gpu(published)
    assert published.labs("check").code == 0
    published.edit(published.notebook(), change)
    result = published.labs("check")
    assert result.code == 1, result.text


def _move_to_gpu(published):
    """As if the published numbers were a GPU's, and this machine came along to check them."""
    family = published.values.stem
    published.edit(published.values, lambda found: found["machine"].update(profile="cuda"))
    text = published.notebook().read_text()
    published.notebook().write_text(text.replace(family, family.replace("cpu", "gpu")))
    published.values.rename(published.values.with_name(f"{family.replace('cpu', 'gpu')}.json"))


@pytest.mark.slow
def test_a_ratio_is_broken_when_it_is_out_of_its_band_twice(published):
    published.set_band(100, 200)
    result = published.labs("check")
    assert result.code == 1
    assert "measuring it once more" in result.text
    assert "measured twice" in result.text
    assert rows(result.text, "broken") == ["00/speedup"]


def test_a_ratio_inside_its_band_holds(published):
    result = published.labs("check")
    assert result.code == 0
    assert "once more" not in result.text
    assert "00/speedup" in rows(result.text, "held")


def test_a_ratio_without_a_band_fails_the_check(published):
    published.edit(published.values, lambda found: found["labs"]["00"]["speedup"].pop("band"))
    result = published.labs("check")
    assert result.code == 1
    assert rows(result.text, "new") == ["00/speedup"]
    assert "no band yet: labs publish --rebase 6" in result.text


def test_a_ratio_outside_its_band_is_not_published(published):
    published.set_band(100, 200)
    before = published.files()
    result = published.labs("publish")
    assert result.code == 2
    assert "lab 00: outside its band: speedup (was speedup = 2" in result.text
    assert "--rebase 6" in result.text
    assert published.files() == before


# --- runs that cannot be judged or published


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [("check", 1, "lab 00: not run: labs run 00"), ("publish", 2, "lab 00 was not run: labs run 00")],
)
def test_without_a_run_it_says_what_to_do(checkout, command, code, said):
    checkout.write_lab("00", [FINE])
    result = checkout.labs(command)
    assert result.code == code
    assert said in result.text


def _end_with_error(ran):
    ran.edit(ran.build / "00_tiny.json", lambda found: found.update(status="error", cell=3, error="ValueError: no"))


def test_a_failed_run_is_not_checked(ran):
    _end_with_error(ran)
    result = ran.labs("check")
    assert result.code == 1
    assert "lab 00: the run ended with error: ValueError: no" in result.text
    assert "labs run 00" in result.text


def test_a_failed_run_is_not_published(ran):
    _end_with_error(ran)
    before = ran.files()
    result = ran.labs("publish")
    assert result.code == 2
    assert "ended with error (ValueError: no): only a whole run is published" in result.text
    assert ran.files() == before


@pytest.mark.parametrize("command", ["check", "publish"])
@pytest.mark.parametrize("text", ["{", "[]", '{"records": []}'])
def test_a_corrupt_record_of_a_run_is_named_with_what_to_do(published, command, text):
    path = published.build / "00_tiny.json"
    path.write_text(text)
    result = published.labs(command)
    assert result.code == 2
    assert str(path) in result.text
    assert "run the lab again" in result.text
    assert "Traceback" not in result.text


@pytest.mark.parametrize("command", ["check", "publish"])
@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text("{")], ids=["missing", "corrupt"])
def test_a_lost_executed_copy_is_named_with_what_to_do(published, command, spoil):
    path = published.build / "00_tiny.ipynb"
    spoil(path)
    result = published.labs(command)
    assert result.code in (1, 2)
    assert str(path) in result.text
    assert "labs run 00" in result.text or "run the lab again" in result.text
    assert "Traceback" not in result.text


def test_a_lab_that_changed_since_its_run_is_not_published(ran):
    ran.edit(ran.notebook(), lambda found: found["cells"][3]["source"].append("  # edited"))
    before = ran.files()
    result = ran.labs("publish")
    assert result.code == 2
    assert "lab 00 has changed since it ran: labs run 00" in result.text
    assert ran.files() == before


@pytest.mark.slow
def test_a_run_with_other_parameters_is_neither_compared_nor_published(published):
    before = published.files()
    assert published.labs("run", "-p", "steps=3").code == 0
    check, publish = published.labs("check"), published.labs("publish")
    assert check.code == 1
    assert "the last run was with steps=3, and only the defaults are compared: labs run 00" in check.text
    assert "0 judged" in check.text
    assert publish.code == 2
    assert "ran with {'steps': 3}: only a run with its defaults is published" in publish.text
    assert published.files() == before


# --- publishing again


def test_publishing_the_same_run_again_changes_nothing(published):
    before = published.files()
    result = published.labs("publish")
    assert result.code == 0
    assert "nothing changed" in result.text
    assert published.files() == before


def _exact_part(notebook):
    """The notebook without its measured numbers."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if output["data"].get(RECORD, {}).get("kind") != "exact":
                output.pop("metadata")
            for mime, lines in output["data"].items():
                if mime.startswith("text/"):
                    output["data"][mime] = [line for line in lines if MEASURED not in line]
    return notebook


@pytest.mark.slow
def test_publishing_another_run_changes_only_measured_numbers(published):
    values, notebook = published.values.read_text(), published.notebook().read_text()
    readme = (published.root / "README.md").read_text()
    assert published.labs("run").code == 0
    assert published.labs("publish").code == 0
    assert published.notebook().read_text() != notebook
    assert _exact_part(json.loads(published.notebook().read_text())) == _exact_part(json.loads(notebook))
    assert (published.root / "README.md").read_text() == readme
    before, after = (json.loads(text) for text in (values, published.values.read_text()))
    assert after["machine"] == before["machine"]
    changed = {name for name, entry in after["labs"]["00"].items() if entry != before["labs"]["00"][name]}
    assert changed == {"step_time", "speedup"}
