"""Modes that are not ours come in through our doors: each example of one does what it says."""

from __future__ import annotations

from typing import Any

import few_bits
import near
import pytest
import sharp
import torch
import torch.distributed as dist
import two_levels
from gpt import GPT, GPTConfig
from torch import nn

import shardlib as sl
from shardlib.errors import MeshError, PlanError, RuleError
from shardlib.testing import assert_equivalent
from shardlib.testing.models import MLP, Numbers
from shardlib.trainer import NonPipelineSchedule, initialize, launch, register_schedule
from tests.families.transformer_models import build  # transformers, before the example imports it

import ring2d  # isort: skip

# --- an axis with rank groups of its own ---


def _near() -> tuple[dict[str, int], tuple[int, ...], list[int]]:
    mesh = sl.mesh("dp=2,near=2")
    model = sl.shard_model(near.Net(), mesh, near.RULES)
    (group,) = sl.axes.axis_groups("near", mesh)
    assert model.up.weight.to_local().shape == (16, 8)
    same = dist.get_process_group_ranks(mesh["near"].get_group())
    return sl.MeshShape("dp=2,near=2").coordinate(dist.get_rank()), group.ranks, same


def test_an_axis_has_the_ranks_that_its_function_names(ranks):
    found = ranks(4).run(_near)
    assert [group for _, group, _ in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [place for place, _, _ in found] == [{"dp": r % 2, "near": r // 2} for r in range(4)]
    assert all(list(group) == same for _, group, same in found)


def test_a_model_on_such_an_axis_trains_as_on_one_device():
    assert_equivalent(near.Net, Numbers((8, 8)), mesh="dp=2,near=2", rules=near.RULES, transforms=[sl.zero(1)])


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2)


def test_whole_matrices_are_stepped_on_such_an_axis_too():
    options = {"rules": near.RULES, "transforms": [sl.zero(3)], "optimizer": _muon}
    assert_equivalent(near.Net, Numbers((8, 8)), mesh="dp=2,near=2", **options)


# --- groups that overlap, and handlers that sum gradients ---


def _in_two_levels(model: nn.Module, mesh: Any) -> nn.Module:
    model = sl.shard_model(model, mesh, {"**": None}, check=False)
    sl.register_gradient_reduction(model, two_levels.TwoLevels(mesh))
    return model


def test_a_sum_in_two_levels_is_the_sum():
    assert_equivalent(MLP, Numbers((8, 6)), mesh="dp=4", shard=_in_two_levels)


def _off_by_one(bucket: Any) -> None:
    dist.all_reduce(bucket.tensor[1:], group=bucket.group)


def _wrongly(model: nn.Module, mesh: Any) -> nn.Module:
    model = sl.shard_model(model, mesh, {"**": None}, check=False)
    sl.register_gradient_reduction(model, _off_by_one)
    return model


def test_a_wrong_sum_is_found():
    with pytest.raises(AssertionError, match="gradient"):
        assert_equivalent(MLP, Numbers((8, 6)), mesh="dp=2", shard=_wrongly)


def _trained(config: dict[str, Any]) -> float:
    return few_bits.train(config)


def test_gradients_in_eight_bits_train_as_well(ranks):
    plain = sum(ranks(2).run(_trained, {}))
    assert abs(sum(ranks(2).run(_trained, few_bits.CONFIG)) - plain) < 2e-3
    # What was rounded away is lost without feedback, and the last digits differ.
    without = {"gradient_handler": [{"type": "few_bits", "feedback": False}]}
    assert sum(ranks(2).run(_trained, without)) != plain


# --- a schedule ---


def _sharply(config: dict[str, Any]) -> list[float]:
    return sharp.train(config)


def test_two_ranks_minimise_sharpness_as_one_does(ranks):
    (one,) = ranks(1).run(_sharply, sharp.CONFIG)
    two = torch.tensor(ranks(2).run(_sharply, sharp.CONFIG), dtype=torch.float64).mean(0)
    assert (two - torch.tensor(one, dtype=torch.float64)).abs().max() < 1e-12
    (plainly,) = ranks(1).run(_sharply, {})
    assert abs(plainly[-1] - one[-1]) > 1e-4


# --- a tensor mode ---


def _llama() -> nn.Module:
    torch.manual_seed(0)
    return build("LlamaForCausalLM", "sdpa", num_hidden_layers=1, num_key_value_heads=4, vocab_size=32)


def _ids(step: int) -> torch.Tensor:
    return torch.randint(3, 30, (4, 6), generator=torch.Generator().manual_seed(step))


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids).logits
    return (logits.square() * torch.linspace(0.5, 1.5, logits.shape[-1], dtype=logits.dtype)).mean()


def test_a_tensor_mode_trains_as_one_device_does():
    rules = sl.layouts.load("llama", "ring2d")
    shape = sl.rules.tensor_mode("ring2d").mesh_shape(4)
    assert str(shape) == "down=2,across=2" and shape.names == ring2d.BOTH
    assert_equivalent(_llama, _ids, mesh=shape, rules=rules, loss=_loss, steps=2)


# --- by name ---


def _by_config(config: dict[str, Any]) -> str:
    launch(config, dist.get_rank(), dist.get_world_size(), "localhost", 29500, backend="gloo", verbose=False)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=16, context=8, n_layer=1, n_head=4, d_model=16))
    engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), verbose=False)
    plan = sl.get_plan(engine.model)
    (row,) = (row for row in plan.rows if row.name == "blocks.0.mlp.up.weight")
    return f"{plan.mesh}: {row.compute}"


