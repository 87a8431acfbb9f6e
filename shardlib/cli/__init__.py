"""`shardlib init | check | plan | explain | prove | census`: layout files, plans, proofs; `run` starts ranks.

`tune` finds the fastest plans for a model on a cluster, `calibrate` measures one. `audit` compares with one device what
something else has sharded. Plans need neither processes nor values. `migrate` rewrites scripts for other libraries.

Exit codes: 0 fine, 1 the layout does not do what was asked of it, or a script has lines left to rewrite, 2 what was
typed names nothing. `run` ends as the first host that fails does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from shardlib.cli import census, run
from shardlib.cli.usage import FORMS, UsageError, positive, version
from shardlib.errors import MeshError, ShardlibError

__all__ = ["main"]

_MODEL = f"the model: {FORMS}"
_LAYOUT = "name or path of a layout file (by default the one for the model's class, or what its own tp_plan says)"
_DTYPES = "float64", "float32", "bfloat16", "float16"
_MODE = 'mode of the rules, such as "sequence"'


# Functions of the user that an audit takes in place of the library's means; `made` is what --sharded-by returned.
_OWN = {
    "context": "what forward and backward run in, a function () -> context manager",
    "accumulate": "your own backward passes of a step, a function (made, batches)",
    "clip": "your own clipping, a function (made) -> norm",
    "generate": "your own generation, a function (made, ids) -> tokens",
    "save": "your own saving, a function (made, folder)",
    "load": "your own loading on one device, a function (folder) -> state dict or model",
    "resume": "your own loading into a sharded model, a function (made, folder)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    >>> main(["plan", "torch.nn:Identity", "--mesh", "nonsense"])  # doctest: +SKIP
    2
    """
    options = _parser().parse_args(argv)
    # What commands need is imported once they are known: `--help`, `--version` and completion do not wait for torch.
    from shardlib.layouts import SuggestedLayoutWarning

    module, name = options.run.split(".")
    command = getattr(importlib.import_module(f"shardlib.cli.{module}"), name)
    with warnings.catch_warnings():
        warnings.showwarning = _warn  # type: ignore[assignment]
        warnings.simplefilter("default", SuggestedLayoutWarning)
        try:
            return int(command(options))
        except ShardlibError as error:
            _report(error, as_json=options.json)
            return 2 if isinstance(error, UsageError | MeshError) else 1


def _warn(message: Warning | str, *_where: object) -> None:
    print(f"shardlib: {message}", file=sys.stderr)


def _report(error: ShardlibError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": str(error)}}, indent=2))
    else:
        print(f"shardlib: {error}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardlib", description=__doc__.splitlines()[0] if __doc__ else None)
    versions = f"shardlib {version('shardlib')}, torch {version('torch')}"
    parser.add_argument("--version", action="version", version=versions)
    with suppress(ImportError):  # of an extra
        import shtab

        shtab.add_argument_to(parser, "--print-completion", help="print the completion script of a shell")
    subparsers = parser.add_subparsers(
        required=True, metavar="{init,check,plan,tune,explain,prove,audit,census,run,calibrate,migrate,doctor}"
    )
    _add_plan(_command(subparsers, "plan", "show the layout of every tensor of a model on a mesh"))
    _add_tune(_command(subparsers, "tune", "find the fastest plans for a model on a cluster, and say why"))
    _add_check(_command(subparsers, "check", "check whether a layout file fits a model, or a function of JAX", "?"))
    _add_prove(_command(subparsers, "prove", "train sharded and on one device, and compare everything"))
    _add_audit(_command(subparsers, "audit", "compare a model that something else shards with one device"))
    _add_explain(_command(subparsers, "explain", "show which rule decides about a tensor or module"))
    _add_init(_command(subparsers, "init", "write a first layout file for a model"))
    _add_census(subparsers)
    _add_run(subparsers)
    _add_calibrate(subparsers)
    _add_migrate(subparsers)
    _add_doctor(subparsers)
    return parser


def _command(subparsers: Any, name: str, help: str, models: Literal["?"] | None = None) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=help, description=help)
    parser.add_argument("model", nargs=models, help=_MODEL)
    parser.add_argument("--json", action="store_true", help="print JSON, errors too")
    parser.set_defaults(run=f"commands.{name}")
    return parser


