"""Plans as JSON: one row a line, keys in a fixed order, a version number."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from shardlib._dtypes import is_dtype_name, name_of
from shardlib._mesh_shape import MeshShape
from shardlib._plan.memory import Blocks
from shardlib._plan.report import DryRun, Gathered, Recorded, StageRun
from shardlib._plan.rows import PHASES, Row
from shardlib._plan.step import LossScale, Step
from shardlib._plan.table import PlanTable
from shardlib.errors import PlanError
from shardlib.layout import Layout
from shardlib.rules import Border, Stage

if TYPE_CHECKING:
    import torch

__all__ = ["VERSION", "as_data", "dump", "lines", "load"]

VERSION = 1
_STEP_DTYPES = frozenset({"reduce_dtype", "autocast"})


def dump(plan: PlanTable) -> str:
    """Serialize a plan as JSON text, ending in a newline."""
    return _lines(as_data(plan)) + "\n"


def as_data(plan: PlanTable) -> dict[str, Any]:
    """Convert a plan to dicts, lists, text and numbers."""
    return {
        "version": VERSION,
        "mesh": str(plan.mesh),
        "transforms": list(plan.transforms),
        "notes": list(plan.notes),
        "blocks": dataclasses.asdict(plan.blocks) if plan.blocks else None,
        "units": list(plan.units),
        "repeated": list(plan.repeated),
        "step": _step_data(plan.step),
        **({"stages": [dataclasses.asdict(stage) for stage in plan.stages]} if plan.stages else {}),
        "rows": [_row_data(row) for row in plan.rows],
        "borders": [_border_data(border) for border in plan.borders],
        "report": _report_data(plan.report) if plan.report else None,
    }


def lines(plan: PlanTable) -> list[str]:
    """Return one line for each tensor or border; ranks with equal lines shard in the same way."""
    objects = [_row_data(row) for row in plan.rows] + [_border_data(border) for border in plan.borders]
    stages = [f"stage {number} {stage}" for number, stage in enumerate(plan.stages)]
    head = [f"mesh {plan.mesh}", f"units {json.dumps(plan.units)}", f"step {json.dumps(_step_data(plan.step))}"]
    return [*head, *stages, *map(json.dumps, objects)]


def load(source: str) -> dict[str, Any]:
    """Parse the fields of a plan that `dump` wrote."""
    try:
        data = json.loads(source)
        _check_version(data)
        return {
            "mesh": MeshShape(data["mesh"]),
            "transforms": tuple(data["transforms"]),
            "notes": tuple(data["notes"]),
            "blocks": _blocks(data["blocks"]) if data["blocks"] else None,
            "units": tuple(data.get("units", ())),
            "repeated": tuple(data.get("repeated", ())),
            "step": _step(data.get("step", {})),
            "stages": tuple(Stage(tuple(s["modules"]), tuple(s["tensors"])) for s in data.get("stages", ())),
            "rows": tuple(_row(row) for row in data["rows"]),
            "borders": tuple(_border(border) for border in data["borders"]),
            "report": _report(data["report"]) if data["report"] else None,
        }
    except PlanError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PlanError(
            f"The text is not a plan: {type(error).__name__}: {error}. Give what Plan.to_json or `shardlib plan "
            "--json` wrote, unchanged."
        ) from error


def _check_version(data: Any) -> None:
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise PlanError(
            f"The text is a plan of version {version!r}; this shardlib reads version {VERSION}. "
            "Make the plan again with this version."
        )


def _row_data(row: Row) -> dict[str, Any]:
    data = {
        "name": row.name,
        "kind": row.kind,
        "shape": list(row.global_shape),
        "dtype": _dtype_name(row.dtype),
        "requires_grad": row.requires_grad,
        "persistent": row.persistent,
        "tied": list(row.tied),
    }
    phases = {phase: _layout_data(getattr(row, phase)) for phase in PHASES}
    optional = ({} if row.reshard else {"reshard": False}) | ({"partial": list(row.partial)} if row.partial else {})
    return data | phases | {"rule": row.rule, "note": row.note} | optional


def _row(data: dict[str, Any]) -> Row:
    phases: dict[str, Any] = {phase: _layout(data[phase]) for phase in PHASES}
    return Row(
        name=data["name"],
        kind=data["kind"],
        global_shape=tuple(data["shape"]),
        dtype=_dtype(data["dtype"]),
        requires_grad=data["requires_grad"],
        persistent=data["persistent"],
        tied=tuple(data["tied"]),
        rule=data["rule"],
        note=data["note"],
        reshard=data.get("reshard", True),
        partial=tuple(data.get("partial", ())),
        **phases,
    )


def _border_data(border: Border) -> dict[str, Any]:
    return {
        "module": border.module,
        "side": border.side,
        "layout": _layout_data(border.layout),
        "rule": border.rule,
        "reason": border.reason,
    }


def _border(data: dict[str, Any]) -> Border:
    return Border(**(data | {"layout": _layout(data["layout"])}))


def _layout_data(layout: Layout | None) -> str | None:
    return layout.text if layout is not None else None


def _layout(data: str | None) -> Layout | None:
    return Layout.parse(data) if data is not None else None


def _blocks(data: dict[str, Any]) -> Blocks:
    return Blocks(data["prefix"], data["count"], tuple(data["after"]))


def _step_data(step: Step) -> dict[str, Any]:
    """Return the settings that differ from the defaults, so that a new setting leaves earlier files unchanged."""
    data = step.settings()
    for field in _STEP_DTYPES & set(data):
        data[field] = _dtype_name(data[field])
    return data | ({"scaler": dataclasses.asdict(step.scaler)} if step.scaler else {})


def _step(data: dict[str, Any]) -> Step:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    fields |= {name: _dtype(data[name]) for name in _STEP_DTYPES & set(data)}
    return Step(**fields | ({"scaler": LossScale(**data["scaler"])} if "scaler" in data else {}))


def _report_data(report: DryRun) -> dict[str, Any]:
    """Convert a report; fields of pipelines are left out where they are empty."""
    data = dataclasses.asdict(report)
    return {key: value for key, value in data.items() if value or key not in ("stages", "ranks")}


def _report(data: dict[str, Any]) -> DryRun:
    collectives = tuple(Recorded(**c | {"axes": tuple(c["axes"])}) for c in data["collectives"])
    gathered = tuple(Gathered(**g) for g in data["gathered"])
    stages = tuple(StageRun(**stage) for stage in data.get("stages", ()))
    ranks = tuple(map(_report, data.get("ranks", ())))
    return DryRun(
        collectives,
        gathered,
        data["start_bytes"],
        data["peak_bytes"],
        data.get("flops", 0),
        data.get("activation_bytes", 0),
        stages,
        ranks,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return name_of(dtype)


def _dtype(name: str) -> Any:
    if not is_dtype_name(name):
        raise PlanError(f'"{name}" is not a dtype; give a name such as "float32" or "bfloat16".')
    return name


def _lines(data: dict[str, Any]) -> str:
    """Format every key on a line of its own, and so every element of a list of objects."""
    parts = [f"  {json.dumps(key)}: {_value(value, 1)}" for key, value in data.items()]
    return "{\n" + ",\n".join(parts) + "\n}"


def _value(value: Any, depth: int) -> str:
    pad = "  " * depth
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"{pad}  {json.dumps(item)}" for item in value) + f"\n{pad}]"
    if isinstance(value, dict) and any(isinstance(v, list | tuple) for v in value.values()):
        parts = [f"{pad}  {json.dumps(key)}: {_value(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{pad}" + "}"
    return json.dumps(value)
