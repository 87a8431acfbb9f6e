"""`shardlib check --params`: a function of JAX, its parameters, and a batch of shapes. torch is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardlib._mesh_shape import MeshShape
from shardlib.cli.attributes import find_attribute
from shardlib.cli.shapes import no_dtype, read_shapes
from shardlib.cli.usage import UsageError
from shardlib.rules import Rules

if TYPE_CHECKING:
    from shardlib.jax import LayoutReport

__all__ = ["params_of", "typed"]

_FUNCTION = "A function is module:name or file.py:name."


def params_of(spec: str) -> Any:
    """Return a tree of parameters by its name, or the shapes of what a function without arguments makes.

    Raises:
        UsageError: there is none, or it cannot be made.
    """
    import jax

    found = find_attribute(spec, _FUNCTION)
    if not callable(found):
        return found
    try:
        return jax.eval_shape(found)
    except TypeError as error:
        raise UsageError(
            f'--params "{spec}" makes no tree of arrays: {error}. Give a tree, or a function without arguments that '
            "returns one, such as lambda: model.init(jax.random.key(0), batch)."
        ) from error


def typed(spec: str, params: Any, mesh: str, rules: Rules, example: list[str]) -> LayoutReport:
    """Run `shardlib.jax.check_layouts` for inputs of one data rank, which follow the parameters.

    Raises:
        ShardlibError: what `check_layouts` raises.
        UsageError: there is no such function.
    """
    from shardlib.jax import check_layouts

    shape, function = MeshShape.of(mesh), find_attribute(spec, _FUNCTION)
    if not callable(function):
        raise UsageError(f'"{spec}" is of type {type(function).__name__}; give a function of JAX.')
    batch = _of_all_ranks(read_shapes(example, _array), shape.data_ranks)
    batch = (batch,) if isinstance(batch, dict) else batch
    return check_layouts(function, shape, rules, example=(params, *batch))


def _array(text: str, sizes: tuple[int, ...], dtype_name: str) -> Any:
    import jax
    from jax.numpy import dtype

    try:
        return jax.ShapeDtypeStruct(sizes, jax.dtypes.canonicalize_dtype(dtype(dtype_name)))
    except TypeError as error:
        raise no_dtype(text, dtype_name, ["bool", "int32", "int64", "float32", "bfloat16", "float16"]) from error


def _of_all_ranks(example: Any, ranks: int) -> Any:
    """Repeat rows of dim 0 for every data rank, to make a global batch."""
    import jax

    rows = next((leaf.shape[0] for leaf in jax.tree.leaves(example)), 0)

    def grown(leaf: Any) -> Any:
        return leaf.update(shape=(rows * ranks, *leaf.shape[1:])) if leaf.shape[0] == rows else leaf

    return jax.tree.map(grown, example)