def _add_layout(parser: argparse.ArgumentParser, mesh: str | None = None) -> None:
    """Add what says how a model is sharded; without a default for the mesh, it must be given."""
    default = "" if mesh is None else f' (default "{mesh}")'
    parser.add_argument(
        "--mesh", default=mesh, required=mesh is None, help=f'axes and sizes, as in "dp=2,tp=4"{default}'
    )
    parser.add_argument("--layout", help=_LAYOUT)
    parser.add_argument("--mode", help=_MODE)


def _add_training(parser: argparse.ArgumentParser, example: str) -> None:
    """Add what says how it is trained."""
    _add_example(parser, example)
    parser.add_argument(
        "--transform",
        action="append",
        metavar="CALL",
        help='shard, offload or use lower precision, as in --transform "zero(2) | offload()" or --transform fsdp; may '
        "be given several times, and is applied in order",
    )


def _add_example(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument(
        "--example",
        action="append",
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="an input of one data rank, as in 2x128 or ids=2x128:int64 (the default dtype), once for each input: "
        f"{example}",
    )


def _add_prove(parser: argparse.ArgumentParser) -> None:
    _add_layout(parser)
    _add_training(parser, "its batches are drawn for it; by default what a Hugging Face model takes")
    parser.add_argument("--steps", type=int, default=2, help="training steps (default 2)")
    parser.add_argument(
        "--dtype", choices=_DTYPES, default=_DTYPES[0], help="dtype of the model and its inputs (default float64)"
    )


def _add_audit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="audit.audit", own=_OWN)
    parser.add_argument(
        "--sharded-by", required=True, metavar="FILE.py:NAME", help="your function (model, mesh) -> model"
    )
    parser.add_argument(
        "--mesh", required=True, help='axes and sizes, in the order of the function\'s mesh: "dp=2,tp=2"'
    )
    _add_example(parser, "its batches are drawn for it; by default what a Hugging Face model takes")
    parser.add_argument(
        "--batch", metavar="FILE.py:NAME", help="a function (step) -> global batch, instead of --example"
    )
    parser.add_argument(
        "--dry", action="store_true", help="one step with types in the place of numbers: any mesh, no ranks, no values"
    )
    parser.add_argument("--loss", metavar="FILE.py:NAME", help="a function (model, batch) -> scalar")
    parser.add_argument("--optimizer", metavar="FILE.py:NAME", help="a function (parameters) -> optimizer")
    for name, form in _OWN.items():
        parser.add_argument(f"--{name}", metavar="FILE.py:NAME", help=form)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps (default 2)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds until ranks are given up (default 120)")
    parser.add_argument("--strict", action="store_true", help='count what is "weighted" as a difference')


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_layout(parser)
    _add_training(parser, "dry-run a training step and report its collectives and memory")
    parser.add_argument(
        "--cluster", help="also predict the time of a step on these machines, or say which changes would make it fit"
    )
    parser.add_argument("--diff", metavar="FILE", help="show what changes from a plan that was written by --json")
    parser.add_argument("--html", metavar="FILE", help="also write a page with pictures")
    parser.add_argument("--all", action="store_true", help="a line for every tensor: do not fold repeated blocks")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run="tune.tune")
    parser.add_argument(
        "--cluster", required=True, help='the machines: the name of a preset such as "h100", or a cluster file'
    )
    parser.add_argument("--world", type=positive, required=True, metavar="N", help="the number of ranks")
    parser.add_argument("--batch", type=positive, required=True, metavar="N", help="examples in a step, of all ranks")
    parser.add_argument("--seq", type=positive, metavar="N", help="tokens of an example, of a language model")
    _add_example(parser, "in the place of --seq")
    parser.add_argument("--memory", metavar="BYTES", help='of a device, as in "80GB" (default: all)')
    parser.add_argument(
        "--margin", type=float, default=0.1, metavar="PART", help="part of the memory to leave free (default 0.1)"
    )
    parser.add_argument("--axes", metavar="SIZES", help='sizes that are wanted, as in "tp=8,pp=16"')
    parser.add_argument("--layout", help=_LAYOUT)
    parser.add_argument(
        "--transform",
        action="append",
        metavar="CALL",
        help="what every plan has (default precision('bf16') where the cluster is faster in it)",
    )
    parser.add_argument("--compiled", action="store_true", help="fuse ops in a row, as torch.compile does")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="plans to show (default 5)")
    parser.add_argument("--html", metavar="FILE", help="also write a page with the timeline of each plan")
    parser.add_argument("--script", metavar="FILE", help="write a training script that uses the best plan")
    parser.add_argument("--force", action="store_true", help="replace a script that is there")


