"""Ranks that search together agree, and none waits for one that ran out of memory. Real processes, gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labsupport.measure import MemoryLedger
from labsupport.train import Workload, find_batch_size

WORKER = Path(__file__).with_name("ranks_worker.py")


def told_by(case, folder, ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    done = subprocess.run(
        [*command, str(WORKER), case, str(folder)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["alike", "unlike", "knee"])
def test_ranks_agree_on_what_fits_on_all_of_them(case, tmp_path):
    first, second = told_by(case, tmp_path)
    assert first == second and first["by"] == "memory" and first["as before"]
    assert first["max"] + 1 in first["trials"] and len(first["trials"]) <= 6


@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_search_on_all(tmp_path):
    first, second = told_by("broken", tmp_path)
    assert second["error"] == "KeyError: 'only here'"
    assert "rank 1 failed at 8 samples: KeyError" in first["error"]
    assert first["as before"] and second["as before"]


@pytest.mark.parametrize("view", [False, True])
def test_the_buckets_of_ddp_count(view, tmp_path, monkeypatch):
    """A trial does not synchronise, so that no rank waits in vain; what the buckets take has to count all the same."""
    monkeypatch.setenv("LABS_PROFILE", "cpu")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(nn.Linear(512, 512), gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)

        def batch(n, device):
            return torch.randn(n, 512)

        def loss(model, inputs):
            return model(inputs).square().mean()

        found = find_batch_size(
            Workload("wrapped", lambda: wrapped, batch, loss, lambda _: optimizer),
            budget="8MiB",
            knee=False,
            progress=None,
        )
        inputs = batch(found.max_batch, None)
        with MemoryLedger(wrapped, optimizer, inputs=inputs) as ledger:
            for _ in range(4):  # the buckets are laid out anew after the first
                optimizer.zero_grad()
                loss(wrapped, inputs).backward()
                optimizer.step()
    finally:
        dist.destroy_process_group()
    assert ledger.peak_bytes <= 8 << 20
    a_sample = 2 * 512 * 4
    assert view or ledger.peak_bytes > (8 << 20) - 2 * a_sample
