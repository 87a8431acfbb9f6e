"""What must not pass in silence: each error's whole message, and a model left as it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardlib as sl
from shardlib.engine import apply
from shardlib.errors import CheckpointError, InputError, MeshError, PlanError, ShardingError
from shardlib.testing import assert_equivalent
from shardlib.testing.models import MLP, Numbers, Transformer, rules_for
from tests.engine.whole import whole

RULES = rules_for(MLP())
ROWS = Numbers((8, 6))


def _message(error: type[Exception], act: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        act()
    return str(caught.value)


def _mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MLP(width=7).double()


def _wrong_world() -> str:
    return _message(MeshError, lambda: sl.shard_model(_mlp(), "dp=2,tp=2", RULES))


def test_mesh_of_another_size_than_the_job(ranks):
    assert ranks(2).run(_wrong_world)[0] == (
        'Mesh "dp=2,tp=2" needs 4 processes, but 2 are running. Start them with `torchrun --nproc_per_node 4`, or '
        "change an axis (one size may be -1 and is then inferred)."
    )


def _of_rank(texts: list[str], call: Callable[[str], Any]) -> str:
    return _message(MeshError, lambda: call(texts[dist.get_rank()]))


@pytest.mark.parametrize("call", [sl.mesh, lambda mesh: sl.shard_model(_mlp(), mesh, {"**": None})])
def test_ranks_that_ask_for_different_meshes(ranks, call):
    """Rank 0, which may keep the store, is among the many and is the only other one."""
    for texts, told in (
        (["dp=2,tp=2", "dp=4", "dp=2,tp=-1", "dp=2,tp=2"], [("0, 2, 3", "dp=2,tp=2"), ("1", "dp=4")]),
        (["tp=4", "dp=4", "dp=4", "dp=4"], [("0", "tp=4"), ("1, 2, 3", "dp=4")]),
    ):
        assert set(ranks(4).run(_of_rank, texts, call, timeout=60)) == {
            "The ranks ask for different meshes:\n"
            + "".join(f'  rank {which}: "{mesh}" on cpu\n' for which, mesh in told)
            + "Give every rank the same mesh; do not let it depend on the rank."
        }


def test_one_rank_asks_for_a_mesh_that_cannot_be(ranks):
    first, *others = ranks(3).run(_of_rank, ["dp=2", "dp=3", "dp=3"], sl.mesh, timeout=60)
    assert first.startswith('Mesh "dp=2" needs 2 processes, but 3 are running.')
    assert set(others) == {
        'The ranks ask for different meshes:\n  rank 0: "dp=2" on cpu\n  rank 1, 2: "dp=3" on cpu\n'
        "Give every rank the same mesh; do not let it depend on the rank."
    }


def _alone() -> str:
    if dist.get_rank():
        return ""
    return _message(MeshError, lambda: sl.mesh("dp=2", timeout=0.5))


def test_a_mesh_that_other_ranks_do_not_ask_for(ranks):
    told = ranks(2).run(_alone)[0]
    assert told.startswith('Rank 0 asked for mesh "dp=2" on cpu, and timed out waiting for the other ranks: ')
    assert told.endswith("\nCreate the same mesh on every rank of the job.")


def _twice() -> str:
    model = sl.shard_model(_mlp(), "tp=2", RULES)
    return _message(ShardingError, lambda: sl.shard_model(model, "tp=2", RULES))


def test_model_sharded_twice(ranks):
    assert ranks(2).run(_twice)[0] == (
        'This MLP is sharded already, on mesh "tp=2". Build a new model to shard it otherwise.'
    )


def _foreign() -> str:
    model = _mlp()
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), sl.mesh("tp=2"), [Shard(0)]))
    return _message(ShardingError, lambda: sl.shard_model(model, "tp=2", RULES))


def test_model_sharded_by_something_else(ranks):
    assert ranks(2).run(_foreign)[0] == (
        '"up.weight" is a DTensor already ((Shard(dim=0),)); shard_model takes a model of plain tensors. Give it the '
        "model as it was before parallelize_module, fully_shard or distribute_tensor."
    )


def _early_optimizer() -> str:
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sl.shard_model(model, "tp=2", RULES)
    model(ROWS(0)).square().mean().backward()
    return _message(ShardingError, optimizer.step)


def test_optimizer_built_before_sharding(ranks):
    assert ranks(2).run(_early_optimizer)[0] == (
        'This optimizer was built before its model was sharded: 9 of its 9 parameters (the first is "scale") are '
        "no longer the model's, and stepping them would train nothing. Build the optimizer after shard_model: "
        "torch.optim.AdamW(model.parameters()). Where the model's mesh was changed, give the optimizer to "
        "reshard(model, mesh, optimizer)."
    )


def _wrong_device() -> str:
    model = sl.shard_model(_mlp(), "tp=2", RULES)
    return _message(InputError, lambda: model(torch.empty(8, 6, device="meta")))


def test_input_on_another_device(ranks):
    assert ranks(2).run(_wrong_device)[0] == (
        'An input of shape (8, 6) is on meta, but the model\'s mesh is on cpu. Move the batch first: batch.to("cpu").'
    )


def _other_rules() -> str:
    rules = sl.Rules({"up": "colwise" if dist.get_rank() == 0 else None}, unmatched="replicate")
    return _message(PlanError, lambda: sl.shard_model(_mlp(), "tp=2", rules))


def test_ranks_with_different_rules(ranks):
    shown = (
        '{"name": "up.weight", "kind": "parameter", "shape": [7, 6], "dtype": "float64", "requires_grad": true, '
        '"persistent": true, "tied": ["up.weight"], "stored": "%s", "compute": "%s", "grad": "%s", "state": "%s", '
        '"rule": "up", "note": "%s"}'
    )
    for message in ranks(2).run(_other_rules):
        assert message == (
            "The ranks were given different rules, models or meshes. The first difference in their plans:\n"
            f"  rank 0: {shown % (*['out@tp in'] * 4, 'column-parallel (out dim); uneven')}\n"
            f"  rank 1: {shown % (*['_ _'] * 4, 'replicated')}\n"
            "Give every rank the same rules; do not let them depend on the rank."
        )


def _other_weights() -> tuple[str, bool]:
    model = _mlp(seed=dist.get_rank() // 2)
    before = dict(model.named_parameters())
    message = _message(ShardingError, lambda: sl.shard_model(model, "dp=2,tp=2", RULES))
    return message, all(before[name] is p for name, p in model.named_parameters())


def test_ranks_with_different_first_weights(ranks):
    for message, untouched in ranks(4).run(_other_weights):
        lines = message.splitlines()
        assert lines[0] == ('The ranks start from different weights: 8 of 9 tensors differ, the first is "up.weight":')
        assert lines[1].startswith("  rank 0, 1: float64 [7, 6] [") and lines[2].startswith("  rank 2, 3: float64")
        assert lines[3] == (
            "Seed every rank alike before the model is built (torch.manual_seed(0)), or load the same checkpoint."
        )
        assert untouched


def _weights_on_one_rank() -> str:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = _mlp()
    return _message(ShardingError, lambda: sl.shard_model(model, "dp=2", {"**": None}, transforms=sl.zero(3)))


def test_weights_on_the_first_rank_and_the_meta_device_on_the_others(ranks):
    for message in ranks(2).run(_weights_on_one_rank):
        assert message == (
            "Ranks have values of different numbers of the model's 9 tensors, and the others on the meta device:\n"
            "  rank 0: 9\n"
            "  rank 1: 0\n"
            "No rank sends its values to the others. Load the weights on every rank; or build the model on every rank "
            "in shardlib.booster.LazyInitContext, also by from_pretrained: it then takes no memory, and shard_model "
            "gives each rank its shards."
        )


def _other_batches(evaluated: bool) -> str:
    model = sl.shard_model(_mlp(), "dp=2,tp=2", RULES)
    if evaluated:
        with torch.no_grad():
            model(torch.ones(2, 6, dtype=torch.float64))
    return _message(InputError, lambda: model(torch.full((2, 6), float(dist.get_rank()), dtype=torch.float64)))


@pytest.mark.parametrize("evaluated", [False, True])
def test_model_ranks_with_different_batches(ranks, evaluated: bool):
    assert ranks(4).run(_other_batches, evaluated)[3] == (
        'Ranks of the model axis "tp" work on the same examples, but were given different batches; "args[0]" '
        "differs:\n"
        "  rank 2: float64 [2, 6] [2, 2, 2, 2, ...]\n"
        "  rank 3: float64 [2, 6] [3, 3, 3, 3, ...]\n"
        "Pick the batch by the rank's place on the data axes alone, for example with DistributedSampler(dataset, "
        'num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank()).'
    )


def _wrong_shape() -> str:
    model = sl.shard_model(_mlp(), "tp=2", RULES)
    state = MLP(width=8).double().state_dict()
    return _message(CheckpointError, lambda: model.load_state_dict(state))


def test_state_dict_of_another_model(ranks):
    assert ranks(2).run(_wrong_shape)[0] == (
        'The state dict has "scale" with shape (8,); the model has it with global shape (7,) (local shape '
        "(4,) on this rank). Load a state dict of the same model: full tensors, or DTensors."
    )


def test_an_unknown_backend(ranks):
    assert ranks(1).run(_message, ShardingError, lambda: sl.shard_model(_mlp(), "dp=1", RULES, compile="fast"))[0] == (
        'compile=\'fast\' was given; give "auto", "aot_eager", "inductor", or None for eager.'
    )


def _state_of(model: nn.Module) -> dict[str, Any]:
    """What a model and its modules have, by identity."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name}.__class__"] = type(module)
        for key, value in vars(module).items():
            if value is None:  # as a class may have it
                continue
            inside = {str(k): id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)
            found[f"{name}.{key}"] = inside
    for name, param in model.named_parameters():
        found[f"{name} hooks"] = len(param._backward_hooks or ()) + len(param._post_accumulate_grad_hooks or ())
    return found


