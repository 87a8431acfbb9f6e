"""Checkpoints of orbax and safetensors, read into arrays. Runs on the devices; failures are plain assertions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import shardlib as sl
import shardlib.jax as sj
from shardlib.checkpoint import _files, _orbax
from shardlib.testing import models
from tests.jax.refusals import raised
from tests.torchvision_on_cpu import import_torchvision

__all__ = ["CHECKS", "hugging_face", "refused", "saved_by_orbax"]


@contextmanager
def _readings(readers: Any) -> Iterator[list[tuple[str, int]]]:
    """Which tensors are read, and how many elements each time."""
    seen: list[tuple[str, int]] = []
    original = readers.read

    def read(self: Any, file: str, name: str, dtype: Any, shape: Any, part: Any) -> torch.Tensor:
        seen.append((name, part.numel))
        return original(self, file, name, dtype, shape, part)

    with mock.patch.object(readers, "read", read):
        yield seen


def _write_hugging_face(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Two files and an index."""
    names = sorted(state)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    folder.mkdir()
    for file, held in files.items():
        save_file({name: state[name].contiguous() for name in held}, folder / file)
    where = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def _rest(rules: dict[str, str]) -> sl.Rules:
    return sl.Rules(rules, unmatched="replicate")


def _same(got: Any, wanted: Any) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].sharding == array.sharding and got[name].dtype == array.dtype, name
        assert np.array_equal(got[name], array), name


def _tensors_in_parts_padded_and_tied(folder: Path) -> None:
    """Fused heads, a vocabulary of 11 on four devices, ZeRO's split storage, a tied head; the model was on meta."""
    make: Any = lambda: models.Transformer(vocab=11, heads=4, head=4, layers=1, fused=True, tied=True).double()  # noqa: E731
    model, mesh = make(), sj.make_mesh("dp=2,tp=4")
    rules, options = models.rules_for(model), {"transforms": [sl.zero(3)]}
    _, wanted = sj.compile_model(model, mesh, rules, **options)
    with torch.device("meta"):
        empty = make()
    fn, abstract = sj.compile_model(empty, mesh, rules, **options)
    assert not any(isinstance(array, jax.Array) for array in abstract.values())
    _write_hugging_face(folder / "hf", {name: t.detach() for name, t in model.named_parameters()})
    with _readings(_files.Readers) as seen:
        got = sj.load(folder / "hf", fn)
    _same(got, wanted)
    for name, tensor in model.named_parameters():
        pieces = len({str(i) for i in wanted[name].sharding.devices_indices_map(wanted[name].shape).values()})
        sizes = [size for read, size in seen if read == name]
        assert sum(sizes) == tensor.numel(), "no element twice"
        assert pieces > 1 and max(sizes) <= wanted[name].size / pieces, (name, sizes)
    sl.save(folder / "own", model)
    _same(sj.load(folder / "own", fn), wanted)


def _buffers_and_frozen_parameters(folder: Path) -> None:
    model = models.MLP(width=7, buffers=True).double()
    model.up.bias.requires_grad_(False)
    save_file({name: t.detach() for name, t in model.state_dict().items()}, folder / "mlp.safetensors")
    rules = models.rules_for(model)
    wanted, params = sj.compile_model(model, sj.make_mesh("dp=2,tp=4"), rules)
    for parameter in model.parameters():
        parameter.data.zero_()
    fn, _ = sj.compile_model(model, sj.make_mesh("dp=2,tp=4"), rules)
    _same(sj.load(folder / "mlp.safetensors", fn), params)
    _same(fn.buffers, wanted.buffers)


TREE = {
    "params": {
        "layers": [{"kernel": np.arange(32.0).reshape(4, 8), "bias": np.arange(8.0)}],
        "head": {"kernel": np.arange(24.0).reshape(8, 3)},
        "scale": np.array(3.0),
    },
    "step": np.array(7),
}


def saved_by_orbax(folder: Path) -> None:
    """A tree that lay on eight devices, in each of orbax's forms."""
    import orbax.checkpoint as ocp

    laid = sj.shard_params(TREE, sj.make_mesh("dp=2,tp=4"), _rest({"layers.*.kernel": "in@dp out@tp"}))
    laid["params"]["layers"][0]["half"] = jnp.ones((2, 4), jnp.bfloat16)
    for name, form in {"ocdbt": {}, "plain": {"use_ocdbt": False}, "zarr3": {"use_zarr3": True}}.items():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**form)) as checkpointer:
            checkpointer.save(folder / name, args=ocp.args.PyTreeSave(laid))
    with ocp.CheckpointManager(folder / "steps") as manager:
        manager.save(3, args=ocp.args.StandardSave(laid))
        manager.wait_until_finished()


