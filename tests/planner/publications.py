"""Published measurements as data: the files in `published/`, one for each publication, and what their keys mean."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from torch import nn

from tests.planner.models import llama, megatron_gpt

__all__ = ["FILES", "build", "evaluate", "load", "models", "runs", "symbols"]

FOLDER = Path(__file__).parent / "published"
FILES = sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> dict[str, Any]:
    """Read a file by its name, as "torchtitan"."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def models(name: str) -> dict[str, dict[str, Any]]:
    """Return the models of a file by their names."""
    return {model["name"]: model for model in load(name)["models"]}


def runs(name: str, **having: Any) -> list[dict[str, Any]]:
    """Return the runs of a file that have these values."""
    return [run for run in load(name)["runs"] if having.items() <= run.items()]


def build(model: dict[str, Any], **options: Any) -> nn.Module:
    """Build a model of a file on `meta`: Llama by its name, all others as Megatron's GPT."""
    if "ffn" in model:
        return llama(model["name"], **options)
    sizes = {size: model[size] for size in ("hidden", "heads", "layers", "seq", "vocab")}
    return megatron_gpt(**sizes, tied=model.get("tied", True), **options)


def symbols(model: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return what the symbols of the papers' formulas stand for; `l` and `L`, `v` and `V` are the same."""
    layers, vocab = model["layers"], model["vocab"]
    own = {"a": model["heads"], "h": model["hidden"], "s": model["seq"]}
    return {**own, "L": layers, "l": layers, "v": vocab, "V": vocab, **more}


def evaluate(formula: str, values: dict[str, Any]) -> float:
    """Evaluate a formula of a file, which is Python, with these values of its symbols."""
    return float(eval(formula, {"__builtins__": {}}, values))