_STEPS = (
    "shard_tensors",
    "install_modules",
    "install_param_runtime",
    "compile_calls",
    "install_pipeline",
    "wrap_calls",
    "agree_on_random_state",
    "Sharded",
)


def _failing_after(mesh: str, transforms: tuple[Any, ...], **given: Any) -> list[str]:
    """The steps whose error leaves something behind."""
    torch.manual_seed(0)
    model = Transformer(vocab=7, heads=2, head=4, layers=2, tied=True)
    rules = rules_for(model)
    rules = rules.with_stages("embed, position, blocks.0 | blocks.1, norm, head") if "pp" in mesh else rules
    before, wrong = _state_of(model), []
    for name in _STEPS:
        if (name == "install_pipeline" and "pp" not in mesh) or (name == "agree_on_random_state" and "rng" in given):
            continue  # there is no such step
        step = getattr(apply, name)

        def fail(*args: Any, step: Any = step, **kwargs: Any) -> None:
            step(*args, **kwargs)
            raise OSError

        with mock.patch.object(apply, name, fail), pytest.raises(OSError):
            sl.shard_model(model, mesh, rules, transforms=transforms, **given)
        after = _state_of(model)
        different = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        wrong += [f"{name}: {', '.join(sorted(different))}"] if different else []
    alone = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    alone.step()  # it is a model of one device
    sl.shard_model(model, mesh, rules, transforms=transforms, **given)
    return wrong


