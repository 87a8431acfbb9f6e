"""A training step of what `Booster.boost` returns, beside the same step with the engine directly.

    python benchmarks/boosters.py                            # both sizes, two ranks, some minutes on two cores

Each pair is one plan and one optimizer. The engine directly is `shard_model` and an `OptimizerWrapper`, called as the
booster calls them.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist
from _harness import OPTIONS, Trained, Variant, compare, is_rank, parser, start_ranks, write
from _models import Size, plain

import shardlib as sl
from shardlib.booster import Booster, LowLevelZeroPlugin, TorchDDPPlugin

PLUGINS = {
    "TorchDDPPlugin": (TorchDDPPlugin(), ()),
    "LowLevelZeroPlugin": (LowLevelZeroPlugin(stage=1, precision="fp32"), (sl.zero(1),)),
}


def directly(size: Size, *, name: str) -> Trained:
    model = sl.shard_model(plain(size), "dp=-1", {"**": None}, transforms=PLUGINS[name][1])
    return model, sl.OptimizerWrapper(torch.optim.AdamW(model.parameters(), **OPTIONS), model)


def boosted(size: Size, *, name: str) -> Trained:
    model = plain(size)
    model, optimizer, *_ = Booster(plugin=PLUGINS[name][0]).boost(
        model, torch.optim.AdamW(model.parameters(), **OPTIONS)
    )
    return model, optimizer


VARIANTS = [
    variant
    for name in PLUGINS
    for variant in (
        Variant(f"{name}, directly", partial(directly, name=name)),
        Variant(f"{name}, boosted", partial(boosted, name=name), peers=(f"{name}, directly",)),
    )
]


def main() -> None:
    args = parser(__doc__).parse_args()
    if is_rank():
        sl.mesh(dp=-1)
        write(args, compare(args, VARIANTS, seed=args.seed + dist.get_rank()))
        dist.destroy_process_group()
        return
    sys.exit(start_ranks(2, sys.argv[1:]))


if __name__ == "__main__":
    main()
