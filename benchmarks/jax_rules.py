"""What the rules of KerasHub and MaxText do to the models that they are for: not of time.

    python benchmarks/jax_rules.py [--keras-hub FOLDER] [--maxtext FOLDER] [--quick] [--json FILE]

docs/jax-rules-audit.md has the findings.
The folders are clones of github.com/keras-team/keras-hub and github.com/AI-Hypercomputer/maxtext; without one, its part
is left out. KerasHub's backbones are built at published sizes inside `jax.eval_shape`, so no weight is allocated. Of
MaxText the configurations are read, and golden files, which have the names and shapes of the parameters; where its
packages are installed, its Llama is built too, with two layers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update(KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
from _report import parser, write

import shardlib as sl
import shardlib.jax as sj
from shardlib.errors import InputError

GIB = 2**30

# The meshes: that of the docstrings of `get_layout_map`, and one with both axes.
MESHES = (("batch", 1), ("model", 8)), (("batch", 2), ("model", 4))

# Sizes as published: docs/jax-rules-audit.md names a source of each. KerasHub counts both halves of Gemma's gated MLP.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 2B": ("GemmaBackbone", {"vocabulary_size": 256000, "num_layers": 18, "num_query_heads": 8,
        "num_key_value_heads": 1, "hidden_dim": 2048, "intermediate_dim": 32768, "head_dim": 256}),
    "Gemma 7B": ("GemmaBackbone", {"vocabulary_size": 256000, "num_layers": 28, "num_query_heads": 16,
        "num_key_value_heads": 16, "hidden_dim": 3072, "intermediate_dim": 49152, "head_dim": 256}),
    "Llama 2 7B": ("LlamaBackbone", {"vocabulary_size": 32000, "num_layers": 32, "num_query_heads": 32,
        "num_key_value_heads": 32, "hidden_dim": 4096, "intermediate_dim": 11008}),
    "Llama 3 8B": ("Llama3Backbone", {"vocabulary_size": 128256, "num_layers": 32, "num_query_heads": 32,
        "num_key_value_heads": 8, "hidden_dim": 4096, "intermediate_dim": 14336}),
    "Qwen2.5 0.5B": ("QwenBackbone", {"vocabulary_size": 151936, "num_layers": 24, "num_query_heads": 14,
        "num_key_value_heads": 2, "hidden_dim": 896, "intermediate_dim": 4864, "tie_word_embeddings": True}),
    "Qwen2.5 7B": ("QwenBackbone", {"vocabulary_size": 152064, "num_layers": 28, "num_query_heads": 28,
        "num_key_value_heads": 4, "hidden_dim": 3584, "intermediate_dim": 18944, "tie_word_embeddings": False}),
    "Qwen1.5-MoE A2.7B": ("QwenMoeBackbone", {"vocabulary_size": 151936, "num_layers": 24, "num_query_heads": 16,
        "num_key_value_heads": 16, "hidden_dim": 2048, "intermediate_dim": 5632, "moe_intermediate_dim": 1408,
        "shared_expert_intermediate_dim": 5632, "num_experts": 60, "top_k": 4}),
    "Qwen3 30B-A3B": ("Qwen3MoeBackbone", {"vocabulary_size": 151936, "num_layers": 48, "num_query_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "hidden_dim": 2048, "intermediate_dim": 6144,
        "moe_intermediate_dim": 768, "num_experts": 128, "top_k": 8}),
}  # fmt: skip

# Sizes at which a forward is typed and compiled: every dim that a map splits divides by 8.
_TINY = {"vocabulary_size": 64, "num_layers": 2, "num_query_heads": 8, "num_key_value_heads": 8, "hidden_dim": 64,
    "intermediate_dim": 128}  # fmt: skip
_EXPERTS = {"moe_intermediate_dim": 64, "num_experts": 8, "top_k": 2}
TINY: dict[str, dict[str, Any]] = {
    "GemmaBackbone": _TINY | {"head_dim": 8},
    "LlamaBackbone": _TINY,
    "Llama3Backbone": _TINY,
    "QwenBackbone": _TINY,
    "QwenMoeBackbone": _TINY | _EXPERTS | {"shared_expert_intermediate_dim": 64},
    "Qwen3MoeBackbone": _TINY | _EXPERTS | {"head_dim": 8},
}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--keras-hub", type=Path, metavar="FOLDER", help="a clone of keras-hub")
    p.add_argument("--maxtext", type=Path, metavar="FOLDER", help="a clone of maxtext")
    args = p.parse_args()
    found: dict[str, Any] = {}
    if args.keras_hub:
        sys.path.insert(0, str(args.keras_hub))
        found["keras_hub"] = list(_keras_hub(args))
        found["forwards"] = list(map(_shown, forwards(args.quick)))
    if args.maxtext:
        found["maxtext_golden"] = list(map(_shown, golden_files(args.maxtext)))
        found["maxtext_forward"] = _shown(maxtext_forward(args.maxtext / "src"))
        found["maxtext_configs"] = list(map(_shown, configurations(args.maxtext / "src" / "maxtext")))
    if args.json:
        write(args.json, found, jax=jax.__version__)


def _shown(found: dict[str, Any]) -> dict[str, Any]:
    print(found)
    return found


# --- KerasHub -------------------------------------------------------------------------------------------------------


def _keras_hub(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for model in list(SIZES)[: 1 if args.quick else None]:
        for mesh in MESHES:
            yield _shown(backbone(model, mesh))


def backbone(model: str, mesh: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    """Lay out a backbone at a published size by its own map."""
    import keras
    import keras_hub

    name, sizes = SIZES[model]
    cls = getattr(keras_hub.models, name)
    devices = keras.distribution.DeviceMesh(
        tuple(size for _, size in mesh), tuple(axis for axis, _ in mesh), keras.distribution.list_devices()
    )
    tree = jax.eval_shape(lambda: {each.path: each.value for each in cls(**sizes, dtype="bfloat16").variables})
    read = sl.Rules.from_keras_layout_map(cls.get_layout_map(devices))
    rules = sl.Rules(read.rules, unmatched="replicate", optional=tuple(read.rules))
    resolution = rules.resolve(tree, dict(mesh))
    coverage = rules.coverage(tree, dict(mesh))
    whole = sorted(resolution.unmatched, key=lambda each: -each.global_bytes)
    return {
        "model": model,
        "mesh": ",".join(f"{axis}={size}" for axis, size in mesh),
        "GiB": round(coverage.bytes / GIB, 2),
        "GiB_that_no_key_matches": round(coverage.unmatched_bytes / GIB, 2),
        "largest": sorted({_folded(each.name) for each in whole if len(each.global_shape) > 1}),
        "keys_without_a_variable": [row.rule for row in coverage.rows if not row.tensors],
        "uneven": sorted(
            {
                f"{_folded(each.name)} {each.global_shape} {each.layout}"
                for each in resolution.tensors.values()
                if each.layout.uneven_dims(each.global_shape, resolution.mesh)
            }
        ),
        "refused": _refused(rules, tree, dict(mesh)),
    }


def _refused(rules: sl.Rules, tree: Any, mesh: dict[str, int]) -> str:
    try:
        rules.to_partition_specs(tree, mesh)
    except InputError as fault:
        return str(fault)
    return ""


def _folded(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def forwards(quick: bool) -> Iterator[dict[str, Any]]:
    """Type the forward of each backbone by its own map, and compile it; of Llama also with q, k and v over heads."""
    import keras
    import keras_hub

    mesh = keras.distribution.DeviceMesh((1, 8), ("batch", "model"), keras.distribution.list_devices())
    for name in list(TINY)[: 1 if quick else None]:
        cls = getattr(keras_hub.models, name)
        model, read = cls(**TINY[name]), sl.Rules.from_keras_layout_map(cls.get_layout_map(mesh))
        yield {"backbone": name, "map": "published"} | forward(model, read.rules)
        if name == "LlamaBackbone":
            key = next(key for key in read.rules if "(query|key|value)" in key)
            yield {"backbone": name, "map": "over heads"} | forward(
                model, dict(read.rules) | {key: "embed@batch heads@model head"}
            )


def forward(model: Any, layouts: Any) -> dict[str, Any]:
    """Return what types and the compiled program say of a forward on model=8."""
    rules = sl.Rules(layouts, unmatched="replicate", optional=tuple(layouts))
    tree, mesh = {each.path: each.value for each in model.trainable_variables}, sj.make_mesh("batch=1,model=8")
    others = [each.value for each in model.non_trainable_variables]
    ids = jax.ShapeDtypeStruct((2, 16), "int32")
    batch = {"token_ids": ids, "padding_mask": ids}

    def apply(params: Any, batch: Any) -> Any:
        return model.stateless_call([params[each.path] for each in model.trainable_variables], others, batch)[0]

    return _typed_and_compiled(apply, mesh, rules, tree, batch)


def _typed_and_compiled(apply: Any, mesh: Any, rules: sl.Rules, tree: Any, batch: Any) -> dict[str, Any]:
    report = sj.check_layouts(apply, mesh, rules, example=(tree, batch))
    moves = Counter[str]()
    for line in report.lines:
        moves[line.parameter or line.code] += sum(line.moved.values())
    rows = jax.tree.map(lambda _: jax.NamedSharding(mesh, jax.P(sl.MeshShape.of(mesh).data_axes)), batch)
    compiled = jax.jit(apply, in_shardings=(sj.shardings(tree, mesh, rules), rows)).lower(tree, batch).compile()
    return {
        "findings": [f"{each.operands}: {each.conflict}" for each in report.findings],
        "typed": dict(report.moved),
        "communications_by_parameter_or_line": dict(+moves),
        "reshards": sorted({f"{each.code}: {each.conflict}" for each in report.reshards}),
        "compiled": _collectives(compiled.as_text() or ""),
    }


def _collectives(text: str) -> dict[str, int]:
    kinds = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"
    return {kind: count for kind in kinds if (count := len(re.findall(rf" {kind}(?:-start)?\(", text)))}


# --- MaxText --------------------------------------------------------------------------------------------------------


def golden_files(root: Path) -> Iterator[dict[str, Any]]:
    """Lay out the parameters of each golden file by the configuration that it is for, and compare."""
    for file in sorted(root.glob("tests/utils/sharding_info/**/logical_shardings.json")):
        logical, named = (_params(file.with_name(name)) for name in ("logical_shardings.json", "named_shardings.json"))
        model, rule = file.parts[-5], file.parts[-2].removeprefix("rule_").split("_")[0]
        mesh = {axis: size for axis, size in next(iter(named.values()))["mesh"]["shape"].items() if size > 1}
        names = {name: _spec(each) for name, each in logical.items()}
        tree = {name: jax.ShapeDtypeStruct(tuple(each["shape"]), "float32") for name, each in logical.items()}
        rules = sl.Rules.from_maxtext(_configs(root / "src" / "maxtext" / "configs", rule, model), names, mesh)
        resolution = rules.resolve(tree, mesh)
        local = [
            each.layout.local_shape(each.global_shape, mesh, dict.fromkeys(mesh, 0))
            for each in resolution.tensors.values()
        ]
        held = 4 * sum(map(math.prod, local))
        yield {
            "model": model,
            "rules": rule,
            "mesh": mesh,
            "parameters": len(tree),
            "other_than_golden": [
                name for name in tree if _axes(resolution.tensors[name].layout) != _on(named[name], mesh)
            ],
            "bytes_on_a_device_over_an_even_share": round(
                held * math.prod(mesh.values()) / sum(each.global_bytes for each in resolution.tensors.values()), 4
            ),
            "uneven": [
                each.name
                for each in resolution.tensors.values()
                if each.layout.uneven_dims(each.global_shape, resolution.mesh)
            ],
        }


# Llama 2 7B's configuration, smaller.
_SMALL_LLAMA = {"base_emb_dim": 64, "base_num_query_heads": 8, "base_num_kv_heads": 8, "base_mlp_dim": 128,
    "base_num_decoder_layers": 2, "head_dim": 8, "vocab_size": 64, "max_target_length": 16, "per_device_batch_size": 1,
    "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 4, "model_name": "llama2-7b", "override_model_config": True,
    "scan_layers": False, "attention": "dot_product", "hardware": "cpu", "skip_jax_distributed_system": True,
    "enable_checkpointing": False, "dataset_type": "synthetic", "run_name": "x",
    "base_output_directory": "x"}  # fmt: skip


def maxtext_forward(source: Path) -> dict[str, Any]:
    """Type and compile the forward of MaxText's Llama by its default rules, on fsdp=2, tensor=4."""
    import numpy as np

    sys.path.insert(0, str(source))
    try:
        nn = importlib.import_module("flax.linen")
        pyconfig, models = (
            importlib.import_module(f"maxtext.{name}") for name in ("configs.pyconfig", "models.models")
        )
    except (ImportError, SyntaxError) as fault:
        return {"left_out": str(fault)}
    configs = source / "maxtext" / "configs"
    config = pyconfig.initialize(["", str(configs / "base.yml"), *(f"{k}={v}" for k, v in _SMALL_LLAMA.items())])
    # Without the axis of pipelines, of which the JAX engine has none.
    sizes = {axis: {"fsdp": 2, "tensor": 4}.get(axis, 1) for axis in config.mesh_axes if axis != "stage"}
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))
    model, ids = models.transformer_as_linen(config, mesh, quant=None, model_mode="train"), np.zeros((8, 16), "int32")
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(0)}

    def made() -> Any:
        return model.init(rngs, ids, ids, ids, enable_dropout=False)["params"]

    def apply(params: Any, ids: Any) -> Any:
        with mesh, nn.logical_axis_rules(config.logical_axis_rules):
            ones = np.ones((8, 16), "int32")
            return model.apply({"params": params}, ids, ones, ones, enable_dropout=False, rngs=rngs)

    with mesh, nn.logical_axis_rules(config.logical_axis_rules):
        boxed = jax.eval_shape(made)
    tree, logical = nn.unbox(boxed), nn.get_partition_spec(boxed)
    flat = jax.tree_util.tree_leaves_with_path(logical, is_leaf=lambda leaf: isinstance(leaf, jax.P))
    names = {".".join(key.key for key in path): tuple(spec) for path, spec in flat}
    files = [configs / "base.yml", configs / "models" / "llama2-7b.yml"]
    rules = sl.Rules.from_maxtext(files, names, {axis: size for axis, size in sizes.items() if size > 1})
    return _typed_and_compiled(apply, mesh, rules, tree, jax.ShapeDtypeStruct((8, 16), "int32"))


