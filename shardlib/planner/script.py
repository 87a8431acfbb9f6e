"""The code that uses a choice: the call, and a whole training script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardlib.engine.pipeline.batch import rows as rows_of

__all__ = ["call_lines", "written"]


def call_lines(choice: Any) -> list[str]:
    """Return the lines that shard `model`."""
    if choice.rules:
        lines = [f"rules = {choice.rules}" + (f'.mode("{choice.mode}")' if choice.mode else "")]
    else:
        mode = f', mode="{choice.mode}"' if choice.mode else ""
        lines = [f"rules = sl.layouts.for_model(model{mode})"]
    if choice.stages:
        lines.append(f"rules = rules.with_stages(sl.rules.Balanced({_counts(choice.stages)}))")
    parts = [f"sl.{part!r}" for part in getattr(choice.transforms, "parts", (choice.transforms,))]
    lines.append(f"transforms = {' | '.join(parts)}")
    lines.append(f'model = sl.shard_model(model, "{choice.mesh}", rules, transforms=transforms)')
    return lines


def _counts(stages: tuple[int, ...]) -> str:
    """Write numbers of blocks, with repetition where the list is long.

    >>> _counts((1, 2, 2, 1)), _counts((7, *[8] * 14, 7))
    ('[1, 2, 2, 1]', '[7, *[8] * 14, 7]')
    """
    if len(stages) <= 8:
        return str(list(stages))
    runs: list[list[int]] = []
    for count in stages:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return (
        "["
        + ", ".join(f"*[{count}] * {times}" if times > 2 else ", ".join([str(count)] * times) for count, times in runs)
        + "]"
    )


def written(
    choice: Any, model: str, batch: int, seq: int, sizes: Mapping[str, Any] | None = None, example: Any = None
) -> str:
    """Return a training script on random data."""
    imports, built = _model_lines(model, sizes)
    world, own = choice.mesh.world_size, batch // choice.mesh.data_ranks
    nodes = f" --nnodes {world // 8} --rdzv_backend c10d --rdzv_endpoint HOST:29500" if world > 8 else ""
    return "\n".join(
        [
            f'"""Train on {world} ranks, "{choice.mesh}": {batch} examples a step, {own} of them on each data rank.',
            "",
            f"    torchrun --nproc_per_node {min(world, 8)}{nodes} train.py",
            "",
            "The data are random: put your own in the place of `rows`.",
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
            *(f"    {line}" for line in built),
            *call_lines(choice),
            "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)",
            "",
            "rank, mesh = torch.distributed.get_rank(), sl.get_plan(model).mesh",
            "index, _ = mesh.data_place(mesh.coordinate(rank))  # which rows of the global batch this rank has",
            "generator = torch.Generator().manual_seed(1 + index)",
            "",
            "",
            *_rows(seq, example),
            "",
            "",
            *([] if seq else [*_CRITERION, "", ""]),
            "for step in range(10):",
            *_loop(choice, own, seq, named=isinstance(example, Mapping)),
            "    optimizer.step()",
            "    optimizer.zero_grad()",
            "    if rank == 0:",
            '        print(f"step {step}: loss {float(loss):.4f}")',
            "",
        ]
    )


_CRITERION = [
    "def criterion(output, batch):  # put your own loss in its place",
    '    if getattr(output, "loss", None) is not None:',
    "        return output.loss",
    '    return getattr(output, "logits", output).float().square().mean()',
]


def _rows(seq: int, example: Any) -> list[str]:
    if seq:
        return [
            "def rows(count):",
            f"    ids = torch.randint(model.config.vocab_size, (count, {seq}), generator=generator)",
            '    return {"input_ids": ids, "labels": ids}',
        ]
    given = (example,) if isinstance(example, torch.Tensor) else example
    values = [*given.values()] if isinstance(given, Mapping) else [*given] if isinstance(given, tuple) else []
    if not values or not all(isinstance(value, torch.Tensor) for value in values):
        return [
            "def rows(count):",
            '    raise NotImplementedError("return the arguments of the model for so many rows")',
        ]
    drawn = [_drawn(value, rows_of(example)) for value in values]
    if isinstance(given, Mapping):
        shown = "{" + ", ".join(f'"{name}": {text}' for name, text in zip(given, drawn, strict=True)) + "}"
    else:
        shown = f"({', '.join(drawn)},)"
    return ["def rows(count):", f"    return {shown}"]


def _drawn(tensor: torch.Tensor, rows: int) -> str:
    """Write how random values like an example are made."""
    first = ["count"] if tensor.ndim and len(tensor) == rows else []
    shape = f"({', '.join([*first, *map(str, tensor.shape[len(first) :])])},)" if tensor.ndim else "()"
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return f"torch.randn({shape}, dtype={tensor.dtype}, generator=generator)"
    return f"torch.randint(2, {shape}, generator=generator).to({tensor.dtype})"


def _loop(choice: Any, own: int, seq: int, *, named: bool) -> list[str]:
    if choice.stages:
        return [f"    loss = sl.pipeline_step(model, rows({own}){'' if seq else ', criterion'}).loss"]
    if seq:
        lines = [f"loss = model(**rows({choice.rows})).loss", "loss.backward()"]
    else:
        call = f"model({'**' if named else '*'}batch)"
        lines = [f"batch = rows({choice.rows})", f"loss = criterion({call}, batch)", "loss.backward()"]
    if choice.microbatches == 1:
        return [f"    {line}" for line in lines]
    return [f"    for _ in range({choice.microbatches}):", *(f"        {line}" for line in lines)]


def _model_lines(model: str, sizes: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
    """Return the imports of a model that the command line names, and the lines that build it."""
    if model.endswith(".json") or Path(model).is_dir():
        folder = str(Path(model).parent) if Path(model).name == "config.json" else model
        config = f'config = AutoConfig.from_pretrained("{folder}", use_cache=False)'
        name = _architecture(Path(model))
        make = f"{name}.from_config" if name.startswith("Auto") else name
        return [f"from transformers import AutoConfig, {name}"], [config, f"model = {make}(config)"]
    if sizes is not None:
        config = sizes["class"].removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config"
        given = [f"{key}={value!r}," for key, value in sizes.items() if key != "class"]
        lines = [f"config = {config}(", *(f"    {one}" for one in given), "    use_cache=False,", ")"]
        return [f"from transformers import {config}, {sizes['class']}"], [*lines, f"model = {sizes['class']}(config)"]
    module, _, name = model.rpartition(":") if ":" in model else model.rpartition(".")
    if module.endswith(".py"):
        file = Path(module).resolve()
        found = ["import sys", "", f'sys.path.insert(0, "{file.parent}")  # the folder of {file.name}']
        return [*found, f"from {file.stem} import {name}"], [f"model = {name}()"]
    return [f"from {module} import {name}"], [f"model = {name}()"]


def _architecture(path: Path) -> str:
    """Return the class of transformers that a folder or config.json names."""
    file = path / "config.json" if path.is_dir() else path
    named = json.loads(file.read_text(encoding="utf-8")).get("architectures") if file.is_file() else None
    first = next(iter(named or ()), "AutoModel" if file.is_file() else "AutoModelForCausalLM")
    return "AutoModelForCausalLM" if first.endswith(("ForCausalLM", "LMHeadModel")) else str(first)
