"""The census: a sample of it runs, what it keeps is what it finds, and nothing stops it.

Set SHARDLIB_CENSUS_SEED to prove another sample of the kept results.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardlib.errors import InputError
from shardlib.testing import census
from shardlib.testing.census._diffusion import batch_of, small_arguments
from shardlib.testing.census._inputs import ROWS, NoInputs
from shardlib.testing.census._page import page, summary
from shardlib.testing.census._shrink import shrunk
from tests.house.source import ROOT
from tests.torchvision_on_cpu import let_torchvision_in

let_torchvision_in()

KEPT = ROOT / "benchmarks" / "results" / "census.jsonl"
KEPT_ON_JAX, KEPT_ON_TORCHAX = KEPT.with_name("census_jax.jsonl"), KEPT.with_name("census_torchax.jsonl")
USUAL = ("gptj", "ijepa", "internlm3", "glm_ocr")  # proposed rules, images, a layout file, a completed tp_plan


@pytest.fixture(scope="module")
def kept() -> dict[str, census.Result]:
    return {result.name: result for result in census.read(KEPT) if result.library == "transformers"}


@pytest.fixture(autouse=True)
def _torchvision_on_ranks(ranks):
    ranks(4).run(let_torchvision_in)  # transformers imports it by the way


def _entries(*names: str) -> list[census.Entry]:
    return [entry for entry in census.entries("transformers") if entry.name in names]


def _sample(kept: dict[str, census.Result]) -> tuple[str, ...]:
    seed = os.environ.get("SHARDLIB_CENSUS_SEED")
    proved = [name for name, result in kept.items() if result.status == "proved" and result.seconds < 6]
    return USUAL if seed is None else tuple(random.Random(seed).sample(proved, len(USUAL)))


def test_a_sample_is_proved_as_the_kept_results_say_and_is_not_proved_twice(
    kept: dict[str, census.Result], tmp_path: Path
):
    chosen, file, told = _entries(*_sample(kept)), tmp_path / "census.jsonl", []
    found = census.run(chosen, file, seconds=60, report=told.append)
    assert [dataclasses.replace(r, seconds=0) for r in found] == [
        dataclasses.replace(kept[entry.name], seconds=0) for entry in chosen
    ]
    assert told == found == census.read(file)
    assert all(result.status == "proved" and result.sharded > 0 for result in found)
    assert census.run(chosen, file) == []


def test_a_model_that_fails_or_hangs_is_a_line(tmp_path: Path):
    missing = census.Entry("transformers", "llama", "NoSuchModel", "tokens")
    (failed,) = census.run([missing], tmp_path / "failed.jsonl", seconds=60)
    assert (failed.status, failed.proved) == ("not built", {}) and "NoSuchModel" in failed.error
    (hung,) = census.run(_entries("gptj"), tmp_path / "hung.jsonl", seconds=0.001)
    assert hung.status == "not built" and hung.error.startswith("HangError: rank 0 did not answer within 0.001 s")
    assert [json.loads(line)["error"] for line in (tmp_path / "hung.jsonl").read_text().splitlines()] == [hung.error]


def test_a_model_of_timm_is_proved_like_one_of_transformers():
    entry = next(entry for entry in census.entries("timm") if entry.name == "efficientvit_mit")
    (found,) = census.run([entry], seconds=60)
    assert (found.status, found.inputs) == ("proved", ("x",)), found.error


def test_on_jax_a_model_is_proved_on_one_device_and_a_second_engine_is_another_line(tmp_path: Path):
    file = tmp_path / "census.jsonl"
    census.write(file, [census.Result("transformers", "gpt2", "GPT2LMHeadModel")])
    (found,) = census.run(_entries("gpt2"), file, seconds=300, engine="jax", meshes=("tp=1",))
    assert (found.engine, found.status, found.proved) == ("jax", "proved", {"tp=1": True}), found.error
    assert [result.engine for result in census.read(file)] == ["torch", "jax"]


def test_a_model_that_tells_a_batch_from_its_halves_is_proved_without_data_axes_alone():
    (found,) = census.run(_entries("ibert"), seconds=60)
    assert (found.status, found.mixes, found.proved) == ("proved", True, {"tp=2": True}), found.error


def test_code_that_asks_for_float32_is_given_float64():
    """XGLM's attention fills a float32 tensor with the least float64."""
    (found,) = census.run(_entries("xglm"), seconds=60)
    assert (found.status, found.upcast) == ("proved", True), found.error