def _add_census(subparsers: Any) -> None:
    summary = "prove every architecture of an installed library: tiny, sharded, one training step beside one device"
    parser = subparsers.add_parser("census", help=summary, description=summary)
    census.add_options(parser)
    parser.set_defaults(run="census.census")


def _add_run(subparsers: Any) -> None:
    summary = "launch a script on several ranks, on this machine or on several"
    # No abbreviations: --host is one of --hostfile.
    parser = subparsers.add_parser("run", help=summary, description=summary, allow_abbrev=False)
    run.add_options(parser)
    parser.set_defaults(run="run.run", json=False)


def _add_calibrate(subparsers: Any) -> None:
    summary = "measure this machine, and write what was measured as a cluster file"
    parser = subparsers.add_parser("calibrate", help=summary, description=f"{summary}; on accelerators under torchrun")
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="CPU ranks over gloo (default 2)")
    parser.add_argument("--quick", action="store_true", help="few and small sizes: seconds, and rough figures")
    parser.add_argument("--name", default="calibrated", help='the name of the cluster (default "calibrated")')
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write (default: to the terminal)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--json", action="store_true", help="print JSON, errors too")
    parser.set_defaults(run="calibrate.calibrate")


def _add_doctor(subparsers: Any) -> None:
    summary = "say what is installed, what is missing for which feature, and what is known to be wrong with it"
    parser = subparsers.add_parser("doctor", help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print JSON, errors too")
    parser.set_defaults(run="commands.doctor")


def _add_migrate(subparsers: Any) -> None:
    summary = "rewrite the imports of scripts for ColossalAI and fairscale, and list what is left"
    parser = subparsers.add_parser("migrate", help=summary, description=summary)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a script, or a folder: all Python files in it")
    parser.add_argument("--write", action="store_true", help="write the files; without it, print what would change")
    parser.add_argument("--json", action="store_true", help="print JSON, errors too")
    parser.set_defaults(run="migrate.migrate")


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i",
        "--installed",
        action="store_true",
        help="the same as `shardlib doctor`",
    )
    _add_layout(parser, "tp=2")
    parser.add_argument(
        "--jax",
        action="store_true",
        help="also type the model's graph under JAX's explicit sharding, and report contractions and operands whose "
        "layouts are ambiguous or contradict each other; no devices are needed",
    )
    parser.add_argument(
        "--example",
        action="append",
        metavar="[NAME=]SHAPE[:DTYPE]",
        help="for --jax and --params: an input of one data rank, as of plan; by default what a Hugging Face model "
        "takes. Inputs with names are one dict, the batch of a function",
    )
    parser.add_argument(
        "--params",
        metavar="NAME",
        help="module:name or file.py:name of a tree of parameters, or of a function without arguments that makes one; "
        "MODEL is then a function of JAX, whose first argument they are, and torch is not imported",
    )
    parser.add_argument("--golden", metavar="FILE", help="fail unless --jax or --params finds what is in this file")
    parser.add_argument("--update", action="store_true", help="write the file of --golden instead")
    parser.add_argument("--expect", metavar="FILE", help="fail unless the plan is the one in this file (plan --json)")
    parser.set_defaults(run="check.check")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="a parameter, a buffer, a module, or an activation such as blocks.0.output")
    parser.add_argument("--mesh", help="axes and sizes; with it, the local shapes are shown")
    parser.add_argument("--layout", help=_LAYOUT)
    parser.add_argument("--mode", help=_MODE)


def _add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write (default: to the terminal)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