def _orbax_on_another_mesh(folder: Path) -> None:
    """All forms, a part of the tree, in other layouts; of a module of torch too, with kernels the other way round."""
    saved_by_orbax(folder)
    mesh, structs = sj.make_mesh("dp=4,tp=2"), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), TREE)
    into = sj.shard_params(structs["params"], mesh, _rest({"head.kernel": "in@(tp,dp) out", "bias": "out@tp"}))
    inside = lambda name: None if name in ("step", "params.layers.0.half") else name.removeprefix("params.")  # noqa: E731
    for form in ("ocdbt", "plain", "zarr3", "steps/3"):
        with _readings(_orbax.OrbaxReaders) as seen:
            got = sj.load(folder / form, into, names=inside)
        assert jax.tree.all(jax.tree.map(np.array_equal, got, TREE["params"])), form
        assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, got, into))
        assert [size for name, size in seen if name == "params.head.kernel"] == [3] * 8
    fn, _ = sj.compile_model(nn.Linear(8, 3, bias=False).double(), mesh, {"weight": "out@tp in"})
    names = {"params.head.kernel": "weight", **dict.fromkeys(_others("params.head.kernel"))}
    arrays = sj.load(folder / "ocdbt", fn, names=names, transpose={"head.kernel": (1, 0)})
    assert torch.equal(fn.to_torch(arrays)["weight"], torch.from_numpy(TREE["params"]["head"]["kernel"].T))  # type: ignore[index,call-overload]


def _others(name: str) -> list[str]:
    paths = ["layers.0.kernel", "layers.0.bias", "layers.0.half", "head.kernel", "scale"]
    return [each for each in ("step", *(f"params.{path}" for path in paths)) if each != name]


CHECKS = {
    check.__name__.removeprefix("_").replace("_", " "): check
    for check in (_tensors_in_parts_padded_and_tied, _buffers_and_frozen_parameters, _orbax_on_another_mesh)
}


def hugging_face(name: str, folder: Path) -> None:
    """What `save_pretrained` writes: tied heads, a base model's names, experts that are stacked on reading."""
    import_torchvision()
    import transformers as hf

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    llama = {**sizes, "intermediate_size": 64, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config: Any = {
        "llama": lambda: hf.LlamaConfig(**llama),
        "gpt2": lambda: hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0),
        "mixtral": lambda: hf.MixtralConfig(**{**llama, "num_local_experts": 4}),
    }[name]()
    first, second = (hf.AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    (first.base_model if name == "gpt2" else first).save_pretrained(folder, max_shard_size="20KB")
    fn, _ = sj.compile_model(second, sj.make_mesh("dp=2,tp=4" if name == "gpt2" else "dp=4,tp=2"), name)
    _same(sj.load(folder, fn), fn.from_torch(dict(first.named_parameters())))


def refused(folder: Path) -> dict[str, str]:
    """What is raised for each wrong thing, before anything is read."""
    save_file({"a.wieght": torch.ones(2, 3), "b": torch.ones(2), "c": torch.ones(2)}, folder / "x.safetensors")
    struct = jax.ShapeDtypeStruct
    tree = {"a": {"weight": struct((2, 3), "float32")}, "b": struct((3,), "float32"), "c": struct((2,), "float64")}
    with torch.device("meta"):
        hidden = nn.Linear(2, 2, bias=False)
        hidden.register_buffer("position", torch.ones(2), persistent=False)
    fn, _ = sj.compile_model(hidden, sj.make_mesh("dp=8"), sl.Rules({"weight": None, "position": None}))
    with _readings(_files.Readers) as seen:
        found = {
            "all": raised(lambda: sj.load(folder / "x.safetensors", tree)),
            "leaf": raised(lambda: sj.load(folder / "x.safetensors", {"a": 1})),
            "meta": raised(lambda: sj.load(folder / "x.safetensors", fn)),
        }
    assert not seen
    return found
