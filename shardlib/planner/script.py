"""The code that uses a choice: the call, and a whole training script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["call_lines", "written"]


def call_lines(choice: Any) -> list[str]:
    """Return the lines that shard `model`."""
    mode = f', mode="{choice.mode}"' if choice.mode else ""
    lines = [f"rules = sl.layouts.for_model(model{mode})"]
    if choice.stages:
        lines.append(f"rules = rules.with_stages(sl.rules.Balanced({list(choice.stages)}))")
    transforms = " | ".join(f"sl.{part!r}" for part in getattr(choice.transforms, "parts", (choice.transforms,)))
    lines.append(f'model = sl.shard_model(model, "{choice.mesh}", rules, transforms={transforms})')
    return lines


def written(choice: Any, model: str, batch: int, seq: int) -> str:
    """Return a training script on random data."""
    imports, built = _model_lines(model)
    own = batch // choice.mesh.data_ranks
    rows = own if choice.stages else choice.rows
    passes = 1 if choice.stages else choice.microbatches
    run = f"torchrun --nproc_per_node {min(choice.mesh.world_size, 8)} train.py"
    if choice.mesh.world_size > 8:
        run += f"    # on each of the {choice.mesh.world_size // 8} nodes"
    return "\n".join(
        [
            f'"""Train on "{choice.mesh}": {batch} examples a step, {own} of them on each data rank.',
            "",
            f"    {run}"
            + ("" if choice.mesh.world_size <= 8 else f"    # on each of the {choice.mesh.world_size // 8} nodes"),
            '"""',
            "",
            "import torch",
            *imports,
            "",
            "import shardlib as sl",
            "from shardlib.booster import LazyInitContext",
            "",
            "torch.manual_seed(0)",
            "with LazyInitContext():  # each rank makes its own shards",
            f"    model = {built}",
            *call_lines(choice),
            "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)",
            "",
            "generator = torch.Generator().manual_seed(1 + sl.get_plan(model).mesh.data_place("
            "sl.get_plan(model).mesh.coordinate(torch.distributed.get_rank()))[0])",
            "for step in range(10):",
            *_loop(choice, rows, passes, seq),
            "    optimizer.step()",
            "    optimizer.zero_grad()",
            "    if torch.distributed.get_rank() == 0:",
            '        print(f"step {step}: loss {float(loss):.4f}")',
            "",
        ]
    )


def _loop(choice: Any, rows: int, passes: int, seq: int) -> list[str]:
    draw = f"ids = torch.randint(model.config.vocab_size, ({rows}, {seq}), generator=generator)"
    if not seq:
        draw = "batch = ...  # the rows of this data rank"
    call = "dict(input_ids=ids, labels=ids)" if seq else "batch"
    if choice.stages:
        return [f"    {draw}", f"    loss = sl.pipeline_step(model, {call}).loss"]
    return [
        f"    for _ in range({passes}):",
        f"        {draw}",
        f"        loss = model(**{call}).loss" if seq else "        loss = model(batch)",
        "        loss.backward()",
    ]


def _model_lines(model: str) -> tuple[list[str], str]:
    """Return the imports of a model that the command line names, and the expression that builds it."""
    if model.endswith(".json") or Path(model).is_dir():
        return (
            ["from transformers import AutoConfig, AutoModelForCausalLM"],
            f'AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("{model}"))',
        )
    module, _, name = model.rpartition(":") if ":" in model else model.rpartition(".")
    module = module.removesuffix(".py").replace("/", ".")
    return [f"from {module} import {name}"], f"{name}()"