@pytest.mark.parametrize(
    ("mesh", "transforms", "given"),
    [
        ("dp=2,tp=2", (sl.zero(3), sl.checkpoint_activations("blocks.*")), {}),
        ("dp=2", (sl.zero(1, overlap=True), sl.precision("bf16")), {"compile": None, "rng": "exact"}),
        ("dp=2,pp=2", (sl.zero(2),), {}),
    ],
)
def test_an_error_in_any_step_leaves_the_model_as_it_was(
    ranks, mesh: str, transforms: tuple[Any, ...], given: dict[str, Any]
):
    for wrong in ranks(sl.MeshShape(mesh).world_size).run(_failing_after, mesh, transforms, **given):
        assert not wrong


def _pipeline() -> str:
    return _message(PlanError, lambda: sl.shard_model(_mlp(), "pp=2", {"**": None}))


def test_a_pipeline_axis_without_stages(ranks):
    assert ranks(2).run(_pipeline)[0] == (
        'Mesh "pp=2" has the pipeline axis "pp", and the rules name no stages for it. Name them: Rules(..., '
        'stages="embed, blocks.0-3 | blocks.4-7, norm, head"), or stages=Balanced(); a layout file\'s rules take them '
        "with rules.with_stages(Balanced())."
    )


def _plan_for_another_mesh() -> str:
    plan = sl.plan(_mlp(), "tp=4", RULES)
    return _message(PlanError, lambda: sl.shard_model(_mlp(), "tp=2", plan))


