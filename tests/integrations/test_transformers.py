"""Trainers of transformers on sharded models, beside their own classes in one process: losses and weights to 1e-10."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardlib as sl
from shardlib.errors import CheckpointError, MeshError, PlanError, ShardingError
from shardlib.testing import shared_pool
from tests.families.params import params
from tests.families.transformer_models import build, transformers
from tests.integrations.accelerated import DEEP_RESUMED, RESUMED, model_for, reset
from tests.integrations.trained import (
    OVERFLOWS,
    Ran,
    adapters,
    arguments,
    fine_tunes,
    generates,
    generates_on_ranks,
    generates_until,
    peft,
    run,
)

from shardlib.integrations.transformers import Sharding, Trainer, _load_weights  # isort: skip  # after torchvision

# peft 0.21 asks transformers 5 by a former name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

WAYS = {
    "tp": ("tp=2", 2),
    "dp": ("dp=2", 2),
    "fsdp": ("dp=2 | fsdp()", 2),
    "zero": ("dp=2 | zero(2)", 2),
    "dp x tp": ("dp=2,tp=2 | zero(2)", 4),
    "ep": ("ep=2", 2),
    "ep x tp": ("ep=2,tp=2 | zero(2)", 4),
}
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine"},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"max_grad_norm": 0.1, "optim": "sgd", "warmup_steps": 3},
    "evaluation": {"eval_strategy": "epoch", "first": "evaluate", "then": "predict", "weight_decay": 0.1},
}


@cache
def _alone(**options: Any) -> Ran:
    with TemporaryDirectory() as folder:
        return run(None, folder, **options)


def _on_ranks(way: str, folder: Path, **options: Any) -> list[Ran]:
    sharding, world = WAYS[way]
    return shared_pool(world).run(run, sharding, str(folder), **options)


def _equal(ran: Ran, exact: Ran) -> None:
    torch.testing.assert_close(ran.logs, exact.logs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ran.predicted, exact.predicted)
    torch.testing.assert_close(ran.weights, exact.weights, rtol=1e-10, atol=1e-10)


@pytest.mark.covering
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_trains_as_in_one_process(tmp_path: Path, way: str, training: str):
    model = model_for(way)
    for ran in _on_ranks(way, tmp_path, model_class=model, **TRAININGS[training]):
        _equal(ran, _alone(model_class=model, **TRAININGS[training]))


STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}


@pytest.mark.parametrize("ways", params(RESUMED, deep=DEEP_RESUMED))
def test_a_run_resumes_on_its_own_mesh_and_on_another(tmp_path: Path, ways: tuple[str, str]):
    """It stops in the middle of the second epoch, as if it was killed."""
    saved, loaded = ways
    model = model_for(ways)
    exact = _alone(model_class=model)
    stops = {"stop_at": 8, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1, "model_class": model}
    _on_ranks(saved, tmp_path / "run", **stops)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-8"]
    for ran in _on_ranks(loaded, tmp_path / "run", resume=True, model_class=model):
        _equal(ran, exact)


def test_the_best_model_is_loaded_and_transformers_reads_it(tmp_path: Path):
    options = {**STEPS, "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "learning_rate": 0.1}
    exact = run(None, str(tmp_path / "alone"), **options)
    for ran in _on_ranks("dp x tp", tmp_path / "run", then="save", **options):
        _equal(ran, exact)
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "final", dtype=torch.float64)
    torch.testing.assert_close(dict(plain.state_dict()), exact.weights, rtol=1e-10, atol=1e-10)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == sorted([*(path.name for path in (tmp_path / "alone").iterdir()), "final"])


@pytest.mark.parametrize("adapt", ["get_peft_model", "add_adapter"])
def test_adapters_resume_on_another_mesh_and_the_best_ones_are_loaded(tmp_path: Path, adapt: str):
    """transformers alone loads no checkpoint of a model with `add_adapter`: the other way gives the same numbers."""
    options = {**STEPS, "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "learning_rate": 0.1}
    exact = run(None, str(tmp_path / "alone"), adapt="get_peft_model", then="save", **options)
    if adapt == "add_adapter":
        exact.weights = {name.removeprefix("base_model.model."): value for name, value in exact.weights.items()}
    _on_ranks("dp", tmp_path / "run", stop_at=8, adapt=adapt, **options)
    for ran in _on_ranks("dp x tp", tmp_path / "run", resume=True, adapt=adapt, then="save", **options):
        _equal(ran, exact)
    saved = [load_file(tmp_path / folder / "final" / "adapter_model.safetensors") for folder in ("run", "alone")]
    torch.testing.assert_close(*saved, rtol=1e-10, atol=1e-10)


def test_adapters_of_another_config_are_refused(tmp_path: Path):
    few, more = (peft.get_peft_model(build("GPT2LMHeadModel"), adapters("c_attn", *rest)) for rest in ([], ["c_fc"]))
    few.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"only one of both has .*c_fc.lora_A.*Build the model with"):
        _load_weights(str(tmp_path), more)


def test_label_smoothing_is_that_of_one_process(tmp_path: Path):
    """transformers sums the smoothed part in float32."""
    options = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3}
    exact = run(None, str(tmp_path / "alone"), **options)
    for ran in _on_ranks("zero", tmp_path / "run", **options):
        torch.testing.assert_close(ran.logs, exact.logs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ran.weights, exact.weights, rtol=1e-4, atol=1e-5)


REFUSED = {
    "fsdp": (True, r'Write sharding="dp=-1 \| fsdp\(\)"'),
    "deepspeed": ({}, r'Write sharding="dp=-1 \| zero\(2\)"'),
    "parallelism_config": (object(), 'Name the axes in sharding="dp=2,tp=2"'),
    "torch_compile": (True, 'compile="inductor"'),
    "fp16_full_eval": (True, "Write fp16=True"),
    "bf16_full_eval": (True, "A sharded model keeps its dtype"),
    "auto_find_batch_size": (True, "A model is sharded once"),
    "neftune_noise_alpha": (5.0, "leave it out"),
    "use_liger_kernel": (True, "leave it out"),
    "train_sampling_strategy": ("group_by_length", 'write "random" or "sequential"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_shard_by_other_means_are_refused_with_what_to_write(tmp_path: Path, name: str):
    value, message = REFUSED[name]
    given = arguments(str(tmp_path), 4)
    setattr(given, name, value or "config.json")
    with pytest.raises(PlanError, match=message):
        Trainer(build("GPT2LMHeadModel"), given, sharding="tp=2")


def test_a_sharding_is_text_or_an_object():
    assert Sharding.of("dp=2,tp=2 | zero(2) | offload()") == Sharding("dp=2,tp=2", transforms="zero(2) | offload()")
    assert Sharding.of(None) == Sharding("dp=-1")
    with pytest.raises(PlanError, match="give text such as"):
        Sharding.of({"tp": 2})


def _on_a_pipeline(folder: str) -> str:
    try:
        Trainer(build("GPT2LMHeadModel"), arguments(folder, 4), sharding="pp=2")
    except MeshError as error:
        return str(error)
    finally:
        reset()
    return "nothing"


def test_a_pipeline_axis_is_refused(tmp_path: Path):
    for said in shared_pool(2).run(_on_a_pipeline, str(tmp_path)):
        assert 'The mesh "pp=2" has a pipeline axis' in said and "write a loop with shardlib.pipeline_step" in said


def test_optimizer_state_of_a_plain_trainer_is_refused(tmp_path: Path):
    run(None, str(tmp_path), save_strategy="steps", save_steps=12)
    with pytest.raises(CheckpointError, match="was written by transformers' own Trainer"):
        _on_ranks("tp", tmp_path, resume=True)


@pytest.mark.parametrize("way", params(["zero"], deep=["tp"]))
def test_a_seq2seq_trainer_generates_as_in_one_process(tmp_path: Path, way: str):
    """T5 normalises in float32. It accepts the number of tokens, and its loss is a mean nevertheless."""
    sharding, world = WAYS[way]
    exact, loss = generates(None, str(tmp_path / "alone"))
    for found, last in shared_pool(world).run(generates, sharding, str(tmp_path / "run")):
        assert found.tolist() == exact.tolist() and last == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("model_class", "sharding", "options"),
    [
        pytest.param("LlamaForCausalLM", "dp=2 | zero(3)", {}, marks=pytest.mark.deep),
        ("LlamaForCausalLM", "dp=2 | fsdp()", {"num_beams": 2}),
        ("MixtralForCausalLM", "ep=2", {}),
        pytest.param("LlamaForCausalLM", "dp=2 | zero(2)", {}, marks=pytest.mark.deep),
    ],
)
def test_data_ranks_may_generate_texts_of_different_lengths(model_class: str, sharding: str, options: dict[str, Any]):
    """And train afterwards: no rank goes on to its next forward while another one generates."""
    exact = [generates_until(length, model_class, None, options) for length in (6, 11)]
    found = shared_pool(2).run(generates_on_ranks, (6, 11), model_class, sharding, options, timeout=120)
    for (text, loss), (exact_text, exact_loss) in zip(found, exact, strict=True):
        assert text == exact_text and loss == pytest.approx(exact_loss, rel=1e-10)


@pytest.mark.parametrize("way", params([way for way in WAYS if way != "ep x tp"], deep=["ep x tp"]))
@pytest.mark.parametrize("argument", ["bf16", "fp16", "activation_checkpointing"])
@pytest.mark.covering
def test_other_arguments_mean_what_they_mean_in_one_process(tmp_path: Path, way: str, argument: str):
    """In bf16, the first step differs by the rounding of one pass. Later, a router near a tie sends tokens elsewhere,
    and AdamW enlarges small gradients: after a change of its weights by 1e-3, one process parts from itself by 17 % in
    the norm of gradients and by 2 % in losses. Therefore, after the first step, only losses of experts are compared.
    float16 has 3 bits more. The first data rank alone overflows in a step, whose loss is not finite on that rank."""
    options = {argument: True, "model_class": model_for(way)}
    exact = _alone(**options)
    low = argument in ("bf16", "fp16")
    for ran in _on_ranks(way, tmp_path / "run", **options):
        assert ran.scale == exact.scale == (2.0**9 if argument == "fp16" else None)
        for step, (log, exact_log) in enumerate(zip(ran.logs, exact.logs, strict=True)):
            near = 1e-10 if not low else 2**-7 if step == 0 else 2e-2
            near = near / 8 if argument == "fp16" else near
            compared = log.keys() - ({"grad_norm"} if "ep" in way and low and step else set())
            for name in compared - ({"loss"} if argument == "fp16" and step == OVERFLOWS else set()):
                torch.testing.assert_close(log[name], exact_log[name], rtol=near, atol=near, equal_nan=True)


@pytest.mark.parametrize(
    ("trainer", "reference", "sharding"),
    [
        ("SFTTrainer", None, "dp=2 | zero(3)"),
        pytest.param("DPOTrainer", None, "dp=2 | zero(3)", marks=pytest.mark.deep),
        # Its estimate of the divergence pairs the rows of a rank's own batch.
        pytest.param("KTOTrainer", "dp=2", "dp=2 | zero(3)", marks=pytest.mark.deep),
        *(pytest.param("SFTTrainer", None, way, marks=pytest.mark.deep) for way in ("dp=2", "tp=2", "dp=2 | fsdp()")),
    ],
)
def test_trls_trainers_train_an_output_layer_whose_weight_their_loss_reads(
    tmp_path: Path, trainer: str, reference: str | None, sharding: str
):
    """They give `lm_head.weight` to an autograd function and do not call the layer. Their loss is float32."""
    given = trainer, "LlamaForCausalLM"
    if reference is None:
        exact = fine_tunes(None, str(tmp_path / "alone"), *given)
    else:
        exact = shared_pool(2).run(fine_tunes, reference, str(tmp_path / "replicated"), *given)[0]
    for ran in shared_pool(2).run(fine_tunes, sharding, str(tmp_path / "run"), *given):
        torch.testing.assert_close(ran.weights, exact.weights, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ran.logs, exact.logs, rtol=1e-4, atol=1e-5)


def _adapted_after_sharding() -> str:
    model = build("LlamaForCausalLM")
    sl.shard_model(model, "tp=2")
    with pytest.raises(ShardingError) as raised:
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["down_proj"]))
    return str(raised.value)


def test_peft_comes_before_sharding():
    assert set(shared_pool(2).run(_adapted_after_sharding)) == {
        'peft adds an adapter around "down_proj.base_layer.weight", of which this rank has a shard, and '
        "LlamaMLP.down_proj is part of a model that shard_model has sharded: the adapter would have the sizes of the "
        "shard. Call peft.get_peft_model before shard_model; the adapter then is split as its layer is."
    }


@pytest.mark.deep
@pytest.mark.parametrize("way", [way for way in WAYS if "ep" not in way])
def test_trls_sfttrainer_fine_tunes_as_in_one_process(tmp_path: Path, way: str):
    """Its loss is float32."""
    sharding, world = WAYS[way]
    exact = fine_tunes(None, str(tmp_path / "alone"))
    for ran in shared_pool(world).run(fine_tunes, sharding, str(tmp_path / "run")):
        torch.testing.assert_close(ran.logs, exact.logs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ran.weights, exact.weights, rtol=1e-5, atol=1e-5)
