"""Offload, precision, recomputing, accumulation: what they change, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardlib._plan import LossScale, Plan, Step, make_plan
from shardlib.errors import PlanError
from shardlib.transforms import accumulate, checkpoint_activations, fsdp, offload, precision, zero
from tests.transforms.cases import laid_out


def _dtypes(made: Plan, name: str) -> list[str]:
    return [str(layout.dtype).removeprefix("torch.") for layout in made[name].layouts.values()]


def test_offload_moves_phases_to_the_host():
    made = laid_out() | offload()
    assert {row.state.memory for row in made.rows if row.state} == {"host"}
    assert {layout.memory for row in made.rows for phase, layout in row.layouts.items() if phase != "state"} == {
        "device"
    }
    assert made.memory().host == made.memory().state
    every = laid_out() | offload("all")
    assert {row.compute.memory for row in every.rows} == {"device"}
    assert every.memory().device == every.memory().buffers


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_offload_moves_the_largest_tensors_until_there_is_enough(fraction: float):
    made = laid_out() | offload("grads", fraction=fraction)
    rows = [row for row in made.rows if row.grad]
    sizes = {row.name: row.local_bytes(made.mesh, phase="grad") for row in rows}
    moved = sorted(sizes[row.name] for row in rows if row.grad and row.grad.memory == "host")
    stayed = [sizes[row.name] for row in rows if row.grad and row.grad.memory == "device"]
    assert sum(moved) >= fraction * sum(sizes.values())
    assert sum(moved[1:]) < fraction * sum(sizes.values()) or not moved or fraction == 1
    assert not moved or not stayed or moved[0] >= max(stayed)


def test_offload_counts_pieces_of_split_tensors():
    made = laid_out() | zero(3) | offload("params")
    assert made.memory().host == made.memory().parameters < laid_out().memory().parameters


@pytest.mark.parametrize(("name", "low"), [("bf16", "bfloat16"), ("fp16_naive", "float16"), ("fp8", "bfloat16")])
def test_low_precision_has_a_master_copy_beside_the_state(name: str, low: str):
    made = laid_out() | precision(name)
    assert _dtypes(made, "embed.weight") == [low, low, "float32", "float32"]
    assert _dtypes(laid_out() | precision(name, grads=low), "embed.weight") == [low, low, low, "float32"]
    assert _dtypes(made, "frozen.weight") == [low, low]
    assert _dtypes(made, "norm.running_mean") == ["None", "None"]
    assert made["embed.weight"].has_master
    assert made.step.fp8 == (("**",) if name == "fp8" else ())
    assert made.step.scaler == (LossScale() if name == "fp16_naive" else None)


def test_without_a_master_copy_state_is_narrow_too():
    made = laid_out() | precision("bf16", master=False)
    assert _dtypes(made, "embed.weight") == ["bfloat16"] * 4
    assert not made["embed.weight"].has_master
    whole = laid_out().memory()
    assert made.memory().total - made.memory().buffers == (whole.total - whole.buffers) // 2


@pytest.mark.parametrize(
    ("transform", "step"),
    [
        (precision("fp32"), Step()),
        (precision("fp16"), Step(autocast=torch.float16, scaler=LossScale())),
        (precision("bf16", autocast=True), Step(autocast=torch.bfloat16)),
        (precision("fp8", autocast=True, linears="mlp"), Step(autocast=torch.bfloat16, fp8=("mlp",))),
        (precision("fp32", reduce="bfloat16"), Step(reduce_dtype=torch.bfloat16)),
    ],
)
def test_some_precisions_change_the_step_alone(transform, step: Step):
    made = laid_out() | transform
    assert made.rows == laid_out().rows
    assert made.step == step


def test_what_is_kept_stays_as_it_is():
    made = laid_out() | precision("bf16", keep=("norm", "embed"))
    assert made["norm.weight"] == laid_out()["norm.weight"]
    assert made["embed.weight"] == laid_out()["embed.weight"]
    assert _dtypes(made, "blocks.0.proj.weight")[0] == "bfloat16"


def test_a_model_that_is_low_already_stays_and_the_plan_says_so():
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    made = make_plan(model, "dp=2", {"weight": None, "bias": None}) | precision("bf16")
    assert made.notes == ('precision("bf16") changes no tensor: no parameter is of float32.',)
    assert _dtypes(made, "weight") == ["None"] * 4


def test_layouts_and_precision_go_together_in_any_order():
    low, split, away = precision("bf16"), fsdp(), offload()
    orders = [(low, split, away), (away, split, low), (split, low, away)]
    assert len({(laid_out() | a | b | c).rows for a, b, c in orders}) == 1


def test_activations_of_units_or_of_named_modules_are_recomputed():
    assert (laid_out() | checkpoint_activations()).step.recompute == ("^blocks.0", "^blocks.1")
    both = laid_out() | checkpoint_activations("qkv") | checkpoint_activations(("proj", "qkv"))
    assert both.step.recompute == ("qkv", "proj")


def test_the_settings_of_the_step_are_printed_compared_and_kept_apart():
    made = laid_out() | accumulate(4) | precision("fp16", reduce="float32") | checkpoint_activations()
    assert str(made).splitlines()[-1] == (
        "Step: buckets of 25 MiB, accumulate 4, reduce_dtype float32, autocast float16, scaler "
        "LossScale(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0, "
        "max_scale=4294967296.0, hysteresis=1), recompute ^blocks.{0-1} x2"
    )
    assert "~ step: accumulate 1 -> 4" in laid_out().diff(made).splitlines()
    assert "~ step: recompute none -> ^blocks.{0-1} x2" in laid_out().diff(made).splitlines()


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("fp32", {"autocast": True}, 'it is for "bf16", "fp16" and "fp8"'),
        ("fp16_naive", {"autocast": True}, 'it is for "bf16", "fp16" and "fp8"'),
        ("fp32", {"scaler": LossScale()}, "gradients of float32 need none"),
        ("bf16", {"linears": "mlp"}, 'they apply to "fp8" only'),
        ("fp32", {"scaling": "delayed"}, 'it is for "fp8"'),
        ("bf16", {"history": 8}, 'it is for scaling="delayed"'),
        ("fp8", {"history": 8}, 'it is for scaling="delayed"'),
    ],
)
def test_an_argument_that_a_precision_has_no_use_for_is_refused(name: str, given: dict[str, Any], reason: str):
    with pytest.raises(PlanError) as raised:
        precision(name, **given)
    named = "autocast=True" if "autocast" in given else next(iter(given))
    assert str(raised.value).endswith(
        f"): {named} contradicts the rest: {reason}. Leave it out, or choose another name."
    )


def test_all_of_fp8_goes_together():
    made = laid_out() | precision("fp8", linears="mlp", scaling="delayed", history=1, autocast=True)
    assert (made.step.fp8, made.step.fp8_history) == (("mlp",), 1)


def _built_in(dtype: torch.dtype) -> Plan:
    return make_plan(nn.Linear(4, 4, dtype=dtype), "dp=2", {"weight": None, "bias": None})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: offload("stat"),
            'offload(\'stat\'): "stat" is not one of "state", "params", "grads", of which several may be '
            'given, and "all" stands for all three. Did you mean "state"?',
        ),
        (
            lambda: offload(fraction=1.5),
            "offload('state', fraction=1.5): give something to move, and from 0 to 1 of it.",
        ),
        (
            lambda: precision("bfloat16"),
            'precision(\'bfloat16\'): give one of "bf16", "fp16", "fp16_naive", "fp8", "fp32". Did you mean "bf16"?',
        ),
        (
            lambda: precision("bf16", reduce="int8"),
            'precision("bf16", reduce=\'int8\'): give a dtype of floating point, such as "float32".',
        ),
        (
            lambda: precision("fp16", master=False),
            'precision("fp16", master=False): master=False contradicts the rest: parameters that stay float32 have no '
            "copy. Leave it out, or choose another name.",
        ),
        (
            lambda: precision("bf16", autocast=True, keep="norm"),
            'precision("bf16", autocast=True, keep="norm"): keep contradicts the rest: every parameter stays float32. '
            "Leave it out, or choose another name.",
        ),
        (
            lambda: precision("fp8", scaling="dealyed"),
            'precision("fp8", scaling="dealyed"): scaling is "current" or "delayed". Did you mean "delayed"?',
        ),
        *[
            (
                lambda history=history: precision("fp8", scaling="delayed", history=history),
                f'precision("fp8", scaling="delayed", history={history!r}): history is a number of steps, from 1 up.',
            )
            for history in (0, True, 2.5)
        ],
        (
            lambda: precision("fp16", scaler=1024.0),
            'precision("fp16", scaler=1024.0): scaler is a float; give a LossScale, or nothing.',
        ),
        (
            lambda: _built_in(torch.float64) | precision("bf16"),
            'precision("bf16"): weight is float64 (and 1 more); precision is about models of float32. Build the model '
            "in float32, or call model.float() first; in float64 leave precision out.",
        ),
        (
            lambda: _built_in(torch.bfloat16) | precision("fp16"),
            'precision("fp16"): weight is bfloat16 (and 1 more); precision is about models of float32. Build the model '
            'in float32, or call model.float() first; for a model of bfloat16 give "bf16".',
        ),
        (
            lambda: _built_in(torch.float16) | precision("fp8", autocast=True),
            'precision("fp8", autocast=True): weight is float16 (and 1 more); precision is about models of float32. '
            'Build the model in float32, or call model.float() first; for a model of float16 give "fp16".',
        ),
        (
            lambda: laid_out() | precision("bf16") | precision("fp16"),
            'precision("fp16"): the plan was made with precision("bf16"), which has other arguments. Choose one of '
            "the two.",
        ),
        (
            lambda: precision("fp16_naive")(precision("bf16")(laid_out())),
            'precision("fp16_naive"): "count" has the layout ": bfloat16" already, and would become torch.'
            "float16. Choose one precision; `keep` names what stays float32.",
        ),
        (
            lambda: laid_out() | accumulate(2) | accumulate(4),
            "accumulate(4): the plan was made with accumulate(2), which has other arguments. Choose one of the two.",
        ),
        (
            lambda: accumulate(4)(accumulate(2)(laid_out())),
            "accumulate(4): the plan accumulates 2 microbatches already. Choose one.",
        ),
        (lambda: accumulate(0), "accumulate(0): give a number of microbatches, from 1 up."),
        (
            lambda: _built_in(torch.float64) | checkpoint_activations(),
            'checkpoint_activations(): the model has no repeated blocks (a ModuleList of two or more) that "units" '
            'could mean. Name the modules, as in checkpoint_activations("layers.*").',
        ),
        (
            lambda: Step().replace(speed=2),
            "Step.replace was given speed; a step has accumulate, bucket_mb, unbucketed_mb, reduce_dtype, autocast, "
            "scaler, recompute, fp8, overlap, fp8_history, schedule, microbatches, capacity_factor.",
        ),
        (
            lambda: LossScale(init_scale=0.5),
            "LossScale(init_scale=0.5, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=1.0, "
            "max_scale=4294967296.0, hysteresis=1): give 0 < min_scale <= init_scale <= max_scale, growth_factor >= 1, "
            "0 < backoff_factor <= 1, growth_interval >= 1 and hysteresis >= 1.",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], message: str):
    with pytest.raises(PlanError) as raised:
        make()
    assert str(raised.value) == message