def _params(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text())
    return {
        ".".join(re.findall(r"\['([^']+)'\]", key)): each for key, each in found.items() if key.startswith(".params")
    }


def _configs(folder: Path, rule: str, model: str) -> list[Path]:
    if rule != "default":
        return [folder / "custom_mesh_and_rule" / f"{rule}.yml"]
    return [folder / "base.yml", folder / "models" / f"{model}.yml"]


def _spec(given: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple(each) if isinstance(each, list) else each for each in given["partition_spec"])


def _axes(layout: sl.Layout) -> list[tuple[str, ...]]:
    return [dim.axes for dim in layout.dims if hasattr(dim, "axes")]


def _on(golden: dict[str, Any], mesh: dict[str, int]) -> list[tuple[str, ...]]:
    """The axes of each dim that a golden file gives a parameter, without those of size one."""
    entries = [(each,) if isinstance(each, str) else each or () for each in _spec(golden)]
    entries += [()] * (len(golden["shape"]) - len(entries))
    return [tuple(axis for axis in axes if axis in mesh) for axes in entries]


def configurations(source: Path) -> Iterator[dict[str, Any]]:
    """Check every configuration that has rules: axes that its mesh does not have, pairs that never apply, and names
    that no Python file of MaxText has."""
    words = set(re.findall(r"\w+", " ".join(file.read_text() for file in source.rglob("*.py"))))
    for file in sorted((source / "configs").rglob("*.yml")):
        own = _rules_of(file)
        if not own.get("logical_axis_rules"):
            continue
        pairs = [(name, [axes] if isinstance(axes, str) else axes or []) for name, axes in own["logical_axis_rules"]]
        mesh_axes = _mesh_axes(file, source / "configs")
        lost = [(name, [axis for axis in axes if axis not in mesh_axes]) for name, axes in pairs]
        found = {
            "axes_not_in_mesh_axes": {name: axes for name, axes in lost if axes},
            "pairs_that_never_apply": [
                pair
                for at, pair in enumerate(pairs)
                if any(one == pair[0] and set(axes) <= set(pair[1]) for one, axes in pairs[:at])
            ],
            "names_in_no_python_file": sorted({name for name, _ in pairs if name not in words}),
        }
        if any(found.values()):
            yield {"file": str(file.relative_to(source)), **found}


def _rules_of(file: Path) -> dict[str, Any]:
    import yaml

    content = yaml.safe_load(file.read_text())
    return content if isinstance(content, dict) else {}


def _mesh_axes(file: Path, folder: Path) -> list[str]:
    """The mesh axes of a configuration: its own, those of its `base_config`, or those of base.yml."""
    content = _rules_of(file)
    if axes := content.get("mesh_axes"):
        return list(axes)
    base = content.get("base_config")
    found = next((place for place in (file.parent / base, folder / base) if place.is_file()), None) if base else None
    return _mesh_axes(found or folder / "base.yml", folder)


if __name__ == "__main__":
    main()