def test_plan_made_for_another_mesh(ranks):
    assert ranks(2).run(_plan_for_another_mesh)[0] == (
        'The plan was made for mesh "tp=4", but the model is to be sharded on mesh "tp=2". Make the plan again for '
        "this mesh: shardlib.plan(model, mesh, rules)."
    )


def test_plan_of_a_model_that_is_not_sharded():
    assert _message(ShardingError, lambda: sl.get_plan(nn.Linear(2, 2))) == (
        "This Linear was not sharded by shardlib; call shardlib.shard_model(model, mesh, rules) first."
    )


def _lazy() -> str:
    return _message(ShardingError, lambda: sl.shard_model(nn.Sequential(nn.LazyLinear(4)), "tp=2", {"0": "colwise"}))


def test_a_lazy_module(ranks):
    assert ranks(2).run(_lazy)[0] == (
        '"0.weight" has no shape yet (a lazy module). Run the model once on an example before sharding it.'
    )


def _failing_forward() -> bool:
    model = sl.shard_model(_mlp(), "tp=2", RULES)
    with pytest.raises(RuntimeError):
        model(torch.zeros(8, 5, dtype=torch.float64))
    model(ROWS(0)).square().mean().backward()
    return isinstance(model.up.weight.grad, DTensor)


def test_a_forward_that_raised_leaves_the_model_usable(ranks):
    assert all(ranks(2).run(_failing_forward))


_TO_WHAT_IT_IS = [
    lambda model: model.to("cpu"),
    lambda model: model.to(device=torch.device("cpu"), dtype=torch.float64, non_blocking=True),
    lambda model: model.cpu().double(),
    lambda model: model.down.to("cpu"),
    lambda model: nn.ModuleList([model]).to(torch.float64)[0],
]
_TO_SOMETHING_ELSE = [
    lambda model: model.half(),
    lambda model: model.to("meta", torch.float32),
    lambda model: model.down.to(torch.bfloat16),
    lambda model: nn.ModuleList([model]).float(),
    lambda model: model.to_empty(device="cpu"),
]


def _converted(mesh: str, *transforms: Any) -> list[str]:
    model, shape = _mlp(), sl.MeshShape(mesh)
    model.register_buffer("offset", torch.ones(6, dtype=torch.float64), persistent=False)
    model = sl.shard_model(model, mesh, RULES, transforms=transforms)
    index, count = shape.data_place(shape.coordinate(dist.get_rank()))
    model(ROWS(0).chunk(count)[index]).square().mean().backward()
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), model.offset]
    values = [whole(tensor).clone() for tensor in tensors]
    assert all(convert(model) in (model, model.down) for convert in _TO_WHAT_IT_IS)
    said = [_message(ShardingError, lambda c=convert: c(model)) for convert in _TO_SOMETHING_ELSE]
    after = [*model.parameters(), *(p.grad for p in model.parameters()), model.offset]
    assert all(a is b for a, b in zip(after, tensors, strict=True))
    assert all(torch.equal(whole(a), value) for a, value in zip(after, values, strict=True))
    return said


