"""Models, and code that shards them by torch's own means, right and wrong."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

DIM, WORDS = 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Words(nn.Module):
    """Predicts words, by blocks of which each has a norm and two linear layers."""

    def __init__(self, layers: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def ids() -> torch.Tensor:
    return torch.zeros(2, 8, dtype=torch.long)


def data_parallel(model: nn.Module, mesh: DeviceMesh, **given: Any) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **given)
    return fully_shard(model, mesh=mesh, **given)


def tensor_parallel(
    model: Words, mesh: DeviceMesh, *, head: bool = True, down: Any = None, data: bool = True, **given: Any
) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": down or RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    if head:
        parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    return data_parallel(model, mesh["dp"], **given) if data else model


def sequence_parallel(model: Words, mesh: DeviceMesh, *, norms: bool = True, data: bool = True) -> nn.Module:
    """Split the sequence between blocks; with `norms=False` those of the blocks are left out of the plan."""
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=not norms),
        **({"norm": SequenceParallel()} if norms else {}),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    start = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=not norms)
    end = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"embedding": start, "norm": SequenceParallel(), "head": end})
    return data_parallel(model, mesh["dp"]) if data else model


def in_low_precision(model: Words, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return tensor_parallel(model, mesh, mp_policy=policy)


def replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(model, mesh=mesh["dp"])


def replicated_and_parallel(model: Words, mesh: DeviceMesh) -> nn.Module:
    return replicated(tensor_parallel(model, mesh, data=False), mesh)


def in_ddp(model: nn.Module, mesh: DeviceMesh, **given: Any) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[0], process_group=mesh.get_group("dp"), **given)


def by_composable_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(model, process_group=mesh.get_group("dp"))


def on_own_mesh(model: nn.Module, _mesh: DeviceMesh) -> nn.Module:
    """Ask for a GPU, a back end and a mesh, as the script of a training run does."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % 8)
    model.to("cuda").cuda()
    own = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("outer", "inner"))
    return data_parallel(torch.compile(model), own)


class Local(nn.Module):
    """A block that leaves DTensor for its products, as attention kernels are called."""

    def __init__(self, grad_placements: Any = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)
        self.mesh: DeviceMesh | None = None
        self.grad_placements = grad_placements

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        if self.mesh is None:
            return self.down(self.up(x))
        x = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=self.grad_placements)
        found = x @ self.up.weight.to_local().t() @ self.down.weight.to_local().t()
        return DTensor.from_local(found, self.mesh, [Partial()]).full_tensor()


def local_products(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model:  # type: ignore[attr-defined]
        block.up.weight = nn.Parameter(distribute_tensor(block.up.weight, mesh, [Shard(0)]))
        block.down.weight = nn.Parameter(distribute_tensor(block.down.weight, mesh, [Shard(1)]))
        block.mesh = mesh
    return model


class Copy(torch.autograd.Function):
    """Passes on what all ranks have, and sums the gradients that they compute (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Broadcast(Copy):
    """Passes on what all ranks have, and gives all ranks the gradient of one."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.broadcast(grad, 0)
        return grad


class Sum(torch.autograd.Function):
    """Sums what the ranks compute, and passes gradients on (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class ByHand(nn.Module):
    """A block of plain tensors, split as Megatron does."""

    def __init__(self, *, copies: str = "sum") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)
        self.copy = {"sum": Copy.apply, "broadcast": Broadcast.apply}.get(copies, lambda x: x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return Sum.apply(self.down(torch.relu(self.up(self.copy(x)))))


def by_hand(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model:  # type: ignore[attr-defined]
        block.up.weight = nn.Parameter(block.up.weight.detach().chunk(mesh.size(), 0)[mesh.get_local_rank()])
        block.down.weight = nn.Parameter(block.down.weight.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()])
    return model


RIGHT: dict[str, tuple[Any, Any, str]] = {
    "tensor parallel": (Words, tensor_parallel, "dp=4,tp=2"),
    "sequence parallel": (Words, sequence_parallel, "dp=4,tp=2"),
    "bfloat16": (Words, in_low_precision, "dp=4,tp=2"),
    "FSDP": (Words, lambda model, mesh: data_parallel(model, mesh), "dp=4"),
    "HSDP": (Words, lambda model, mesh: data_parallel(model, mesh), "dp_replicate=2,dp_shard=4"),
    "replicate": (Words, replicated, "dp=4"),
    "tensor parallel and replicate": (Words, replicated_and_parallel, "dp=4,tp=2"),
    "DDP": (Words, in_ddp, "dp=4"),
    "replicate by DDP": (Words, by_composable_ddp, "dp=4"),
    "its own mesh": (Words, on_own_mesh, "dp=4"),
    "tied": (functools.partial(Words, tied=True), lambda model, mesh: fully_shard(model, mesh=mesh), "dp=4"),
}
