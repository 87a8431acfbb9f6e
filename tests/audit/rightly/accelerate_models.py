"""Models that Accelerate shards rightly: by DDP, FSDP2, HSDP and the plans of transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib.testing.census import Entry, read
from shardlib.testing.census._models import batch
from shardlib.testing.census._run import mean_loss
from tests.audit.rightly import Case, transformers_models
from tests.audit.rightly.architectures import ARCHITECTURES
from tests.audit.rightly.transformers_models import CENSUS, built, case_of, measured

__all__ = ["CASES"]


def _plugin(model: nn.Module, **options: Any) -> FullyShardedDataParallelPlugin:
    blocks = {type(block).__name__ for block in getattr(model, "blocks", ())}
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": sorted(blocks)}
    chosen = policy if blocks else {"auto_wrap_policy": "no_wrap"}
    if hasattr(model, "_no_split_modules") and model._no_split_modules:
        chosen = {"auto_wrap_policy": "transformer_based_wrap"}
    return FullyShardedDataParallelPlugin(fsdp_version=2, **chosen, **options)  # type: ignore[arg-type]


def by_ddp(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Accelerator]:
    accelerator = Accelerator(cpu=True)
    return accelerator.prepare(model), accelerator


def by_fsdp2(model: nn.Module, mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, Accelerator]:
    plugin = _plugin(model, **options)
    config = ParallelismConfig(dp_shard_size=mesh.size())
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    return _prepared(accelerator, model), accelerator


def by_hsdp(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, Accelerator]:
    plugin = _plugin(model)
    config = ParallelismConfig(dp_replicate_size=mesh.shape[0], dp_shard_size=mesh.shape[1])
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
    return _prepared(accelerator, model), accelerator


def by_auto_plan(folder: Path, mesh: DeviceMesh, *, cls: str) -> tuple[nn.Module, Accelerator]:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=mesh.size()))
    return _prepared(accelerator, transformers_models.by_auto_plan(folder, mesh, cls=cls)), accelerator


def _prepared(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Prepare a model, with an optimizer as FSDP2 demands."""
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[0]  # type: ignore[no-any-return]


# --- the table ------------------------------------------------------------------------------------------------------


def _of_torch(name: str, how: str, mesh: str, shard: Any) -> Case:
    build_one, batches, loss = ARCHITECTURES[name]
    return Case(name, how, mesh, build_one, shard, batches, loss)


def _of_timm(name: str, how: str, mesh: str, shard: Any) -> Case:
    entry, found = _timm()[name]
    return Case(
        f"{entry.cls} (timm)", how, mesh, functools.partial(built, entry), shard,
        functools.partial(batch, entry, found.labels, found.extra), mean_loss,
    )  # fmt: skip


@functools.cache
def _timm() -> dict[str, Any]:
    results = [result for result in read(CENSUS) if result.library == "timm" and result.built]
    return {
        result.name: (Entry("timm", result.name, result.cls, result.labels, result.share), result) for result in results
    }


TORCH = (
    "mlp", "mlp, swiglu", "mlp, frozen trunk", "mixer", "gpt", "gpt, tied", "gpt, fused qkv", "gpt, post-norm",
    "gpt, mixture", "llama", "llama, tied", "vit", "encoder", "convolutions", "lstm",
)  # fmt: skip
TRANSFORMERS = (
    "llama", "qwen3", "mixtral", "gpt2", "gemma3_text", "phi3", "olmo2", "opt", "mistral", "cohere", "bloom",
    "distilbert", "electra", "qwen3_moe", "smollm3",
)  # fmt: skip
# Accelerate's FSDP2 raises: it shards their embeddings twice, or a tied table in two units.
BY_DDP_ALONE = ("bert", "roberta", "t5", "vit", "deit")
TIMM = ("vision_transformer", "convnext", "deit", "beit", "cait", "eva", "davit")


def _cases() -> Iterator[Case]:
    for how, mesh, shard in (("DDP", "dp=2", by_ddp), ("FSDP2", "fsdp=2", by_fsdp2)):
        for name in TORCH:
            yield _of_torch(name, how, mesh, shard)
        for name in TRANSFORMERS if how == "FSDP2" else (*TRANSFORMERS, *BY_DDP_ALONE):
            yield case_of(name, how, mesh, shard)
        for name in TIMM:
            yield _of_timm(name, how, mesh, shard)
    for name in ("gpt", "llama"):
        shard = functools.partial(by_fsdp2, reshard_after_forward=False)
        yield _of_torch(name, "FSDP2, kept after forward", "fsdp=2", shard)
        shard = functools.partial(by_fsdp2, cpu_ram_efficient_loading=True)
        yield _of_torch(name, "FSDP2, loaded by rank 0", "fsdp=2", shard)
    for name in ("mlp", "gpt", "llama", "vit"):
        yield _of_torch(name, "HSDP", "dp_replicate=2,dp_shard=2", by_hsdp)
    for name in ("llama", "qwen3", "mixtral", "gemma3_text", "mistral"):
        shard = functools.partial(by_auto_plan, cls=measured()[name].cls)
        yield case_of(name, "tp_size=2", "tp=2", shard)


CASES = tuple(_cases())
