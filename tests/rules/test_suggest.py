"""Suggestions for a model that nobody wrote rules for."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from shardlib import layouts
from shardlib._mesh_shape import MeshShape
from shardlib._plan import make_plan
from shardlib.rules import Rules, suggest
from shardlib.rules._values import spelled
from shardlib.rules.suggest import complete
from tests.families.transformer_models import small, transformers
from tests.rules.zoo import MLP, ConvNet, Downsampled, Gated, Grouped, Tiny, on_meta


def hugging_face(name: str) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, name)(small(name))


def test_what_is_suggested_and_why() -> None:
    assert suggest(on_meta(Tiny)).to_toml() == (
        'description = "Suggested for Tiny from its modules; check what is a guess"\nmodels = '
        '["tests.Tiny"]\n\n[axes]\nheads = "tp?"\nff = "tp"\nvocab = "tp"\n\n[sizes]\nheads = "n_head"\nqkv = '
        '3\n\n[params]\n# a table of tokens; its rows, the vocabulary, are sharded\nembed = "rowwise"\n# '
        'the output layer, tied to "embed"\nhead = "vocab"\n# guess: q, k and v are stacked one after the other, the '
        'number of heads is "n_head"\n"blocks.*.attn.qkv" = "(qkv heads head)"\n# takes the heads of '
        '"blocks.*.attn"\n"blocks.*.attn.proj" = "rowwise"\n# widens 16 to 64 and "down" narrows it '
        'again\n"blocks.*.mlp.up" = "ff"\n# narrows what "up" widened\n"blocks.*.mlp.down" = '
        '"rowwise"\n"blocks.*.norm" = "replicate"\n'
    )


class Attention(nn.Module):
    """Attention that knows its number of heads."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))


def test_heads_that_do_not_divide_are_replicated_and_the_plan_says_so() -> None:
    model = nn.Sequential(Attention(3, 24))
    made = make_plan(model, "tp=2", suggest(model))
    assert made["0.q_proj.weight"].local_shape(made.mesh) == (24, 24)
    assert "does not divide" in made["0.q_proj.weight"].note
    assert made["0.o_proj.weight"].local_shape(made.mesh) == (24, 12)
    assert make_plan(model, "tp=3", suggest(model))["0.q_proj.weight"].local_shape(MeshShape.of("tp=3")) == (8, 24)


def test_two_numbers_of_heads_in_one_model_have_different_names() -> None:
    first, second = Attention(4, 16), Attention(2, 16)
    first.head_dim, second.attention_head_size = 4, 8
    model = nn.ModuleDict({"image": first, "text": second})
    rules = suggest(model)
    assert rules.sizes == {"head_dim": "head_dim", "head_dim2": "attention_head_size"}
    made = make_plan(model, "tp=2", rules)
    assert made["text.q_proj.weight"].stored.text == "(heads=2@tp head_dim2=8) in"


def test_a_size_has_to_be_known_to_all_layers_of_a_name() -> None:
    model = nn.ModuleList([nn.ModuleDict({"attn": Attention(4, 16)}), nn.ModuleDict({"attn": Attention(4, 16)})])
    model[0].attn.head_dim = 4
    rules = suggest(model)
    assert rules.sizes == {"heads": "num_heads"}
    del model[1].attn.num_heads
    assert suggest(model).sizes == {} and make_plan(model, "tp=2", suggest(model))["1.attn.q_proj.weight"].stored.axes


def test_a_module_called_output_is_named_by_its_tensors() -> None:
    model = nn.ModuleDict({"attention": nn.ModuleDict({"output": nn.LayerNorm(4)})})
    rules = suggest(model)
    assert make_plan(model, "tp=2", rules)["attention.output.weight"].rule == "attention.output.*"


def test_heads_by_their_number_and_by_their_width_do_not_mix() -> None:
    first, second = Attention(4, 16), Attention(2, 16)
    del second.num_heads
    second.head_dim = 8
    model = nn.ModuleDict({"image": first, "text": second})
    rules = suggest(model)
    assert rules.axes == {"heads": "tp?", "heads2": "tp?"}
    made = make_plan(model, "tp=2", rules)
    assert made["image.q_proj.weight"].stored.text == "(heads=4@tp head=4) in"
    assert made["text.q_proj.weight"].stored.text == "(heads2=2@tp head_dim=8) in"


FAMILIES = [
    ("gpt2", "GPT2LMHeadModel"),
    ("llama", "LlamaForCausalLM"),
    ("llama", "Qwen3ForCausalLM"),
    ("bert", "BertForMaskedLM"),
    ("bert", "BertForSequenceClassification"),
    ("vit", "ViTForImageClassification"),
]


