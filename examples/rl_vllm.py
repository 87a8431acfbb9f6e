"""Teach a small Llama to sort digits by GRPO: vLLM samples answers, a sharded model learns, and shardlib moves weights.

    torchrun --nproc_per_node 2 examples/rl_vllm.py --mesh dp=2 --transform "zero(3)"
    torchrun --nproc_per_node 2 examples/rl_vllm.py --mesh tp=2
    python examples/rl_vllm.py --alone  # one process, whose model is not sharded

The engine starts with random weights of its own: all that it knows comes by `send_weights`. "gap" is the largest
difference of a log-probability that vLLM reports from that of the model that trains. It is rounding, of float32, as
long as the engine has the weights of the last step. Needs `shardlib[hf]` and vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

import shardlib as sl
from shardlib.integrations.vllm import connect

SORT = 10  # the token after the digits, which asks for the sorted ones
DIGITS = 3
CLIP = 0.2  # of the ratio of new and old probabilities
CONFIG = LlamaConfig(
    vocab_size=16, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--mesh", default="dp=-1", help="axes and sizes; one size may be -1 (as many as are left)")
    p.add_argument("--transform", help='such as "zero(3)"')
    p.add_argument("--alone", action="store_true", help="do not shard")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--prompts", type=int, default=32, help="of a step")
    p.add_argument("--group", type=int, default=16, help="answers to each prompt")
    p.add_argument("--updates", type=int, default=2, help="of the model, with the answers of one step")
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--json", type=Path, help="write the curve to this file")
    return p


def start_engine() -> LLM:
    """The engine, from a config alone: its weights are sent."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # its processes are none of torchrun's
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, where there is no GPU
    with tempfile.TemporaryDirectory() as folder:
        CONFIG.save_pretrained(folder)
        return LLM(
            folder, load_format="dummy", dtype="float32", max_model_len=64, skip_tokenizer_init=True,
            enforce_eager=True, weight_transfer_config={"backend": "shardlib"},
        )  # fmt: skip


def questions(step: int, args: argparse.Namespace) -> Tensor:
    """The prompts of a step, in rows of digits; the same on every rank and in every run."""
    return torch.randint(10, (args.prompts, DIGITS), generator=torch.Generator().manual_seed(step))


def sample(engine: LLM, asked: Tensor, step: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Answers to each question, and their log-probabilities: [prompts * group, digits]."""
    seeds = [(step * len(asked) + row) * args.group for row in range(len(asked))]  # each answer has one of its own
    how = [
        SamplingParams(n=args.group, seed=seed, max_tokens=DIGITS, logprobs=0, ignore_eos=True, detokenize=False)
        for seed in seeds
    ]
    prompts = [{"prompt_token_ids": [*row, SORT]} for row in asked.tolist()]
    answers = [answer for of_one in engine.generate(prompts, how, use_tqdm=False) for answer in of_one.outputs]
    tokens = [list(answer.token_ids) for answer in answers]
    logprobs = [[at[token].logprob for at, token in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
    return torch.tensor(tokens), torch.tensor(logprobs)


def logprobs_of(model: nn.Module, asked: Tensor, answers: Tensor) -> Tensor:
    """The log-probabilities of the answers' tokens by the model that trains."""
    tokens = torch.cat([asked, asked.new_full((len(asked), 1), SORT), answers[:, :-1]], 1)
    logits = model(tokens, use_cache=False).logits[:, asked.shape[1] :]
    return logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> Tensor:
    """Take a step of GRPO; returns the log-probabilities before it."""
    asked, answers, sampled, advantages = batch
    logprobs = logprobs_of(model, asked, answers)
    ratio = (logprobs - sampled).exp()  # of the model that trains to the one that vLLM had
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    sl.clip_grad_norm_(model, 1.0)
    optimizer.step()
    return logprobs.detach()


def main() -> None:
    args = parser().parse_args()
    mesh = sl.mesh(args.mesh)  # starts the job's process group, which has to be there before the engine is
    rank, shape = dist.get_rank(), sl.MeshShape.of(mesh)
    place, places = shape.data_place(shape.coordinate(rank))
    engine = start_engine() if rank == 0 else None

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG)
    model = model.to(mesh.device_type)
    if not args.alone:
        transforms = [sl.transforms.parse(args.transform)] if args.transform else []
        model = sl.shard_model(model, mesh, transforms=transforms, compile=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    connection = connect(model, engine)

    curve = []
    for step in range(args.steps):
        start = time.perf_counter()
        connection.send_weights()
        if engine:
            engine.reset_prefix_cache()  # it is of the old weights
        sent = time.perf_counter()

        asked = questions(step, args)
        box: list[Any] = [sample(engine, asked, step, args) if engine else None]
        dist.broadcast_object_list(box)  # one rank has asked the engine; all learn from its answers
        answers, sampled = box[0]
        generated = time.perf_counter()

        asked = asked.repeat_interleave(args.group, 0)
        rewards = (answers == asked.sort(1).values).float().mean(1)
        groups = rewards.view(-1, args.group)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        rows = (asked, answers, sampled, advantages.view(-1, 1))
        batch = tuple(each.chunk(places)[place].to(mesh.device_type) for each in rows)
        logprobs = update(model, optimizer, batch)
        gap = (logprobs - batch[2]).abs().max()
        for _ in range(args.updates - 1):
            update(model, optimizer, batch)
        dist.all_reduce(gap, op=dist.ReduceOp.MAX)
        trained = time.perf_counter()

        seconds = {"generate": generated - sent, "train": trained - generated, "send": sent - start}
        curve.append({"reward": rewards.mean().item(), "entropy": -sampled.mean().item(), "gap": gap.item(), **seconds})
        if rank == 0:
            times = " / ".join(f"{each:.2f}" for each in seconds.values())
            print(f"step {step:3}  reward {rewards.mean():.3f}  gap {gap:.1e}  seconds {times}", flush=True)

    connection.shutdown()
    if args.json and rank == 0:
        args.json.write_text(json.dumps(curve, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":  # vLLM starts processes, which import this file
    main()
