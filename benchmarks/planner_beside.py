"""Predicted memory of training steps beside runs: shardlib, and others that predict memory or search for a plan.

    python benchmarks/planner_beside.py [--quick] [--json FILE]
    python benchmarks/planner_beside.py --megatron FOLDER     # a checkout of Megatron-LM, for its formula
    python benchmarks/planner_beside.py --galvatron FOLDER    # its package: searches on its own profiles, and ends

It runs in `.venv-planner` (`make .venv-planner/.planner`), which has DeepSpeed, llm-analysis and Galvatron beside
shardlib. What is not installed is left out of the tables.

The truth is a run on gloo ranks: the peak of the bytes of live tensors on rank 0 in the second training step, with
gradients, optimizer state, activations and buffers for communication. Each tool is compared with runs of the libraries
that it describes: shardlib, torch (`DistributedDataParallel`, `fully_shard`), DeepSpeed. An error is the prediction
over the run, minus one. The meter is of this benchmark and knows none of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from _beside_models import MODELS, Case, cases
from _beside_runs import RUNS, run
from _beside_tools import MEGATRON, TOOLS, CannotExpress, versions
from _harness import is_rank, start_ranks
from _report import parser, write
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def main() -> None:
    args = _parser().parse_args()
    if is_rank():
        run(args.library, args.file, chosen(args))
        return
    if args.galvatron:
        import _beside_galvatron

        searched = _beside_galvatron.search_all(args.galvatron, args.quick)
        Console(width=160).print(_beside_galvatron.table(searched))
        if args.json:
            write(args.json, {"galvatron": searched})
        return
    MEGATRON.extend([args.megatron] if args.megatron else [])
    truths = measured(args)
    rows = predicted(args, truths)
    Console(width=160).print(table(rows), *reasons(rows), sep="\n")
    if args.json:
        facts = {"versions": versions()}
        write(
            args.json,
            {"runs": [{"library": k[0], "case": str(k[1]), **v} for k, v in truths.items()], "rows": rows},
            **facts,
        )


def chosen(args: argparse.Namespace) -> list[Case]:
    """Return the cases that the command line asks for."""
    return [case for case in cases(args.quick) if case.ranks in args.ranks and case.model in args.models]


def measured(args: argparse.Namespace) -> dict[tuple[str, Case], Row]:
    """Run every case with every library that can, and return what was measured."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for library in RUNS:
            for ranks in sorted({case.ranks for case in chosen(args)}):
                file = Path(folder) / f"{library}_{ranks}.json"
                status = start_ranks(ranks, [*sys.argv[1:], "--library", library, "--file", str(file)])
                if status:
                    raise SystemExit(f"{library} on {ranks} ranks ended with status {status}")
                for row in json.loads(file.read_text()):
                    found[library, Case(**row.pop("case"))] = row
    return found


def predicted(args: argparse.Namespace, truths: dict[tuple[str, Case], Row]) -> list[Row]:
    """Ask every tool about every case; a row is a tool, a case and a run that the tool describes."""
    rows: list[Row] = []
    for case in chosen(args):
        for name, tool in TOOLS.items():
            answer = _asked(tool.predict, case)
            for library in tool.against:
                truth = truths.get((library, case))
                if truth is None:
                    continue
                row = {"tool": name, "run": library, **vars(case), **answer, "truth": truth}
                if "peak" in truth and "predicted" in answer:
                    row["error"] = answer["predicted"] / truth["peak"] - 1
                elif "predicted" in answer:
                    row["reason"] = f"the run: {truth['error']}"
                rows.append(row)
    return rows


def table(rows: list[Row]) -> Table:
    """Return the errors by tool and model: the median over cases, and the largest."""
    title = "error of the predicted peak, in percent: median of absolute values (least to greatest) of how many cases"
    made = Table("tool", "beside runs of", *MODELS, title=title, title_justify="left")
    errors: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found = [100 * row["error"]] if "error" in row else []
        errors[row["tool"], row["run"]][row["model"]].extend(found)
    for (tool, library), by_model in sorted(errors.items(), key=lambda item: [*TOOLS].index(item[0][0])):
        made.add_row(tool, library, *(_cell(by_model[model]) for model in MODELS))
    return made


def reasons(rows: list[Row]) -> list[str]:
    """Return lines that say why tools have no answer, and to how many cases."""
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        if "reason" in row:
            counts[f"{row['tool']} beside {row['run']}: {row['reason'][:160]}"] += 1
    return ["", *(f"- {reason} ({count} cases)" for reason, count in counts.items())]


def _asked(predict: Any, case: Case) -> Row:
    try:
        return {"predicted": int(predict(case))}
    except CannotExpress as error:
        return {"reason": str(error)}
    except Exception as error:  # a tool that fails has no answer; the others go on
        return {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}


def _cell(errors: list[float]) -> str:
    if not errors:
        return "-"
    middle = statistics.median(map(abs, errors))
    return f"{middle:.1f} ({min(errors):+.1f} to {max(errors):+.1f}) of {len(errors)}"


def _parser() -> argparse.ArgumentParser:
    p = parser(__doc__)
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    p.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    p.add_argument("--megatron", type=Path, metavar="FOLDER", help="a checkout of Megatron-LM")
    p.add_argument("--galvatron", type=Path, metavar="FOLDER", help="the folder of Galvatron's package")
    for hidden, kind in (("--library", str), ("--file", Path)):
        p.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    return p


if __name__ == "__main__":
    main()
