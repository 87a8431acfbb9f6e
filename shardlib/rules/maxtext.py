"""Configurations of MaxText: the pairs of logical names and mesh axes of its YAML files.

Read as MaxText's `configs/pyconfig.py` and `utils/sharding.py` do: `base_config` below the file, pairs of later files
in the place of those of the same names, and axes of size one left out after all pairs are applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlib._mesh_shape import AxisKind, MeshLike, MeshShape, listed
from shardlib.errors import RuleError, VersionError, nearest
from shardlib.rules.logical import read_logical_axes
from shardlib.rules.specs import register_kinds

__all__ = ["read_maxtext"]

Config = str | Path | Mapping[str, Any] | Sequence[Any]


def read_maxtext(config: Config, names: Any, mesh: MeshLike, kinds: Mapping[str, AxisKind] | None) -> dict[str, str]:
    """Return the rules of a configuration; see `Rules.from_maxtext`."""
    known, pairs = _merged(config)
    register_kinds(known, kinds)
    shape = MeshShape.of(mesh)
    if known and (strange := [axis for axis in shape if axis not in known]):
        raise RuleError(
            f'Mesh "{shape}" has the axes {listed(strange)}, and the configuration has mesh_axes {listed(known)}. Use '
            f"axes of the configuration, so that its rules mean this mesh.{nearest(strange[0], known)}"
        )

    def kept(parameter: str, name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        if known and (lost := [axis for axis in axes if axis not in known]):
            raise RuleError(
                f'The dim "{name}" of "{parameter}" gets the axes {listed(axes)}, and {listed(lost)} is not in the '
                f"mesh_axes of the configuration, {listed(known)}. Correct the pair, or add the axis."
            )
        return tuple(axis for axis in axes if axis in shape)

    made: dict[str, str] = read_logical_axes(names, pairs, kept)["rules"]
    return made


def _merged(config: Config) -> tuple[tuple[str, ...], list[Any]]:
    """Return the mesh axes and the pairs of one or several configurations."""
    axes: tuple[str, ...] = ()
    pairs: list[Any] = []
    for each in _contents(config):
        axes = tuple(each.get("mesh_axes") or axes)
        new = list(each.get("logical_axis_rules") or ())
        replaced = {pair[0] for pair in new if isinstance(pair, list | tuple) and pair}
        kept = [] if each.get("override_logical_axis_rules") else [pair for pair in pairs if pair[0] not in replaced]
        pairs = [*kept, *new]
    if pairs:
        return axes, pairs
    raise RuleError(
        f"A configuration of MaxText was given as {config!r}, without logical_axis_rules. Give base.yml, or a file of "
        "custom_mesh_and_rule, or [base.yml, the model's file]."
    )


def _contents(config: Config) -> Iterator[Mapping[str, Any]]:
    if isinstance(config, Mapping):
        yield config
    elif isinstance(config, str | Path):
        yield _loaded(Path(config))
    elif isinstance(config, Sequence):
        for each in config:
            yield from _contents(each)
    else:
        raise RuleError(
            f"A configuration of MaxText was given as {type(config).__name__} {config!r}; give the path of a YAML "
            'file, its content, or a list of these: {"mesh_axes": [...], "logical_axis_rules": [["mlp", "tensor"]]}.'
        )


def _loaded(path: Path) -> dict[str, Any]:
    """Return a file's content over that of the files that it is based on; a list replaces a list."""
    try:
        import yaml
    except ImportError:
        raise VersionError(
            f'Reading "{path}" needs PyYAML, which is not installed. Run `pip install pyyaml`, or give the content.'
        ) from None
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as fault:
        raise RuleError(f'"{path}" cannot be read as a configuration of MaxText: {fault}. Correct the file.') from None
    if not isinstance(content, dict):
        raise RuleError(
            f'"{path}" has {type(content).__name__} in place of keys and values. Give a YAML file of MaxText.'
        )
    base = content.get("base_config")
    return (_loaded(_found(path, base)) if base else {}) | content


def _found(path: Path, base: str) -> Path:
    """Return the file that another one is based on: beside it, or in a folder above, as in MaxText's configs."""
    places = [folder / base for folder in path.resolve().parents]
    if found := next((place for place in places if place.is_file()), None):
        return found
    raise RuleError(f'"{path}" has base_config "{base}", which is not beside it nor in a folder above. Correct it.')
