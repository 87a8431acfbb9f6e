"""The table: phases, transforms, memory, and what a wrong argument is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib._mesh_shape import MeshShape
from shardlib._plan import Memory, Plan, Row, make_plan
from shardlib._plan.memory import Blocks, stages
from shardlib.errors import MeshError, PlanError
from shardlib.layout import Layout
from tests.plan.cases import MLP_RULES, gpt_plan, mlp


def _texts(row: Row) -> dict[str, str]:
    return {phase: str(layout) for phase, layout in row.layouts.items()}


def test_a_model_axis_splits_all_phases():
    row = make_plan(mlp(), "dp=2,tp=2", MLP_RULES)["2.weight"]
    assert _texts(row) == dict.fromkeys(("stored", "compute", "grad", "state"), "out in@tp")


def test_a_data_axis_in_a_rule_splits_what_is_kept_and_not_what_is_computed_with():
    rules = {"0.weight": "out@(fsdp,tp) in", "0.bias": "out@fsdp", "2": "replicate"}
    made = make_plan(mlp(), "fsdp=2,tp=2", rules)
    kept = "out@(fsdp,tp) in"
    assert _texts(made["0.weight"]) == {"stored": kept, "compute": "out@tp in", "grad": kept, "state": kept}
    assert _texts(made["0.bias"])["compute"] == "out"
    mesh = made.mesh
    assert made["0.weight"].local_shape(mesh) == (8, 16)
    assert made["0.weight"].local_shape(mesh, phase="compute") == (16, 16)


def test_buffers_and_frozen_parameters_have_neither_gradient_nor_state():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    made = make_plan(model, "dp=2", {"0": "replicate", "1": "replicate"})
    assert list(made["0.weight"].layouts) == ["stored", "compute"]
    assert list(made["1.running_mean"].layouts) == ["stored", "compute"]
    assert "frozen" in made["0.weight"].note


def test_tied_tensors_share_a_row_that_every_name_finds():
    made = gpt_plan(tied=True)
    assert made["head.weight"] is made["embed.weight"]
    assert made["head.weight"].tied == ("embed.weight", "head.weight")


def test_a_plan_counts_bytes_of_the_largest_rank():
    made = make_plan(mlp(33), "dp=2,tp=4", MLP_RULES)
    # 33 features over 4 ranks: the first holds 9. Biases: 9 split, 16 whole. Four bytes each; AdamW keeps two more.
    elements = 9 * 16 + 9 + 16 * 9 + 16
    # Small gradients are packed to be reduced.
    assert made.memory() == Memory(4 * elements, 4 * elements, 8 * elements, 0, buckets=4 * elements)
    assert made.memory(state_tensors=1).state == 4 * elements
    assert "uneven" in made["0.weight"].note


def test_a_phase_in_host_memory_and_another_dtype_are_counted_so():
    def offload(made: Plan) -> Plan:
        return made.map_rows(lambda row: row.replace(state=Layout.parse(f"{row.state} : float32 host")))

    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    made = make_plan(model, "dp=2", {"weight": None}, transforms=[offload])
    # Eight times eight of them: two bytes each, and AdamW's two and a master copy of four.
    assert made.memory() == Memory(parameters=128, gradients=128, state=768, buffers=0, host=768, buckets=128)
    assert made.memory().device == 256
    assert made.transforms == ("offload",)


def test_a_pipeline_axis_divides_the_largest_list_of_blocks():
    made = gpt_plan("pp=3,tp=2", n_layer=8, tied=False)
    assert made.blocks == Blocks("blocks", 8, ("norm.weight", "norm.bias", "head.weight"))
    held = [[row.name for row in stage] for stage in stages(made.rows, made.mesh, made.blocks)]
    blocks = [sorted({int(name.split(".")[1]) for name in names if name.startswith("blocks.")}) for names in held]
    assert blocks == [[0, 1], [2, 3, 4], [5, 6, 7]]  # the middle takes the rest first, then the last stage
    outside = [[name for name in names if not name.startswith("blocks.")] for names in held]
    assert outside == [["embed.weight", "position.weight"], [], ["norm.weight", "norm.bias", "head.weight"]]
    whole = gpt_plan("tp=2", n_layer=8, tied=False).memory()
    assert whole.total / 3 < made.memory().total < whole.total / 2
    assert made.notes == (
        'Memory counts the 8 blocks of "blocks" divided evenly over "pp", modules before them on the first stage and '
        "modules after them on the last; the figures are those of the largest stage.",
    )


@pytest.mark.parametrize(
    ("layers", "ranks", "expected"),
    [
        (8, 2, [4, 4]),
        (7, 2, [3, 4]),
        (6, 4, [1, 2, 2, 1]),
        (7, 4, [1, 2, 2, 2]),
        (9, 4, [2, 3, 2, 2]),
        (2, 4, [0, 1, 1, 0]),
    ],
)
def test_blocks_that_do_not_divide_are_more_in_the_middle(layers: int, ranks: int, expected: list[int]):
    with torch.device("meta"):
        model = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(layers))})
    made = make_plan(model, f"pp={ranks},dp=2", {"**": None})
    assert list(map(len, stages(made.rows, made.mesh, made.blocks))) == expected
    assert made.memory().parameters == 4 * max(expected)


def test_a_pipeline_without_blocks_counts_all_and_says_so():
    made = make_plan(mlp(), "pp=2", MLP_RULES)
    assert made.memory() == make_plan(mlp(), "tp=1", MLP_RULES).memory()
    assert made.notes == ('The model has no repeated blocks: memory counts all of it on each stage of "pp".',)


def test_memory_is_that_of_the_rank_whose_stages_hold_most():
    model = nn.Sequential(*(nn.Linear(1, width, bias=False) for width in (1, 20, 30, 4)))

    def held(stages: str, **step: str) -> int:
        made = make_plan(model, "pp=2", sl.Rules({"**": None}, stages=stages))
        return made.replace(step=made.step.replace(**step)).memory().parameters // 4

    assert held("0 | 1-3") == 54 and held("0-2 | 3") == 51
    assert held("0 | 1 | 2 | 3") == 31  # in turn: 1 + 30, 20 + 4
    assert held("0 | 1 | 2 | 3", schedule="zbv") == 50  # down and up again: 1 + 4, 20 + 30


def test_a_buffer_that_no_stage_names_is_held_by_all():
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.BatchNorm1d(1, affine=False), "c": nn.Linear(1, 1)})
    made = make_plan(model, "pp=2", sl.Rules({"**": None}, stages="a | c"))
    assert made.memory().buffers == 4 + 4 + 8
    tied = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    tied["b"].weight = tied["a"].weight
    assert make_plan(tied, "pp=2", sl.Rules({"**": None}, stages="a | b")).memory().parameters == 8


def test_a_tied_tensor_is_counted_on_every_stage_that_needs_it():
    made = gpt_plan("pp=2", tied=True)
    first, last = stages(made.rows, made.mesh, made.blocks)
    assert made["embed.weight"] in first
    assert made["embed.weight"] in last


def test_planning_needs_neither_values_nor_processes_and_leaves_the_model_alone(monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    monkeypatch.setattr(torch.distributed, "new_group", None)
    with torch.device("meta"):
        model = mlp()
    before = dict(model.named_parameters())
    made = make_plan(model, MeshShape(dp=1024, tp=16), MLP_RULES)
    assert made.mesh.world_size == 16384
    assert dict(model.named_parameters()) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            ("dp=2,tp=-1", MLP_RULES),
            PlanError,
            'Mesh "dp=2,tp=-1" leaves a size open. A plan needs every size: give a number, or '
            'MeshShape("dp=2,tp=-1").resolve(number_of_processes).',
        ),
        (
            ("dp=2", 3),
            PlanError,
            "Rules were given as int; give shardlib.Rules, a mapping from patterns to layouts, or the name or path of "
            "a layout file.",
        ),
        (
            (2, MLP_RULES),
            MeshError,
            'A mesh was given as int; give text such as "dp=2,tp=4", a MeshShape, a mapping from axis name to size, '
            "a torch DeviceMesh with mesh_dim_names, or a mesh of JAX.",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments, error, message):
    with pytest.raises(error) as raised:
        make_plan(mlp(), *arguments)
    assert str(raised.value) == message


@pytest.mark.parametrize("model", ["gpt2", nn.Linear])
def test_a_model_is_a_module_and_not_its_name_or_class(model):
    with pytest.raises(PlanError) as raised:
        make_plan(model, "dp=2")
    assert str(raised.value) == (
        f"A model was given as {type(model).__name__}; give a torch.nn.Module, on any device or meta."
    )


def test_a_transform_that_returns_no_plan_is_named():
    def forgets_to_return(_made):
        pass

    with pytest.raises(PlanError) as raised:
        make_plan(mlp(), "tp=2", MLP_RULES, transforms=[forgets_to_return])
    assert str(raised.value) == (
        "The transform forgets_to_return returned NoneType; a transform takes a Plan and returns a Plan."
    )


def test_a_name_that_the_plan_lacks_is_answered_with_the_nearest():
    with pytest.raises(PlanError) as raised:
        make_plan(mlp(), "tp=2", MLP_RULES)["0.wieght"]
    assert str(raised.value) == (
        'The plan has no tensor "0.wieght". Did you mean "0.weight"? It has 4 tensors; print(plan) lists them.'
    )


def test_a_field_that_rows_lack_is_refused():
    with pytest.raises(PlanError) as raised:
        make_plan(mlp(), "tp=2", MLP_RULES).rows[0].replace(layout=None)
    assert str(raised.value) == (
        "Row.replace was given layout; a row has name, kind, global_shape, dtype, requires_grad, persistent, tied, "
        "stored, compute, grad, state, rule, note, reshard, partial."
    )


def test_a_phase_that_a_row_lacks_is_refused():
    made = make_plan(nn.BatchNorm1d(4), "dp=2", {"weight": None, "bias": None})
    with pytest.raises(PlanError) as raised:
        made["running_mean"].local_bytes(made.mesh, phase="grad")
    assert str(raised.value) == '"running_mean" has no grad phase; it has stored, compute.'
