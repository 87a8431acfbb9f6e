"""A model that has a part of the weights that it was to get refuses all that would use them, and says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.engine.torn import torn
from shardlib.errors import ShardingError, ShardlibError
from shardlib.testing import shared_pool
from shardlib.weights import _reshard, _transfer
from tests.weights.cases import COLUMNS, RULES, made


def _fail_at(module: Any, name: str, call: int) -> Callable[[], None]:
    """Let rank 1 raise at a call of a function; return what restores it."""
    original, calls = getattr(module, name), list[int]()

    def fails(*args: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == call:
            raise MemoryError("no memory")
        return original(*args)

    setattr(module, name, fails)
    return lambda: setattr(module, name, original)


def _said(work: Callable[[], Any]) -> str:
    with pytest.raises(ShardlibError) as caught:
        work()
    return f"{type(caught.value).__name__}: {caught.value}"


def _torn(by: str, folder: str) -> dict[str, str]:
    """Return what every call says of a torn model."""
    whole = sl.shard_model(made(0), "tp=2", RULES)
    sl.save(f"{folder}/whole", whole)
    model: Any = sl.shard_model(made(1), "tp=2", COLUMNS)
    restore = _fail_at(*((_transfer, "local_of", 9) if by == "transfer" else (_reshard, "_free", 3)))
    work = (
        (lambda: sl.transfer(whole, model, bucket_mb=1e-3)) if by == "transfer" else (lambda: sl.reshard(model, "dp=2"))
    )
    assert "no memory" in _said(work)
    restore()
    tokens = torch.arange(4)
    said = {
        "forward": _said(lambda: model(tokens)),
        "pipeline_step": _said(lambda: sl.pipeline_step(model, tokens, lambda out, _: out.sum(), microbatches=1)),
        "full_state_dict": _said(lambda: sl.full_state_dict(model)),
        "save": _said(lambda: sl.save(f"{folder}/torn", model)),
        "stream_weights": _said(lambda: list(sl.stream_weights(model))),
        "reshard": _said(lambda: sl.reshard(model, "dp=2")),
        "transfer": _said(lambda: sl.transfer(model, whole)),
        "copy.deepcopy": _said(lambda: copy.deepcopy(model)) if by == "transfer" else "",
    }
    if by == "reshard":
        said["transfer into"] = _said(lambda: sl.transfer(whole, model))
        said["load"] = _said(lambda: sl.load(f"{folder}/whole", model))
        return said
    sl.load(f"{folder}/whole", model)
    assert torch.equal(model.eval()(tokens), _again(folder, tokens))
    return said


def _again(folder: str, tokens: torch.Tensor) -> torch.Tensor:
    other = sl.shard_model(made(2), "tp=2", COLUMNS)
    sl.load(f"{folder}/whole", other)
    return other.eval()(tokens)


@pytest.mark.parametrize(
    ("by", "do"),
    [
        ("transfer", "Transfer into it again, or load a checkpoint into it"),
        ("reshard", "Build a new one, shard it, and load a checkpoint"),
    ],
)
def test_every_call_refuses_a_torn_model_and_says_what_to_do(by: str, do: str, tmp_path: Any):
    for said in shared_pool(2).run(_torn, by, str(tmp_path), timeout=60):
        for call, told in said.items():
            if told:
                assert f"{by}() has failed. {do}" in told, (call, told)
                if call in {"forward", "pipeline_step", "full_state_dict", "reshard", "transfer", "stream_weights"}:
                    assert told.startswith("ShardingError: "), told


def _through_the_wrapper(_: str) -> str:
    """Tear the model that `torch.compile` was given."""
    model: Any = sl.shard_model(made(1), "tp=2", COLUMNS)
    wrapped = torch.compile(model, backend="eager")
    restore = _fail_at(_reshard, "_free", 3)
    assert "no memory" in _said(lambda: sl.reshard(wrapped, "dp=2"))
    restore()
    said = {_said(lambda each=each: sl.stream_weights(each).__next__()) for each in (wrapped, model)}
    assert isinstance(wrapped, nn.Module)
    return "\n".join(said)


def test_a_compiled_wrapper_is_torn_with_its_model():
    for told in shared_pool(2).run(_through_the_wrapper, "", timeout=60):
        assert "reshard() has failed" in told


def test_a_copy_of_a_torn_model_is_torn_until_it_has_all_weights():
    model = nn.Linear(4, 4)
    with pytest.raises(ZeroDivisionError), torn(model, "transfer"):
        raise ZeroDivisionError
    other = copy.deepcopy(model)
    for call in (lambda: other(torch.ones(4)), lambda: list(sl.stream_weights(other))):
        with pytest.raises(ShardingError, match="has a part of the weights"):
            call()
    with pytest.raises(ShardingError, match="has a part of the weights"):
        sl.transfer(other, nn.Linear(4, 4))
    sl.transfer(nn.Linear(4, 4), other)
    other(torch.ones(4))
