"""Registry of the dims of modules' tensors, so that one rule can name a module and lay out its weight and bias."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardlib._again import is_again
from shardlib.errors import RuleError
from shardlib.rules._tree_node import TreeNode

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CONVS", "ModuleDims", "dims_of", "linear_dims", "register_dims"]

_DIM = re.compile(r"\([^()]*\)|\S+")
_FACTOR = re.compile(r"\w+")


@dataclass(frozen=True)
class ModuleDims:
    """The dims of a module's own parameters and buffers, by name.

    Attributes:
        tensors: tensor name to the names of its dims, in storage order: `{"weight": "out in", "bias": "out"}`. A
            fused dim lists its factors in parentheses, `*kernel` is any number of dims.
        output: the dim that is the module's output features; "colwise" shards it. None when there is no such dim.
        contracted: dims that the module sums over; sharding one leaves a partial output. "rowwise" shards it.
        sizes: sizes of factors of fused dims: numbers, or attribute paths on the module.
        linear: whether the class's forward multiplies its input by `weight`, adds `bias` if it has one, and does
            nothing else.
    """

    tensors: Mapping[str, str]
    output: str | None = None
    contracted: tuple[str, ...] = ()
    sizes: Mapping[str, int | str] = field(default_factory=dict)
    linear: bool = field(default=False, compare=False)

    def dims(self, tensor: str, ndim: int) -> tuple[str, ...] | None:
        """Return the dims of one tensor, `*name` expanded; None for an unknown tensor or another number of dims.

        >>> ModuleDims({"weight": "out in *kernel"}).dims("weight", 4)
        ('out', 'in', '_', '_')
        """
        if tensor not in self.tensors:
            return None
        dims = split_dims(self.tensors[tensor])
        starred = [at for at, dim in enumerate(dims) if dim.startswith("*")]
        for at in starred:
            dims = dims[:at] + ("_",) * (ndim - len(dims) + 1) + dims[at + 1 :]
        return dims if len(dims) == ndim else None

    @property
    def is_transposed(self) -> bool:
        """Whether the weight of a linear layer is (in, out), and not (out, in)."""
        return self.linear and split_dims(self.tensors["weight"])[1] == self.output

    @property
    def names(self) -> frozenset[str]:
        """Every dim and factor name that a rule may use."""
        return frozenset(name for text in self.tensors.values() for name in _FACTOR.findall(text) if name != "_")


DimsOf = Callable[[Any], ModuleDims]
_REGISTRY: dict[type | str, ModuleDims | DimsOf] = {}


def register_dims(
    module_type: type[nn.Module] | str,
    dims: ModuleDims | DimsOf | None = None,
    /,
    *,
    output: str | None = None,
    contracted: tuple[str, ...] = (),
    sizes: Mapping[str, int | str] | None = None,
    linear: bool = False,
    **tensors: str,
) -> None:
    """Register the dims of a module type's tensors, so that rules may name the module.

    Repeating the same call is allowed, as when a notebook cell runs again.

    Args:
        module_type: the class, or its qualified name ("transformers.pytorch_utils.Conv1D") to avoid
            importing it. Subclasses are included.
        dims: a `ModuleDims` instead of the keywords, or a function from a module to one.
        output: the dim that is the module's output features.
        contracted: dims that the module sums over.
        sizes: sizes of the factors of fused dims: numbers or attribute paths on the module.
        linear: the class's forward multiplies its input by `weight`, adds `bias` if it has one, and does nothing else.
            Such a layer is computed by one local product. A subclass with a forward of its own is not meant.
        **tensors: parameter or buffer name to its dims in storage order.

    Raises:
        RuleError: no tensor is given, `output` or `contracted` is not a dim, `linear` of other tensors than a weight of
            these two dims and a bias, or the type is registered differently.

    >>> class Scale(nn.Linear): ...
    >>> register_dims(Scale, weight="out in", bias="out", output="out", contracted=("in",))
    >>> dims_of(Scale(4, 8)).tensors["bias"]
    'out'
    """
    registered = dims or ModuleDims(tensors, output, tuple(contracted), dict(sizes or {}), linear)
    if isinstance(registered, ModuleDims):
        _check(module_type, registered)
    known = (_REGISTRY.get(module_type) if isinstance(module_type, str) else _registered(module_type)) or registered
    if known != registered and not is_again(known, registered):
        raise RuleError(
            f"register_dims({_called(module_type)}): this type is registered already, as {_spelled(known)}. Register a "
            "subclass of your own, or name the parameters in your rules."
        )
    if linear or known is registered or known != registered:
        _REGISTRY[module_type] = registered


def dims_of(module: nn.Module) -> ModuleDims | None:
    """Return the dims of a module's own tensors, by its class or a base class; None when none are registered.

    A class whose name ends in "Norm" and whose parameters are all one-dimensional and equally long is a norm.

    >>> dims_of(nn.Linear(4, 8)).contracted
    ('in',)
    >>> dims_of(nn.LSTM(4, 8)) is None
    True
    """
    if isinstance(module, TreeNode):
        return module.dims  # type: ignore[no-any-return]
    for cls in type(module).__mro__:
        found = _registered(cls)
        if found is not None:
            return found if isinstance(found, ModuleDims) else found(module)
    return _norm_by_name(module)


def linear_dims(module: nn.Module) -> ModuleDims | None:
    """Return the dims of a linear layer, or None where the module's forward is not known to be linear.

    What counts is the class that defines the forward which a call runs, not the classes that it inherits from.

    >>> linear_dims(nn.Linear(4, 8)).is_transposed
    False
    >>> class Scaled(nn.Linear):
    ...     def forward(self, x):
    ...         return 2 * super().forward(x)
    >>> linear_dims(Scaled(4, 8)) is None
    True
    """
    if "forward" in vars(module):
        return None
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    found = _registered(owner)
    return found if isinstance(found, ModuleDims) and found.linear else None


def _registered(cls: type) -> ModuleDims | DimsOf | None:
    return _REGISTRY.get(cls) or _REGISTRY.get(f"{cls.__module__}.{cls.__qualname__}")


def split_dims(text: str) -> tuple[str, ...]:
    """Split a text form into dims; a fused dim stays in one piece.

    >>> split_dims("(qkv heads head) embed")
    ('(qkv heads head)', 'embed')
    """
    return tuple(_DIM.findall(text))


def _norm_by_name(module: nn.Module) -> ModuleDims | None:
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    if type(module).__name__.endswith("Norm") and len(set(shapes.values())) == 1 and len(min(shapes.values())) == 1:
        return ModuleDims(dict.fromkeys(shapes, "embed"))
    return None


def _check(module_type: type | str, dims: ModuleDims) -> None:
    if not dims.tensors:
        raise RuleError(
            f"register_dims({_called(module_type)}) was given no tensor; name each parameter and buffer with its dims, "
            'as in register_dims(MyLinear, weight="out in", bias="out", output="out", contracted=("in",)).'
        )
    for what, names in (("output", (dims.output,)), ("contracted", dims.contracted)):
        unknown = [name for name in names if name is not None and name not in dims.names]
        if unknown:
            raise RuleError(
                f'register_dims({_called(module_type)}): {what} names "{unknown[0]}", which is not a dim of '
                f"{_spelled(dims)}. Use one of the dims given for its tensors."
            )
    if dims.linear and not _is_linear(dims):
        raise RuleError(
            f"register_dims({_called(module_type)}, linear=True) was given {_spelled(dims)}; a linear layer has a "
            "weight of its output and its one contracted dim, and a bias of its output or none. Leave linear= out."
        )


def _is_linear(dims: ModuleDims) -> bool:
    weight, others = split_dims(dims.tensors.get("weight", "")), dict(dims.tensors)
    others.pop("weight", None)
    return sorted(weight) == sorted([str(dims.output), *dims.contracted]) and others in ({}, {"bias": dims.output})


def _called(module_type: type | str) -> str:
    return f'"{module_type}"' if isinstance(module_type, str) else module_type.__qualname__


def _spelled(dims: ModuleDims | DimsOf) -> str:
    if not isinstance(dims, ModuleDims):
        return f"the function {getattr(dims, '__qualname__', dims)}"
    return ", ".join(f'{name}="{text}"' for name, text in dims.tensors.items())


def _conv(module: Any) -> ModuleDims:
    # With groups, an output channel sums over its own group only: there is no dim that all of them contract.
    names = "in out" if module.transposed else "out in"
    tensors = {"weight": f"{names} *kernel", **_by_channel(module, names), "bias": "out"}
    if module.groups == 1:
        return ModuleDims(tensors, "out", ("in",))
    if module.transposed:
        return ModuleDims({"weight": "in out_per_group *kernel", "bias": "out"})
    return ModuleDims({**tensors, "weight": "out in_per_group *kernel"}, "out")


def _by_channel(module: Any, names: str) -> dict[str, str]:
    """Return the dims of parameters that a subclass has for each output channel, such as a gain, and of the direction
    and the lengths that the old weight norm makes of the weight."""
    own = {name: p for name, p in module.named_parameters(recurse=False) if name not in ("weight", "bias")}
    vectors = {name: p.numel() for name, p in own.items() if p.shape[:1] == (p.numel(),)}
    channels = {name: "out *one" for name, size in vectors.items() if size == module.out_channels}
    if "weight_v" in own and "weight_g" in vectors:
        channels |= {"weight_v": f"{names} *kernel", "weight_g": f"{names.split()[0]} *one"}
    return channels


CONVS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_BATCH_STATISTICS = ModuleDims(
    {
        "weight": "channel",
        "bias": "channel",
        "running_mean": "channel",
        "running_var": "channel",
        "num_batches_tracked": "",
    },
    output="channel",
)


_NORM = ModuleDims({"weight": "*lead embed", "bias": "*lead embed"})
_TABLE = ModuleDims({"weight": "vocab embed"}, "embed", ("vocab",))
# The layers of torch, by the modules of `torch.nn` that define them.
_TORCH: dict[str, dict[str, ModuleDims | DimsOf]] = {
    "linear": {
        "Linear": ModuleDims({"weight": "out in", "bias": "out"}, "out", ("in",), linear=True),
        "Bilinear": ModuleDims({"weight": "out in1 in2", "bias": "out"}, "out", ("in1", "in2")),
    },
    "sparse": {"Embedding": _TABLE, "EmbeddingBag": _TABLE},
    "conv": dict.fromkeys(CONVS, _conv),
    "normalization": {
        "LayerNorm": _NORM,
        "RMSNorm": _NORM,
        "GroupNorm": ModuleDims({"weight": "channel", "bias": "channel"}, "channel"),
    },
    "batchnorm": dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"), _BATCH_STATISTICS),
    "instancenorm": dict.fromkeys(("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"), _BATCH_STATISTICS),
    "activation": {
        "PReLU": ModuleDims({"weight": "channel"}, "channel"),
        "MultiheadAttention": ModuleDims(
            {
                "in_proj_weight": "(qkv heads head) embed",
                "in_proj_bias": "(qkv heads head)",
                "q_proj_weight": "(heads head) embed",
                "k_proj_weight": "(heads head) kdim",
                "v_proj_weight": "(heads head) vdim",
                "bias_k": "_ _ (heads head)",
                "bias_v": "_ _ (heads head)",
            },
            "heads",
            sizes={"qkv": 3, "heads": "num_heads"},
        ),
    },
}
for _module, _layers in _TORCH.items():
    for _layer, _dims in _layers.items():
        register_dims(f"torch.nn.modules.{_module}.{_layer}", _dims)
# Hugging Face's Conv1D is a linear layer with its weight transposed.
register_dims(
    "transformers.pytorch_utils.Conv1D", weight="in out", bias="out", output="out", contracted=("in",), linear=True
)
