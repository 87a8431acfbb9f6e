"""Predictions of a training step's memory, by shardlib and by others, each asked in its own terms.

A tool gets a case and returns bytes on the first rank, or raises `CannotExpress`. What a tool is told is what its own
documentation asks for; no number of a run reaches it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import logging
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _beside_models import MODELS, Case, Decoder, build, example
from _beside_runs import fully_sharded, transforms
from torch import nn
from torch.distributed import init_device_mesh

import shardlib as sl
from shardlib.transforms import Transform

MIB = 2**20
MEGATRON: list[Path] = []  # the folder of --megatron, if it was given


class CannotExpress(Exception):
    """This tool has no way to say this configuration."""


@dataclass(frozen=True)
class Tool:
    """Attributes:
    predict: returns the predicted bytes.
    against: the libraries whose runs it describes.
    counts: what its number includes, in words.
    """

    predict: Callable[[Case], int]
    against: tuple[str, ...]
    counts: str


# --- shardlib ---------------------------------------------------------------------------------------------------------


def predicted_peak(make: Callable[[], nn.Module], mesh: str, given: Sequence[Transform], batch: tuple[Any, ...]) -> int:
    """Return the peak of a rank's memory in a training step, as shardlib predicts it."""
    with torch.device("meta"):
        model = make()
    return sl.plan(model, mesh, {"**": None}, transforms=given).time("cpu", example=batch).memory.total


def by_shardlib(case: Case) -> int:
    return predicted_peak(lambda: build(case), f"dp={case.ranks}", transforms(case), example(case))


# --- torch ------------------------------------------------------------------------------------------------------------


def by_fsdp_mem_tracker(case: Case) -> int:
    """torch's FSDPMemTracker, which runs two steps on fake tensors as rank 0 of a fake world.

    It counts what fake kernels allocate when an op is dispatched for the first time in a process, such as temporaries
    of a fused optimizer. So it is asked twice, and the second answer counts, which is the better one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if case.sharding != "fsdp":
        raise CannotExpress("it follows fully_shard only")
    dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
    try:
        _tracked(case)
        return _tracked(case)
    finally:
        dist.destroy_process_group()


def _tracked(case: Case) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    mesh = init_device_mesh("cpu", (case.ranks,))  # which reads values, so it cannot be made of fake tensors
    with FakeTensorMode():
        model = fully_sharded(case, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = example(case)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs(batch)
        with tracker:
            for _ in range(2):
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                tracker.reset_mod_stats()  # as torchtitan does; the peak of all steps stays
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def by_deepspeed(case: Case) -> int:
    """DeepSpeed's estimators, without offload."""
    if case.dtype != "bf16":
        raise CannotExpress("it counts 16-bit training only")
    if case.sharding not in ("zero2", "zero3"):
        raise CannotExpress("there are estimators of stages 2 and 3 only")
    ranks: dict[str, Any] = {"num_gpus_per_node": case.ranks, "num_nodes": 1, "cpu_offload": False}
    model = build(case)
    if case.sharding == "zero2":
        zero: Any = _imported("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeed")
        return zero.estimate_zero2_model_states_mem_needs(zero.model_to_params(model), **ranks)[1]
    zero = _imported("deepspeed.runtime.zero.stage3", "DeepSpeed")
    total, largest = zero.model_to_params(model)
    return zero.estimate_zero3_model_states_mem_needs(total, largest, cpu_offload_params=False, **ranks)[1]


# --- llm-analysis -----------------------------------------------------------------------------------------------------


