"""The value and its text."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.errors import LayoutError
from shardlib.layout import Dim, Factor, Layout
from tests.layout.cases import Case, cases

HOW = (
    'Write one word per dim, as in "vocab@tp embed": name@axis or name@(outer,inner) shards a dim, (a b@axis c) is a '
    'fused dim, "..." stands for any leading dims.'
)


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("vocab@tp embed", (Dim((Factor("vocab", ("tp",)),)), Dim((Factor("embed"),)))),
        ("embed@(fsdp,tp)", (Dim((Factor("embed", ("fsdp", "tp")),)),)),
        ("... ff@tp", (..., Dim((Factor("ff", ("tp",)),)))),
        ("(kv@tp? head)", (Dim((Factor("kv", ("tp",), optional=True), Factor("head"))),)),
        ("(3 heads=2@tp head)", (Dim((Factor("3", (), 3), Factor("heads", ("tp",), 2), Factor("head"))),)),
        ("1 _ _@dp", (Dim((Factor("1", (), 1),)), Dim((Factor("_"),)), Dim((Factor("_", ("dp",)),)))),
        ("out in", (Dim((Factor("out"),)), Dim((Factor("in"),)))),
        ("", ()),
    ],
)
def test_what_a_text_means(text: str, dims: tuple):
    assert Layout.parse(text).dims == dims


def test_a_text_may_name_partial_axes_dtype_and_memory():
    layout = Layout.parse("batch embed + sum@(tp,dp) + max@cp : bfloat16 host")
    assert layout.partial == {"tp": "sum", "dp": "sum", "cp": "max"}
    assert (layout.dtype, layout.memory) == (torch.bfloat16, "host")


@pytest.mark.parametrize(
    "text",
    [
        "vocab@tp embed",
        "batch@dp seq embed",
        "embed@(fsdp,tp)",
        "(qkv heads@tp head) embed",
        "(kv@tp? head) 1",
        "... ff@tp",
        "_ embed@tp",
        "batch embed + max@cp + sum@(dp,tp)",
        "embed@fsdp : float32 host",
        "+ sum@dp",
        "",
    ],
)
def test_text_in_canonical_form_is_given_back(text: str):
    assert str(Layout.parse(text)) == text


def test_axes_of_one_operator_are_written_in_order():
    assert str(Layout.parse("a + sum@(tp,dp) + max@cp")) == "a + max@cp + sum@(dp,tp)"


def test_spaces_do_not_matter():
    assert str(Layout.parse(" vocab@( fsdp , tp )  (a  b) +sum@dp:host")) == "vocab@(fsdp,tp) (a b) + sum@dp : host"


@given(cases(partial=True), st.sampled_from([None, torch.bfloat16]), st.sampled_from(["device", "host"]))
def test_text_to_layout_to_text_is_stable(case: Case, dtype: torch.dtype | None, memory: str):
    layout = Layout(case.layout.dims, case.layout.partials, dtype, memory)
    assert Layout.parse(layout.text) == layout
    assert eval(repr(layout), {"Layout": Layout.parse}) == layout
    assert str(Layout.parse(str(layout))) == str(layout)


def test_a_pickled_layout_leaves_out_its_hash_which_differs_between_processes():
    layout = Layout.parse("vocab@tp embed")
    before = pickle.dumps(layout)
    assert isinstance(hash(layout), int) and pickle.dumps(layout) == before


def test_a_layout_is_a_value():
    one, other = (Layout.parse("(3 heads@tp head) embed@dp + sum@cp", sizes={"heads": 4}) for _ in range(2))
    assert one == other and hash(one) == hash(other) and pickle.loads(pickle.dumps(one)) == one
    assert one != Layout.parse("(3 heads@tp head) embed@dp + sum@cp")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("vocab@ embed", f'"vocab@" cannot be read. {HOW}'),
        ("vocab@(tp embed", f'"vocab@(tp" cannot be read. {HOW}'),
        ("(a=3=4 b) c", f'"(a=3=4" cannot be read. {HOW}'),
        ("vocab embed@@tp", f'"embed@@tp" cannot be read. {HOW}'),
        ("(qkv (heads@tp head))", f"Axis composition is one-level (brackets inside brackets not allowed). {HOW}"),
        ("(qkv heads", f'Imbalanced parentheses in expression: "(qkv heads". {HOW}'),
        ("embed embed", f'Indexing expression contains duplicate dimension "embed". {HOW}'),
        ("vocab%tp", f"Unknown character '%'. {HOW}"),
        ("vocab? embed", '"vocab?" has "?" without an axis. Write name@axis? to shard a dim only if it divides.'),
        ("vocab@t-p", '"t-p" in "@t-p" is not an axis name. Write @axis, or @(outer,inner) for several axes.'),
        ("vocab@(tp,)", '"" in "@(tp,)" is not an axis name. Write @axis, or @(outer,inner) for several axes.'),
        ("...@tp", '"..." carries axes or a size. Name the dim that is to be sharded; "..." is never sharded.'),
        ("(... a)", '"..." stands inside parentheses. Write "..." outside of any fused dim; it stands for whole dims.'),
        ("(1 a) b", '"(1 a)" has a factor of one, or none. Leave such factors out; a dim of size one is "1".'),
        ("() b", '"()" has a factor of one, or none. Leave such factors out; a dim of size one is "1".'),
        ("(a=0 b)", '"a" has size 0. Give each name one positive size, in the text or in sizes.'),
        ("(heads=2 b)", '"heads" has size 2 and 4. Give each name one positive size, in the text or in sizes.'),
        ("a + sum", '"+ sum" cannot be read. Write a pending reduction as "+ sum@axis" or "+ avg@(a,b)".'),
        (
            "a + smu@tp",
            '"smu" is not a reduction. Known are sum, avg, max, min, product, band, bor, bxor. Did you mean "sum"?',
        ),
        (
            "a : bfloat61",
            '"bfloat61" is not a dtype. After ":" give a dtype, "device" or "host". Did you mean "bfloat16"?',
        ),
        (
            "vocab@tp embed@tp",
            'axis "tp" is used twice. Each axis shards one dim of a tensor or is reduced over, once; drop one of the '
            "two, or use another axis of the mesh.",
        ),
        (
            "vocab@tp embed + sum@tp",
            'axis "tp" is used twice. Each axis shards one dim of a tensor or is reduced over, once; drop one of the '
            "two, or use another axis of the mesh.",
        ),
    ],
)
def test_what_cannot_be_read_is_shown_with_the_offending_part(text: str, fact: str):
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text, sizes={"heads": 4})
    assert str(caught.value) == f'Layout "{text}": {fact}'


def test_a_size_that_is_no_number_is_refused():
    with pytest.raises(LayoutError) as caught:
        Layout.parse("(qkv heads@tp head)", sizes={"heads": "n_head"})  # type: ignore[dict-item]
    assert str(caught.value) == (
        'Layout "(qkv heads@tp head)": "heads" has size \'n_head\'. Give each name one positive size, in the text or '
        "in sizes."
    )


def test_something_else_than_text_is_refused():
    with pytest.raises(LayoutError) as caught:
        Layout.parse(3)  # type: ignore[arg-type]
    assert str(caught.value) == (
        'A layout was given as int 3; give text such as "vocab@tp embed", or for placements call '
        "Layout.from_placements."
    )


@pytest.mark.parametrize(
    ("text", "global_shape", "mesh", "resolved"),
    [
        ("... ff@tp", (2, 3, 4), "tp=2", "_ _ ff@tp"),
        ("...", (), "tp=2", ""),
        ("(3 heads=4@tp head)", (24,), "tp=2", "(3 heads=4@tp head=2)"),
        ("(3 heads@tp head=2)", (24,), "tp=2", "(3 heads=4@tp head=2)"),
        ("(kv=2@tp? head) embed", (8, 5), "tp=2", "(kv=2@tp head=4) embed"),
        ("(kv=2@tp? head) embed", (8, 5), "tp=4", "(kv=2 head=4) embed"),
        ("kv@tp? embed", (6, 5), "tp=4", "kv embed"),
        ("kv@(dp,tp)? embed", (8, 5), "dp=2,tp=4", "kv@(dp,tp) embed"),
        ("kv@(dp,tp)? embed", (4, 5), "dp=2,tp=4", "kv@dp embed"),
        ("kv@(dp,tp)? embed", (5, 5), "dp=2,tp=4", "kv embed"),
        ("vocab@tp embed", (7, 5), "tp=4", "vocab@tp embed"),
        ("vocab@tp", (0,), "tp=4", "vocab@tp"),
    ],
)
def test_resolve_makes_a_layout_concrete(text: str, global_shape: tuple[int, ...], mesh: str, resolved: str):
    layout = Layout.parse(text).resolve(global_shape, mesh)
    assert layout.text == resolved
    assert layout.resolve(global_shape, mesh) == layout


@pytest.mark.parametrize(
    ("text", "global_shape", "problem"),
    [
        (
            "vocab@tpp embed",
            (4, 4),
            'axis "tpp" is not on the mesh, which has "dp", "tp". Use one of these, or add the axis to the mesh. Did '
            "you "
            'mean "tp"?',
        ),
        (
            "a + sum@cp",
            (4,),
            'axis "cp" is not on the mesh, which has "dp", "tp". Use one of these, or add the axis to the mesh.',
        ),
        (
            "a b",
            (4,),
            "it names 2 dims, the tensor has 1 dim. Name every dim of the tensor once; leading dims may be written "
            '"...".',
        ),
        (
            "... a b",
            (4,),
            "it names 2 dims, the tensor has 1 dim. Name every dim of the tensor once; leading dims may be written "
            '"...".',
        ),
        (
            "(qkv heads@tp head) embed",
            (24, 4),
            'the sizes of "qkv", "heads", "head" in dim 0 "qkv heads head" are not known. Give them, as in '
            'sizes={"qkv": ..., "heads": ...}; one is inferred.',
        ),
        (
            "embed (3 heads=5@tp head)",
            (4, 16),
            'dim 1 "3 heads head" of size 16 is not a multiple of 3 x 5 = 15. Correct the sizes given, so that '
            '"head" can '
            "be inferred.",
        ),
        (
            "(a=3 b=4)",
            (13,),
            'dim 0 "a b" is 3 x 4 = 12 by the sizes given, the tensor has 13. Correct the sizes, or the pattern if it '
            "names another dim.",
        ),
        (
            "embed=8",
            (13,),
            'dim 0 "embed" is 8 by the sizes given, the tensor has 13. Correct the sizes, or the pattern if it names '
            "another dim.",
        ),
        (
            "(3 heads=6@(dp,tp) head)",
            (36,),
            'factor "heads" of size 6 does not divide over dp=2 x tp=4. Factors of a fused dim must divide: use axes '
            'whose sizes divide 6, or write "heads@(dp,tp)?" to shard it only where it divides.',
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(text: str, global_shape: tuple[int, ...], problem: str):
    layout = Layout.parse(text)
    with pytest.raises(LayoutError) as caught:
        layout.validate(global_shape, "dp=2,tp=4")
    context = f'Layout "{layout}" for a tensor of global shape {global_shape} on mesh "dp=2,tp=4"'
    assert str(caught.value) == f"{context}: {problem}"


def test_views_of_a_layout():
    layout = Layout.parse("vocab@(fsdp,tp) (a b@dp) + sum@cp")
    assert layout.axes == {"fsdp", "tp", "dp", "cp"}
    assert (layout.axes_of(0), layout.axes_of(1), layout.ndim) == (("fsdp", "tp"), ("dp",), 2)
    assert str(layout.with_axes_dropped(["fsdp", "cp"])) == "vocab@tp (a b@dp)"
    assert layout.with_axes_dropped(["pp"]) is layout
    assert Layout.parse("vocab@tp embed@dp").uneven_dims((50257, 768), "dp=2,tp=4") == (0,)
    assert Layout.parse("... a").ndim is None and Layout.parse("... a@tp").axes_of(0) == ()


def test_axes_of_one_dim_are_replaced():
    layout = Layout.parse("vocab@tp (a b@dp)")
    assert str(layout.with_axes(0, ("fsdp", "tp"))) == "vocab@(fsdp,tp) (a b@dp)"
    assert str(layout.with_axes(1, ("dp", "fsdp"), factor=1)) == "vocab@tp (a b@(dp,fsdp))"
    assert str(Layout.parse("kv@tp?").with_axes(0, ())) == "kv"


def test_dropping_axes_settles_a_question():
    assert Layout.parse("kv@tp? embed").with_axes_dropped(["tp"]) == Layout.parse("kv embed")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Layout.parse("a b").with_ndim(3),
            'Layout "a b" names 2 dims and was asked for 3. Name every dim of the tensor once; leading dims may be '
            'written "...".',
        ),
        (
            lambda: Layout.parse("... a b").with_ndim(1),
            'Layout "... a b" names 2 dims and was asked for 1. Name every dim of the tensor once; leading dims may be '
            'written "...".',
        ),
        (
            lambda: Layout.parse("... a").with_axes(0, ("tp",)),
            'Layout "... a": dim 0 is "...", which is never sharded. Call with_ndim first.',
        ),
    ],
)
def test_views_that_make_no_sense_are_refused(call: Callable[[], object], message: str):
    with pytest.raises(LayoutError) as caught:
        call()
    assert str(caught.value) == message


def test_every_dtype_of_torch_is_read_again():
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert len(dtypes) > 30
    for dtype in dtypes:
        layout = Layout(Layout.parse("_").dims, dtype=dtype)
        assert layout.dtype is dtype and Layout.parse(layout.text) == layout
