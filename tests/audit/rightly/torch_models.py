"""Models that PyTorch's own functions shard rightly."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.audit.rightly import Case
from tests.audit.rightly.architectures import ARCHITECTURES

__all__ = ["CASES"]

# --- plans ----------------------------------------------------------------------------------------------------------

Plan = dict[str, ParallelStyle]
_OF_TOKENS = ("gpt", "llama")


def _feed(prefix: str, names: tuple[str, ...] = ("up",)) -> Plan:
    return {**{f"{prefix}.{name}": ColwiseParallel() for name in names}, f"{prefix}.down": RowwiseParallel()}


def _block(name: str) -> Plan:
    """Return Megatron's plan for the blocks of an architecture: columns, then rows."""
    mixers = {"qkv"} if "fused" in name else {"q", "k", "v"}
    plan: Plan = {f"blocks.*.attn.{each}": ColwiseParallel() for each in mixers}
    plan["blocks.*.attn.proj"] = RowwiseParallel()
    if "mixture" in name:
        return plan | _feed("blocks.*.feed.experts.*")
    return plan | _feed("blocks.*.feed", ("gate", "up") if "llama" in name else ("up",))


def tensor_parallel_plan(name: str) -> Plan:
    """Return the plan of an architecture: blocks, and the vocabulary where there is one."""
    if name.startswith("mlp"):
        return _feed("blocks.*.1", ("gate", "up") if "swiglu" in name else ("up",))
    if name == "mixer":
        return _feed("blocks.*") | _feed("times.*")
    if name in ("bag", "twins"):
        return _feed("blocks.*")
    if name == "vit":
        return _block(name) | {"head": ColwiseParallel(output_layouts=Replicate())}
    vocabulary: Plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return _block(name) | vocabulary


def sequence_parallel_plan(name: str, *, loss_too: bool = False) -> Plan:
    """Return the plan in which activations between layers are split over the sequence."""
    whole = functools.partial(PrepareModuleInput, input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = _block(name)
    plan["blocks.*.attn.proj"] = RowwiseParallel(output_layouts=Shard(1))
    plan["blocks.*.feed.down"] = RowwiseParallel(output_layouts=Shard(1))
    plan |= {"blocks.*.attn": whole(), "blocks.*.feed": whole()}
    plan |= {each: SequenceParallel() for each in ("blocks.*.norm1", "blocks.*.norm2", "norm")}
    plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if "llama" not in name or "tied" in name:  # with learned positions: one table of them on every rank
        plan["position"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    plan["head"] = ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1) if loss_too else Replicate(), use_local_output=not loss_too
    )
    return plan


# --- what shards ----------------------------------------------------------------------------------------------------


def by_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def by_fsdp(model: nn.Module, mesh: DeviceMesh, *, reshard: bool = True) -> nn.Module:
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def by_one_unit(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model, mesh=mesh)
    return model


def by_replicate(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in getattr(model, "blocks", ()):
        replicate(block, mesh=mesh)
    replicate(model, mesh=mesh)
    return model


def by_plan(model: nn.Module, mesh: DeviceMesh, *, name: str) -> nn.Module:
    return _tied(name, parallelize_module(model, mesh, tensor_parallel_plan(name)))


def by_sequence(model: nn.Module, mesh: DeviceMesh, *, name: str, loss_too: bool = False) -> nn.Module:
    return _tied(name, parallelize_module(model, mesh, sequence_parallel_plan(name, loss_too=loss_too)))


def by_plan_and_fsdp(model: nn.Module, mesh: DeviceMesh, *, name: str, sequence: bool = False) -> nn.Module:
    shard = by_sequence if sequence else by_plan
    return by_fsdp(shard(model, mesh["tp"], name=name), mesh["fsdp"])


def by_plan_and_replicate(model: nn.Module, mesh: DeviceMesh, *, name: str) -> nn.Module:
    return by_replicate(by_plan(model, mesh["tp"], name=name), mesh["dp"])


def _tied(name: str, model: nn.Module) -> nn.Module:
    """Tie the vocabulary again: `parallelize_module` gives each of the two layers a parameter of its own."""
    if "tied" in name:
        model.head.weight = model.embed.weight  # type: ignore[union-attr]
    return model


# --- the table ------------------------------------------------------------------------------------------------------


def _case(name: str, how: str, mesh: str, shard: object, **options: object) -> Case:
    build, batch, loss = ARCHITECTURES[name]
    return Case(name, how, mesh, build, shard, batch, loss, **options)  # type: ignore[arg-type]


def _cases() -> Iterator[Case]:
    for name in ARCHITECTURES:
        yield _case(name, "DDP", "dp=2", by_ddp)
        yield _case(name, "fully_shard", "fsdp=2", by_fsdp)
    for name in ("mlp", "gpt, tied", "llama", "vit", "convolutions", "lstm"):
        yield _case(name, "fully_shard, kept after forward", "fsdp=2", functools.partial(by_fsdp, reshard=False))
        yield _case(name, "fully_shard as one unit", "fsdp=2", by_one_unit)
        yield _case(name, "replicate", "dp=2", by_replicate)
        yield _case(name, "HSDP", "dp_replicate=2,dp_shard=2", by_fsdp)
    split = [name for name in ARCHITECTURES if name.startswith(("mlp", "mixer", "gpt", "llama", "vit", "bag", "twins"))]
    for name in split:
        yield _case(name, "parallelize_module", "tp=2", functools.partial(by_plan, name=name))
    for name in ("gpt", "gpt, fused qkv", "gpt, no bias", "llama", "llama, tied"):
        yield _case(name, "sequence parallel", "tp=2", functools.partial(by_sequence, name=name))
    for name in ("gpt", "llama"):
        shard = functools.partial(by_sequence, name=name, loss_too=True)
        yield _case(name, "sequence and loss parallel", "tp=2", shard, context=loss_parallel)
    for name in ("mlp", "gpt", "gpt, fused qkv", "llama", "vit"):
        shard = functools.partial(by_plan_and_fsdp, name=name)
        yield _case(name, "parallelize_module and fully_shard", "fsdp=2,tp=2", shard)
    for name in ("gpt", "llama"):
        shard = functools.partial(by_plan_and_fsdp, name=name, sequence=True)
        yield _case(name, "sequence parallel and fully_shard", "fsdp=2,tp=2", shard)
    for name in ("mlp", "gpt"):
        yield _case(
            name, "parallelize_module and replicate", "dp=2,tp=2", functools.partial(by_plan_and_replicate, name=name)
        )


CASES = tuple(_cases())
