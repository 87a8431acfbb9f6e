"""A script of two ranks: torch before shardlib is imported, beside a sharded model, and after the last one is gone."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

CONFIGS = "torch._dynamo.config", "torch._functorch.config"


def attributes() -> dict[str, int]:
    """The functions, classes and properties of torch's modules and classes, and of DTensor's dispatcher, by name."""
    found: dict[str, Any] = {}
    warnings.simplefilter("ignore", FutureWarning)  # of deprecated names
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "transformers") and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__.partition(".")[0] == name.partition(".")[0]:
                    found |= {f"{value.__module__}.{value.__qualname__}.{k}": v for k, v in vars(value).items()}
    found = {name: value for name, value in found.items() if callable(value) or hasattr(type(value), "__get__")}
    return {name: id(value) for name, value in found.items()}


def tables() -> dict[str, str]:
    """The tables, settings and kernels of torch, by name."""
    dispatcher: Any = DTensor._op_dispatcher
    hooks = {
        f"{home}.{name}": str(list(value.values()))
        for home in ("torch.nn.modules.module", "torch.optim.optimizer")
        for name, value in vars(sys.modules[home]).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    infos = dispatcher.sharding_propagator.op_to_schema_info
    return {
        **hooks,
        "dispatcher": str(sorted(vars(dispatcher))),
        "handlers": str(sorted((str(op), id(each)) for op, each in dispatcher._custom_op_handlers.items())),
        "schemas": str(sorted((str(op), id(info)) for op, info in infos.items())),
        "implicit replication": str(dispatcher._allow_implicit_replication),
        "kernels": torch._C._dispatch_dump("aten::tensor_split.tensor_indices_or_sections"),
        **{f"{name} {key}": str(value) for name in CONFIGS for key, value in config_of(name).items()},
    }


def config_of(name: str) -> dict[str, Any]:
    return importlib.import_module(name).get_config_copy()


class Scaled(torch.optim.SGD):
    """An optimizer whose step calls that of its base class."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        return super().step(closure)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).double()


def trained(model: nn.Module, kind: Any = torch.optim.AdamW, *, seed: int | None = None) -> list[torch.Tensor]:
    optimizer = kind(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    for _ in range(2):
        model(torch.randn(4, 16, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def clipped(model: nn.Module) -> list[torch.Tensor]:
    """Write into plain gradients what a DTensor holds, after the same op has written into replicated DTensors."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        torch.manual_seed(0)
        model(torch.randn(4, 16, dtype=torch.float64)).square().mean().backward()
        nn.utils.clip_grad_norm_(reversed(list(model.parameters())), 0.01, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def with_norm() -> nn.Module:
    """A model that has, sharded by columns and rows, plain parameters and a replicated one of the same shape."""
    return nn.Sequential(OrderedDict(norm=nn.LayerNorm(16, dtype=torch.float64), block=plain()))


def programs(mesh: DeviceMesh) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Train with torch alone: DDP, FSDP2, DTensor, recomputation."""
    yield "DDP", trained(DistributedDataParallel(plain()), Scaled)
    yield "FSDP2", trained(fully_shard(plain(), mesh=mesh))
    torch.manual_seed(0)
    x, y = (distribute_tensor(torch.randn(8, 6, dtype=torch.float64), mesh, [Shard(0)]) for _ in range(2))
    x.requires_grad_()
    (x.softmax(-1) @ y.T).square().sum().backward()
    assert isinstance(x.grad, DTensor)
    yield "DTensor", [x.grad.full_tensor(), torch.argmax(y, -1).full_tensor()]  # type: ignore[attr-defined]
    block, given = plain(), torch.ones(2, 16, dtype=torch.float64, requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, given, use_reentrant=True).sum().backward()
    yield "recomputation", [given.grad]  # type: ignore[list-item]


def sharded() -> Iterator[tuple[str, nn.Module]]:
    """Sharded models that need what shardlib changes in torch, after two steps."""
    import shardlib as sl

    blocks = nn.Sequential(plain(), plain(), nn.Dropout(0.1))
    for name, mesh, rules, transforms, options in [
        ("zero(1)", "dp=2", {"**": None}, sl.zero(1), {}),
        ("zero(3), recomputed", "dp=2", {"**": None}, [sl.zero(3), sl.checkpoint_activations("**")], {}),
        ("tp, exact", "tp=2", {"*.0": "colwise", "*.2": "rowwise"}, (), {"rng": "exact"}),
        ("tp, compiled", "tp=2", {"**.0": "colwise", "**.2": "rowwise"}, (), {}),
    ]:
        model: nn.Module = nn.ModuleDict({"h": nn.ModuleList(plain() for _ in range(2))})
        model.forward = types.MethodType(lambda self, x: self.h[1](self.h[0](x)), model)  # type: ignore[method-assign]
        if name != "tp, compiled":
            model = copy.deepcopy(blocks)
        model = sl.shard_model(model, mesh, rules, transforms=transforms, **options)  # type: ignore[arg-type]
        for kind in (Scaled, torch.optim.AdamW):
            trained(model, kind, seed=None if mesh == "dp=2" else 0)
        yield name, model
        del model
    model = sl.shard_model(with_norm(), "tp=2", {"norm": None, "block.0": "colwise", "block.2": "rowwise"})
    for got, want in zip(clipped(model), clipped(with_norm()), strict=True):
        torch.testing.assert_close(got, want)
    yield "tp, clipped", model


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name, value in before.items() if name in after and after[name] != value)


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for name in (*CONFIGS, "torch._inductor.config", "torch.distributed.pipelining"):
        importlib.import_module(name)
    alone = dict(programs(mesh))
    # The compiler changes torch when it first runs.
    torch.compile(plain(), backend="eager")(torch.ones(2, 16, dtype=torch.float64))
    attributes_before, tables_before = attributes(), tables()
    report: dict[str, Any] = {}
    for name, model in sharded():
        beside = dict(programs(mesh))
        report[f"numbers beside {name}"] = [
            key for key, want in alone.items() if not all(map(torch.equal, want, beside[key]))
        ]
        del model
    gc.collect()
    report["attributes"] = differing(attributes_before, attributes())
    report["tables"] = differing(tables_before, tables())
    after = dict(programs(mesh))
    report["numbers after"] = [key for key, want in alone.items() if not all(map(torch.equal, want, after[key]))]
    if dist.get_rank() == 0:
        print(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
