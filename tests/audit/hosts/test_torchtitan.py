"""torchtitan's Llama on CPU ranks over gloo, by its own `parallelize_llama`, beside one device in float64.

Its default way to shard, spmd_types, asks more of `fully_shard` than torch 2.13 has. Attention is torch's own: on CPUs
FlexAttention has no backward, and torchtitan has no other for language models.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._utils
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.testing import shared_pool
from shardlib.testing.census._run import upcasting

WIDTH, VOCAB, SEQ, ROWS = 32, 64, 16, 8


def _on_cpu() -> None:
    """Let torchtitan, which takes a machine without an accelerator for one with CUDA, use CPUs and float64."""
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan import config

    config.TORCH_DTYPE_MAP["float64"] = torch.float64


def _config() -> Any:
    import torchtitan.models.llama3 as llama
    from torchtitan.models import common
    from torchtitan.models.common import config_utils
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config_utils.get_attention_config = llama.get_attention_config = lambda *_: ScaledDotProductAttention.Config()
    rope = common.ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=64, theta=500000, scaling="llama")
    return llama.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCAB,
        tok_embeddings=common.Embedding.Config(
            num_embeddings=VOCAB, embedding_dim=WIDTH, param_init=llama._EMBEDDING_INIT
        ),
        norm=common.RMSNorm.Config(normalized_shape=WIDTH, param_init=llama._NORM_INIT),
        lm_head=common.Linear.Config(
            in_features=WIDTH, out_features=VOCAB, param_init=llama._output_linear_init(WIDTH)
        ),
        layers=llama._build_llama3_layers(
            n_layers=2, dim=WIDTH, n_heads=4, n_kv_heads=2, hidden_dim=64, rope=rope, attn_backend="sdpa"
        ),
    )


def _job(**sizes: Any) -> Any:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig

    training = TrainingConfig(seq_len=SEQ, local_batch_size=ROWS)
    training.mixed_precision_param = training.mixed_precision_reduce = "float64"
    return SimpleNamespace(
        training=training,
        parallelism=ParallelismConfig(**sizes),
        compile=CompileConfig(enable=False),
        debug=SimpleNamespace(moe_force_load_balance=False, spmd_typechecking=False),
    )


def _built(job: Any) -> Any:
    torch.manual_seed(0)
    config = _config()
    config.update_from_config(config=job)
    model = config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.double()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses over the number of all tokens: its FSDP sums gradients over ranks, undivided."""
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (ROWS * SEQ)


def _off(sizes: dict[str, int], data: int, backend: str) -> dict[str, float]:
    """Return by how much the gradients of a job differ from one device, of the largest value of each."""
    _on_cpu()
    from torchtitan.distributed import ParallelDims, utils
    from torchtitan.models.llama3 import parallelize_llama

    single = _built(_job(data_parallel_shard_degree=1, spmd_backend="partial_dtensor"))
    job = _job(**{"data_parallel_shard_degree": 1, **sizes}, spmd_backend=backend)
    utils.set_spmd_backend(backend)
    dims = ParallelDims.from_config(job.parallelism, dist.get_world_size())
    dims.build_mesh()
    model = parallelize_llama(
        _built(job), parallel_dims=dims, training=job.training, parallelism=job.parallelism,
        compile_config=job.compile, ac_config=None, dump_folder="",
    )  # fmt: skip
    ids = torch.randint(VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(1))
    part = ids.chunk(data)[dims.get_mesh("batch").get_local_rank() if data > 1 else 0]
    with upcasting():  # its rotary angles are applied in float32
        for each, rows in ((single, ids), (model, part)):
            positions = torch.arange(SEQ).expand(len(rows), SEQ)
            _loss(each(rows[:, :-1], positions=positions), rows[:, 1:]).backward()
    return {name: _error(single.get_parameter(name), p) for name, p in model.named_parameters()}


def _error(want: nn.Parameter, got: nn.Parameter) -> float:
    assert isinstance(got.grad, DTensor)
    assert want.grad is not None
    return ((got.grad.full_tensor() - want.grad).abs().max() / want.grad.abs().max()).item()


@pytest.mark.parametrize(
    ("sizes", "data"),
    [
        ({"tensor_parallel_degree": 2}, 1),
        ({"tensor_parallel_degree": 2, "enable_sequence_parallel": False}, 1),
        ({"data_parallel_shard_degree": 2}, 2),
        ({"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}, 2),
        ({"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2}, 4),
    ],
    ids=["tp", "tp without sequence", "fsdp", "fsdp and tp", "hsdp"],
)
def test_gradients_are_those_of_one_device(sizes: dict[str, int], data: int):
    degrees = [size for name, size in sizes.items() if name.endswith("degree")]
    for off in shared_pool(math.prod(degrees)).run(_off, sizes, data, "partial_dtensor"):
        assert max(off.values()) < 1e-10, off


def test_the_default_way_to_shard_needs_a_newer_torch():
    with pytest.raises(ValueError, match="all parameters must be DTensors on the full SPMD mesh"):
        shared_pool(2).run(_off, {"data_parallel_shard_degree": 2}, 2, "spmd_types")
