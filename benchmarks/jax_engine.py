"""The JAX engine beside the same GPT written in plain JAX and in flax: what it costs, once and at every step.

    python benchmarks/jax_engine.py                         # one device
    python benchmarks/jax_engine.py --mesh dp=2,tp=2        # pretended CPU devices
    python benchmarks/jax_engine.py --quick --json out.json
    python benchmarks/jax_engine.py --depths 4,16,48        # also compilation, unrolled and with scan=True

All are jitted and take the same training step (forward, backward, optax's AdamW) from the same parameters, turn about
in one process: what slows one round slows all. Reported are medians, the median and the middle half of the ratios of
single rounds, and what XLA counts in each program, which no other process disturbs; then what is paid once: import,
export, tracing and XLA's compiling. Losses of three steps must agree. flax is left out where it is not installed, and
so is torchax (`pip install --no-deps torchax`), which runs on one device.
`train_step` is shardlib's step: around the compiled model, and around the plain one by rules. Compilation at several
depths is in seconds of processor time.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _report
from _report import alternate, compared, written

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def parser() -> argparse.ArgumentParser:
    p = _report.parser(__doc__)
    p.add_argument("--mesh", default="dp=1,tp=1")
    p.add_argument("--rounds", type=int, default=60)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--context", type=int, default=64)
    p.add_argument("--depths", default="")
    return p


def plain_gpt(params: dict[str, Any], ids: Any, heads: int) -> Any:
    """The example GPT by hand, on the arrays of `compile_model`: fused weights are there in parts."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, name: str) -> Any:
        mean = x.mean(-1, keepdims=True)
        deviation = jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5)
        return (x - mean) * deviation * params[f"{name}.weight"] + params[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    batch, seq = ids.shape
    x = params["embed.weight"][ids] + params["position.weight"][jnp.arange(seq)]
    width = x.shape[-1]
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    for at in range(sum(name.endswith("attn.proj.weight") for name in params)):
        block = f"blocks.{at}"
        weight = params[f"{block}.attn.qkv.weight"].reshape(3, width, width)
        fused = jnp.einsum("bte,qhe->qbth", norm(x, f"{block}.norm1"), weight)
        fused = fused + params[f"{block}.attn.qkv.bias"].reshape(3, 1, 1, width)
        q, k, v = (part.reshape(batch, seq, heads, -1).swapaxes(1, 2) for part in fused)
        scores = jnp.where(causal, (q / math.sqrt(width // heads)) @ k.swapaxes(-1, -2), -jnp.inf)
        mixed = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(batch, seq, width)
        x = x + linear(mixed, f"{block}.attn.proj")
        hidden = linear(norm(x, f"{block}.norm2"), f"{block}.mlp.up")
        x = x + linear(hidden * 0.5 * (1 + jax.lax.erf(hidden * math.sqrt(0.5))), f"{block}.mlp.down")
    return norm(x, "norm") @ params["embed.weight"].T


def loss_of(logits: Any, targets: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def training_step(model: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    import jax
    import optax

    def step(params: Any, state: Any, ids: Any, targets: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: loss_of(model(p, ids), targets))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def import_seconds(module: str) -> float:
    """In a fresh interpreter that has torch already."""
    code = f"import torch, time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import jax
    import optax
    import torch
    from gpt import GPT, GPTConfig

    import shardlib.jax as sj

    heads = 8
    config = GPTConfig(context=args.context, n_layer=args.layers, n_head=heads, d_model=args.width)
    torch.manual_seed(0)
    model = GPT(config)
    batch = torch.randint(256, (2, args.rows, args.context))
    mesh = sj.make_mesh(args.mesh)
    laid_out, (fn, params) = seconds(lambda: sj.compile_model(model, mesh))
    export, _ = seconds(lambda: fn.prepare(batch[0]))
    ids, targets = (jax.device_put(rows.numpy(), sj.named_sharding("batch@dp seq", mesh)) for rows in batch)
    result: dict[str, Any] = {
        "mesh": args.mesh,
        "parameters": sum(p.numel() for p in model.parameters()),
        "once": {
            "import shardlib": import_seconds("shardlib"),
            "import shardlib.jax": import_seconds("shardlib.jax"),
            "import jax alone": import_seconds("jax"),
            "parameters laid out": laid_out,
            "export": export,
        },
    }
    variants = {"interpreted": (fn, params), "plain": (lambda p, ids: plain_gpt(p, ids, heads), params)}
    if importlib.util.find_spec("flax") is not None:
        variants["flax"] = flax_gpt(model, mesh, args, heads)
    if importlib.util.find_spec("torchax") is not None and jax.device_count() == 1:
        variants["torchax"] = torchax_gpt(model, mesh)
    optimizer = optax.adamw(1e-3)
    programs, losses = {}, {}
    for name, (each, own) in variants.items():
        step, state = jax.jit(training_step(each, optimizer)), jax.jit(optimizer.init)(own)
        traced, lowered = seconds(functools.partial(step.lower, own, state, ids, targets))
        compiled, program = seconds(lowered.compile)
        result["once"] |= {f"{name}: traced": traced, f"{name}: compiled by XLA": compiled}
        result.setdefault("flops", {})[name] = program.cost_analysis()["flops"]
        programs[name] = functools.partial(program, own, state, ids, targets)
        losses[name] = three_losses(step, own, state, ids, targets)
    for name, step in our_steps(fn, params, optimizer, mesh, heads).items():
        begun = step.init(params)
        program = step.lower(begun, (ids, targets)).compile()
        result["flops"][name] = program.cost_analysis()["flops"]
        programs[name] = functools.partial(program, begun, (ids, targets))
        losses[name] = []
        for _ in range(3):
            begun, metrics = step(begun, (ids, targets))
            losses[name].append(float(metrics["loss"]))
    if any(abs(a - b) > 1e-5 for each in losses.values() for a, b in zip(each, losses["plain"], strict=True)):
        raise SystemExit(f"They are different models: losses {losses}")
    rounds: dict[str, list[float]] = {name: [] for name in programs}
    for order in alternate(list(programs), args.rounds):
        for name in order:
            taken, _ = seconds(functools.partial(run, programs[name]))
            rounds[name].append(taken)
    result["step"] = {name: statistics.median(taken) for name, taken in rounds.items()}
    result["against"] = {
        name: compared(rounds["interpreted"], rounds[name]) for name in variants if name != "interpreted"
    }
    result["train_step"] = {
        f"{ours} / {name}": compared(rounds[ours], rounds[name])
        for ours in ("train_step", "train_step by rules")
        for name in ("plain", "flax", "torchax")
        if name in rounds
    }
    result["depths"] = {depth: compilation(args, int(depth)) for depth in args.depths.split(",") if depth}
    return result


def our_steps(fn: Any, params: Any, optimizer: Any, mesh: Any, heads: int) -> dict[str, Any]:
    """shardlib's step of the compiled model, and of the plain one with the same layouts; they keep their state."""
    import shardlib.jax as sj

    rules = {f"^{name}": sj.from_named_sharding(array.sharding, array.ndim) for name, array in params.items()}

    def plain(p: Any, batch: Any) -> Any:
        return loss_of(plain_gpt(p, batch[0], heads), batch[1])

    def compiled(p: Any, batch: Any) -> Any:
        return loss_of(fn(p, batch[0]), batch[1])

    return {
        "train_step": sj.train_step(compiled, optimizer, fn, donate=False),
        "train_step by rules": sj.train_step(plain, optimizer, rules, mesh, donate=False),
    }


def compilation(args: argparse.Namespace, depth: int) -> dict[str, dict[str, float]]:
    """Seconds of processor time to export, trace and compile a loss and its gradients, unrolled and scanned."""
    import jax
    import torch
    from gpt import GPT, GPTConfig

    import shardlib.jax as sj

    model = GPT(GPTConfig(context=args.context, n_layer=depth, n_head=8, d_model=args.width))
    ids = torch.zeros(args.rows, args.context, dtype=torch.int64)
    found = {}
    for name, scan in (("unrolled", False), ("scanned", True)):
        fn, params = sj.compile_model(model, sj.make_mesh(args.mesh), scan=scan)
        program = jax.jit(jax.value_and_grad(lambda p, fn=fn: loss_of(fn(p, ids), ids.numpy())))
        start = time.process_time()
        fn.prepare(ids)
        exported = time.process_time()
        lowered = program.lower(params)
        traced = time.process_time()
        lowered.compile()
        taken = {"export": exported - start, "trace": traced - exported, "compile": time.process_time() - traced}
        found[name] = {**taken, "lines": float(lowered.as_text().count("\n"))}
    return found


def run(program: Callable[[], Any]) -> Any:
    import jax

    return jax.block_until_ready(program())


def flax_gpt(model: Any, mesh: Any, args: argparse.Namespace, heads: int) -> tuple[Callable[..., Any], Any]:
    """The model in flax as a function, and torch's parameters as its own, laid out alike."""
    import _flax_gpt

    import shardlib.jax as sj

    module = _flax_gpt.GPT(256, args.context, args.layers, heads, args.width)
    tree = _flax_gpt.params_of(dict(model.named_parameters()), args.layers, heads)
    return lambda p, ids: module.apply({"params": p}, ids), sj.shard_params(tree, mesh, _flax_gpt.RULES)


def torchax_gpt(model: Any, mesh: Any) -> tuple[Callable[..., Any], Any]:
    """The model as torchax runs it, and its parameters."""
    import jax
    from _torchax import imported

    states, run = imported().extract_jax(model)
    names = {name for name, _ in model.named_parameters()}
    states = jax.device_put(states, jax.NamedSharding(mesh, jax.P()))
    kept = {name: array for name, array in states.items() if name not in names}
    return lambda p, ids: run({**kept, **p}, (ids,)), {name: states[name] for name in states if name in names}


def three_losses(step: Callable[..., Any], params: Any, state: Any, *batch: Any) -> list[float]:
    losses = []
    for _ in range(3):
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
    return losses


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"GPT of {result['parameters']:,} parameters on {result['mesh']}")
    for title, justify in (("what", "left"), ("seconds", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for name, taken in {**result["once"], **{f"{n}: a step": t for n, t in result["step"].items()}}.items():
        table.add_row(name, f"{taken:.4f}")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    for name, found in result["against"].items():
        counted = result["flops"]["interpreted"] / result["flops"][name]
        console.print(
            f"interpreted / {name}: a step {written(found)}, operations counted by XLA {counted:.3f}",
            soft_wrap=True,
        )
    for name, found in result["train_step"].items():
        counted = math.prod(result["flops"][each] ** at for each, at in zip(name.split(" / "), (1, -1), strict=True))
        console.print(f"{name}: a step {written(found)}, operations counted by XLA {counted:.3f}", soft_wrap=True)
    for depth, each in result["depths"].items():
        for name, found in each.items():
            told = ", ".join(f"{what} {number:.1f}" for what, number in found.items())
            console.print(f"{depth} layers, {name}: {told}", soft_wrap=True)


def main() -> None:
    args = parser().parse_args()
    if args.quick:
        args.layers, args.width, args.rows, args.context, args.rounds = 1, 32, 4, 16, 3
    devices = math.prod(int(part.split("=")[1]) for part in args.mesh.split(","))
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={devices}")
    sys.path.insert(0, str(EXAMPLES))
    result = measure(args)
    show(result)
    if args.json:
        _report.write(args.json, result)


if __name__ == "__main__":
    main()