@pytest.mark.parametrize(
    ("mesh", "transforms"),
    [
        ("tp=2", []),
        ("dp=2", []),
        ("dp=2", [sl.zero(1)]),
        ("dp=2", [sl.zero(2)]),
        ("dp=2", [sl.zero(3)]),
        ("fsdp=2,tp=2", [sl.fsdp()]),
    ],
    ids=str,
)
def test_a_conversion_that_would_change_a_sharded_model(ranks, mesh: str, transforms: list[Any]):
    """`model.to(device)` where the model is there does nothing: trainers call it."""
    for said in ranks(sl.MeshShape(mesh).world_size).run(_converted, mesh, *transforms):
        assert said[0] == (
            'A conversion of a sharded MLP would make "scale", which is torch.float64 on cpu, torch.float16 on '
            "cpu. Nothing was changed: gradient buckets and optimizer state were made for its present dtype and "
            "device. Move and cast a model before shard_model or boost; or choose dtypes with precision(), and what is "
            "kept in host memory with offload()."
        )
        assert '"scale", which is torch.float64 on cpu, torch.float32 on meta' in said[1]
        assert 'sharded Linear would make "weight", which is torch.float64 on cpu, torch.bfloat16 on cpu' in said[2]
        assert "torch.float32 on cpu" in said[3] and "a tensor in other memory" in said[4]


def _fused_over_two_axes() -> str:
    rules = sl.Rules({"up": "(two half@(sp,tp))"}, sizes={"two": 2}, unmatched="replicate")
    return _message(PlanError, lambda: sl.shard_model(MLP(width=8), "sp=2,tp=2", rules))


def test_a_fused_dim_over_two_model_axes(ranks):
    assert ranks(4).run(_fused_over_two_axes)[0] == (
        '"up.weight" has the layout "(two half@(sp,tp)) in": a fused dim sharded over several axes can be planned but '
        "not run, since torch all-gathers such a DTensor in the wrong order. Shard it over one axis, and another dim "
        "over the other."
    )


def _fused_activation_over_two_axes() -> str:
    rules = sl.Rules({"up.output": "batch (two half@(sp,tp))", "**": None}, sizes={"two": 2})
    return _message(PlanError, lambda: sl.shard_model(MLP(width=8), "sp=2,tp=2", rules))


def test_an_activation_with_a_fused_dim_over_two_model_axes(ranks):
    assert (
        ranks(4)
        .run(_fused_activation_over_two_axes)[0]
        .startswith('"up.output" has the layout "batch (two half@(sp,tp))": a fused dim sharded over several axes')
    )


def _uneven_in_another_order() -> tuple[str, bool]:
    model = MLP(width=7)
    before = dict(model.named_parameters())
    rules = sl.Rules({"up.bias": "out@(sp,tp)"}, unmatched="replicate")
    message = _message(PlanError, lambda: sl.shard_model(model, "dp=1,tp=2,sp=2", rules))
    return message, all(before[name] is p for name, p in model.named_parameters())


def test_an_uneven_dim_whose_axes_stand_in_another_order(ranks):
    assert ranks(4).run(_uneven_in_another_order)[0] == (
        '"up.bias", of global shape (7,), has the layout "out@(sp,tp)": dim 0 is sharded unevenly over sp and tp, in '
        'another order than that of mesh "dp=1,tp=2,sp=2", which can be planned but not run. Write @(tp,sp) there, or '
        "give the dim a size that 4 divides.",
        True,
    )


def _uneven_activation(layout: str) -> str:
    rules = sl.Rules({"up.output": layout}, unmatched="replicate")
    model = sl.shard_model(MLP(width=7).double(), "tp=2,sp=2", rules)
    return _message(InputError, lambda: model(ROWS(0)))