def by_llm_analysis(case: Case) -> int:
    """llm-analysis, with its defaults for Adam: gradients, master weights and moments of four bytes each."""
    sizes = _decoder(case)
    if case.dtype != "bf16":
        raise CannotExpress("it counts weights of 4, 8 and 16 bits only")
    config: Any = _imported("llm_analysis.config", "llm-analysis")
    analysis: Any = _imported("llm_analysis.analysis", "llm-analysis")
    importlib.import_module("llm_analysis.logger").logger.setLevel(logging.ERROR)
    # Its own configuration of Llama has 4 * hidden_dim for a gated MLP of 8/3 * hidden_dim, which has as many weights.
    model = config.ModelConfig(
        "case",
        sizes.layers,
        sizes.heads,
        sizes.embed,
        sizes.vocab,
        sizes.seq,
        sizes.kv_heads,
        ffn_embed_dim=4 * sizes.embed,
    )
    asked = analysis.LLMAnalysis(
        model,
        config.get_gpu_config_by_name("a100-sxm-80gb"),  # the time depends on it, the memory does not
        config.DtypeConfig("w16a16e16", 16, 16, 16),
        config.ParallelismConfig(dp_size=case.ranks),
    )
    rows = MODELS[case.model].rows
    stages = {"replicate": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
    with contextlib.redirect_stdout(io.StringIO()):
        found = asked.training(
            batch_size_per_gpu=rows,
            gradient_accumulation_steps=1,
            global_batch_size=rows * case.ranks,
            seq_len=sizes.seq,
            activation_recomputation=analysis.ActivationRecomputation.FULL
            if case.recompute
            else analysis.ActivationRecomputation.NONE,
            ds_zero=analysis.DSZeRO(stages[case.sharding]),
            flash_attn=True,
            softmax_dropout=False,
            mlp_gated_linear_units=sizes.gated,
        )
    return int(found["(weight+op_state+grad+act)_memory_per_gpu"])


# --- Megatron ---------------------------------------------------------------------------------------------------------


def by_megatron(case: Case) -> int:
    """Megatron-LM's `report_theoretical_memory`, of the checkout in `MEGATRON`."""
    sizes = _decoder(case)
    if case.dtype != "bf16":
        raise CannotExpress("it counts bf16 training only")
    if case.sharding not in ("replicate", "zero1"):
        raise CannotExpress("it knows data parallelism, and the distributed optimizer")
    if case.recompute:
        raise CannotExpress("it has no formula for full recomputation")
    if not MEGATRON:
        raise CannotExpress("no checkout: see --megatron")
    args = types.SimpleNamespace(
        kv_channels=sizes.embed // sizes.heads,
        num_attention_heads=sizes.heads,
        hidden_size=sizes.embed,
        group_query_attention=sizes.kv_heads != sizes.heads,
        num_query_groups=sizes.kv_heads,
        num_experts=None,
        swiglu=sizes.gated,
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        num_layers=sizes.layers,
        mtp_num_layers=None,
        normalization="RMSNorm" if sizes.rms_norm else "LayerNorm",
        multi_latent_attention=False,
        padded_vocab_size=sizes.vocab,
        untie_embeddings_and_output_weights=not sizes.tied,
        ffn_hidden_size=sizes.ff,
        add_bias_linear=not sizes.rms_norm,
        expert_tensor_parallel_size=1,
        expert_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        tensor_model_parallel_size=1,
        world_size=case.ranks,
        data_parallel_size=case.ranks,
        use_distributed_optimizer=case.sharding == "zero1",
        seq_length=sizes.seq,
        micro_batch_size=MODELS[case.model].rows,
        sequence_parallel=False,
        recompute_granularity=None,
        hybrid_layer_pattern=None,
        is_hybrid_model=False,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        found = _megatron(MEGATRON[0]).report_theoretical_memory(args, num_microbatches=1)
    return int(found[-1] * MIB)


def _megatron(folder: Path) -> Any:
    """Return the one file of Megatron-LM, without the rest, which wants GPUs; it takes two names from `utils`."""
    name = "megatron.training.theoretical_memory_usage"
    if name not in sys.modules:
        utils: Any = types.ModuleType("megatron.training.utils")
        utils.is_hybrid_model, utils.print_rank_0 = (lambda args: args.is_hybrid_model), (lambda text: None)
        sys.modules["megatron.training.utils"] = utils
        for package in ("megatron", "megatron.training"):
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(folder / package.replace(".", "/"))]
    return importlib.import_module(name)


TOOLS: dict[str, Tool] = {
    "shardlib": Tool(by_shardlib, ("shardlib",), "what the planner says of a step, with the optimizer"),
    "FSDPMemTracker": Tool(by_fsdp_mem_tracker, ("torch",), "a dry run of fully_shard, with the optimizer"),
    "DeepSpeed's estimators": Tool(
        by_deepspeed, ("deepspeed", "shardlib"), "parameters, gradients and states; no activations"
    ),
    "llm-analysis": Tool(
        by_llm_analysis, ("deepspeed", "torch", "shardlib"), "formulas for decoders, with activations"
    ),
    "Megatron's formula": Tool(by_megatron, ("shardlib",), "formulas for decoders, with activations"),
}


def versions() -> dict[str, str]:
    """Return the version of each tool that is here."""
    found = {"torch": str(torch.__version__)}
    for name in ("deepspeed", "llm-analysis", "hetu-galvatron"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _decoder(case: Case) -> Decoder:
    sizes = MODELS[case.model].decoder
    if sizes is None:
        raise CannotExpress("it knows decoders only")
    return sizes


def _imported(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CannotExpress(f"{name} is not installed ({error})") from None
