"""Galvatron's search on the profiles that its package ships, for `planner_beside.py --galvatron`.

The search needs no GPU: it reads times of layers, sizes of activations and bandwidths that its authors have measured.
Only the package `galvatron.core.search_engine` is imported; `galvatron.core` itself imports a runtime for GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import shutil
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

HARDWARE = "profile_hardware/hardware_configs"
# Searches in which everything but the kind of parallelism is free. "sdp" is its word for ZeRO 3.
SPACES = "full", "dp", "sdp", "tp", "pp", "3d"


@dataclass(frozen=True)
class Search:
    """A search with the options of one of Galvatron's own scripts.

    Attributes:
        model, folder, profile: the name, and the files under `models/` in which its profile is.
        hidden, layers, seq: the sizes that the search is told.
        nodes, gpus: GPUs are those of a node.
        memory: GB of a GPU.
        batch: sequences, or images, of a step.
        shipped: the result of this search that the package ships, in its words; None where there is none.
        options: more options of the script.
    """

    model: str
    folder: str
    profile: str
    hidden: int
    layers: int
    seq: int
    nodes: int
    gpus: int
    memory: int
    batch: int
    options: tuple[str, ...]
    shipped: str | None = None


# Options of its scripts `search_dist.sh`, with two changes. "fine_grained_mode 0" is one strategy for all layers, as
# shardlib has: with one for each layer, a search over eight GPUs takes minutes for each number of microbatches.
# In a ViT at most two GPUs share a layer: with four, Galvatron 2.4.0 raises KeyError on this profile, which has no
# memory of embeddings over four GPUs with stages.
COARSE = "--fine_grained_mode", "0", "--disable_tp_consec", "1", "--no_async_grad_reduce"
VIT = *COARSE, "--sp_space", "tp", "--max_tp_deg", "2"
GPT = *COARSE, "--sp_space", "tp+sp", "--sequence_parallel"
BATCHES = *GPT, "--time_profile_mode", "batch"
LENGTHS = *GPT, "--time_profile_mode", "sequence", "--memory_profile_mode", "sequence"
SEARCHES = [
    Search(
        "ViT-huge", "vit_hf", "hidden1280_head16", 1280, 32, 197, 1, 4, 23, 160, VIT,
        "galvatron_config_hidden1280_head16_1nodes_4gpus_per_node_23GB_bf16_[tpconsec_off].json",
    ),
    Search(
        "ViT-xhuge", "vit_hf", "hidden2560_head32", 2560, 128, 197, 1, 4, 50, 64, VIT,
        "galvatron_config_hidden2560_head32_1nodes_4gpus_per_node_50GB_bf16_[tpconsec_off].json",
    ),
    Search("BERT-large", "bert_hf", "hidden1024_head16", 1024, 24, 512, 1, 8, 24, 256, LENGTHS),
    Search("GPT-6.7B", "gpt_hf", "hidden4096_head32_seqlen2048", 4096, 32, 2048, 1, 8, 34, 64, BATCHES),
    Search("Llama-7B", "llama_hf", "hidden4096_head32_seqlen2048", 4096, 32, 2048, 1, 8, 36, 64, BATCHES),
    Search("Llama-7B", "llama_hf", "hidden4096_head32_seqlen2048", 4096, 32, 2048, 2, 8, 36, 64, BATCHES),
]  # fmt: skip


def search_all(package: Path, quick: bool) -> list[dict[str, Any]]:
    """Run the searches; each has its inputs, and for each space the plan that was found and its predicted time."""
    engine = _engine(package)
    return [search(engine, package, one) for one in (SEARCHES[:1] if quick else SEARCHES)]


def search(engine: Any, package: Path, one: Search) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _profiles(package, one, folder)
        found = {space: _found(engine, one, folder, space) for space in SPACES}
    result: dict[str, Any] = {"search": vars(one), "inputs": found["full"].pop("inputs", None), "found": found}
    if one.shipped:
        result["shipped"] = json.loads((package / "models" / one.folder / "configs" / one.shipped).read_text())
    return result


def table(results: list[dict[str, Any]]) -> Table:
    made = Table("model", "GPUs", "batch", "space", "plan of layers", "s a step", "rows a second", "MB", "search s")
    for result in results:
        one = result["search"]
        for space, found in result["found"].items():
            plan = found.get("plan", found.get("reason"))
            numbers = (found["seconds"], found["throughput"]) if "plan" in found else (None, None)
            memory = f"{max(found['memory_mb']):,.0f}" if "plan" in found else "-"
            figures = (f"{number:.3f}" if number else "-" for number in numbers)
            gpus = f"{one['nodes']} x {one['gpus']}"
            made.add_row(
                one["model"], gpus, str(one["batch"]), space, plan, *figures, memory, f"{found['searched']:.1f}"
            )  # fmt: skip
    return made


def _engine(package: Path) -> Any:
    sys.path.insert(0, str(package.parent))
    core = types.ModuleType("galvatron.core")
    core.__path__ = [str(package / "core")]
    sys.modules["galvatron.core"] = core
    return importlib.import_module("galvatron.core.search_engine.search_engine")


def _profiles(package: Path, one: Search, folder: Path) -> None:
    """Copy the profile of a model and of a cluster; an older layout lacks lengths of sequences, which are added."""
    for kind in ("computation", "memory"):
        file = package / "models" / one.folder / "configs" / f"{kind}_profiling_bf16_{one.profile}.json"
        given = json.loads(file.read_text())
        convert = _with_length if kind == "computation" else _with_lengths
        (folder / file.name).write_text(json.dumps(convert(given, one.seq)))
    shutil.copytree(package / HARDWARE, folder / "hardware")
    # Times of collectives over two to eight GPUs are there for one node of eight; the links inside a node are the same.
    times = folder / "hardware" / f"sp_time_{one.nodes}nodes_{one.gpus}gpus_per_node.json"
    if not times.exists():
        shutil.copy(folder / "hardware" / "sp_time_1nodes_8gpus_per_node.json", times)


def _with_length(given: dict[str, Any], seq: int) -> dict[str, Any]:
    return {key if "seq" in key or "_bsz" not in key else f"{key}_seq{seq}": value for key, value in given.items()}


def _with_lengths(given: dict[str, Any], seq: int) -> dict[str, Any]:
    old = ("layertype_", "other_memory_")
    nested = {
        key: value if any(name.isdigit() and int(name) > 64 for name in value) else {str(seq): value}
        for key, value in given.items()
        if key.startswith(old)
    }
    return {**given, **nested}


def _found(engine: Any, one: Search, folder: Path, space: str) -> dict[str, Any]:
    args = _arguments(one, folder, space)
    said = io.StringIO()
    start = time.perf_counter()
    with contextlib.redirect_stdout(said):
        searching = engine.GalvatronSearchEngine(args)
        layer = {"hidden_size": one.hidden, "layer_num": one.layers, "seq_len": one.seq}
        searching.set_search_engine_info(str(folder), [layer], one.profile)
        searching.initialize_search_engine()
        kept = _kept(searching)
        try:
            throughput = float(searching.parallelism_optimization())
        except (KeyError, ZeroDivisionError) as error:  # of its own, where a space has no plan for these GPUs
            return {"searched": time.perf_counter() - start, "reason": f"{type(error).__name__}: {error}"}
    searched = time.perf_counter() - start
    result: dict[str, Any] = {"searched": searched}
    if space == "full":
        result["inputs"] = _inputs(searching)
    if throughput <= 0:
        return result | {"reason": "nothing fits"}
    (written,) = folder.glob("galvatron_config_*.json")
    plan = json.loads(written.read_text())
    written.unlink()
    return result | {
        "throughput": throughput,
        "seconds": one.batch / throughput,
        "memory_mb": [float(each) for each in kept["mem_cost"]],
        "plan": _in_words(plan, one),
        "config": plan,
    }


def _kept(searching: Any) -> dict[str, Any]:
    """Return a mapping that will have what the search finds, which it otherwise prints and saves in parts."""
    kept: dict[str, Any] = {}
    save = searching.save_results

    def keep(found: dict[str, Any], *rest: Any) -> None:
        kept.update(found)
        save(found, *rest)

    searching.save_results = keep
    return kept


def _arguments(one: Search, folder: Path, space: str) -> argparse.Namespace:
    options: Any = importlib.import_module("galvatron.core.search_engine.arguments")
    hardware = str(folder / "hardware") + "/"
    given = {
        "num_nodes": one.nodes,
        "num_gpus_per_node": one.gpus,
        "memory_constraint": one.memory,
        "settle_bsz": one.batch,
        "search_space": space,
        "mixed_precision": "bf16",
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "zero2",
        "memory_profiling_path": str(folder),
        "time_profiling_path": str(folder),
        "allreduce_bandwidth_config_path": hardware,
        "p2p_bandwidth_config_path": hardware,
        "overlap_coe_path": hardware,
        "sp_time_path": hardware,
        "output_config_path": str(folder),
        "log_dir": str(folder / "logs"),
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    args = options.galvatron_search_args(argparse.ArgumentParser()).parse_args([*words, *one.options])
    args.hidden_size, args.seq_length, args.num_hidden_layers = one.hidden, one.seq, one.layers
    return args


def _in_words(config: dict[str, Any], one: Search) -> str:
    """Return how many layers have which degrees: `pp2 tp2 dp4` with zero2 or zero3, and `ckpt` for recomputation."""
    columns = [config[name].split(",") for name in ("tp_sizes_enc", "dp_types_enc", "use_sp", "checkpoint")]
    pp = config["pp_deg"]
    counts: dict[str, int] = {}
    for tp, zero3, ulysses, recomputed in zip(*columns, strict=True):
        dp = one.nodes * one.gpus // pp // int(tp)
        kind = "zero3" if zero3 == "1" else config["default_dp_type"]
        said = [f"pp{pp}", f"{'sp' if ulysses == '1' else 'tp'}{tp}", f"dp{dp}", kind]
        text = " ".join([*said, "ckpt"] if recomputed == "1" else said)
        counts[text] = counts.get(text, 0) + 1
    layers = ", ".join(f"{count} x {text}" for text, count in counts.items())
    return f"{layers}; {config['chunks']} microbatches"


def _inputs(searching: Any) -> dict[str, Any]:
    """Return what the search was given, in its units: ms, MB, GB/s (bus) and ms a MB."""
    plain: dict[str, Any] = {
        "forward_ms_of_a_layer_for_a_row": searching.time_profiled_list,
        "forward_ms_of_the_rest_for_a_row": searching.other_time_profiled_list,
        "parameter_mb_of_a_layer_float32": searching.param_sizes,
        "activation_mb_of_a_layer_for_a_row_by_tp": searching.act_sizes,
        "rest_mb": searching.other_memory_pp_off,
        "rest_mb_with_stages": searching.other_memory_pp_on,
        "allreduce_gb_a_second": searching.allreduce_bandwidth,
        "p2p_gb_a_second": searching.p2p_bandwidth,
        "overlap_coefficient": searching.overlap_coe,
        "backward_over_forward": 2,
    }
    return json.loads(json.dumps(plain, default=lambda value: value.tolist()), parse_constant=lambda infinite: None)
