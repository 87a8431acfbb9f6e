"""Train a sharded model on two ranks beside a running engine, which gets its weights after every step.

torchrun --nproc_per_node 2 trained.py FAMILY MESH WORKERS FOLDER [ZERO STAGE] [--record FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.integrations.vllm import connect
from tests.vllm.engines import compare, engine
from tests.vllm.families import model_of, write

# Float32, a model of 200 tokens: the sums of 128 terms round to some 1e-6 of a logit of 1; nine such layers follow each
# other. Wrong weights are 1e-1 off here.
_ROUNDING = 2e-4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("mesh")
    parser.add_argument("workers", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--zero", type=int)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    model = model_of(args.family)
    alone = copy.deepcopy(model)
    model = sl.shard_model(model, args.mesh, transforms=() if args.zero is None else sl.zero(args.zero))
    rank = dist.get_rank()
    with ExitStack() as stack:
        llm = None
        if rank == 0:
            write(args.family, args.folder)
            llm = stack.enter_context(engine(str(args.folder), args.workers))
        connection = connect(model, llm)
        optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, alone))
        ids = torch.randint(1, 200, (4, 16), generator=torch.Generator().manual_seed(1))
        shape = sl.get_plan(model).mesh
        index, count = shape.data_place(shape.coordinate(rank))
        for step in range(3):
            connection.send_weights()
            if llm is not None:
                apart = compare(llm, alone)
                print(f"step {step}: log-probabilities are {apart:.1e} apart")
                assert apart < _ROUNDING
            for each, rows, stepping in (
                (model, ids.chunk(count)[index], optimizer),
                (alone, ids, reference),
            ):
                each(rows, labels=rows).loss.backward()
                stepping.step()
                stepping.zero_grad()
        if args.record is not None and rank == 0:
            args.record.write_text(_recorded(connection, args))
        print(sum(moves.bytes for moves in connection.moves), "bytes each time")
        connection.shutdown()
        dist.barrier()
    print("right")


def _recorded(connection: object, args: argparse.Namespace) -> str:
    """Return what each worker reads of each tensor, as JSON."""
    read = connection._feed._read[dist.get_world_size() :]
    workers = [
        {name: [[*box.offsets, *box.sizes] for box in boxes] for name, (_, boxes) in of_rank.items()}
        for of_rank in read
    ]
    lines = [
        f"  {json.dumps(name)}: {json.dumps([worker.get(name, []) for worker in workers])}"
        for name in dict.fromkeys(name for worker in workers for name in worker)
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
