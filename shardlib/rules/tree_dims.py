"""The dims of the arrays of layers of flax, haiku, equinox and Keras, whose order is not torch's.

A layer whose object is in the tree, such as one of equinox, is known by its class; others by the names and the numbers
of dims of their arrays.
"""

from __future__ import annotations

from shardlib.rules._tree_node import TreeNode
from shardlib.rules.dims import ModuleDims

__all__ = ["dims_of_node"]

_BY_CLASS = {
    "equinox.nn._linear.Linear": ModuleDims({"weight": "out in", "bias": "out"}, "out", ("in",)),
    "equinox.nn._embedding.Embedding": ModuleDims({"weight": "vocab embed"}, "embed", ("vocab",)),
    "equinox.nn._conv.Conv": ModuleDims({"weight": "out in *kernel", "bias": "out *one"}, "out", ("in",)),
    "equinox.nn._normalisation.LayerNorm": ModuleDims({"weight": "*lead embed", "bias": "*lead embed"}),
    "equinox.nn._normalisation.RMSNorm": ModuleDims({"weight": "*lead embed", "bias": "*lead embed"}),
    "equinox.nn._normalisation.GroupNorm": ModuleDims({"weight": "channel", "bias": "channel"}, "channel"),
}
_DENSE = ModuleDims({"kernel": "in out", "bias": "out"}, "out", ("in",))
_CONV = ModuleDims({"kernel": "*kernel in out", "bias": "out"}, "out", ("in",))
_HAIKU = ModuleDims({"w": "in out", "b": "out"}, "out", ("in",))
_HAIKU_CONV = ModuleDims({"w": "*kernel in out", "b": "out"}, "out", ("in",))
_TO_HEADS = ModuleDims({"kernel": "embed heads head", "bias": "heads head"}, "heads", ("embed",))
_FROM_HEADS = ModuleDims({"kernel": "heads head embed", "bias": "embed"}, "embed", ("heads",))
_EMBEDDING = ModuleDims({"embedding": "vocab embed", "embeddings": "vocab embed"}, "embed", ("vocab",))
_OF_A_CHANNEL = ("scale", "offset", "bias", "gamma", "beta", "mean", "var", "moving_mean", "moving_variance")
_NORM = ModuleDims(dict.fromkeys(_OF_A_CHANNEL, "channel"), "channel")
_STATISTICS = {"mean", "var"}, {"moving_mean", "moving_variance"}  # of a norm, apart from its parameters
_HEADS = {"query", "key", "value"}  # of the attention of flax and Keras
_JOINED = ("out", "attention_output")


def dims_of_node(node: TreeNode, name: str, parent: TreeNode | None) -> ModuleDims | None:
    """Return the dims of a layer's arrays, or None for a layer that is not known.

    Args:
        node: the layer.
        name: its key in the level above.
        parent: the level above.

    >>> from shardlib.rules._tree_node import TreeTensor
    >>> node = TreeNode(tensors={"kernel": TreeTensor((4, 8), "float32", True)})
    >>> dims_of_node(node, "up", None).tensors["kernel"]
    'in out'
    """
    for cls in type(node.value).__mro__:
        if found := _BY_CLASS.get(f"{cls.__module__}.{cls.__qualname__}"):
            return found
    return _by_arrays(node, name, parent)


def _by_arrays(node: TreeNode, name: str, parent: TreeNode | None) -> ModuleDims | None:
    ndims = {key: len(tensor.shape) for key, tensor in node.tensors.items()}
    of_attention = parent is not None and _is_attention(parent)
    match ndims:
        case {"kernel": 3} if of_attention and name in _HEADS:
            return _known(_TO_HEADS, ndims)
        case {"kernel": 3} if of_attention and name in _JOINED:
            return _known(_FROM_HEADS, ndims)
        case {"kernel": 3} if not _is_conv(node, name):
            return None
        case {"kernel": int(ndim)}:
            return _known(_DENSE if ndim == 2 else _CONV, ndims) if ndim > 1 else None
        case {"w": int(ndim)}:
            return _known(_HAIKU if ndim == 2 else _HAIKU_CONV, ndims) if ndim > 1 else None
        case {"embedding": 2} | {"embeddings": 2}:
            return _known(_EMBEDDING, ndims)
    is_norm = bool(ndims.keys() & {"scale", "gamma"}) or ndims.keys() in _STATISTICS
    return _known(_NORM, ndims) if is_norm and {*ndims.values()} == {1} else None


def _is_attention(node: TreeNode) -> bool:
    """Return whether heads are the dims that flax and Keras have them as. Gemma of KerasHub has them in front."""
    kernels = {key: child.tensors["kernel"].shape for key, child in node.children.items() if "kernel" in child.tensors}
    joined = [kernels[key] for key in _JOINED if key in kernels]
    query = kernels.get("query", ())
    return kernels.keys() >= _HEADS and len(query) == 3 and all(shape[:2] == query[1:] for shape in joined)


def _is_conv(node: TreeNode, name: str) -> bool:
    """Return whether a kernel of three dims is that of a convolution, and not of a layer that has heads as dims."""
    bias = node.tensors.get("bias")
    return "conv" in name.lower() or (bias is not None and len(bias.shape) == 1)


def _known(dims: ModuleDims, ndims: dict[str, int]) -> ModuleDims | None:
    """Return the dims if all arrays of a layer have them."""
    return dims if all(dims.dims(key, ndim) is not None for key, ndim in ndims.items()) else None