@pytest.mark.parametrize(("file", "name"), FAMILIES)
def test_the_guess_is_what_the_layout_file_says(file: str, name: str) -> None:
    model = hugging_face(name)
    guessed, known = (rules.resolve(model, "tp=2") for rules in (suggest(model), layouts.load(file)))
    for tensor, layout in known.tensors.items():
        assert guessed.tensors[tensor].layout.placements("tp=2") == layout.layout.placements("tp=2"), tensor
    assert {key: border.layout for key, border in guessed.borders.items()} == {
        key: border.layout for key, border in known.borders.items()
    }


class FusedPair(nn.Module):
    """Attention with queries of their own, and keys and values fused in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.h = 4
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)


def test_keys_and_values_fused_apart_from_queries() -> None:
    rules = suggest(FusedPair())
    text = {name: str(tensor.layout) for name, tensor in rules.resolve(FusedPair(), "tp=2").tensors.items()}
    assert text["q.weight"] == "(heads@tp head) in"
    assert text["kv.weight"] == "(kv heads@tp head) in"
    assert text["out.weight"] == "out in@tp"


def test_encoder_decoder_attention_and_gated_mlps() -> None:
    config = transformers.T5Config(
        d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=52, vocab_size=67, feed_forward_proj="gated-gelu"
    )
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    tensors = suggest(model).resolve(model, "tp=2").tensors
    split = {name.split("layer.")[-1] for name, tensor in tensors.items() if tensor.layout.axes and "decoder" in name}
    assert split == {
        *(f"0.SelfAttention.{each}.weight" for each in "qkvo"),
        *(f"1.EncDecAttention.{each}.weight" for each in "qkvo"),
        *(f"2.DenseReluDense.{each}.weight" for each in ("wi_0", "wi_1", "wo")),
    }
    assert str(tensors["shared.weight"].layout) == "vocab@tp embed"


def test_experts_are_split_inside() -> None:
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=52, num_hidden_layers=2, num_attention_heads=4, vocab_size=67
    )
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    rules = suggest(model)
    resolution = rules.resolve(model, "tp=2")
    experts = "model.layers.0.mlp.experts"
    assert str(resolution.tensors[f"{experts}.gate_up_proj"].layout) == "expert (gate_up ff@tp) embed"
    assert str(resolution.tensors[f"{experts}.down_proj"].layout) == "expert embed ff@tp"
    assert str(resolution.borders[experts, "output"].layout) == "..."
    assert "# guess: the sum of the experts is replicated here\n" in rules.to_toml()


class Filters(nn.Module):
    """Raw parameters, which widen and narrow as those of experts do, but say nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"slow": (2, 4, 6), "fast": (2, 6, 4), "down": (6,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


def test_raw_parameters_that_nothing_tells_from_others_are_left_whole() -> None:
    rules = suggest(nn.ModuleDict({"filters": Filters()}))
    assert {value.name for value in rules.rules.values()} == {"replicate"} and not rules.activations


def test_attention_of_torch() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False)
    layouts_of = {name: str(t.layout) for name, t in suggest(model).resolve(model, "tp=2").tensors.items()}
    assert layouts_of["layers.1.self_attn.in_proj_weight"] == "(qkv heads@tp head) embed"
    assert layouts_of["layers.1.self_attn.out_proj.weight"] == "out in@tp"
    assert layouts_of["layers.1.linear1.weight"] == "ff@tp in"
    assert layouts_of["layers.1.linear2.weight"] == "out in@tp"


