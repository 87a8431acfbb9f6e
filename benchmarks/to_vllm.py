"""Weights of a sharded model into a running vLLM, in memory, beside a checkpoint on a memory file system.

    torchrun --nproc_per_node 2 benchmarks/to_vllm.py

Two ranks train under ZeRO-3 and an engine of two workers serves. One way is `send_weights`; the other saves a folder in
the format of Hugging Face to memory, and lets vLLM reload it. Both end with the same log-probabilities. Memory is the
largest growth of a training rank's resident set meanwhile. Needs the environment of `make test-vllm`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _report import alternate, compared, parser, write, written
from torch import nn
from transfer import measured
from transformers import LlamaConfig, LlamaForCausalLM

import shardlib as sl
from shardlib.integrations.vllm import connect

FOLDER = Path("/dev/shm/shardlib-vllm")


def config(width: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8 * width,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=64,
    )


def engine(folder: Path) -> Any:
    for name in [*os.environ]:
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") or "TORCHELASTIC" in name:
            del os.environ[name]
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM

    return LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        tensor_parallel_size=2,
        weight_transfer_config={"backend": "shardlib"},
    )


def main() -> None:
    args = parser(__doc__).parse_args()
    width, layers, rounds = (128, 2, 2) if args.quick else (512, 8, 6)
    torch.manual_seed(0)
    model: nn.Module = sl.shard_model(LlamaForCausalLM(config(width, layers)), "dp=2", transforms=sl.zero(3))
    rank = dist.get_rank()
    taken: dict[str, list[float]] = {"send_weights": [], "checkpoint in memory": []}
    memory = dict.fromkeys(taken, 0)
    with ExitStack() as stack:
        llm = None
        sl.save(FOLDER / "start", model, weights="huggingface", random=False)
        stack.callback(shutil.rmtree, FOLDER, ignore_errors=True)
        if rank == 0:
            llm = engine(FOLDER / "start")
            stack.callback(lambda: llm.llm_engine.engine_core.shutdown())
        connection = connect(model, llm)

        def by_checkpoint(_: Any, __: Any) -> None:
            sl.save(FOLDER / "step", model, weights="huggingface", random=False)
            if llm is not None:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(FOLDER / "step")})
                shutil.rmtree(FOLDER / "step")
            dist.barrier()

        ways: dict[str, Callable[[Any, Any], Any]] = {
            "send_weights": lambda _, __: connection.send_weights(),
            "checkpoint in memory": by_checkpoint,
        }
        for way in ways.values():
            way(model, llm)
        for order in alternate(list(ways), rounds):
            for name in order:
                seconds, grown = measured(ways[name], model, model)
                taken[name].append(seconds)
                memory[name] = max(memory[name], grown)
        sent = sum(moves.bytes for moves in connection.moves)
        connection.shutdown()
    size = sum(p.numel() * p.element_size() for p in LlamaForCausalLM(config(width, layers)).parameters())
    ratio = compared(taken["checkpoint in memory"], taken["send_weights"])
    if rank == 0:
        mib = 2**20
        print(f"a model of {size / mib:.0f} MiB; {sent / mib:.1f} MiB are sent to two workers")
        for name, each in taken.items():
            print(f"  {name:<20} {min(each):.3f} s; memory grows by {memory[name] / mib:.0f} MiB")
        print(f"  the checkpoint takes {written(ratio)} times as long", flush=True)
        if args.json:
            fastest = {name: min(each) for name, each in taken.items()}
            found: dict[str, Any] = {
                "model_bytes": size,
                "sent_bytes": sent,
                "seconds": fastest,
                "ratio": ratio,
                "memory_bytes": memory,
            }
            write(args.json, found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # vLLM's processes import this file
    main()
