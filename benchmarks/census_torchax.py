"""Train the architectures of the JAX census on torchax, and keep a line for each in `results/census_torchax.jsonl`.

    pip install --no-deps torchax
    python benchmarks/census_torchax.py [--source timm] [--names llama,t5] [--again]

It takes those that the file of `census.py --engine jax` built, with the same inputs and sizes, and continues where it
was stopped. Each runs on one device in float64, with torchax's settings for accuracy; loss and gradients are compared
with torch's. A result is "right" where none differs by more than a millionth of the largest gradient, which is wider
than what shardlib is held to. --quick takes one architecture and keeps nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

from _report import parser, write
from _torchax import imported

from shardlib.testing import census
from shardlib.testing.census import Result, _models
from shardlib.testing.census._run import _run, _said, _weighted_mean, upcasting

RESULTS = Path(__file__).parent / "results"
WITHIN = 1e-6


def trained(ours: Result) -> tuple[str, str]:
    """Return "right", "wrong" or "error", and what there is to say of it."""
    try:
        difference, where = compared(ours)
        if difference > WITHIN and not ours.upcast:  # where code asks for float32, rounding may be all there is
            difference, where = min((difference, where), compared(dataclasses.replace(ours, upcast=True)))
    except Exception as error:  # whatever torchax raises is its result
        return "error", _said(error)
    if difference <= WITHIN:
        return "right", ""
    return "wrong", f"{where} differs by {difference:.1e} of the largest gradient"


def compared(ours: Result) -> tuple[float, str]:
    """Return the largest difference in loss and gradients, of the largest value there is, and where it is."""
    import jax
    import numpy as np
    import torch

    from shardlib.testing.equivalence.train import cast

    torchax = imported()
    torchax.enable_accuracy_mode()
    env = torchax.default_env()
    entry = next(each for each in census.entries(ours.library) if each.name == ours.name)
    entry = dataclasses.replace(entry, share=ours.share, experts="batched_mm")
    torch.manual_seed(0)
    module = around(_models.build(entry).double(), ours.upcast)
    batch = cast(_models.batch(entry, ours.labels, ours.extra, 0), torch.float64)
    states, run = torchax.extract_jax(module)
    expected = module(batch)  # in torch; it notes the outputs to train by, which torchax's tensors do not say
    expected.backward()
    theirs = {name: p.grad for name, p in module.named_parameters() if p.requires_grad and name in states}
    params = {name: states[name] for name in theirs}
    kept = {name: array for name, array in states.items() if name not in theirs}
    arrays = env.t2j_copy(batch)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: run({**kept, **p}, (arrays,))))(params)
    largest = max((float(g.abs().max()) for g in theirs.values() if g is not None and g.numel()), default=1.0)
    found = [(abs(float(loss) - float(expected)) / max(abs(float(expected)), 1.0), "loss")]
    for name, grad in theirs.items():
        difference = np.abs(np.asarray(grads[name]) - (0 if grad is None else grad.numpy()))
        found.append((float(difference.max(initial=0.0)) / largest, name.removeprefix("model.")))
    return max(found, key=lambda each: (each[0] != each[0], each[0]))  # nan is the largest


def around(model: Any, upcast: bool) -> Any:
    """Return a module that gives the census's loss of a batch."""
    import torch

    from shardlib.engine._torch import pytree

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.trained: list[bool] | None = None

        def forward(self, batch: Any) -> torch.Tensor:
            with upcasting() if upcast else contextlib.nullcontext():
                output = _run(model, batch)
                loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
                if loss is not None:
                    return loss.mean()
                leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
                if self.trained is None:
                    self.trained = [leaf.is_floating_point() and leaf.requires_grad for leaf in leaves]
                means = [_weighted_mean(x) for x, chosen in zip(leaves, self.trained, strict=True) if chosen]
                return torch.stack(means).sum()

    return Around()


class Worker:
    """A process of its own, since torchax changes torch for all that a process does."""

    def __init__(self) -> None:
        self.pool: Any = None

    def trained(self, ours: Result, seconds: float) -> tuple[str, str]:
        self.pool = self.pool or multiprocessing.get_context("spawn").Pool(1)
        try:
            return self.pool.apply_async(trained, (ours,)).get(seconds)  # type: ignore[no-any-return]
        except multiprocessing.TimeoutError:
            self.pool.terminate()
            self.pool = None
            return "error", f"no answer within {seconds:.0f} s"


def read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "name" in line]


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--source", help="only this library")
    p.add_argument("--names", help="only these, separated by commas")
    p.add_argument("--again", action="store_true", help="also those that stand in the file and are not right")
    p.add_argument("--seconds", type=float, default=120.0, help="the longest for each")
    p.add_argument("--ours", type=Path, default=RESULTS / "census_jax.jsonl")
    p.add_argument("--file", type=Path, default=RESULTS / "census_torchax.jsonl")
    args = p.parse_args()
    if args.quick:
        args.file, args.names = Path(tempfile.mkdtemp()) / args.file.name, "gpt2"
    chosen = [r for r in census.read(args.ours) if r.built and args.source in (None, r.library)]
    if args.names:
        chosen = [r for r in chosen if r.name in args.names.split(",")]
    names = {(r.library, r.name) for r in chosen}
    kept = [line for line in read(args.file) if not args.again or line["status"] == "right" or key(line) not in names]
    known = {key(line) for line in kept}
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    worker = Worker()
    for ours in chosen:
        if (ours.library, ours.name) in known:
            continue
        status, error = worker.trained(ours, args.seconds)
        kept.append({"library": ours.library, "name": ours.name, "cls": ours.cls, "status": status, "error": error})
        print(*kept[-1].values(), flush=True)
        args.file.write_text("".join(json.dumps(line) + "\n" for line in sorted(kept, key=key)), encoding="utf-8")
    if args.json:
        write(args.json, [line for line in kept if key(line) in names])


def key(line: dict[str, Any]) -> tuple[str, str]:
    return line["library"], line["name"]


if __name__ == "__main__":
    main()