class Bloomy(nn.Module):
    """Attention whose q, k and v lie head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.query_key_value = nn.Linear(16, 48)
        self.dense = nn.Linear(16, 16)


def test_heads_that_hold_q_k_and_v_each() -> None:
    model = nn.ModuleDict({"attn": Bloomy()})
    tensors = suggest(model).resolve(model, "tp=2").tensors
    assert tensors["attn.query_key_value.bias"].layout.text == "(heads=4@tp qkv_head=12)"
    assert str(tensors["attn.dense.weight"].layout) == "out in@tp"


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)


def test_a_fused_projection_without_a_number_of_heads_is_left_whole() -> None:
    rules = suggest(nn.ModuleDict({"attn": Headless()}))
    assert {key: value.name for key, value in rules.rules.items()} == {
        "attn.qkv": "replicate",
        "attn.proj": "replicate",
    }
    assert rules.notes["attn.qkv"] == (
        "guess: fused q, k and v; no attribute tells the number of heads for (qkv heads head)"
    )


def test_layers_in_a_row_are_paired_one_after_the_other() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    layouts_of = {n: str(t.layout) for n, t in suggest(model).resolve(model, "tp=2").tensors.items() if "weight" in n}
    assert layouts_of == {
        "0.weight": "ff@tp in",
        "2.weight": "out in@tp",
        "3.weight": "ff@tp in",
        "5.weight": "out in@tp",
    }


GATED = {"w1": (8, 32), "w2": (32, 8), "w3": (8, 32)}


def test_a_gate_may_be_listed_last() -> None:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({n: nn.Linear(*s) for n, s in GATED.items()})})
    layouts_of = {n: str(t.layout) for n, t in suggest(model).resolve(model, "tp=2").tensors.items() if "weight" in n}
    assert layouts_of == {"mlp.w1.weight": "ff@tp in", "mlp.w2.weight": "out in@tp", "mlp.w3.weight": "ff@tp in"}


@pytest.mark.parametrize(
    "model",
    [
        ConvNet,
        Tiny,
        Downsampled,
        Gated,
        Grouped,
        lambda: MLP(16),
        lambda: nn.LSTM(4, 8),
        lambda: nn.Linear(4, 4),
        lambda: nn.Sequential(Grouped(), Gated(), Downsampled(), Tiny()),
    ],
)
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=4", "dp=2"])
def test_a_suggestion_names_every_parameter_and_resolves(model: type[nn.Module], mesh: str) -> None:
    built = on_meta(model)
    rules = suggest(built)
    assert rules.unmatched == "error"
    assert rules.resolve(built, mesh).unmatched == ()
    assert Rules.from_toml(rules.to_toml()) == rules


def test_a_pattern_is_anchored_where_it_would_find_more() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "block": nn.ModuleDict({"norm": nn.LayerNorm(4)})})
    assert list(suggest(model).rules) == ["^norm", "block.norm"]


ALONE = "out channel ..."


class Bottleneck(nn.Module):
    """A block of convolutions: to fewer channels, grouped, and back, with a shortcut."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, groups=groups), nn.BatchNorm2d(8)
        self.conv3, self.bn3 = nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16)
        self.shortcut = nn.Conv2d(16, 16, 1)


@pytest.mark.parametrize(
    ("groups", "split"),
    [
        (1, {"conv1": "channel", "bn1": "channel", "conv2": "rowwise", "conv3": ALONE}),
        (4, {"conv1": "channel", "bn1": "channel", "conv2": "(groups group)", "bn2": "channel", "conv3": "rowwise"}),
    ],
)
def test_convolutions_that_follow_each_other_are_paired(groups: int, split: dict[str, str]) -> None:
    model = nn.Sequential(Bottleneck(groups), Bottleneck(groups))
    rules = suggest(model)
    values = {key.removeprefix("*."): spelled(value).strip('"') for key, value in rules.rules.items()}
    assert {key: value for key, value in values.items() if value != "replicate"} == {**split, "shortcut": ALONE}
    made = make_plan(model, "tp=3", rules)  # neither channels nor groups divide over three ranks
    assert made["0.bn1.weight"].local_shape(made.mesh) == (8,)
    if groups > 1:
        assert made["0.conv2.weight"].local_shape(made.mesh) == (8, 2, 3, 3)


class Standardized(nn.Conv2d):
    """A convolution whose forward normalizes its weight, with a gain for each output channel."""

    def __init__(self) -> None:
        super().__init__(16, 8, 1)
        self.gain = nn.Parameter(torch.ones(8, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, (self.weight - mean) * self.gain, self.bias)


def weight_normed(conv: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises its parametrization instead
        return nn.utils.weight_norm(conv)


LONE = [
    (nn.Conv2d(16, 8, 1), ALONE, (8, 8, 1, 1)),
    (nn.ConvTranspose2d(16, 8, 1), "channel out ...", (8, 8, 1, 1)),
    (nn.Conv1d(16, 32, 1, groups=4), "(groups group)", (16, 4, 1)),
    (nn.ConvTranspose1d(16, 32, 1, groups=4), "(groups group) ...", (8, 8, 1)),
    (Standardized(), "channel", (4, 16, 1, 1)),
    (weight_normed(nn.Conv1d(16, 8, 1)), "channel", (4, 16, 1)),
    (weight_normed(nn.ConvTranspose1d(16, 8, 1)), "channel out ...", (8, 8, 1)),
]


@pytest.mark.parametrize(("conv", "value", "shape"), LONE)
def test_a_convolution_in_no_pair_is_sharded_alone(conv: nn.Module, value: str, shape: tuple[int, ...]) -> None:
    model = nn.ModuleDict({"conv": conv})
    rules = suggest(model)
    assert spelled(rules.rules["conv"]) == f'"{value}"'
    assert rules.activations.keys() == (set() if "out" in value else {"conv.output"})
    made, weight = make_plan(model, "tp=2", rules), "conv.weight_v" if hasattr(conv, "weight_v") else "conv.weight"
    assert made[weight].local_shape(made.mesh) == shape
    assert "does not divide" in make_plan(model, "tp=3", rules)[weight].note


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 16, 3),
        nn.Conv2d(16, 4, 3),
        nn.Conv2d(16, 512, 2),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.Linear(16, 16),
    ],
)
def test_layers_of_images_patches_or_single_channels_are_not_sharded_alone(layer: nn.Module) -> None:
    assert spelled(suggest(nn.ModuleDict({"layer": layer})).rules["layer"]) == '"replicate"'


