"""`labs batch`: on real files, with real plans and searches."""

import json
import sys

import pytest
from click.testing import CliRunner

from labsupport.cli import main
from labsupport.train.rooms import largest_batches, rooms

FILE = """
import torch
from torch import nn
from helper import WIDTH
from labsupport import Workload

print("hello")
model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 10))


def batch(n, device):
    return torch.randn(n, WIDTH, device=device), torch.randint(10, (n,), device=device)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


workload = Workload("mine", lambda: model, batch, loss, torch.optim.AdamW)
made = lambda: workload
refuses = Workload(
    "branching", lambda: model, batch, lambda m, b: loss(m, b) if len(b[0]) < 3 else loss(m, b).exp(), torch.optim.AdamW
)
nothing = lambda: 3
broken = lambda: 1 / 0
number = 3
if __name__ == "__main__":
    raise SystemExit("this is no script here")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LABS_PROFILE", "cpu")
    monkeypatch.setattr("labsupport.train.batch_size.KNEE_S", 0.2)
    (tmp_path / "train.py").write_text(FILE)
    (tmp_path / "helper.py").write_text("WIDTH = 64\n")
    (tmp_path / "fails.py").write_text("import torch\nraise KeyError('mine')\n")
    (tmp_path / "empty.py").write_text("values = []\n")
    monkeypatch.chdir(tmp_path)


def labs(*words):
    done = CliRunner().invoke(main, ["batch", *words], catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_parts_cards_search_knee_and_the_line_to_use():
    code, out, err = labs("train.py:workload", "--budget", "4MiB")
    assert code == 0 and "hello" not in out and "hello" in err
    assert "largest batch in 4.00 MiB (the budget given): 1185 samples" in out
    assert "with 32 samples: 436 KiB: parameter 75.0 KiB, gradient 75.0 KiB, optimizer state 150 KiB" in out
    assert all(card in out for card in rooms()) and "an estimate" in out and "fragmentation" in out
    assert "1185 samples (the plan's largest): fits" in out and "1186 samples (one more): does not fit" in out
    assert "knee: " in out and out.splitlines()[-1].startswith("the line to use: batch_size = ")


def test_json_is_one_object():
    code, out, _ = labs("train.py:made", "--budget", "4MiB", "--json", "--multiple-of", "8")
    found = json.loads(out)
    assert code == 0 and found["search"]["max_batch"] == found["planned_batch"] // 8 * 8 == 1184
    assert sum(found["parts"].values()) == found["peak_bytes"]
    assert found["search"]["recommended_batch"] % 8 == 0 and found["search"]["stopped_by"] == "memory"
    assert found["search"]["timings"][0]["samples_per_s"] > 0


def test_plan_only_runs_no_step():
    code, out, err = labs("train.py:workload", "--accelerator", "T4", "--plan-only", "--batch", "64")
    assert code == 0 and "no step was run: --plan-only" in out
    assert "90% of a T4 (16 GB)" in out and "estimated for CUDA" in out and "with 64 samples" in out


def test_the_cards_are_those_of_the_plan():
    from labsupport.diagnose.user_files import named_in_file
    from labsupport.train import Workload, plan_memory

    _, out, _ = labs("train.py:workload", "--plan-only", "--json")
    with named_in_file("train.py:workload", Workload) as workload:
        plan = plan_memory(workload, target="cuda")
    found = json.loads(out)["largest_by_card"]
    assert found == largest_batches(plan)
    for card, room in rooms().items():
        assert plan.peak_bytes(found[card]) <= room < plan.peak_bytes(found[card] + 1)


@pytest.mark.parametrize("asked", [["--accelerator", "H200 SXM"], ["--budget", "118.2GiB"]])
def test_more_than_is_free_here_is_only_planned(monkeypatch, asked):
    monkeypatch.setattr("labsupport.train.batch_size.allowed_memory_bytes", lambda: 1 << 30)
    code, out, _ = labs("train.py:workload", *asked)
    assert code == 0 and "no step was run: 118 GiB are more than 80% of this machine's free memory, 819 MiB" in out
    code, out, err = labs("train.py:refuses", *asked)
    assert code == 2 and not out and "cannot be planned" in err and "no step was run: 118 GiB" in err


def test_steps_run_here_under_the_memory_of_a_card(monkeypatch):
    monkeypatch.setattr("labsupport.diagnose.batch_report.rooms", lambda: {"T4 (16 GB)": 4 << 20})
    code, out, _ = labs("train.py:workload", "--accelerator", "t4", "--json")
    found = json.loads(out)
    assert code == 0 and found["accelerator"] == "T4 (16 GB)" and found["device"] == "cpu"
    assert found["plan"]["target"] == "cuda" and found["search"]["max_batch"] == 1185
    _, out, _ = labs("train.py:workload", "--accelerator", "T4 (16 GB)", "--max-batch", "8")
    assert "run here, on the CPU, with as much memory: a T4 (16 GB) has a knee of its own" in out


def test_what_is_planned_for_a_cpu_only(monkeypatch):
    from labsupport.train import plan_memory
    from labsupport.train.traces import CannotPlan

    def no_cuda(*args, target):
        if target == "cuda":
            raise CannotPlan("an operation that CUDA lacks")
        return plan_memory(*args, target=target)

    monkeypatch.setattr("labsupport.diagnose.batch_report.plan_memory", no_cuda)
    code, out, _ = labs("train.py:workload", "--budget", "4MiB", "--plan-only")
    assert code == 0 and "no card can be planned for: an operation that CUDA lacks" in out and "1185 samples" in out


def test_what_cannot_be_planned_is_searched():
    code, out, _ = labs("train.py:refuses", "--budget", "1MiB")
    assert code == 0 and "branching cannot be planned" in out and "stopped by: memory" in out
    code, _, err = labs("train.py:refuses", "--plan-only")
    assert code == 2 and "cannot be planned" in err


def test_a_size_that_the_model_does_not_take(tmp_path):
    (tmp_path / "norm.py").write_text(FILE.replace("nn.ReLU()", "nn.BatchNorm1d(256)"))
    code, out, _ = labs("norm.py:workload", "--budget", "4MiB", "--plan-only", "--batch", "1")
    assert code == 0 and "cannot be planned with 1 sample" in out and "T4 (16 GB)" in out


def test_a_model_that_is_kept_by_its_function(tmp_path):
    """A plan may build it without memory: that must not be the one that the steps are run with."""
    (tmp_path / "kept.py").write_text(
        FILE + "\nfrom functools import cache\n"
        "kept = Workload('kept', cache(lambda: nn.Linear(WIDTH, 10)), batch, loss, torch.optim.SGD)\n"
    )
    code, out, _ = labs("kept.py:kept", "--budget", "1MiB", "--max-batch", "8")
    assert code == 0 and "8 samples (max_batch): fits" in out and "largest batch by card" in out


def test_a_budget_in_which_nothing_fits():
    code, out, err = labs("train.py:workload", "--budget", "4KB")
    assert code == 1 and not out
    assert "not even 1 sample fits in 3.91 KiB. Parameters, buffers and optimizer state alone take 75.0 KiB" in err
    code, out, _ = labs("train.py:workload", "--budget", "4KB", "--plan-only")
    assert code == 1 and "(the budget given): not even 1 sample" in out


def test_a_trial_that_takes_too_long():
    code, out, err = labs("train.py:workload", "--budget", "4MiB", "--trial-limit", "0.00001")
    assert code == 1 and not out and "time limit" in err and "--trial-limit" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "FILE.py:NAME is expected"),
        (["notebook.ipynb:workload"], "FILE.py:NAME is expected"),
        (["gone.py:workload"], "there is no file gone.py"),
        (["train.py:worklaod"], "its Workloads are workload, refuses; did you mean workload?"),
        (["empty.py:workload"], "it has no Workload at its top"),
        (["train.py:number"], "is of type int: a Workload is expected"),
        (["train.py:nothing"], "returned the type int: a Workload is expected"),
        (["train.py:broken"], "ZeroDivisionError"),
        (["fails.py:workload"], "KeyError: 'mine'"),
        (["train.py:workload", "--budget", "lots"], "'lots' is not a size"),
        (["train.py:workload", "--accelerator", "T5", "--plan-only"], "near are T4 (16 GB)"),
        (["train.py:workload", "--accelerator", "zz", "--plan-only"], "there are M4000 (8 GB), P5000 (16 GB)"),
        (["train.py:workload", "--accelerator", "V100 SXM2"], "sold with several sizes of memory"),
        (["train.py:workload", "--accelerator", "T4", "--budget", "1GiB"], "not both"),
        (["train.py:workload", "--budget", "1MiB", "--multiple-of", "64", "--max-batch", "9"], "not one such size"),
    ],
)
def test_requests_that_make_no_sense(words, message):
    code, out, err = labs(*words)
    assert code == 2 and message in err and not out
    assert "importlib" not in err and "user_files" not in err


@pytest.mark.parametrize(
    ("own_loss", "message"),
    [
        ("no_such_thing(model)", "AttributeError"),
        ("cross_entropy(model(batch[0]), batch[1][:1])", "ValueError: Expected input batch_size (2)"),
        ("cross_entropy(model(batch[0][:, 1:]), batch[1])", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_an_error_of_the_workload_itself_has_its_line(tmp_path, own_loss, message):
    (tmp_path / "odd.py").write_text(FILE.replace("cross_entropy(model(batch[0]), batch[1])", own_loss))
    code, out, err = labs("odd.py:workload", "--budget", "1MiB")
    assert code == 2 and not out and message in err and "(in a trial of 2 samples)" in err
    assert f'odd.py", line {FILE[: FILE.index("return nn.functional")].count(chr(10)) + 1}, in loss' in err
    assert "labsupport" not in err.replace("labsupport/measure/allocations.py", "")  # the last line may be ours


def test_a_model_that_is_none(tmp_path):
    (tmp_path / "odd.py").write_text(FILE.replace('"mine", lambda: model', '"mine", lambda: 3'))
    for options in (["--plan-only"], ["--budget", "1MiB"]):
        code, _, err = labs("odd.py:workload", *options)
        assert code == 2 and err.endswith("model of workload 'mine': a Module is expected, got int\n")


@pytest.mark.parametrize("program", ["raise SystemExit(0)", "import argparse; argparse.ArgumentParser().error('mine')"])
def test_a_file_that_ends_the_program(tmp_path, program):
    (tmp_path / "script.py").write_text(FILE + program)
    code, out, err = labs("script.py:workload", "--plan-only")
    assert code == 2 and not out and "script.py ends the program" in err and "__main__" in err and program in err


def test_a_file_runs_as_python_runs_it(tmp_path):
    """Neighbours may be imported late, no argument is left, its classes can be pickled; then all is as before."""
    (tmp_path / "script.py").write_text(
        f"""{FILE}
import argparse, pickle, sys

argparse.ArgumentParser().parse_args()
sys.path.insert(0, "nowhere")


class Mine(torch.optim.SGD):
    pass


def late():
    import neighbour

    assert pickle.loads(pickle.dumps(Mine)) is Mine
    return neighbour.model


workload = Workload("mine", late, batch, loss, Mine)
"""
    )
    (tmp_path / "neighbour.py").write_text("from torch import nn\nmodel = nn.Linear(64, 10)\n")
    before = sys.path[:], sys.argv
    code, out, err = labs("script.py:workload", "--budget", "1MiB", "--max-batch", "8")
    assert code == 0 and "fits" in out, err
    assert (sys.path, sys.argv) == before and "script" not in sys.modules