def test_widths_in_proportion_still_fit_each_other():
    config = importlib.import_module("transformers").CvtConfig()
    made = shrunk(config, 8)
    assert made["embed_dim"] == [8, 24, 48] and made["depth"] == [1, 2, 2]
    assert shrunk(config, 4)["depth"] == [1, 2, 10]  # stages as deep as usual


class Denoiser(nn.Module):
    """A model as diffusers has them: its configuration is the arguments of its constructor."""

    def __init__(
        self,
        sample_size: int = 64,
        patch_size: int = 2,
        in_channels: int = 4,
        num_layers: int = 28,
        num_attention_heads: int = 24,
        attention_head_dim: int = 128,
        joint_attention_dim: int = 4096,
        axes_dims_rope: tuple[int, ...] = (16, 56, 56),
        block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280),
        norm_num_groups: int = 32,
        dropout: float = 0.1,
        guidance_embeds: bool = False,
        activation_fn: str = "gelu",
    ) -> None:
        super().__init__()
        self.config = {"in_channels": in_channels, "guidance_embeds": guidance_embeds, "axes_dims_rope": axes_dims_rope}

    def forward(
        self, hidden_states: Any, timestep: Any, class_labels: Any = None, guidance: Any = None, img_ids: Any = None
    ) -> None: ...


def test_arguments_of_diffusers_become_tiny_and_still_fit_each_other():
    made = small_arguments(Denoiser)
    assert made == {
        "sample_size": 16,
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "joint_attention_dim": 64,
        "axes_dims_rope": (4, 6, 6),
        "block_out_channels": (16, 32, 64, 64),
        "norm_num_groups": 4,
        "dropout": 0.0,
    }
    assert sum(made["axes_dims_rope"]) == made["attention_head_dim"]


def test_inputs_of_diffusers_are_those_that_its_forward_requires_or_all():
    model = Denoiser(**small_arguments(Denoiser))
    required = batch_of(model, "video", 0)
    assert {name: tuple(x.shape) for name, x in required.items()} == {
        "hidden_states": (ROWS, 4, 5, 16, 16),
        "timestep": (ROWS,),
    }
    assert [*batch_of(model, "image, all", 0)] == ["hidden_states", "timestep", "class_labels", "img_ids"]
    model.config["guidance_embeds"] = True
    assert "guidance" in batch_of(model, "image, all", 0)
    assert not torch.equal(batch_of(model, "video", 1)["hidden_states"], required["hidden_states"])
    model.forward = lambda sample, nonsense: None
    with pytest.raises(NoInputs, match='its forward requires "nonsense", for which the census has no values'):
        batch_of(model, "image", 0)


def test_a_difference_is_wrong_and_an_error_on_a_mesh_is_refused():
    built = census.Result("x", "y", "Y", built=True, proved={"tp=2": True, "dp=2,tp=2": False})
    assert dataclasses.replace(built, error="differs on dp=2,tp=2: the loss").status == "wrong"
    assert dataclasses.replace(built, error="dp=2,tp=2: RuleError: no").status == "refused"
    assert dataclasses.replace(built, proved={"tp=2": True}).status == "proved"
    export = "tp=1: InputError: Around cannot be compiled: its forward depends on values of tensors, at x.py:3"
    assert dataclasses.replace(built, engine="jax", error=export).status == "not exported"
    assert dataclasses.replace(built, engine="jax", error="tp=1: PlanError: 1 op has no lowering").status == "refused"


def test_only_known_libraries_are_taken():
    with pytest.raises(
        InputError, match='The census was given library "nonsense"; it knows transformers, timm, torchvision'
    ):
        census.entries("nonsense")


def test_the_kept_results_are_sorted_and_say_when_and_with_what():
    head, *lines = map(json.loads, KEPT.read_text().splitlines())
    assert head.keys() == {"date", "versions"} and head["versions"].keys() == {"torch", *census.LIBRARIES}
    names = [(line["library"], line["name"]) for line in lines]
    assert names == sorted(set(names)) and {library for library, _ in names} == set(census.LIBRARIES)
    assert all(result.error for result in census.read(KEPT) if result.status != "proved")
    assert not any("site-packages" in file.read_text() for file in (KEPT, KEPT_ON_JAX, KEPT_ON_TORCHAX))


def test_the_page_of_models_is_that_of_the_kept_results():
    """`python -m shardlib.testing.census --table census.jsonl --jax census_jax.jsonl --torchax census_torchax.jsonl`
    writes it, in benchmarks/results/."""
    assert (ROOT / "docs" / "models.md").read_text() == page(KEPT, KEPT_ON_JAX, KEPT_ON_TORCHAX)
    assert summary(census.read(KEPT)) in (ROOT / "README.md").read_text()