def test_a_layer_of_a_block_may_widen_as_much_as_it_likes() -> None:
    model = nn.ModuleList([nn.ModuleDict({"predictor": nn.Conv1d(8, 512, 1)}) for _ in range(2)])
    rules = suggest(nn.ModuleDict({"blocks": model, "embed": nn.Conv1d(8, 512, 1)})).rules
    assert {key: spelled(value) for key, value in rules.items()} == {
        "blocks.*.predictor": f'"{ALONE}"',
        "embed": '"replicate"',
    }


def test_a_linear_layer_before_a_batch_norm_is_a_convolution_of_tokens() -> None:
    model = nn.ModuleDict({"linear": nn.Linear(16, 8), "norm": nn.BatchNorm1d(8)})
    assert spelled(suggest(model).rules["linear"]) == '"out channel"' and not suggest(model).activations
    assert make_plan(model, "tp=2", suggest(model))["linear.weight"].stored.text == "out channel@tp"


class LeViT(nn.Module):
    """Attention whose values are twice as wide as its queries and keys; all lie head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.key_dim = 4, 2
        self.qkv, self.proj = nn.Linear(16, 32), nn.Linear(16, 16)


def test_fused_attention_with_wider_values_lies_head_by_head() -> None:
    rules = suggest(nn.ModuleDict({"attn": LeViT()})).rules
    assert {key: spelled(value) for key, value in rules.items()} == {
        "attn.qkv": '"(heads qkv_head)"',
        "attn.proj": '"rowwise"',
    }


def test_convolutions_around_attention_are_no_pair() -> None:
    convs = {"conv1": nn.Conv2d(16, 8, 1), "attn": nn.ModuleDict(), "conv2": nn.Conv2d(8, 16, 1)}
    assert spelled(suggest(nn.ModuleDict(convs)).rules["conv1"]) == '"channel"'
    convs["attn"] = nn.ModuleDict({"q": nn.Conv2d(8, 8, 1), "k": nn.Conv2d(8, 8, 1)})
    assert {spelled(value) for value in suggest(nn.ModuleDict(convs)).rules.values()} == {f'"{ALONE}"'}


class Wrapped(nn.Module):
    """A block of two streams, as diffusers writes it: joint attention; layers that widen stand in activations."""

    def __init__(self, widened: int) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.heads = 4
        for name in ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj"):
            self.attn.add_module(name, nn.Linear(16, 16))
        self.attn.to_out = nn.ModuleList([nn.Linear(16, 16), nn.Dropout(0.0)])
        self.attn.to_add_out = nn.Linear(16, 16)
        activation = nn.ModuleDict({"proj": nn.Linear(16, widened)})
        self.ff = nn.ModuleDict({"net": nn.ModuleList([activation, nn.Dropout(0.0), nn.Linear(64, 16)])})


@pytest.mark.parametrize(("widened", "value"), [(64, "ff"), (128, "(gate_up ff)")])
def test_a_layer_alone_in_a_list_belongs_to_the_block_around_it(widened: int, value: str) -> None:
    rules = suggest(nn.ModuleList([Wrapped(widened), Wrapped(widened)])).rules
    assert {key.removeprefix("*."): spelled(value).strip('"') for key, value in rules.items()} == {
        **{
            f"attn.{name}": "(heads head)"
            for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
        },
        "attn.to_out.0": "rowwise",
        "attn.to_add_out": "rowwise",
        "ff.net.*.proj": value,
        "ff.net.2": "rowwise",
    }


class Timed(nn.Module):
    """A block of convolutions with a value for each channel between them, from an embedding of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.time, self.norm2 = nn.Conv2d(16, 8, 3), nn.Linear(4, 8), nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2d(8, 16, 3)


