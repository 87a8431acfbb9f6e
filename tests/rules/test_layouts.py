"""Finding layout files: by name, by path, by the class of a model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from shardlib import layouts
from shardlib.errors import MeshError, RuleError
from shardlib.rules import Rules, registered_tensor_modes, suggest, tensor_mode
from shardlib.rules.suggest import complete
from tests.families.transformer_models import small, transformers
from tests.rules.zoo import Tiny, on_meta

FOLDER = Path(__file__).parents[2] / "layouts"


def test_every_file_of_the_folder_is_available_with_its_description() -> None:
    assert layouts.available().keys() == {path.stem for path in FOLDER.glob("*.toml")} >= {"example_gpt"}
    assert all(layouts.available().values())


def test_every_file_of_modes_is_a_tensor_mode_with_its_description() -> None:
    names = {path.stem for path in (FOLDER / "modes").glob("*.toml")}
    assert {"2d", "2.5d", "3d"} <= names <= registered_tensor_modes().keys()
    assert all(tensor_mode(name).description for name in names)


def test_a_tensor_mode_that_nobody_registered_is_answered_with_the_nearest() -> None:
    with pytest.raises(RuleError) as caught:
        tensor_mode("2.5")
    assert str(caught.value) == (
        f'No tensor mode is called "2.5"; there are {", ".join(map(repr, registered_tensor_modes()))}. Register one '
        "with @shardlib.rules.register_tensor_mode('2.5'), in a module that is imported before. Did you mean \"2.5d\"?"
    )


@pytest.mark.parametrize(
    ("ranks", "sizes", "said"),
    [
        (2, {"depth": 8}, "and 2 ranks, depth=8 do not make them up; 8 or 32 or 72 would."),
        (8, {"depth": 3}, "and 8 ranks, depth=3 do not make them up; 3 or 12 or 27 would."),
        (8, {}, "8 ranks alone do not say how long each is. Give the size of one, as in depth=2."),
        (8, {"deep": 2}, 'a size for axis "deep"; its axes are "depth=d,row=q,col=q". Did you mean "depth"?'),
    ],
)
def test_axes_of_a_tensor_mode_that_ranks_do_not_make_up(ranks: int, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(MeshError) as caught:
        tensor_mode("2.5d").mesh_shape(ranks, **sizes)
    assert str(caught.value).endswith(said)


def test_load_by_name_and_by_path(tmp_path: Path) -> None:
    assert layouts.load("example_gpt") == Rules.from_toml(FOLDER / "example_gpt.toml")
    (tmp_path / "mine.toml").write_text('[params]\nup = "colwise"')
    assert layouts.load(tmp_path / "mine.toml") == layouts.load(str(tmp_path / "mine.toml")) == Rules({"up": "colwise"})


def test_an_unknown_name() -> None:
    with pytest.raises(RuleError) as caught:
        layouts.load("exmaple_gpt")
    listed = ", ".join(f"'{name}'" for name in layouts.available())
    assert str(caught.value) == (
        f'No layout file is called "exmaple_gpt"; there are {listed}. Use one of them, or give the path of a file that '
        'ends in .toml. Did you mean "example_gpt"?'
    )


@pytest.mark.parametrize(
    ("model", "file"),
    [("GPT2LMHeadModel", "gpt2"), ("LlamaForCausalLM", "llama"), ("LlamaModel", "llama"), ("BertForMaskedLM", "bert")],
)
def test_for_model_finds_the_file_by_class(model: str, file: str) -> None:
    with torch.device("meta"):
        built = getattr(transformers, model)(small(model))
    rules = layouts.for_model(built)
    assert rules == layouts.load(file)
    rules.resolve(built, "dp=2,tp=2")


def test_for_model_finds_the_file_of_a_base_class() -> None:
    class Mine(transformers.LlamaForCausalLM): ...

    with torch.device("meta"):
        model = Mine(small("LlamaForCausalLM"))
    assert layouts.for_model(model) == layouts.load("llama")


def test_a_class_of_the_same_name_in_another_package_is_another_class() -> None:
    class LlamaForCausalLM(nn.Linear):
        _tp_plan: ClassVar = {"weight": "replicate"}

    model = LlamaForCausalLM(4, 4)
    assert layouts.for_model(model) == Rules.from_tp_plan(model)


def test_without_a_file_the_plan_that_the_model_carries_is_used() -> None:
    config = transformers.OlmoConfig(
        hidden_size=32, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4, vocab_size=67
    )
    with torch.device("meta"):
        model = transformers.OlmoForCausalLM(config)
        model.model.scale = torch.nn.Parameter(torch.ones(1))  # fits no file
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layouts.for_model(model) == Rules.from_tp_plan(model)


def test_a_plan_that_leaves_out_blocks_is_completed_and_said_aloud() -> None:
    class Decoder(Tiny):
        _tp_plan: ClassVar = {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}

    model = on_meta(Decoder)
    said = r'leaves out some of its layers.*\n"blocks.\*.attn.qkv": suggested: guess: q, k and v are stacked'
    with pytest.warns(layouts.SuggestedLayoutWarning, match=said):
        rules = layouts.for_model(model)
    assert rules == complete(Rules.from_tp_plan(model), model) != Rules.from_tp_plan(model)
    assert rules.resolve(model, "tp=2").tensors["embed.weight"].layout.axes == frozenset()  # not a layer of blocks


def test_a_plan_of_the_output_layer_alone_is_no_plan() -> None:
    class Decoder(Tiny):
        _tp_plan: ClassVar = {"head": "colwise_rep"}

    model = on_meta(Decoder)
    with pytest.warns(layouts.SuggestedLayoutWarning):
        assert layouts.for_model(model) == suggest(model)


def test_without_either_a_suggestion_is_made_and_said_aloud() -> None:
    model = on_meta(Tiny)
    with pytest.warns(layouts.SuggestedLayoutWarning) as caught:
        rules = layouts.for_model(model)
    assert rules == suggest(model)
    (warning,) = caught
    lines = rules.to_toml().splitlines()
    assert str(warning.message) == (
        "There is no layout file for tests.rules.zoo.Tiny and it carries no plan. These rules were suggested from its "
        "modules; `shardlib init` writes them to a file to be checked:\n" + "\n".join(lines[:12]) + f"\n... and "
        f"{len(lines) - 12} more lines: print(shardlib.layouts.for_model(model).to_toml())"
    )
    assert warning.filename == __file__


def test_of_all_ranks_one_says_what_was_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layouts.for_model(on_meta(Tiny)) == suggest(on_meta(Tiny))


def test_two_files_for_one_class_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: Rules({"up": "colwise"}, models=["tests.Tiny"]) for name in ("one", "two")}
    monkeypatch.setattr(layouts, "_files", lambda: files)
    with pytest.raises(RuleError) as caught:
        layouts.for_model(on_meta(Tiny))
    assert str(caught.value) == (
        "Layout files 'one' and 'two' are both for tests.rules.zoo.Tiny. Choose one with shardlib.layouts.load('one')."
    )
