"""An engine in the process of the model, and what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed.weight_transfer import ParamMeta, WeightTransferTrainerFactory

from shardlib.errors import CheckpointError, InputError
from shardlib.integrations.vllm import ConnectionInitInfo, ModelWeights, connect
from tests.vllm.engines import compare, engine
from tests.vllm.families import model_of, write


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("engine") / "model"
    write("llama", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with engine(str(folder), 1) as started:
            yield started


def _doubled(model: Any) -> Any:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.25)
    return model


def test_an_engine_in_this_process(llm: Any):
    model = model_of("llama")
    connection = connect(model, llm)
    assert not connection.partly and not connection.unread
    connection.send_weights()
    assert compare(llm, model) < 2e-4
    _doubled(model)
    connection.send_weights()
    assert compare(llm, model) < 2e-4
    connection.shutdown()


def test_a_loader_that_fails_leaves_an_engine_that_refuses_until_it_has_all(llm: Any):
    model = _doubled(model_of("llama"))
    connection = connect(model, llm)
    inner = llm.apply_model(lambda loaded: loaded)[0]
    load, calls = type(inner).load_weights, list[int]()

    def failing(self: Any, weights: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            for _ in range(5):
                next(weights)
            raise ValueError("no room")
        return load(self, weights)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(inner), "load_weights", failing)
        with pytest.raises(CheckpointError, match="no room"):
            connection.send_weights()
        with pytest.raises(Exception, match="has a part of the weights"):
            inner(torch.tensor([1]), torch.tensor([0]))
        connection.send_weights()
    assert compare(llm, model) < 2e-4
    connection.shutdown()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": lambda name: f"policy.{name}"}, "no module or parameter named 'policy'"),
        ({"names": lambda name: None if "mlp" in name else name}, "parameters that no tensor of the model fills"),
        ({"workers": 0}, "workers=0"),
        ({"group_mb": 0}, "group_mb=0"),
    ],
)
def test_what_cannot_be_is_refused(llm: Any, change: dict[str, Any], said: str):
    with pytest.raises(InputError, match=said):
        connect(model_of("llama"), llm, timeout=30, **change)


def test_another_model_is_refused(llm: Any):
    with pytest.raises(InputError, match="vLLM's LlamaForCausalLM"):
        connect(model_of("qwen3"), llm, timeout=30)
    other = model_of("llama")
    other.model.layers[0].mlp.up_proj = nn.Linear(128, 100, bias=False)
    with pytest.raises(InputError, match="vLLM's LlamaForCausalLM"):
        connect(other, llm, timeout=30)
    connection = connect(model_of("llama"), llm)  # and the engine still takes the right one
    connection.send_weights()
    assert compare(llm, model_of("llama")) < 2e-4
    connection.shutdown()


def test_a_parameter_that_is_filled_in_part_is_told(llm: Any):
    connection = connect(model_of("llama"), llm, names=lambda name: None if "k_proj" in name else name)
    assert connection.partly == [f"model.layers.{layer}.self_attn.qkv_proj.weight" for layer in (0, 1)]
    connection.shutdown()


def test_no_engine_and_no_model():
    with pytest.raises(InputError, match="client=None"):
        connect(model_of("llama"))
    with pytest.raises(InputError, match="give a module"):
        connect("llama", None)


def test_an_engine_that_was_connected_again(llm: Any):
    model = _doubled(model_of("llama"))
    first = connect(model, llm)
    first.send_weights()
    second = connect(model, llm)
    with pytest.raises(InputError, match=r"did not update 2: .*has been connected again since"):
        first.send_weights()
    second.send_weights()
    assert compare(llm, model) < 2e-4
    second.shutdown()


def test_by_the_factory_of_vllm(llm: Any):
    model = _doubled(model_of("llama"))
    info = ConnectionInitInfo(rank=0, model=model)
    with pytest.raises(InputError, match="A source was given"):
        WeightTransferTrainerFactory.trainer_init(info, client=llm, source=ModelWeights(model))
    connection = WeightTransferTrainerFactory.trainer_init(info, client=llm)
    connection.send_weights()
    assert compare(llm, model) < 2e-4
    connection.shutdown()


def test_an_engine_that_was_not_asked_to_take_weights(tmp_path: Path):
    class Client:
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            raise RuntimeError("Weight transfer not configured.")

    with pytest.raises(InputError, match=r"Weight transfer not configured\..* was started with weight_transfer"):
        connect(model_of("llama"), Client(), workers=1, timeout=30)
    with pytest.raises(InputError, match="which does not tell them"):
        connect(model_of("llama"), Client(), timeout=30)


def test_a_source_for_the_backends_of_vllm():
    model = model_of("mixtral")
    source = ModelWeights(model, dtype=torch.bfloat16)
    came = dict(source)
    assert source.metadata() == [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in came.items()]
    assert {tensor.dtype for tensor in came.values()} == {torch.bfloat16}
    name = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    want = model.model.layers[1].mlp.experts.gate_up_proj[3, 192:]
    assert torch.equal(came[name], want.bfloat16())
    assert len(list(source)) == len(came)
