"""A GPT of flax.nnx, sharded by a rule file, without torch: the plan first, then training, a checkpoint, and on.

    python examples/nnx_gpt.py --mesh dp=2,tp=2 --devices 4                    # pretends four CPU devices
    python examples/nnx_gpt.py --mesh dp=2,tp=2 --devices 4 --folder run      # saves; run again, it goes on from there
    python examples/nnx_gpt.py --mesh dp=1,tp=1                                # the same losses on one device

It trains on the source files of Python's standard library, one token a byte. Needs `shardlib[jax]`, flax, and orbax for
`--folder`.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

RULES = Path(__file__).with_name("nnx_gpt.toml")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--mesh", default="dp=1,tp=1")
    p.add_argument("--devices", type=int, help="pretend so many CPU devices")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--zero", type=int, choices=[0, 1, 3], default=1)
    p.add_argument("--folder", type=Path, help="save the state here at the end; begin from what is there")
    return p


def main(args: argparse.Namespace) -> list[float]:
    if args.devices:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    import jax
    import optax
    from flax import nnx

    import shardlib as sl
    import shardlib.jax as sj

    jax.config.update("jax_enable_x64", True)
    graph, params, *rest = nnx.split(build(), nnx.Param, ...)

    def loss_fn(params: Any, tokens: Any) -> Any:
        logits = nnx.merge(graph, params, *rest)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    mesh, transforms = sj.make_mesh(args.mesh), [sl.zero(args.zero)] if args.zero else []
    print(sj.plan(params, mesh, RULES, transforms=transforms))
    step = sj.train_step(loss_fn, optax.adamw(1e-3), RULES, mesh, transforms=transforms, clip=1.0)
    state = restored(args.folder, step.abstract(params)) or step.init(params)
    losses = []
    for number in range(int(state.step), args.steps):
        state, metrics = step(state, batch(number))
        losses.append(float(metrics["loss"]))
        print(f"step {number:3d}  loss {losses[-1]:.12f}  gradient norm {float(metrics['grad_norm']):.6f}")
    save(args.folder, state)
    return losses


def build(context: int = 32, width: int = 64, heads: int = 4, layers: int = 2) -> Any:
    """Nothing in the model knows of shardlib."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def attend(query: Any, key: Any, value: Any, *, mask: Any, **_options: Any) -> Any:
        """Attend in float64: flax's own function computes its softmax in float32, whatever the dtype is."""
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), value)

    rngs, f64 = nnx.Rngs(0), {"param_dtype": jnp.float64}

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs, **f64) for _ in range(2))
            self.attention = nnx.MultiHeadAttention(heads, width, decode=False, attention_fn=attend, rngs=rngs, **f64)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs, **f64)
            self.down = nnx.Linear(4 * width, width, rngs=rngs, **f64)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class GPT(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(256, width, rngs=rngs, **f64)
            self.position = nnx.Embed(context, width, rngs=rngs, **f64)
            self.blocks = nnx.List([Block() for _ in range(layers)])
            self.norm = nnx.LayerNorm(width, rngs=rngs, **f64)
            self.head = nnx.Linear(width, 256, rngs=rngs, **f64)

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return GPT()


def batch(step: int, rows: int = 8, context: int = 32) -> Any:
    """The rows of a step: the same ones on every mesh."""
    import numpy as np

    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")))
    length = context + 1
    first = step * rows * length
    found = np.frombuffer(text, "uint8", rows * length, first % (len(text) - rows * length))
    return found.reshape(rows, length).astype("int32")


def restored(folder: Path | None, abstract: Any) -> Any:
    """Read the state of an earlier run, which may have had another mesh: each device reads its own shards."""
    if folder is None or not (folder / "state").exists():
        return None
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder.resolve() / "state", abstract)


def save(folder: Path | None, state: Any) -> None:
    if folder is not None:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder.resolve() / "state", state, force=True)


if __name__ == "__main__":
    main(parser().parse_args())