@pytest.mark.parametrize("layout", ["batch width@(sp,tp)", "batch (two=2 half@tp)"])
def test_an_uneven_activation_of_equal_pieces(ranks, layout: str):
    shown = layout.replace("=2", "")
    assert ranks(4).run(_uneven_activation, layout)[0] == (
        f'The layout "{shown}" was given to an activation of global shape (8, 7): as a fused dim, or over axes in '
        "another order than the mesh's (tp, sp), it shards dim 1, which 4 does not divide. Give the dim a size that 4 "
        "divides, or shard the unfused dim, over axes in the mesh's order."
    )


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("batch (heads=1@tp head)", 'factor "heads" of size 1 does not divide over tp=2.'),
        ("batch seq width@tp", "names 3 dims and was asked for 2."),
    ],
)
def test_an_activation_that_its_layout_does_not_fit(ranks, layout: str, why: str):
    message = ranks(4).run(_uneven_activation, layout)[0]
    assert why in message and message.endswith("It was given to an activation of global shape (8, 7).")


def test_an_even_dim_may_be_split_in_any_order():
    rules = sl.Rules({"up": "out@(sp,tp) in", "up.output": "batch width@(sp,tp)"}, unmatched="replicate")
    assert_equivalent(MLP, ROWS, "tp=2,sp=2", rules, steps=1)


def _idle_axis() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sl.shard_model(_mlp(), "model=2", RULES)
    return [str(warning.message) for warning in caught if "model axis" in str(warning.message)]


def test_a_model_axis_that_no_rule_names(ranks):
    warned, silent = ranks(2).run(_idle_axis)
    assert warned == [
        'No rule shards anything over the model axis "model" of mesh "model=2": its 2 ranks compute the same. Name it '
        'in a rule, or make it a data axis. The rules name "tp", which the mesh lacks: use one name in both.'
    ]
    assert silent == []
    assert sl.plan(_mlp(), "model=2", RULES).notes == (
        'Axis "model" (2 ranks) shards nothing: no rule of this model names it. The rules name "tp", which the mesh '
        "lacks: use one name in both.",
    )


def _forgotten_root() -> list[str]:
    body = sl.shard_model(_mlp(), "dp=2", {"**": None})
    torch.manual_seed(0)
    head = nn.Linear(5, 2).double()
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            head(body(ROWS(0))).sum().backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


def test_blocks_sharded_and_the_root_forgotten(ranks):
    assert ranks(2).run(_forgotten_root)[0] == [
        "2 of this optimizer's 11 parameters belong to no sharded model (of shapes (2, 5), (2,)): their gradients "
        "are not averaged over the 2 data ranks, so that replicas diverge. Call shard_model on the module that holds "
        "all of them."
    ]


def test_options_that_are_none():
    assert _message(ShardingError, lambda: sl.shard_model(_mlp(), "tp=1", RULES, compile="fast")) == (
        'compile=\'fast\' was given; give "auto", "aot_eager", "inductor", or None for eager.'
    )
    assert _message(PlanError, lambda: sl.shard_model(_mlp(), "tp=1", RULES, bucket_mb=0)) == (
        "bucket_mb=0 was given; give a positive number of megabytes, such as 25."
    )
    assert _message(PlanError, lambda: sl.plan(None, "tp=2", {})) == (
        "A model was given as NoneType; give a torch.nn.Module, on any device or meta."
    )
    assert _message(PlanError, lambda: sl.plan(_mlp(), "tp=2", RULES, transforms=[3])) == (
        "A transform was given as 3; give functions that take a Plan and return a Plan."
    )
    assert _message(MeshError, lambda: sl.MeshShape(8)) == (
        'A mesh shape was given as 8; give text such as "dp=2,tp=4", a mapping from axis name to size, or keywords, as '
        "in MeshShape(dp=2, tp=4)."
    )


