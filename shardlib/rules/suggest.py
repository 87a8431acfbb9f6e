"""Suggestion of rules for a model without any: from its modules, with reasons; what needs a look is marked as a guess.

Evidence is: usual names of attention and MLPs, pairs of linear layers that widen and narrow again, convolutions that
follow each other in a block, an output as wide as an embedding is long, tied weights, and attributes with the number of
heads.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from shardlib.rules._chains import FACTORS, Chained, alone, chains
from shardlib.rules._model import ModelIndex, is_layer
from shardlib.rules._rules import Rules
from shardlib.rules.dims import dims_of
from shardlib.rules.patterns import NameIndex, compile_pattern

if TYPE_CHECKING:
    from torch import nn

__all__ = ["complete", "suggest"]

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
_Q = ("q", "q_proj", "query", "wq", "to_q", "q_lin", "query_proj", "linear_q", "add_q_proj")
_K = ("k", "k_proj", "key", "wk", "to_k", "k_lin", "key_proj", "linear_k", "add_k_proj")
_V = ("v", "v_proj", "value", "wv", "to_v", "v_lin", "value_proj", "linear_v", "add_v_proj")
_KV = ("kv", "kv_proj", "key_value", "wkv", "to_kv", "kv_lin", "linear_kv")
_FUSED = ("qkv", "qkv_proj", "c_attn", "wqkv", "in_proj", "to_qkv", "attn_qkv")
_HEAD_MAJOR = ("query_key_value",)
_UP = (
    "up",
    "up_proj",
    "gate",
    "gate_proj",
    "fc1",
    "c_fc",
    "w1",
    "w3",
    "wi",
    "wi_0",
    "wi_1",
    "lin1",
    "linear1",
    "linear_in",
)
_DOWN = ("down", "down_proj", "fc2", "c_proj", "w2", "wo", "lin2", "linear2", "linear_out")
_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads", "nh", "h")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_HEAD_DIM = ("head_dim", "d_head", "attention_head_size", "key_value_proj_dim", "d_kv")
_KEY_DIM = ("key_dim",)
_DIGITS = "0123456789"
_ROLES = ("colwise", "rowwise", "replicate")
_TOKENS = re.compile(r"tok|word|wte|vocab|shared|^embed$|^embedding$|^embeddings$", re.IGNORECASE)
_NOT_TOKENS = re.compile(r"type|pos|segment|wpe|relative", re.IGNORECASE)


def suggest(model: nn.Module) -> Rules:
    """Propose rules for a model; `rules.notes` gives reasons by key, and marks as a guess what has to be looked at.

    Every parameter gets a rule; one that is not recognised is replicated. The model may be on `meta`.

    >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> print(suggest(mlp).to_toml())
    description = "Suggested for Sequential from its modules; check what is a guess"
    models = ["torch.Sequential"]
    <BLANKLINE>
    [axes]
    ff = "tp"
    <BLANKLINE>
    [params]
    # widens 8 to 32 and "2" narrows it again
    0 = "ff"
    # narrows what "0" widened
    2 = "rowwise"
    <BLANKLINE>
    """
    draft = _Draft(ModelIndex(model))
    draft.embeddings()
    draft.fill()
    return draft.rules()


def complete(rules: Rules, model: nn.Module) -> Rules:
    """Add to rules what `suggest` proposes for attention, MLPs and convolutions of which the rules name no layer.

    A plan for the language model of a model of text and images leaves the blocks of its vision tower alone: they get
    rules too. Embeddings and output layers do not. Dims that are added have other names than those of the rules.

    >>> class Tower(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)) for _ in range(2))
    >>> model = nn.ModuleDict({"text": Tower(), "image": Tower()})
    >>> complete(Rules({"text.blocks.*.0": "colwise", "text.blocks.*.1": "rowwise"}), model).rules.keys()
    dict_keys(['text.blocks.*.0', 'text.blocks.*.1', 'image.blocks.*.0', 'image.blocks.*.1'])
    """
    draft = _Draft(ModelIndex(model), taken=frozenset(rules.dim_names))
    draft.fill()
    draft.keep_beside(rules.rules)
    if not draft.entries:
        return rules
    draft.notes = {name: f"suggested: {note}" for name, note in draft.notes.items()}
    made = draft.rules()
    return replace(
        rules,
        rules={**rules.rules, **made.rules},
        activations={**rules.activations, **made.activations},
        axes={**rules.axes, **made.axes},
        sizes={**rules.sizes, **made.sizes},
        notes={**rules.notes, **made.notes},
    )


@dataclass(frozen=True)
class _Linear:
    """A linear layer, by the folded name that all layers like it share."""

    name: str
    first: str  # the full name of the first layer of that name
    inputs: int
    outputs: int

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]


class _Heads(NamedTuple):
    """The names of the factors of an attention's projections: heads, heads of keys and values, and the inner one."""

    own: str
    kv: str
    inner: str


