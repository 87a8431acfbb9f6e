"""The registry of dim names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardlib.errors import RuleError
from shardlib.rules import ModuleDims, register_dims
from shardlib.rules.dims import dims_of, linear_dims
from tests.rules.zoo import Scale, Transposed, on_meta

MODULES = [
    (nn.Linear, 4, 6),
    (nn.Bilinear, 2, 3, 4),
    (nn.Embedding, 10, 4),
    (nn.EmbeddingBag, 10, 4),
    (nn.Conv1d, 4, 6, 3),
    (nn.Conv2d, 4, 6, 3),
    (nn.Conv3d, 4, 6, 3),
    (nn.ConvTranspose1d, 4, 6, 3),
    (nn.ConvTranspose2d, 4, 6, 3),
    (nn.ConvTranspose3d, 4, 6, 3),
    (nn.LayerNorm, 4),
    (nn.LayerNorm, (3, 4)),
    (nn.RMSNorm, 4),
    (nn.GroupNorm, 2, 4),
    (nn.BatchNorm1d, 4),
    (nn.BatchNorm2d, 4),
    (nn.SyncBatchNorm, 4),
    (nn.InstanceNorm2d, 4, 1e-5, 0.1, True, True),
    (nn.PReLU, 4),
    (nn.MultiheadAttention, 8, 2, 0.0, True, True),
    (nn.MultiheadAttention, 8, 2, 0.0, True, False, False, 6, 4),
]


@pytest.mark.parametrize("build", MODULES, ids=lambda build: f"{build[0].__name__}{build[1:]}")
def test_every_own_tensor_of_torchs_modules_has_its_dims_named(build: tuple) -> None:
    module = on_meta(*build)
    dims = dims_of(module)
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    assert own
    for name, tensor in own.items():
        named = dims.dims(name, tensor.ndim)
        assert named is not None and len(named) == tensor.ndim, name


def test_a_subclass_of_a_convolution_may_have_parameters_for_each_channel() -> None:
    conv = nn.Conv2d(4, 6, 3)
    conv.gain, conv.scale, conv.other = (nn.Parameter(torch.ones(shape)) for shape in ((6, 1, 1, 1), (6,), (6, 4)))
    dims = dims_of(conv)
    assert dims.dims("gain", 4) == ("out", "_", "_", "_") and dims.dims("scale", 1) == ("out",)
    assert "other" not in dims.tensors


@pytest.mark.parametrize(("conv", "length"), [(nn.Conv1d(4, 6, 3), "out"), (nn.ConvTranspose1d(4, 6, 3), "in")])
def test_the_old_weight_norm_of_a_convolution_has_a_length_for_each_channel(conv: nn.Module, length: str) -> None:
    weight = dims_of(conv).dims("weight", 3)
    with pytest.warns(FutureWarning):
        dims = dims_of(nn.utils.weight_norm(conv))
    assert dims.dims("weight_v", 3) == weight and dims.dims("weight_g", 3) == (length, "_", "_")


@pytest.mark.parametrize(
    ("module", "dim", "output", "contracted"),
    [
        (nn.Linear(4, 6), "out in", "out", ("in",)),
        (nn.Embedding(10, 4), "vocab embed", "embed", ("vocab",)),
        (nn.Conv2d(4, 6, 3), "out in _ _", "out", ("in",)),
        (nn.ConvTranspose2d(4, 6, 3), "in out _ _", "out", ("in",)),
        (nn.Conv2d(4, 8, 3, groups=2), "out in_per_group _ _", "out", ()),
        (nn.ConvTranspose2d(4, 8, 3, groups=2), "in out_per_group _ _", None, ()),
        (nn.LayerNorm((3, 4)), "_ embed", None, ()),
        (nn.BatchNorm2d(4), "channel", "channel", ()),
        (nn.GroupNorm(2, 4), "channel", "channel", ()),
    ],
    ids=str,
)
def test_what_the_dims_of_a_weight_mean(
    module: nn.Module, dim: str, output: str | None, contracted: tuple[str, ...]
) -> None:
    dims = dims_of(module)
    assert dims.dims("weight", module.weight.ndim) == tuple(dim.split())
    assert (dims.output, dims.contracted) == (output, contracted)


def test_a_norm_is_known_by_its_name_when_its_parameters_are_one_dimensional() -> None:
    class LlamaRMSNorm(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(shape))

    class Gain(LlamaRMSNorm): ...

    assert dims_of(LlamaRMSNorm(4)).dims("weight", 1) == ("embed",)
    assert dims_of(LlamaRMSNorm(4, 4)) is None
    assert dims_of(Gain(4)) is None


def test_a_class_is_registered_by_its_qualified_name_without_importing_it() -> None:
    name = f"{Transposed.__module__}.Transposed"
    register_dims(name, weight="in out", bias="out", output="out", contracted=("in",))
    assert dims_of(Transposed(4, 6)).tensors == {"weight": "in out", "bias": "out"}


def test_dims_may_depend_on_the_module() -> None:
    class Either(nn.Linear): ...

    register_dims(Either, lambda module: ModuleDims({"weight": f"out in{module.in_features}"}))
    assert dims_of(Either(4, 6)).tensors == {"weight": "out in4"}


def test_a_norm_is_known_by_its_name_and_its_own_parameters() -> None:
    class WeightNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.inner = nn.Parameter(torch.ones(4)), nn.Linear(4, 6)

    assert dims_of(WeightNorm()).tensors == {"weight": "embed"}


def test_a_call_may_run_again_with_its_function_defined_anew() -> None:
    class Either(nn.Linear): ...

    class Own(nn.Linear): ...

    for names in ("out in", "out features"):  # the cell was edited in between

        def dims(module: nn.Module, names: str = names) -> ModuleDims:
            return ModuleDims({"weight": names})

        register_dims(Either, dims)
        register_dims(Own, weight="out in")
    assert dims_of(Either(4, 6)).tensors == {"weight": "out features"}
    with pytest.raises(RuleError, match=r"registered already, as the function .*dims"):
        register_dims(Either, lambda module: ModuleDims({"weight": "out in"}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {},
            "register_dims(Scale) was given no tensor; name each parameter and buffer with its dims, as in "
            'register_dims(MyLinear, weight="out in", bias="out", output="out", contracted=("in",)).',
        ),
        (
            {"gain": "out in", "output": "features"},
            'register_dims(Scale): output names "features", which is not a dim of gain="out in". Use one of the dims '
            "given for its tensors.",
        ),
        (
            {"gain": "out in", "contracted": ("inn",)},
            'register_dims(Scale): contracted names "inn", which is not a dim of gain="out in". Use one of the dims '
            "given for its tensors.",
        ),
        (
            {"gain": "out in", "output": "out", "contracted": ("in",), "linear": True},
            'register_dims(Scale, linear=True) was given gain="out in"; a linear layer has a weight of its output and '
            "its one contracted dim, and a bias of its output or none. Leave linear= out.",
        ),
    ],
)
def test_errors(arguments: dict, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        register_dims(Scale, **arguments)
    assert str(caught.value) == message


def test_a_linear_layer_stays_one_when_its_class_is_registered_again() -> None:
    register_dims(nn.Linear, weight="out in", bias="out", output="out", contracted=("in",))
    assert linear_dims(nn.Linear(4, 6)) is not None


def test_a_linear_layer_is_known_by_the_forward_that_is_called() -> None:
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Again(Twice): ...

    class Renamed(nn.Linear): ...

    patched = nn.Linear(4, 6)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    known = [linear_dims(module) is not None for module in (Renamed(4, 6), Twice(4, 6), Again(4, 6), patched)]
    assert known == [True, False, False, False]


def test_a_type_means_one_thing() -> None:
    register_dims(nn.Linear, weight="out in", bias="out", output="out", contracted=("in",))
    with pytest.raises(RuleError) as caught:
        register_dims(nn.Linear, weight="in out")
    assert str(caught.value) == (
        'register_dims(Linear): this type is registered already, as weight="out in", bias="out". Register a subclass '
        "of your own, or name the parameters in your rules."
    )
