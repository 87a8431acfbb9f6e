"""How long it takes to plan a Llama-3-405B-shaped model for 16,384 ranks, on one core and without any of them.

    python benchmarks/planning.py [--quick] [--json FILE]

The model has the shape of Llama 3 405B (Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783, table 3)
and lives on `meta`. Each line is measured in a process of its own, so that peak memory belongs to it alone; "baseline"
is what the imports take. Building the model is transformers' part, the rest is ours.
"""

from __future__ import annotations

import importlib
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from _report import parser, write
from rich.console import Console
from rich.table import Table

MESH = "pp=16,dp=8,fsdp=16,tp=8"
LAYERS = (8, 16, 32, 64, 126)
QUICK = (2,)
MIB = 2**20

# As in layouts/llama.toml, with weights and their gradients split over fsdp too.
RULES = {
    "embed_tokens.weight": "vocab@tp embed@fsdp",
    "lm_head.weight": "vocab@tp embed@fsdp",
    "q_proj.weight": "(heads@tp head) embed@fsdp",
    "k_proj.weight": "(kv_heads@tp head) embed@fsdp",
    "v_proj.weight": "(kv_heads@tp head) embed@fsdp",
    "o_proj.weight": "embed@fsdp (heads@tp head)",
    "gate_proj.weight": "ff@tp embed@fsdp",
    "up_proj.weight": "ff@tp embed@fsdp",
    "down_proj.weight": "embed@fsdp ff@tp",
    "*norm.weight": "embed@fsdp",
}


def main() -> None:
    args = parser(__doc__).parse_args()
    results = [_in_own_process(measure, layers) for layers in (QUICK if args.quick else LAYERS)]
    Console(width=140).print(_table(results))
    print(results[-1]["summary"])
    if args.json:
        write(args.json, {"mesh": MESH, "planned": results})


def measure(layers: int) -> dict[str, Any]:
    """Build, plan, count memory, print and save; seconds of each, and the peak resident size of this process."""
    import torch

    torch.set_num_threads(1)
    build, make_plan = _imported()
    seconds: dict[str, float] = {}
    baseline = _peak_mib()
    model = _timed(seconds, "build", lambda: build(layers))
    built = _peak_mib()
    made = _timed(seconds, "plan", lambda: make_plan(model))
    memory = _timed(seconds, "memory", made.memory)
    text = _timed(seconds, "table", lambda: str(made))
    saved = _timed(seconds, "json", made.to_json)
    return {
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tensors": len(made.rows),
        "seconds": {key: round(value, 3) for key, value in seconds.items()},
        "mib": {"baseline": baseline, "model": built - baseline, "ours": _peak_mib() - built},
        "json_kib": len(saved) // 1024,
        "summary": "\n".join(text.splitlines()[:3]),
        "rank_gib": round(memory.total / 2**30, 2),
    }


def _imported() -> tuple[Callable[[int], Any], Callable[[Any], Any]]:
    """Builder and planner, with everything they import."""
    import torch

    _hide_unfit_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardlib._plan import make_plan
    from shardlib.rules import Rules

    def build(layers: int) -> Any:
        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=layers,
            num_attention_heads=128,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            tie_word_embeddings=False,
        )
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            return LlamaForCausalLM(config)

    sizes = {"heads": 128, "kv_heads": 8, "head": 128}
    rules = Rules(RULES, sizes=sizes)
    return build, lambda model: make_plan(model, MESH, rules)


def _hide_unfit_torchvision() -> None:
    """transformers imports torchvision by the way, which fails where that was built for another torch."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = None  # type: ignore[assignment]


def _timed(seconds: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    result = work()
    seconds[name] = time.perf_counter() - start
    return result


def _peak_mib() -> int:
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size // (MIB if sys.platform == "darwin" else 1024)


def _in_own_process(work: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(title=f"Llama-3-405B shape on {MESH} (16,384 ranks), one core")
    steps = list(results[0]["seconds"])
    memories = list(results[0]["mib"])
    columns = ["layers", "parameters", "tensors", *(f"{s}, s" for s in steps), *(f"{m}, MiB" for m in memories)]
    for column in [*columns, "per rank, GiB"]:
        table.add_column(column, justify="right")
    for result in results:
        measured = [f"{result['seconds'][s]:.3f}" for s in steps] + [str(result["mib"][m]) for m in memories]
        size = f"{result['parameters'] / 1e9:.1f} G"
        table.add_row(str(result["layers"]), size, str(result["tensors"]), *measured, str(result["rank_gib"]))
    return table


if __name__ == "__main__":
    main()