@dataclass
class _Draft:
    index: ModelIndex
    entries: dict[str, str] = field(default_factory=dict)
    activations: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int | str] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)  # factors whose size follows from others
    taken: frozenset[str] = frozenset()  # names of dims that mean something else already

    def __post_init__(self) -> None:
        self.names = NameIndex([*self.index.modules, *self.index.leaf])
        self.linears: dict[str, _Linear] = {}
        self.same: dict[str, list[str]] = {}  # the full names of each
        for full, module in self.index.modules.items():
            shape = _linear_shape(module)
            if shape is not None:
                self.linears.setdefault(_folded(full), _Linear(_folded(full), full, *shape))
                self.same.setdefault(_folded(full), []).append(full)

    def fill(self) -> None:
        """Add a rule for every parameter without one."""
        for group in self.groups():
            self.attention(group)
            self.mlp(group)
        self.experts()
        self.chains()
        for group in self.groups():
            self.projections(group)
        self.replicate_the_rest()

    def keep_beside(self, patterns: Iterable[str]) -> None:
        """Keep what shards layers where the patterns find nothing in the same module."""
        found = {name for pattern in patterns for name in self.names.select(compile_pattern(pattern))}
        laid_out = {_folded(name) for name in found if name in self.index.leaf or self.index.own[name]}
        named = laid_out | {name.rpartition(".")[0] for name in laid_out}
        self.entries = {
            name: value
            for name, value in self.entries.items()
            if value != "replicate" and name.rpartition(".")[0] not in named
        }
        kept = {name.rpartition(".")[0] for name in self.entries} | self.entries.keys()
        self.activations = {n: value for n, value in self.activations.items() if n.removesuffix(".output") in kept}
        self.notes = {n: note for n, note in self.notes.items() if n in self.entries or n in self.activations}

    def set(self, name: str, value: str, note: str) -> None:
        if name not in self.entries:
            self.entries[name], self.notes[name] = value, note

    def guess(self, name: str, value: str, note: str) -> None:
        """Set what names and shapes do not prove: whoever reads the layout has to look."""
        self.set(name, value, f"guess: {note}")

    def groups(self) -> Iterable[list[_Linear]]:
        """Return the linear layers by block: by the element of a list of modules that contains them. A list that has
        one layer, beside others of other kinds, is a part of the block around it."""
        blocks: dict[str, list[_Linear]] = {}
        for linear in self.linears.values():
            blocks.setdefault(_block_of(linear.name), []).append(linear)
        parts = {block for block, found in blocks.items() if len(found) == 1 and self._is_part(found[0])}
        made: dict[str, list[_Linear]] = {}
        for linear in self.linears.values():
            block = _block_of(linear.name)
            made.setdefault(_block_of(block[:-2]) if block in parts else block, []).append(linear)
        return made.values()

    def _is_part(self, linear: _Linear) -> bool:
        """Return whether each of the blocks around a list has one layer of a name inside the list."""
        around = _block_of(_block_of(linear.name)[:-2]).count("*")
        names = self.same[linear.name]
        return around > 0 and len(names) == len({tuple(_NUMBER.findall(name)[:around]) for name in names})

    # Embeddings and the output layer.

    def embeddings(self) -> None:
        tables = {n: m for n, m in self.index.modules.items() if is_layer(m, "Embedding")}
        tokens = {name: table for name, table in tables.items() if self._holds_tokens(name, table, tables)}
        for name in tokens:
            self.set(_folded(name), "rowwise", "a table of tokens; its rows, the vocabulary, are sharded")
        sizes = {table.num_embeddings for table in tokens.values()}
        for linear in self.linears.values():
            if linear.outputs in sizes and "*" not in linear.name and linear.inputs != linear.outputs:
                tied = self._tied_to(linear.first, tokens)
                why = f'tied to "{tied}"' if tied else "as wide as the vocabulary"
                self.set(linear.name, "vocab", f"the output layer, {why}")

    def _holds_tokens(self, name: str, table: Any, tables: dict[str, Any]) -> bool:
        last = name.rpartition(".")[2]
        if _NOT_TOKENS.search(last) or (self._tied_to(name, {}) is None and "*" in _folded(name)):
            return False
        largest = max(other.num_embeddings for other in tables.values())
        return bool(_TOKENS.search(last)) or table.num_embeddings == largest

    def _tied_to(self, name: str, others: Iterable[str]) -> str | None:
        tied = self.index.leaf[f"{name}.weight" if name else "weight"].names
        return next((other for other in others if f"{other}.weight" in tied), None)

    # Attention.

    def attention(self, group: list[_Linear]) -> None:
        for linear in group:
            if linear.last in _Q:
                self._separate(linear, group)
            elif linear.last in _HEAD_MAJOR:
                self._fused(linear, group, head_major=True)
            elif linear.last.lower() in _FUSED and linear.outputs == 3 * linear.inputs:
                self._fused(linear, group, head_major=False)
            elif linear.last.lower() in _FUSED and self._attribute(linear, _KEY_DIM):
                self._wider_values(linear, group)

    def _separate(self, q: _Linear, group: list[_Linear]) -> None:
        named = {each.last: each for each in group if each.parent == q.parent}

        def first(names: tuple[str, ...]) -> _Linear | None:
            return next((named[name] for name in names if name in named), None)

        k, v = (named.get(names[_Q.index(q.last)], first(names)) for names in (_K, _V))
        kv = first(_KV)
        if kv is not None and kv.outputs == 2 * q.outputs:
            self._fused_pair(q, kv, group)
            return
        if k is None or v is None:
            return
        heads = self._heads_of(q)
        found = self.set if heads else self.guess
        found(q.name, f"({heads.own} {heads.inner})" if heads else "colwise", _split_by(heads, "query"))
        for linear in (k, v):
            fewer = linear.outputs < q.outputs
            text = f"({heads.kv if fewer else heads.own} {heads.inner})" if heads else "colwise"
            found(linear.name, text, _split_by(heads, "key and value" if fewer else "attention"))
        self._output(q.outputs, v, group)

    def _fused_pair(self, q: _Linear, kv: _Linear, group: list[_Linear]) -> None:
        heads = self._heads_of(q)
        if not heads:
            return
        self.sizes["kv"] = 2
        self.set(q.name, f"({heads.own} {heads.inner})", _split_by(heads, "query"))
        self.guess(kv.name, f"(kv {heads.own} {heads.inner})", "k and v are stacked; each is sharded by heads")
        self._output(q.outputs, kv, group)

    def _heads_of(self, q: _Linear) -> _Heads | None:
        """Return the names of the factors of a projection, once the size of one is known; None when none is."""
        if path := self._attribute(q, _HEAD_DIM):
            return _Heads(self._open("heads"), self._open("kv_heads"), self._sized("head_dim", path))
        if path := self._attribute(q, _HEADS):
            kv = self._attribute(q, _KV_HEADS)
            return _Heads(
                self._sized("heads", path), self._sized("kv_heads", kv) if kv else self._open("kv_heads"), "head"
            )
        return None

    def _fused(self, linear: _Linear, group: list[_Linear], *, head_major: bool) -> None:
        path = self._attribute(linear, _HEADS, parts=3)
        if path:
            heads = self._sized("heads", path)
            text = f"({heads} qkv_head)" if head_major else f"(qkv {heads} head)"
            order = "head by head" if head_major else "one after the other"
            why = f'q, k and v are stacked {order}, the number of heads is "{path}"'
        else:
            text, why = "replicate", "fused q, k and v; no attribute tells the number of heads for (qkv heads head)"
        if text.startswith("(qkv"):
            self.sizes["qkv"] = 3
        self.guess(linear.name, text, why)
        if path:
            self._output(linear.outputs // 3, linear, group)

    def _wider_values(self, linear: _Linear, group: list[_Linear]) -> None:
        """Set fused q, k and v whose values are wider than queries and keys, as LeViT has them: head by head."""
        path = self._attribute(linear, _HEADS)
        if path:
            why = f'q, k and v are stacked head by head, the number of heads is "{path}"'
            self.guess(linear.name, f"({self._sized('heads', path)} qkv_head)", why)
            heads, keys = self._value(linear.first, path), self._value(linear.first, _KEY_DIM[0])
            self._output(linear.outputs - 2 * heads * keys, linear, group)

    def _output(self, width: int, after: _Linear, group: list[_Linear]) -> None:
        """Find the layer that reads the output of attention: the next one in the block that is as wide as all heads."""
        for linear in group[group.index(after) + 1 :]:
            if linear.inputs == width and linear.name not in self.entries and linear.last not in (*_Q, *_K, *_V):
                self.set(linear.name, "rowwise", f'takes the heads of "{after.parent}"')
                return

    def _attribute(self, linear: _Linear, candidates: tuple[str, ...], parts: int = 1) -> str | None:
        """Return the path of an attribute, on a module around a layer or its config, that divides one of the `parts` of
        its output, for all layers of its name."""
        paths = (*candidates, *(f"config.{each}" for each in candidates))
        found = (path for module in self.index.enclosing(linear.first) for path in paths if _read(module, path))
        return next(
            (path for path in found if all(self._divides(n, path, parts) for n in self.same[linear.name])), None
        )

    def _divides(self, name: str, path: str, parts: int) -> bool:
        """Return whether the innermost attribute of that path divides a layer's output."""
        size = self._value(name, path)
        shape = _linear_shape(self.index.modules[name])
        return type(size) is int and size > 0 and shape is not None and shape[1] // parts % size == 0

    def _value(self, name: str, path: str) -> Any:
        """Return an attribute of the innermost module around a name that has it."""
        return next((found for each in self.index.enclosing(name) if (found := _read(each, path)) is not None), None)

    def _sized(self, factor: str, path: str) -> str:
        """Record the source of a factor's size; another path for the same factor gets a name of its own."""
        free = (name for name in _numbered(factor) if name not in self.open | self.taken)
        return next(name for name in free if self.sizes.setdefault(name, path) == path)

    def _open(self, factor: str) -> str:
        """Return a name for a factor whose size follows from the other one."""
        name = next(name for name in _numbered(factor) if name not in self.sizes and name not in self.taken)
        self.open.add(name)
        return name

    # MLPs and experts.

    def mlp(self, group: list[_Linear]) -> None:
        free = [linear for linear in group if linear.name not in self.entries]
        for down in free:
            # A gate may be listed after the layer that narrows again; only its name tells it from the next pair.
            gates = [up for up in free if up.parent == down.parent and up.last in _UP]
            near = dict.fromkeys((*free[: free.index(down)], *gates))
            ups = [up for up in near if up.name not in self.entries and _widens(up, down)]
            if not ups:
                continue
            for up in ups:
                self._widening(up, down)
            self.set(down.name, "rowwise", f'narrows what "{ups[0].last}" widened')

    def _widening(self, up: _Linear, down: _Linear) -> None:
        if up.outputs == down.inputs:
            self.set(up.name, "ff", f'widens {up.inputs} to {up.outputs} and "{down.last}" narrows it again')
        else:
            self.sizes["gate_up"] = 2
            self.guess(
                up.name, "(gate_up ff)", f'twice as wide as "{down.last}" takes: two halves, one gating the other'
            )

    def experts(self) -> None:
        """Find raw three-dimensional parameters that widen and narrow, one slice per expert."""
        for module_name, own in self.index.own.items():
            shapes = {attr: tuple(self.index.leaf[full].tensor.shape) for attr, full in own.items()}
            downs = {attr: shape for attr, shape in shapes.items() if len(shape) == 3 and "down" in attr}
            for attr, (count, embed, ff) in downs.items():
                for other, shape in shapes.items():
                    if shape in ((count, ff, embed), (count, 2 * ff, embed)) and other != attr:
                        self._expert_pair(_folded(module_name), other, attr, fused=shape[1] != ff)

    def _expert_pair(self, module: str, up: str, down: str, *, fused: bool) -> None:
        if fused:
            self.sizes["gate_up"] = 2
        middle = "(gate_up ff)" if fused else "ff"
        self.guess(f"{module}.{up}", f"expert {middle} embed", "every expert widens; all are sharded in the same way")
        self.guess(f"{module}.{down}", "expert embed ff", "every expert narrows again")
        self.activations[f"{module}.output"] = "replicate"
        self.notes[f"{module}.output"] = "guess: the sum of the experts is replicated here"

    # Layers in a row, everything else, and the result.

    def chains(self) -> None:
        known = {name for name, module in self.index.modules.items() if self._entry(name) or not self.index.own[name]}
        made = chains(self.index, known, (*_Q, *_K, *_V, *_KV, *_FUSED, *_HEAD_MAJOR))
        lone = alone(self.index, known | made.keys())
        if made or lone:
            self.sizes.update(FACTORS)
        self._set_each(made | lone)
        for name, (value, _) in lone.items():
            if "out" not in value:  # it sums over no channels
                form = next(form for form in _forms(name) if form in self.entries)
                self.activations[f"{form}.output"] = "replicate"

    def projections(self, group: list[_Linear]) -> None:
        """Find layers of a repeated block that nothing follows by name: those that compute several tensors in one, such
        as scales and shifts of a norm, and those that narrow what several layers made."""
        for linear in group:
            names = self.same[linear.name]
            if "*" not in linear.name or linear.last in ("input", "output") or any(map(self._entry, names)):
                continue
            shapes = [shape for name in names if (shape := _linear_shape(self.index.modules[name]))]
            if all(outputs >= 2 * inputs for inputs, outputs in shapes):
                self.guess(linear.name, "colwise", "several tensors in one: they are gathered where they leave")
                self.activations[f"{linear.name}.output"] = "replicate"
            elif all(inputs >= 2 * outputs for inputs, outputs in shapes) and self._returns(linear, group):
                self.guess(linear.name, "rowwise", "narrows what other layers made")

    def _returns(self, linear: _Linear, group: list[_Linear]) -> bool:
        """Return whether a layer narrows to what another layer of its block takes, as a router of experts does not."""
        return any(linear.outputs == other.inputs for other in group if other is not linear)

    def _set_each(self, values: Mapping[str, Chained]) -> None:
        """Set rules by full names of modules, each under the shortest pattern whose modules all have that rule."""
        by_form: dict[str, set[str]] = {}
        for name in self.index.modules:
            if self.index.own[name]:
                value = values[name][0] if name in values else self._entry(name)
                for form in _forms(name):
                    by_form.setdefault(form, set()).add(value)
        for name, (value, note) in values.items():
            self.set(next(form for form in _forms(name) if len(by_form[form]) == 1), value, note)

    def _entry(self, module_name: str) -> str:
        return next((self.entries[form] for form in _forms(module_name) if form in self.entries), "")

    def replicate_the_rest(self) -> None:
        """Add one rule for each kind of parameter without one: by module where its dims are known, else by name."""
        rest: dict[str, Chained] = {}
        covered = {leaf.name for leaf in self.index.leaves if any(self._covered(name) for name in leaf.names)}
        taken = {form for name in covered for form in _forms(name)}
        for leaf in self.index.leaves:
            if leaf.kind == "buffer" or leaf.name in covered or any(self._covered(name) for name in leaf.names):
                continue
            module_name, module, _ = self.index.owner(leaf.name)
            if is_layer(module, "MultiheadAttention"):
                self.set(_folded(module_name), "heads", "attention of torch; its heads are sharded")
                self.set(f"{_folded(module_name)}.out_proj", "rowwise", "takes the heads")
            elif dims_of(module) is not None and module_name:
                rest[module_name] = "replicate", ""
            else:
                replicate = self.set if leaf.tensor.ndim < 2 else self.guess
                form = next((form for form in _forms(leaf.name) if form not in taken), leaf.name)
                replicate(form, "replicate", "" if leaf.tensor.ndim < 2 else "not recognised")
        self._set_each(rest)

    def _covered(self, name: str) -> bool:
        return _folded(name) in self.entries or bool(self._entry(self.index.owner(name)[0]))

    def rules(self) -> Rules:
        used = " ".join((*self.entries.values(), *self.activations.values()))
        # Heads and channels that do not divide over a mesh are replicated on it, and the plan notes it.
        axes = {"heads": "tp?", "kv_heads": "tp?", "ff": "tp", "vocab": "tp", "channel": "tp?", "groups": "tp?"}
        if "(gate_up ff)" in used:  # of a fused dim, factors have to divide
            axes["ff"] = "tp?"
        found = dict.fromkeys(re.findall(rf"\b(?:{'|'.join(axes)})\d*\b", used))
        model = type(self.index.model)
        keys = {name: self._key(name) for name in (*self.entries, *self.activations)}
        return Rules(
            dict(each for name, value in self.entries.items() for each in self._by_tensor(name, keys[name], value)),
            activations={keys[name]: value for name, value in self.activations.items()},
            axes={
                dim: axes[dim.rstrip(_DIGITS)]
                for dim in sorted(found, key=lambda dim: list(axes).index(dim.rstrip(_DIGITS)))
            },
            sizes={name: size for name, size in self.sizes.items() if re.search(rf"\b{name}\b", used)},
            description=f"Suggested for {model.__qualname__} from its modules; check what is a guess",
            models=(f"{model.__module__.partition('.')[0]}.{model.__qualname__}",),
            notes={keys[name]: note for name, note in self.notes.items() if note},
        )

    def _key(self, name: str) -> str:
        """Return the pattern for a folded name, anchored only where it would otherwise match other modules too."""
        base = name.removesuffix(".output") if name in self.activations else name
        loose, exact = (self.names.select(compile_pattern(pattern)) for pattern in (base, f"^{base}"))
        key = name if loose == exact else f"^{name}"
        # A module that is called "output" is named by its tensors: "attention.output" is what attention returns.
        return (
            f"{key}.*"
            if base == name and name.rpartition(".")[2] in ("input", "output") and name not in self.index.leaf
            else key
        )

    def _by_tensor(self, name: str, key: str, value: str) -> Iterator[tuple[str, str]]:
        """Iterate over the rules of an entry: one, or where the key names tensors, the full dims of each."""
        linear = self.linears.get(name)
        if linear is None or not key.endswith(".*") or value in _ROLES:
            yield key, value
            return
        registered = dims_of(self.index.modules[linear.first])
        assert registered is not None
        for attr, full in self.index.own[linear.first].items():
            dims = registered.dims(attr, self.index.leaf[full].tensor.ndim) or ()
            yield f"{key[:-1]}{attr}", " ".join(value if dim == registered.output else dim for dim in dims)


def _read(module: nn.Module, path: str) -> Any:
    try:
        return attrgetter(path)(module)
    except Exception:  # configurations raise errors of their own for what differs between layers
        return None


def _folded(name: str) -> str:
    """Replace numbers inside a name by `*`; a number at the end stays, since it distinguishes layers of one block."""
    return _NUMBER.sub("*", name)


def _block_of(folded: str) -> str:
    """Return the start of a folded name up to the innermost element of a list; "" where it is in none."""
    found = re.match(r"(?:.*\*\.)?", folded)
    assert found is not None
    return found[0]


def _forms(name: str) -> Iterator[str]:
    """Iterate over a name with all numbers inside it folded, with all but the last, and so on to the name itself.

    >>> list(_forms("stages.0.layers.1.conv"))
    ['stages.*.layers.*.conv', 'stages.*.layers.1.conv', 'stages.0.layers.1.conv']
    """
    yield from dict.fromkeys(
        _NUMBER.sub("*", name, count=count) if count else name for count in range(len(_NUMBER.findall(name)), -1, -1)
    )


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    registered = dims_of(module)
    weight = getattr(module, "weight", None)
    if registered is None or registered.output != "out" or registered.contracted != ("in",) or weight is None:
        return None
    dims = registered.dims("weight", weight.ndim)
    if dims is None or sorted(dims) != ["in", "out"]:
        return None
    return weight.shape[dims.index("in")], weight.shape[dims.index("out")]


def _widens(up: _Linear, down: _Linear) -> bool:
    """Return whether `down` narrows the output of `up` to its input width: by shape, or by name where widths are
    equal."""
    if up.inputs != down.outputs or up.outputs not in (down.inputs, 2 * down.inputs):
        return False
    named = up.last in _UP and down.last in _DOWN
    wrapped = up.parent == f"{down.parent}.*"  # in a module that gates, and stands before `down` in a list
    halves = up.outputs == 2 * down.inputs and (up.parent == down.parent or wrapped)
    gated = halves and ("gate" in up.last or up.last.lower() in _UP or wrapped)
    return named or gated or up.outputs == down.inputs > down.outputs


def _numbered(factor: str) -> Iterator[str]:
    """Iterate over `factor`, `factor2`, `factor3`, ..."""
    yield factor
    yield from (f"{factor}{number}" for number in itertools.count(2))


def _split_by(heads: _Heads | None, what: str) -> str:
    return f"{what} projection, sharded by heads" if heads else f"{what} projection; check that heads divide over tp"
