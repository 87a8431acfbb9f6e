"""A script that torchrun starts again after a rank is killed: it goes on from its last checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl

STEPS = 4


def main(folder: str) -> None:
    torch.manual_seed(0)
    mesh = sl.mesh("dp=2", device_type="cpu")
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    sl.shard_model(model, mesh, {"**": None}, transforms=sl.zero(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints = sl.Checkpoints(folder)
    begin = checkpoints.load(model, optimizer).extra["step"] if checkpoints.latest() else 0
    for step in range(begin, STEPS):
        rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = model(rows.chunk(2)[dist.get_rank()]).square().mean()
        # It is the first attempt of each machine, whose count says so.
        if step == 3 and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and begin == 0 and dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            checkpoints.save(step + 1, model, optimizer, extra={"step": step + 1})
    weights = sl.full_state_dict(model)
    if dist.get_rank() == 0:
        torch.save({"begin": begin, "weights": weights}, Path(folder, "end.pt"))


if __name__ == "__main__":
    main(sys.argv[1])
