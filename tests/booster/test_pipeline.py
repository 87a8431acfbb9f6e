"""`execute_pipeline` trains the numbers of one device, through every style and beside other axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.booster import Booster, HybridParallelPlugin, PipelineGradientCheckpointConfig, TorchDDPPlugin
from shardlib.errors import InputError, PlanError, ShardingError
from shardlib.testing.models import Tokens, Transformer, rules_for
from tests.families.transformer_models import build, text

STEPS, ROWS, VOCAB = 2, 8, 7
TOLERANCE = 1e-10  # of float64; sums in another order differ by some 1e-15


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(vocab=VOCAB, heads=2, head=4, layers=4, tied=True).double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=1e-2)


def criterion(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def plainly() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = gpt()
    optimizer, losses = adamw(model), []
    warm_up(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = criterion(model(Tokens(ROWS, 5, VOCAB)(step)), Tokens(ROWS, 5, VOCAB)(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def warm_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step before boosting, so that there is state to carry over."""
    criterion(model(Tokens(ROWS, 5, VOCAB)(9)), Tokens(ROWS, 5, VOCAB)(9)).backward()
    optimizer.step()
    optimizer.zero_grad()


FIRST = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 0])

PLUGINS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {"pp_size": 2, "num_microbatches": 4}),
    "rows": (4, {"pp_size": 2, "microbatch_size": 3, "zero_stage": 1, "dp_outside": False}),
    "layers": (4, {"pp_size": 2, "num_microbatches": 2, "num_layers_per_stage": [1, 3], "zero_stage": 2}),
    "recomputed": (
        2,
        {
            "pp_size": 2,
            "gradient_checkpoint_config": PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 0]),
        },
    ),
    "interleaved": (4, {"pp_size": 2, "tp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2}),
    "zbv": (2, {"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2}),
    "weighed": (2, {"pp_size": 2, "custom_policy": rules_for(gpt()).with_stages(sl.rules.Balanced(by="flops"))}),
}


def trained(name: str) -> tuple[list[float], dict[str, torch.Tensor], list[bool]]:
    _, given = PLUGINS[name]
    given = {"num_microbatches": 4, **given} if "microbatch_size" not in given else given
    plugin = HybridParallelPlugin(
        **{"tp_size": 1, "custom_policy": rules_for(gpt()), **given}, precision="fp32", max_norm=0.5
    )
    booster, model = Booster(plugin=plugin), gpt()
    optimizer = adamw(model)
    warm_up(model, optimizer)
    example = Tokens(ROWS, 5, VOCAB)(0) if name == "weighed" else None
    model, optimizer, _, _, _ = booster.boost(model, optimizer, criterion, example=example)
    assert sl.get_plan(model).step.recompute == (("^blocks.0",) if name == "recomputed" else ())
    shape = sl.get_plan(model).mesh
    index, count = shape.data_place(shape.coordinate(dist.get_rank()))
    data = iter([Tokens(ROWS, 5, VOCAB)(step).chunk(count)[index] for step in range(STEPS)])
    losses, outputs = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        done = booster.execute_pipeline(data, model, criterion, optimizer, return_outputs=True)
        optimizer.step()
        losses.append(done["loss"].item())
        outputs.append(done["outputs"] is not None and done["outputs"].shape == (ROWS // count, 5, VOCAB))
    return losses, sl.full_state_dict(model), outputs


@pytest.mark.parametrize("name", PLUGINS)
def test_a_pipeline_trains_the_numbers_of_one_device(ranks, name: str):
    losses, weights = plainly()
    found = ranks(PLUGINS[name][0]).run(trained, name)
    for mine, state, _ in found:
        assert mine == pytest.approx(losses, rel=TOLERANCE)
        assert state.keys() == weights.keys()
        assert all(torch.allclose(state[key], weights[key], rtol=0, atol=TOLERANCE) for key in weights)
    assert any(all(outputs) for *_, outputs in found) and not all(all(outputs) for *_, outputs in found)


def squares(output: Any, _batch: Any) -> torch.Tensor:
    return output.last_hidden_state.float().square().mean()


def headless() -> nn.Module:
    torch.manual_seed(0)
    return build("LlamaModel", "sdpa", num_hidden_layers=4)


def trained_headless(options: dict[str, Any]) -> tuple[list[float], Any]:
    plugin = HybridParallelPlugin(**{"tp_size": 1, **options}, pp_size=2, num_microbatches=2, precision="fp16")
    booster, model = Booster(plugin=plugin), headless()
    model, optimizer, _, _, _ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-2), squares)
    losses = []
    for step in range(STEPS):
        done = booster.execute_pipeline(iter([text(step)[1]]), model, squares, optimizer, return_outputs=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(done["loss"].item())
    return losses, None if done["outputs"] is None else done["outputs"].last_hidden_state.shape


def test_a_model_without_a_head_in_half_precision(ranks):
    """Its last stage returns all dims, of a split sequence too."""
    model, losses = headless(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = squares(model(**text(step)[1]), None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] != pytest.approx(losses[0], rel=1e-2)
    for options in ({"zero_stage": 1}, {"tp_size": 2, "enable_sequence_parallelism": True}):
        found = ranks(4).run(trained_headless, options)
        # A square of a number rounded to 2**-11 is off by twice that; other roundings average out.
        assert all(mine == pytest.approx(losses, rel=2**-10) for mine, _ in found)
        assert [shape for _, shape in found if shape is not None] == [(4, 10, 32)] * 2


def refused() -> list[str]:
    model, optimizer, _, _, _ = Booster(plugin=TorchDDPPlugin()).boost(gpt(), None)
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")
    booster, staged = Booster(plugin=plugin), gpt()
    staged, optimizer, _, _, _ = booster.boost(staged, adamw(staged))
    batches = [Tokens(ROWS, 5, VOCAB)(0)]
    said = []
    for kind, call in (
        (PlanError, lambda: booster.execute_pipeline(iter(batches), model, criterion, optimizer)),
        (ShardingError, lambda: booster.execute_pipeline(iter(batches), staged, criterion)),
        (InputError, lambda: booster.execute_pipeline(batches, staged, criterion, optimizer)),  # type: ignore[arg-type]
    ):
        with pytest.raises(kind) as caught:
            call()
        said.append(str(caught.value))
    with torch.no_grad():
        done = booster.execute_pipeline(iter(batches), staged.eval(), criterion)
    want = criterion(gpt()(batches[0]), batches[0]).item()
    assert done["loss"].item() == pytest.approx(want, rel=TOLERANCE) and done["outputs"] is None
    return said


def test_what_cannot_run_is_refused_and_evaluation_needs_no_optimizer(ranks):
    stages, optimizer, iterator = ranks(2).run(refused)[0]
    assert "has no stages. Give HybridParallelPlugin(pp_size=2, num_microbatches=4)" in stages
    assert optimizer.startswith("execute_pipeline was given no optimizer.")
    assert iterator.startswith("execute_pipeline was given a list as data_iter; give an iterator")