def test_a_config_calls_a_tensor_mode_by_its_name(ranks):
    config = {"parallel": {"tensor": {"size": 4, "mode": "2D"}}}
    assert set(ranks(4).run(_by_config, config)) == {"dp=1,row=2,col=2: ff@col embed_in@row"}


@register_schedule("no_steps")
class _NoSteps(NonPipelineSchedule):
    pass


def _refused(config: dict[str, Any]) -> None:
    from shardlib.trainer._settings import Settings

    Settings.of(config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (
            {"parallel": {"tensor": {"size": 1, "mode": "4d"}}},
            r"mode='4d'; it is '1d', None or a tensor mode\. No tensor",
        ),
        ({"parallel": {"tensor": {"size": 1, "mode": "2d", "deep": 2}}}, r'a size for axis "deep"'),
        ({"schedule": "no_steps"}, r"schedule='no_steps'; give a dict"),
        ({"schedule": {"type": "never"}}, r'"never"'),
    ],
)
def test_what_a_config_names_wrongly_is_refused(config: dict[str, Any], error: str):
    with pytest.raises((PlanError, MeshError), match=error):
        _refused(config)
        from shardlib.trainer._settings import shape_of

        shape_of(config)  # type: ignore[arg-type]


def _groups_of(*groups: list[int]) -> Any:
    def groups_of(_shape: sl.MeshShape) -> Any:
        return groups

    return groups_of


@pytest.mark.parametrize(
    ("name", "kind", "groups", "error"),
    [
        ("lone", "model", ([0, 1], [1, 2]), r"return 2 groups of 2 in which every rank is once"),
        ("long", "model", ([0, 1, 2, 3],), r"return 2 groups of 2"),
        ("beyond", "model", ([0, 4], [1, 2]), r"a group has ranks 0 to 3, each once"),
        (
            "down",
            "model",
            ([1, 0], [2, 3]),
            r'make \[1, 0\] a group of axis "down"; ranks have to ascend along every axis',
        ),
        ("crossed", "model", ([0, 3], [1, 2]), r'make \[3, 2\] a group of axis "dp"; ranks have to ascend'),
        ("over", "overlay", ([0, 1],), r'"over" is an overlay, which is not an axis of a mesh'),
    ],
)
def test_wrong_groups_are_refused(name: str, kind: Any, groups: Any, error: str):
    sl.axes.register_axis(name, kind=kind)(_groups_of(*groups))
    with pytest.raises(MeshError, match=error):
        sl.MeshShape({"dp": 2, name: 2}).coordinate(0)


def test_groups_may_come_in_any_order():
    """Those of the other axis are the same; along it ranks ascend."""
    sl.axes.register_axis("shuffled", kind="model")(_groups_of([1, 3], [0, 2]))
    assert sl.MeshShape("dp=2,shuffled=2").ranks == (0, 2, 1, 3)


def test_axes_of_their_own_groups_have_to_cross():
    sl.axes.register_axis("by_rows", kind="model")(_groups_of([0, 1], [2, 3]))

    @sl.axes.register_axis("by_columns", kind="model")
    def columns(_shape: sl.MeshShape) -> list[list[int]]:
        return [[0, 3], [1, 2]]

    with pytest.raises(MeshError, match=r'the groups of "by_columns" are \[\[0, 2\], \[1, 3\]\], and its function'):
        sl.MeshShape("by_rows=2,by_columns=2").coordinate(0)


def test_a_tensor_mode_is_checked_where_it_is_registered_and_used():
    with pytest.raises(RuleError, match=r'"2d" is registered already'):
        sl.rules.register_tensor_mode("2d")(lambda rules: rules)
    with pytest.raises(RuleError, match=r'the axes are "row"; give each once'):
        sl.rules.register_tensor_mode("half", axes="row")
    sl.rules.register_tensor_mode("nothing")(lambda rules: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(RuleError, match=r'"nothing" made NoneType of the rules'):
        sl.Rules({}).mode("nothing")
    sl.rules.register_tensor_mode("divided", transforms=[sl.zero(1)])(lambda rules: rules)
    with pytest.raises(RuleError, match=r"brings the transforms \(zero\(1\),\), which rules cannot hold"):
        sl.Rules({}).mode("divided")
    with pytest.raises(MeshError, match=r"8 ranks do not make them up; 1 or 4 or 9 would"):
        sl.rules.tensor_mode("2d").mesh_shape(8)


def _divided_reduction() -> str:
    model = sl.shard_model(nn.Linear(4, 4), "dp=2", {"*": None}, transforms=[sl.zero(1)])
    try:
        sl.register_gradient_reduction(model, _off_by_one)
    except PlanError as error:
        return str(error)
    return ""


def test_parts_of_gradients_are_not_summed_by_others(ranks):
    assert all('shards gradient or state of "weight"' in said for said in ranks(2).run(_divided_reduction))
