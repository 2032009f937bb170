"""`labs batch`: on real files, with real plans and searches."""

import json

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
    plan = plan_memory(named_in_file("train.py:workload", Workload), target="cuda")
    found = json.loads(out)["largest_by_card"]
    assert found == largest_batches(plan)
    for card, room in rooms().items():
        assert plan.peak_bytes(found[card]) <= room < plan.peak_bytes(found[card] + 1)


def test_a_card_larger_than_this_machine_is_only_planned(monkeypatch):
    monkeypatch.setattr("labsupport.diagnose.batch_report.allowed_memory_bytes", lambda: 8 << 30)
    code, out, _ = labs("train.py:workload", "--accelerator", "H200 SXM")
    assert code == 0 and "no step was run: 118 GiB are more than this machine has" in out


def test_what_cannot_be_planned_is_searched():
    code, out, _ = labs("train.py:refuses", "--budget", "1MiB")
    assert code == 0 and "branching cannot be planned" in out and "stopped by: memory" in out
    code, _, err = labs("train.py:refuses", "--plan-only")
    assert code == 2 and "cannot be planned" in err


def test_a_budget_in_which_nothing_fits():
    code, out, err = labs("train.py:workload", "--budget", "4KB")
    assert code == 1 and not out
    assert "not even 1 sample fits in 3.91 KiB. Parameters, buffers and optimizer state alone take 75.0 KiB" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py"], "FILE.py:NAME is expected"),
        (["gone.py:workload"], "there is no file gone.py"),
        (["train.py:worklaod"], "its Workloads are workload, refuses; did you mean workload?"),
        (["empty.py:workload"], "it has no Workload at its top"),
        (["train.py:number"], "is a int: a Workload is expected"),
        (["train.py:nothing"], "returned a int: a Workload is expected"),
        (["train.py:broken"], "ZeroDivisionError"),
        (["fails.py:workload"], "KeyError: 'mine'"),
        (["train.py:workload", "--budget", "lots"], "'lots' is not a size"),
        (["train.py:workload", "--accelerator", "T5", "--plan-only"], "near are T4 (16 GB)"),
        (["train.py:workload", "--accelerator", "V100 SXM2"], "sold with several sizes of memory"),
        (["train.py:workload", "--accelerator", "T4", "--budget", "1GiB"], "not both"),
        (["train.py:workload", "--budget", "1MiB", "--multiple-of", "64", "--max-batch", "9"], "not one such size"),
    ],
)
def test_requests_that_make_no_sense(words, message):
    code, out, err = labs(*words)
    assert code == 2 and message in err and not out
    assert "importlib" not in err and "runpy" not in err


def test_an_error_of_the_workload_itself_is_raised_as_it_is(tmp_path):
    (tmp_path / "odd.py").write_text(FILE.replace("cross_entropy(model(batch[0]), batch[1])", "no_such_thing(model)"))
    with pytest.raises(AttributeError, match="no_such_thing"):
        labs("odd.py:workload", "--budget", "1MiB")
