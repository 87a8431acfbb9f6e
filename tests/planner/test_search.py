"""The search: what it tries, refuses, finds and says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import PlanError, TooLargeError
from shardlib.planner import changes_that_fit
from shardlib.planner.candidates import Grid, Refusals, divisors, grids, microbatches, schedules
from shardlib.planner.choices import Choice
from shardlib.planner.space import with_rows


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                        num_attention_heads=2, num_key_value_heads=2, use_cache=False)
        )  # fmt: skip


@pytest.fixture(scope="module")
def found(llama) -> sl.BestPlans:
    return sl.best_plans(llama, "h100", world=4, batch=8, seq=1024)


class Mlp(nn.Module):
    def __init__(self, layers: int = 4, width: int = 512) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def _grids(world: int, refused: Refusals | None = None, **given: object) -> list[Grid]:
    settings = {
        "node": 8,
        "blocks": 8,
        "experts": 0,
        "axes": ("tp",),
        "modes": ("sequence",),
        "fixed": {},
        "long": False,
    }
    return [*grids(world, refused=refused or Refusals(), **(settings | given))]  # type: ignore[arg-type]


# --- what is tried ----------------------------------------------------------------------------------------------------


def test_every_mesh_has_all_ranks():
    every = _grids(48)
    assert {grid.mesh.world_size for grid in every} == {48}
    assert all(dict(grid.mesh.items()).get("tp", 1) <= 8 for grid in every)  # within a node
    assert {str(grid.mesh) for grid in every} > {"dp=48", "dp=8,tp=6", "pp=4,dp=12", "pp=2,dp=4,tp=6"}


def test_axes_that_are_asked_for_have_their_sizes():
    assert {str(grid.mesh) for grid in _grids(32, fixed={"tp": 4, "pp": 2})} == {"pp=2,dp=4,tp=4"}
    assert {str(grid.mesh) for grid in _grids(32, fixed={"dp": 16})} == {"dp=16,tp=2", "pp=2,dp=16"}


def test_experts_have_their_axis_and_are_divided_by_it():
    every = _grids(8, axes=("tp", "ep"), experts=4)
    assert {dict(grid.mesh.items()).get("ep", 1) for grid in every} == {1, 2, 4}
    refused = Refusals()
    _grids(8, refused, axes=("ep",), experts=6)
    assert "experts do not divide" in refused.counts


def test_contexts_are_divided_where_they_are_long():
    assert not any("cp" in grid.mesh for grid in _grids(16, modes=("ring",)))
    long = _grids(16, modes=("ring",), long=True)
    assert {grid.mode for grid in long if "cp" in grid.mesh} == {"ring"}


def test_a_batch_is_divided_into_microbatches():
    refused = Refusals()
    four = Grid(sl.MeshShape("dp=4"))
    assert microbatches(32, four, refused) == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert microbatches(24, four, refused) == [(1, 6), (2, 3), (6, 1)]
    assert microbatches(4096, four, refused)[-2:] == [(512, 2), (1024, 1)]
    assert microbatches(30, four, refused) == [] and refused.counts.total() == 1


def test_schedules_have_enough_blocks_and_microbatches():
    grid, refused = Grid(sl.MeshShape("pp=4,dp=2")), Refusals()
    assert [one.name for one in schedules(grid, 8, 8, refused)] == ["1f1b", "interleaved", "zbv"]
    assert [one.name for one in schedules(grid, 4, 6, refused)] == ["1f1b"]
    assert {*refused.counts} == {"fewer blocks than stages"}
    assert [one.name for one in schedules(grid, 16, 6, refused)] == ["1f1b"]
    assert "microbatches do not divide over stages" in refused.counts


@pytest.mark.parametrize(
    ("own", "rows"), [(64, [1, 2, 4, 8, 16, 32, 64]), (48, [1, 2, 4, 8, 16, 48]), (65, [1, 5, 13, 65])]
)
def test_microbatches_of_any_number_of_rows_are_tried(own, rows):
    assert [each for each, _ in microbatches(2 * own, Grid(sl.MeshShape("dp=2")), Refusals())] == rows


def test_divisors_of_a_square_come_once():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_rows_of_an_example_change_and_other_tensors_do_not():
    given = {"ids": torch.zeros(2, 8), "scale": torch.zeros(()), "mask": torch.zeros(3, 3)}
    made = with_rows(given, 5)
    assert [tuple(made[key].shape) for key in given] == [(5, 8), (), (3, 3)]


# --- what is found ----------------------------------------------------------------------------------------------------


def test_the_best_comes_first_and_each_mesh_once(found):
    seconds = [each.time.seconds for each in found]
    assert len(found) == 5 and seconds == sorted(seconds)
    assert len({each.mesh for each in found}) == 5
    assert all(each.time.memory.total <= found.budget for each in found)


def test_each_plan_is_priced_as_the_plan_that_its_call_makes(found, llama):
    for each in [*found][:3]:
        names: dict[str, Any] = {"sl": sl, "model": llama}
        lines = each.call.splitlines()
        exec("\n".join(lines[:-1]), names)
        plan = sl.plan(llama, each.mesh, names["rules"], transforms=names["transforms"])
        rows = each.rows * (each.microbatches if each.stages else 1)
        ids = torch.empty(rows, 1024, dtype=torch.int64, device="meta")
        time = plan.time("h100", example={"input_ids": ids, "labels": ids})
        assert time.seconds == pytest.approx(each.time.seconds, rel=0.01)
        assert time.memory.total == pytest.approx(each.time.memory.total, rel=0.02)


def test_reasons_say_what_neighbours_cost_and_the_runner_up_why_it_lost(found):
    best, second = found[0], found[1]
    assert best.behind == "" and second.behind.startswith("+")
    assert any(line.startswith("recomputation: nothing is recomputed") for line in best.reasons)
    text = str(found)
    assert best.call.splitlines()[-1] in text and "Refused:" in text
    assert text.count("~") <= 2 * found.near_ties() + 1


def test_json_and_the_page_have_the_same_plans(found, tmp_path):
    given = json.loads(found.to_json())
    assert [each["mesh"] for each in given["plans"]] == [str(each.mesh) for each in found]
    found.html(tmp_path / "plans.html")
    page = (tmp_path / "plans.html").read_text()
    assert page.count("<svg") == len(found) and str(found[0].mesh) in page and "http" not in page


def test_less_memory_takes_more_sharding(llama):
    much, little = (
        sl.best_plans(llama, "h100", world=4, batch=8, seq=1024, memory=memory, axes="tp=1,pp=1")[0]
        for memory in ("80GB", "2.5GB")
    )
    assert little.time.memory.total <= 0.9 * 2.5e9 < much.time.memory.total
    assert little.time.seconds > much.time.seconds


def test_a_model_without_blocks_is_spread_over_data_ranks():
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    best = sl.best_plans(model, "h100", world=4, batch=4096, example=torch.empty(1, 256), rules={"**": None})
    assert [str(each.mesh) for each in best] == ["dp=4"]


def test_rules_that_name_blocks_by_number_are_taken_as_they_are():
    rules = {"blocks.0": "colwise", "blocks.1": "rowwise", "blocks.2": None, "blocks.3": None}
    best = sl.best_plans(Mlp(), "h100", world=2, batch=8192, example=torch.empty(1, 512), rules=rules)
    assert {str(each.mesh) for each in best} >= {"dp=2", "tp=2"}


def test_what_does_not_divide_is_refused_with_its_reason(found):
    """There are two heads."""
    assert all("tp=4" not in str(each.mesh) for each in found)
    assert any("tp=4" in line and "heads" in line for line in found.refused)


def test_rules_that_were_given_are_in_the_call():
    rules = sl.Rules({"**": None})
    best = sl.best_plans(Mlp(1), "h100", world=2, batch=8, example=torch.empty(1, 512), rules=rules)[0]
    assert best.call.splitlines()[0] == "rules = sl.Rules.of(rules)"
    assert "for_model" not in best.call


def _choice(**given: Any) -> Choice:
    settings = {"mesh": sl.MeshShape("dp=2"), "mode": None, "transforms": sl.zero(1), "stages": (), "rows": 2}
    return Choice(**(settings | {"microbatches": 2, "time": None} | given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("example", "names", "line"),
    [
        ((torch.empty(1, 3, 8), torch.zeros(())), "batch", "criterion(model(*batch), batch)"),
        (torch.empty(1, 3, 8, dtype=torch.bfloat16), "batch", "criterion(model(*batch), batch)"),
        ({"ids": torch.zeros(2, 4, dtype=torch.int64), "table": torch.empty(5, 3)}, "ids", "model(**batch)"),
    ],
)
def test_a_script_draws_data_of_the_shapes_of_its_example(example, names, line):
    text = _choice().script("package.models:build", 8, example=example)
    assert line in text and names in text
    drawn = text[text.index("def rows") : text.index("def criterion")]
    made: dict[str, Any] = {"torch": torch, "generator": None}
    exec(drawn, made)
    rows = made["rows"](4)
    wanted = with_rows((example,) if isinstance(example, torch.Tensor) else example, 4)
    if isinstance(wanted, dict):
        assert [*rows] == [*wanted]
        rows, wanted = (*rows.values(),), (*wanted.values(),)
    assert [(t.shape, t.dtype) for t in rows] == [(t.shape, t.dtype) for t in wanted]


def test_a_script_of_a_pipeline_gets_a_loss():
    text = _choice(stages=(2, 2)).script("package.models:build", 8, example=torch.empty(1, 3))
    assert "sl.pipeline_step(model, rows(4), criterion).loss" in text


def test_a_script_builds_the_class_that_a_config_names_and_finds_a_file_of_any_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["ViTForImageClassification"], "model_type": "vit"}')
    text = _choice().script(str(tmp_path), 8, example={"pixel_values": torch.empty(1, 3, 8, 8)})
    assert "model = ViTForImageClassification(config)" in text
    text = _choice().script(f"{tmp_path}/nets.py:build", 8, example=torch.empty(1, 3))
    assert f'sys.path.insert(0, "{tmp_path}")' in text and "from nets import build" in text


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world": 0}, "world=0 was given"),
        ({"batch": True}, "batch=True was given"),
        ({"top": -1}, "top=-1 was given"),
        ({"margin": 1.5}, "margin=1.5 was given"),
        ({"margin": "0.1"}, "margin='0.1' was given"),
        ({"memory": "0GB"}, "memory='0GB' and margin=0.1 leave nothing"),
        ({"state_tensors": -1}, "state_tensors=-1 was given"),
        ({"state_tensors": 1.5}, "state_tensors=1.5 was given"),
        ({"seq": 16}, "seq=16 and example= were given"),
        ({"transforms": 5}, "transforms=5 was given"),
        ({"transforms": "bf16"}, "transforms='bf16' was given"),
        ({"transforms": sl.zero(1) | sl.accumulate(2)}, r"accumulate\(2\), and a search chooses"),
        ({"transforms": [sl.pipeline("1f1b", 4)]}, r"pipeline\(.*and a search chooses"),
        ({"example": torch.empty(1, 513)}, r"Mlp stops in a dry run on dp=1 with the example 1x513:float32"),
        ({"example": torch.ones(1, 512, dtype=torch.int64)}, "got operands of bfloat16 and int64"),
        ({"axes": "dp=1,pp=1"}, r"(?s)another world; as dp=1: dp=2.*or axes=, so that they divide"),
        ({"memory": "80 apples"}, "give a quantity such as"),
        ({"example": None}, "Give example="),
        ({"cluster": "h1000"}, "Did you mean"),
        ({"axes": "xp=2"}, "xp"),
    ],
)
def test_bad_input_says_what_to_give(given, message):
    settings = {"cluster": "h100", "world": 2, "batch": 8, "example": torch.empty(1, 512), "rules": {"**": None}}
    cluster, *_ = [(settings | given).pop("cluster")]
    rest = {key: value for key, value in (settings | given).items() if key != "cluster"}
    with pytest.raises(sl.errors.ShardlibError, match=message):
        sl.best_plans(Mlp(), cluster, **rest)


@pytest.mark.parametrize(
    ("model", "message"),
    [(7, "A model was given as"), (Mlp, "A model was given as"), (nn.LazyLinear(4), "no shape yet")],
)
def test_what_is_no_model_is_named(model, message):
    with pytest.raises(PlanError, match=message):
        sl.best_plans(model, "h100", world=2, batch=8, example=torch.empty(1, 512))


def test_one_rank_on_an_axis_asks_nothing_of_the_rules():
    asked = {"world": 2, "batch": 8, "example": torch.empty(1, 512), "rules": {"**": None}}
    found = sl.best_plans(Mlp(), "h100", axes="tp=1,ep=1,pp=1", **asked)
    assert [str(each.mesh) for each in found] == ["dp=2"]


def test_an_open_size_is_chosen():
    found = sl.best_plans(
        Mlp(), "h100", world=2, batch=8, example=torch.empty(1, 512), rules={"**": None}, axes="dp=-1"
    )
    assert {str(each.mesh) for each in found} == {"dp=2", "pp=2"}


def test_an_error_that_no_mesh_mends_is_raised_as_it_is():
    with pytest.raises(PlanError, match="The example has 2 inputs"):
        sl.best_plans(Mlp(1), "h100", world=2, batch=8, example=(torch.empty(1, 512),) * 2, rules={"**": None})
    lacking = sl.Cluster.preset("h100").replace(products=(("float64", sl.Cluster.preset("h100").memory_bandwidth),))
    with pytest.raises(PlanError, match="no rate of products in float32"):
        sl.best_plans(Mlp(1), lacking, world=2, batch=8, example=torch.empty(1, 512), rules={"**": None})


def test_a_language_model_needs_the_length_of_examples(llama):
    with pytest.raises(PlanError, match="give seq="):
        sl.best_plans(llama, "h100", world=2, batch=8)


def test_a_table_of_positions_bounds_the_length_of_examples():
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, use_cache=False))
    with pytest.raises(PlanError, match="seq=65 was given, and GPT2LMHeadModel has a table of 64 positions"):
        sl.best_plans(model, "h100", world=1, batch=1, seq=65)
    assert sl.best_plans(model, "h100", world=1, batch=1, seq=64)


def test_a_world_that_the_batch_does_not_fit_says_so():
    with pytest.raises(PlanError, match=r"(?s)No plan is possible for 7 ranks.*batch does not divide"):
        sl.best_plans(Mlp(1), "h100", world=7, batch=8, example=torch.empty(1, 512), rules={"**": None})


def test_a_budget_that_nothing_meets_names_the_closest_plan_and_what_it_lacks(llama):
    with pytest.raises(PlanError, match=r"The closest is .* It lacks .*most of it are .*more ranks"):
        sl.best_plans(llama, "h100", world=2, batch=8, seq=1024, memory="200MB")


# --- where it does not fit --------------------------------------------------------------------------------------------


def test_a_plan_that_does_not_fit_is_told_with_the_three_cheapest_changes():
    model, batch = Mlp(8, 2048), torch.empty(2048, 2048, device="meta")
    plan = sl.plan(model, "dp=4", {"**": None})
    assert sl.check_memory(model, plan, "h100", example=batch).memory.total < 80e9
    with pytest.raises(TooLargeError, match="it lacks") as caught:
        sl.check_memory(model, plan, "h100", example=batch, memory="500MB")
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 3 and all("a step of" in line and "%" in line for line in lines)
    changes = changes_that_fit(model, plan, "h100", example=batch, budget=450_000_000)
    assert [each.time.seconds for each in changes] == sorted(each.time.seconds for each in changes)
    for each in changes:
        assert each.time.memory.total <= 450_000_000


def test_a_mesh_on_which_more_ranks_share_a_tensor_is_advised_with_the_rows_that_its_data_ranks_get():
    model, batch = Mlp(8, 2048), torch.empty(2048, 2048, device="meta")
    rules = {"blocks.*": "colwise"}
    plan = sl.plan(model, "dp=4", rules)
    changes = changes_that_fit(model, plan, "h100", example=batch, budget=280 * 2**20)
    named = [each for each in changes if "tp" in each.mesh]
    assert named and all(f'mesh="{each.mesh}"' in each.what for each in named)
    for each in named:
        transforms = [sl.transforms.parse(text) for text in each.transforms]
        again = sl.plan(model, each.mesh, rules, transforms=transforms)
        rows = 4 * 2048 // each.mesh.data_ranks // again.step.accumulate
        assert f"{rows} rows" in each.what
        example = torch.empty(rows, 2048, device="meta")
        assert again.time("h100", example=example).seconds == each.time.seconds
    alone = sl.plan(model, "dp=4", {"**": None})  # no rule shards anything over tp
    found = changes_that_fit(model, alone, "h100", example=batch, budget=400 * 2**20)
    assert found and all("tp" not in each.mesh for each in found)


def test_an_error_that_is_caught_has_the_advice_too():
    model, batch = Mlp(8, 2048), torch.empty(2048, 2048, device="meta")
    plan = sl.plan(model, "dp=4", {"**": None})
    with pytest.raises(torch.OutOfMemoryError) as caught, sl.memory_advice(model, plan, "h100", example=batch):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert "The cheapest changes that make it fit" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError) as other, sl.memory_advice(model, plan, "h100", example=batch):
        raise RuntimeError("something else")
    assert not getattr(other.value, "__notes__", [])


def test_an_error_without_advice_stays_what_it_is_and_says_why():
    model = Mlp(2, 64)
    plan = sl.plan(model, "dp=2", {"**": None})
    wrong = torch.empty(4, 65, device="meta")
    with pytest.raises(torch.OutOfMemoryError) as caught, sl.memory_advice(model, plan, "h100", example=wrong):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert "There is no advice on memory: Mlp stops in a dry run" in caught.value.__notes__[0]
    with pytest.raises(PlanError, match="No cluster is called"), sl.memory_advice(model, plan, "h1", example=None):
        raise AssertionError("the body must not run")
