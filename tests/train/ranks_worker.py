"""What each rank of test_ranks.py runs: `python -m torch.distributed.run ... ranks_worker.py CASE OUT`."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labsupport.train import Workload, find_batch_size


def main(case: str, out: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
    width = 64 if case != "unlike" or rank == 0 else 64 * 3  # more to hold on the second rank

    def batch(n, device):
        return torch.randn(n, width)

    def loss(model, inputs):
        if case == "broken" and rank == 1 and len(inputs) > 4:
            raise KeyError("only here")
        return model(inputs[:, :64]).square().mean()

    optimizer = torch.optim.Adam(model.parameters())
    workload = Workload("ranks", lambda: model, batch, loss, lambda _: optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        found = find_batch_size(workload, budget="4MiB", knee=case == "knee", progress=None)
        told = {"max": found.max_batch, "by": found.stopped_by, "trials": [trial.size for trial in found.trials]}
        told["recommended"] = found.recommended_batch
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}"}
    told["as before"] = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    Path(out, f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort an interpreter that is being taken down


if __name__ == "__main__":
    os.environ["LABS_PROFILE"] = "cpu"
    torch.set_num_threads(1)
    main(*sys.argv[1:])
