"""Compare our rows for each op with those that torch states, on one mesh axis of two ranks that are pretended.

Samples are those of PyTorch's database of ops. A row of torch's that we do not have is proved or disproved as our own
are: its operands are cut up, the op runs once for each rank, and the pieces are compared with the op on full tensors.

    python benchmarks/op_rules.py [--only NAME] [--samples 2] [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from _report import parser, write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from shardlib.engine._torch import DTensorSpec, OpSchema, TensorMeta, dispatcher, pytree, schema_of
from shardlib.engine.ops._choose import _candidates, _holds
from shardlib.engine.ops._dispatch import is_random
from shardlib.engine.ops._rows import ANY, Call, Row, rule_of
from shardlib.testing._prove import AtenCall, Claim, _currents, _describe, _output_metas, calls_of, disprove
from shardlib.testing.ops import database, samples_of

_PLAIN = (type(None), Replicate, Shard, Partial)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", help="ops whose name begins so")
    options.add_argument("--samples", type=int, default=2, help="samples of each op")
    args = options.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    _leave_out_costs()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name in islice(database(args.only), 4 if args.quick else None):
        for call in _calls(name, args.samples):
            found[str(call.op)].update(_compare(call, mesh))
    counts: Counter[tuple[str, str]] = Counter()
    for op, seen in sorted((op, seen) for op, seen in found.items() if seen):
        (how,) = (word for word in ("single-dim", "strategy", "none") if word in seen)
        what = next((word for word in ("wrong", "fewer", "same") if word in seen), "no rows")
        counts[how, what] += 1
        print(f"{op:56} {how:10} {what:24} {', '.join(sorted(k for k in seen if ' -> ' in k)[:2])}")
    for (how, what), count in sorted(counts.items()):
        print(f"{count:4} ops: {how}, {what}")
    if args.json:
        rows = [{"torch has": how, "rows": what, "ops": count} for (how, what), count in sorted(counts.items())]
        write(args.json, rows)


def _calls(name: str, count: int) -> Iterator[AtenCall]:
    for sample in samples_of(name, count=count):
        try:
            yield from calls_of([sample.outcome])
        except Exception as error:  # a sample that plain tensors refuse
            print(f"{name}: {error}", file=sys.stderr)


def _leave_out_costs() -> None:
    """Let torch's strategies not price each row, which takes most of the time."""
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.distributed.tensor._ops.")]:
        if hasattr(module, "generate_redistribute_costs"):
            vars(module)["generate_redistribute_costs"] = lambda *_: [0.0]


def _compare(call: AtenCall, mesh: Any) -> Iterator[str]:
    """Yield how torch states rows for a call, how they compare with ours, and which of them are false."""
    rule = rule_of(call.op)
    if rule is None or not call.tensors or is_random(call.op):
        return
    if any(argument.is_out for argument in schema_of(call.op).arguments):
        return
    propagator = dispatcher().sharding_propagator
    single = propagator.op_single_dim_strategy_funcs.get(call.op)
    strategy = propagator.op_strategy_funcs.get(call.op)
    yield "single-dim" if single else "strategy" if strategy else "none"
    if single is None and strategy is None:
        return
    args, kwargs = call.fresh()
    whole = (Replicate(),) * len(call.tensors)
    described = replace(_describe(call, _output_metas(call.op(*args, **kwargs))), current=whole, size=2)
    ours: set[Row] = set()
    theirs = set(_single(single, call, described) if single else ())
    for current in dict.fromkeys(_currents(call.tensors, 2)):
        if all(type(place) in _PLAIN for place in current):
            now = replace(described, current=current)
            rows = [row for row in list(_candidates(rule, now))[1:] if _holds(row, now, empty=rule.empty)]
            ours.update(
                Row(row.outs, tuple(c if p is ANY else p for p, c in zip(row.ins, current, strict=True)))
                for row in rows
            )
            theirs.update(_of_strategy(strategy, call, now, mesh) if not single else ())
    for row in theirs - ours:
        if _is_like_ours(row) and _holds(row, described, empty=rule.empty) and (why := disprove(Claim(call, row, 2))):
            yield "wrong"
            yield f"{row.ins} -> {row.outs}: {why}"
    if ours or theirs:
        yield "fewer" if ours - theirs else "same"


def _is_like_ours(row: Row) -> bool:
    places = (*row.ins, *row.outs)
    plain = all(type(p) in _PLAIN and (not isinstance(p, Partial) or p == Partial("sum")) for p in places)
    return plain and any(isinstance(p, Shard | Partial) for p in places)


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _single(info: Any, call: AtenCall, described: Call) -> Iterator[Row]:
    args, kwargs = pytree.tree_map_only(torch.Tensor, _meta, (call.args, call.kwargs))
    for places in info.func(call.op, tuple(args), kwargs):
        plain: list[Any] = [Shard(p.dim) if not isinstance(p, _PLAIN) and hasattr(p, "dim") else p for p in places]
        outs, ins = plain[: len(plain) - len(call.tensors)], plain[len(plain) - len(call.tensors) :]
        if len(outs) == len(described.outputs):
            wanted = zip(outs, described.outputs, strict=True)
            yield Row(tuple(None if meta is None else p for p, meta in wanted), tuple(ins))


def _of_strategy(function: Any, call: AtenCall, now: Call, mesh: Any) -> Iterator[Row]:
    from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, TupleStrategy

    places = iter(now.current)

    def stated(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return OpStrategy([OpSpec(DTensorSpec(mesh, (next(places),), tensor_meta=_meta(value)))])
        if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            return TupleStrategy(tuple(map(stated, value)))
        return value

    try:
        schema = OpSchema(call.op, tuple(map(stated, call.args)), {k: stated(v) for k, v in call.kwargs.items()})
        specs = function(schema).strategies
    except Exception:  # torch refuses the call, as a view that needs communication
        return
    for spec in specs:
        several = isinstance(spec.output_specs, list | tuple)
        outs = [None if s is None else s.placements[0] for s in (spec.output_specs if several else [spec.output_specs])]
        outs = outs * len(now.outputs) if len(outs) == 1 else outs
        ins = [s.placements[0] for s in spec.input_specs or ()]
        if len(outs) == len(now.outputs) and len(ins) == len(now.inputs):
            yield Row(tuple(outs), tuple(ins))


if __name__ == "__main__":
    main()
