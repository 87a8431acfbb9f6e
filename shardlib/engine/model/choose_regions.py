"""Choice of the modules that compute on DTensors: the smallest ones that enclose all uses of sharded activations.

A weight sharded on its output features (column-parallel) produces sharded activations; a weight sharded on the
contracted dim (row-parallel) consumes them and produces a sum. The smallest module that contains both, such as an
attention or an MLP, encloses the sharded activation, and its inputs and outputs can be plain tensors. Any choice of
regions computes the same numbers, since outputs of a region are full tensors; this one moves the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

__all__ = ["find_regions", "inside"]


def find_regions(
    split: Sequence[str],
    closing: Collection[str],
    laid_out: Collection[str] = (),
    owners: Iterable[Collection[str]] = (),
    *,
    alone: Collection[str] = (),
    asked: Iterable[str] = (),
    uncalled: Collection[str] = (),
) -> list[str]:
    """Return the names of the modules that convert between plain tensors and DTensors.

    Args:
        split: modules that own a sharded tensor, in registration order.
        closing: those of them whose output is replicated once it is summed over the model axes.
        laid_out: modules whose activations a rule shards over model axes; then the whole model is one region.
        owners: for each tied parameter, the modules that own it.
        alone: those of `split` that take no sharded activation; each is a region by itself.
        asked: modules to which a rule gives an input or output layout.
        uncalled: modules without a forward, such as a `ModuleList`; their parent is the region instead.

    >>> find_regions(["b.attn.q", "b.attn.o", "b.mlp.up", "b.mlp.down", "head"], {"b.attn.o", "b.mlp.down"})
    ['b.attn', 'b.mlp', 'head']
    >>> find_regions(["net.layers.0.down", "net.layers.1.up"], {"net.layers.1.up"}, uncalled={"net.layers"})
    ['net']
    """
    if laid_out:
        return [""]
    found = [*_close([name for name in split if name not in alone], closing), *alone, *asked]
    regions = _outermost([_called(name, uncalled) for name in found])
    tied = [owner for group in owners if any(inside(o, regions) for o in group) for owner in group]
    return _outermost([_called(name, uncalled) for name in regions + [o for o in tied if not inside(o, regions)]])


def inside(module: str, regions: Iterable[str]) -> bool:
    """Return whether a module is one of the regions or inside one.

    >>> inside("b.attn.q", ["b.attn"]), inside("b.attn2", ["b.attn"]), inside("x", [""])
    (True, False, True)
    """
    return any(region in ("", module) or module.startswith(f"{region}.") for region in regions)


def _close(split: Sequence[str], closing: Collection[str]) -> list[str]:
    regions: list[str] = []
    opened: list[str] = []
    for module in split:
        if inside(module, regions):
            continue
        if module not in closing:
            opened.append(module)
            continue
        depth = max((len(_common(o, module)) for o in opened), default=0)
        partners = [o for o in opened if len(_common(o, module)) == depth]
        opened = [o for o in opened if o not in partners]
        regions.append(".".join(_common(partners[0], module)) if partners else module)
    return regions + opened


def _called(module: str, uncalled: Collection[str]) -> str:
    while module and module in uncalled:
        module = module.rpartition(".")[0]
    return module


def _common(a: str, b: str) -> list[str]:
    """Return the path of the closest common ancestor of two modules."""
    path = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        path.append(x)
    return path


def _outermost(names: Sequence[str]) -> list[str]:
    unique = list(dict.fromkeys(names))
    return [name for name in unique if not inside(name, (other for other in unique if other != name))]