def test_what_joins_the_channels_of_a_convolution_is_sharded_with_it() -> None:
    rules = suggest(nn.ModuleList([Timed(), Timed()])).rules
    values = {key.removeprefix("*."): spelled(value).strip('"') for key, value in rules.items()}
    assert values == {"conv1": "channel", "time": "channel", "norm2": "channel", "conv2": "rowwise"}


def test_the_first_and_the_last_convolution_of_a_net_do_not_follow_each_other() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv_in, self.blocks = nn.Conv2d(3, 16, 3), nn.ModuleList([Timed(), Timed()])
            self.conv_out = nn.Conv2d(16, 3, 3)

    rules = suggest(Net()).rules
    assert spelled(rules["conv_in"]) == spelled(rules["conv_out"]) == '"replicate"'


def test_layers_with_one_name_and_different_roles_get_rules_of_their_own() -> None:
    blocks = [nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3)) for _ in range(3))) for _ in range(2)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.ModuleDict({"layer": block}) for block in blocks)})
    assert spelled(suggest(model).rules["blocks.0.layer.0.0"]) == '"channel"'
    tensors = suggest(model).resolve(model, "tp=2").tensors
    assert [name for name, tensor in tensors.items() if tensor.layout.axes and "bias" in name] == [
        "blocks.0.layer.0.0.bias",
        "blocks.0.layer.2.0.bias",
        "blocks.1.layer.1.0.bias",
    ]


class Tower(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({kind: Attention(4, 16), "mlp": MLP(16)}) for _ in range(2))
        self.blocks[0][kind].head_dim = self.blocks[1][kind].head_dim = 4


def test_what_a_plan_leaves_out_is_completed() -> None:
    model = nn.ModuleDict({"image": Tower("attn"), "text": Tower("self_attn")})
    given = Rules(
        {f"^text.blocks.*.self_attn.{each}_proj": "(heads@tp head_dim)" for each in "qkv"},
        sizes={"head_dim": "head_dim"},
        unmatched="replicate",
    )
    rules = complete(given, model)
    assert given.rules.items() <= rules.rules.items()
    assert {key for key in rules.rules if key.startswith("text")} == {"text.blocks.*.mlp.up", "text.blocks.*.mlp.down"}
    assert rules.axes == {"heads2": "tp?", "ff": "tp"}
    text = {name: str(tensor.layout) for name, tensor in rules.resolve(model, "tp=2").tensors.items()}
    assert text["image.blocks.1.attn.q_proj.weight"] == "(heads2@tp head_dim2) in"
    assert text["text.blocks.1.self_attn.o_proj.weight"] == "_ _"  # beside what the rules name
    assert text["text.blocks.1.mlp.up.weight"] == "ff@tp in"
    assert complete(rules, model) == rules


class Modulated(nn.Module):
    """A block with scales and shifts of a norm in one layer, two branches that one layer joins, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation, self.branch = nn.Linear(8, 48), nn.Linear(8, 24)
        self.join, self.gate, self.square = nn.Linear(32, 8), nn.Linear(8, 2), nn.Linear(8, 8)


def test_layers_that_nothing_follows_are_gathered_where_they_leave() -> None:
    rules = suggest(nn.ModuleList([Modulated(), Modulated()]))
    assert {key.removeprefix("*."): spelled(value).strip('"') for key, value in rules.rules.items()} == {
        "modulation": "colwise",
        "branch": "colwise",
        "join": "rowwise",
        "gate": "replicate",
        "square": "replicate",
    }
    assert list(rules.activations) == ["*.modulation.output", "*.branch.output"]


class GatedConv(nn.Module):
    """Channels twice as wide, a convolution of each by itself, and one half that gates the other."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.widen, self.each, self.narrow = (
            nn.Conv2d(8, 32, 1),
            nn.Conv2d(32, 32, 3, groups=groups),
            nn.Conv2d(16, 8, 1),
        )


@pytest.mark.parametrize(
    ("groups", "values"),
    [
        (32, ["(gate_up channel)", "(gate_up channel)", "rowwise"]),
        (4, ["out channel ...", "(groups group)", "out channel ..."]),  # each alone, and gathered where it leaves
    ],
)
def test_a_depthwise_convolution_may_hold_both_halves_of_a_gate(groups: int, values: list[str]) -> None:
    rules = suggest(nn.ModuleList([GatedConv(groups), GatedConv(groups)])).rules
    assert [spelled(rules[f"*.{name}"]).strip('"') for name in ("widen", "each", "narrow")] == values