def _plan_what_is_sharded() -> None:
    model = sl.shard_model(_mlp(), "tp=1", RULES)
    assert _message(PlanError, lambda: sl.plan(model, "tp=2", RULES, example=(ROWS(0),))) == (
        "The model is sharded already. Make the plan, with its example, from the single-device model, before "
        "shard_model; a model on `meta` will do."
    )


def test_a_dry_run_of_a_sharded_model(ranks):
    ranks(1).run(_plan_what_is_sharded)


@pytest.mark.parametrize("ask", [sl.MeshShape.groups, sl.MeshShape.lines, sl.MeshShape.only])
def test_an_axis_that_the_mesh_does_not_have(ask: Callable[..., Any]):
    assert _message(MeshError, lambda: ask(sl.MeshShape("dp=2,tp=2"), ("data",))) == (
        'Mesh "dp=2,tp=2" has no axis "data"; it has "dp", "tp".'
    )


def _sparse(mesh: str, transforms: Any) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    sl.shard_model(model, mesh, {"0": "rowwise"} if "tp" in mesh else {"**": None}, transforms=transforms)
    model(torch.tensor([1, 2])).sum().backward()
    return _message(ShardingError, torch.optim.SparseAdam(model.parameters()).step)


@pytest.mark.parametrize(("mesh", "transforms"), [("dp=2", ()), ("dp=2", sl.zero(3)), ("tp=2", ())])
def test_an_optimizer_of_sparse_gradients(ranks, mesh: str, transforms: Any):
    assert set(ranks(2).run(_sparse, mesh, transforms)) == {
        'SparseAdam takes sparse gradients alone, and that of "0.weight" is dense: shardlib reduces gradients as dense '
        "tensors, also those of nn.Embedding(sparse=True). Step on it with torch.optim.Adam, SGD or Adagrad."
    }


def _compiled_step(mesh: str, transforms: Any) -> str:
    model = sl.shard_model(_mlp(), mesh, RULES if "tp" in mesh else {"**": None}, transforms=transforms)
    model(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
    return _message(ShardingError, torch.compile(torch.optim.SGD(model.parameters()).step, backend="eager"))


@pytest.mark.compiled
@pytest.mark.parametrize(("mesh", "transforms"), [("tp=2", ()), ("dp=2", sl.zero(1)), ("dp=2", sl.zero(3))])
def test_a_compiled_step_of_shards(ranks, mesh: str, transforms: Any):
    assert set(ranks(2).run(_compiled_step, mesh, transforms, timeout=120)) == {
        'torch.compile was given the step of SGD, and "scale" is updated in shards, which replace the parameters '
        "during each step, and a graph cannot follow that. Call optimizer.step() itself; torch's fused and foreach "
        "kernels update many tensors in a call."
    }


def _wrap_what_is_sharded() -> None:
    mesh = sl.mesh("dp=2,tp=2")
    model = sl.shard_model(_mlp(), mesh, RULES, transforms=sl.zero(2))
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    for name, wrap in {
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "DataParallel": nn.DataParallel,
        "fully_shard (or replicate)": fully_shard,
    }.items():
        assert _message(ShardingError, lambda wrap=wrap: wrap(model)) == (
            f"{name} was given a model that shard_model has sharded. Train the model itself, without a wrapper: its "
            "gradients are averaged over the data axes when backward() returns, and transforms=sl.zero(2), sl.fsdp() "
            "and others shard it further. Where a trainer wraps models, use the one in shardlib.integrations."
        )
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    # What torch asks of every module is answered as on one device.
    assert not FullyShardedDataParallel.fsdp_modules(model)
    assert not FullyShardedDataParallel.fsdp_modules(copy.deepcopy(model))
    nn.parallel.DistributedDataParallel(_mlp(), device_mesh=mesh["dp"])


def test_torch_may_not_wrap_what_is_sharded(ranks):
    ranks(4).run(_wrap_what_is_sharded)
