"""Recurrent networks: a `lax.scan` over time for each layer and direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.jax._table import lowering

__all__: list[str] = []

State = tuple[Any, ...]
# Of the gates' inputs, the state, and the weights that act on the state.
Cell = Callable[[Any, State, "_Weights"], State]


class _Weights:
    """The weights of one layer in one direction, as torch lists them."""

    def __init__(self, listed: Sequence[Any], has_biases: bool) -> None:
        given = iter(listed)
        self.from_input, self.from_state = next(given), next(given)
        self.bias: Any = next(given) if has_biases else 0
        self.state_bias: Any = next(given) if has_biases else 0
        self.projection = next(given, None)


def _lstm_cell(gates: Any, state: State, weights: _Weights) -> State:
    hidden, cell = state
    i, f, g, o = jnp.split(gates + hidden @ weights.from_state.T + weights.state_bias, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return hidden if weights.projection is None else hidden @ weights.projection.T, cell


def _gru_cell(gates: Any, state: State, weights: _Weights) -> State:
    (hidden,) = state
    r, z, n = jnp.split(gates, 3, axis=-1)
    own_r, own_z, own_n = jnp.split(hidden @ weights.from_state.T + weights.state_bias, 3, axis=-1)
    new = jnp.tanh(n + jax.nn.sigmoid(r + own_r) * own_n)
    return (new + jax.nn.sigmoid(z + own_z) * (hidden - new),)


def _plain_cell(activation: Callable[[Any], Any]) -> Cell:
    return lambda gates, state, weights: (activation(gates + state[0] @ weights.from_state.T + weights.state_bias),)


def _layer(cell: Cell, x: Any, state: State, weights: _Weights, reverse: bool) -> tuple[Any, State]:
    """Run one layer in one direction over `(time, batch, features)`."""
    gates = x @ weights.from_input.T + weights.bias  # of all times at once

    def step(before: State, now: Any) -> tuple[State, Any]:
        after = cell(now, before, weights)
        return after, after[0]

    last, outputs = lax.scan(step, state, gates, reverse=reverse)
    return outputs, last


def _recurrent(
    cell: Cell,
    x: Any,
    first: State,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    key: Any,
) -> tuple[Any, ...]:
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    lasts: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            weights = _Weights(params[at * each : (at + 1) * each], has_biases)
            y, last = _layer(cell, x, tuple(s[at] for s in first), weights, reverse=direction == 1)
            outputs.append(y)
            lasts.append(last)
        x = jnp.concatenate(outputs, axis=-1)
        if train and dropout > 0 and layer < num_layers - 1:
            kept = jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - dropout, x.shape)
            x = jnp.where(kept, x / (1 - dropout) if dropout < 1 else 0, 0)
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    return x, *(jnp.stack(states) for states in zip(*lasts, strict=True))


@lowering("aten::lstm.input", random=True)
def _lstm(x: Any, hx: Sequence[Any], *args: Any, key: Any = None) -> tuple[Any, ...]:
    return _recurrent(_lstm_cell, x, tuple(hx), *args, key=key)


@lowering("aten::gru.input", random=True)
def _gru(x: Any, hx: Any, *args: Any, key: Any = None) -> tuple[Any, ...]:
    return _recurrent(_gru_cell, x, (hx,), *args, key=key)


@lowering("aten::rnn_tanh.input", random=True)
def _rnn_tanh(x: Any, hx: Any, *args: Any, key: Any = None) -> tuple[Any, ...]:
    return _recurrent(_plain_cell(jnp.tanh), x, (hx,), *args, key=key)


@lowering("aten::rnn_relu.input", random=True)
def _rnn_relu(x: Any, hx: Any, *args: Any, key: Any = None) -> tuple[Any, ...]:
    return _recurrent(_plain_cell(jax.nn.relu), x, (hx,), *args, key=key)
