"""Clusters: files and quantities that read back what was written, and times that follow from the figures."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib._plan import KINDS, ByKind, Cluster, Link, Rate, ring_bytes, ring_steps
from shardlib._plan.quantities import Unit, parse_quantity, spell_quantity
from shardlib.errors import PlanError

PRESETS = list(Cluster.presets())
NVLINK = Link("NVLink", 8, 3e-6, Rate(400e9))
NETWORK = Link("InfiniBand", 0, 14e-6, Rate(50e9))
FIRST = """
name = "mine"
devices = 8
memory = "80GB"
launch = "5us"
memory_bandwidth = "3.35TB/s"
host_bandwidth = "63GB/s"
[products]
bfloat16 = "989TFLOP/s"
"""


def cluster(*links: Link, launch: float = 0.0) -> Cluster:
    """A cluster of these links, of which nothing else counts."""
    rate = Rate(1e12)
    return Cluster("c", 8, 80, rate, rate, (("float32", rate),), launch, links)


positive = st.floats(1e-12, 1e20)
words = st.text(max_size=8)
rates = st.builds(Rate, positive, st.floats(1e-3, 1), words)
by_kind = st.builds(ByKind, st.sampled_from(KINDS), st.none() | positive, st.none() | rates)
kinds = st.lists(by_kind, max_size=2, unique_by=lambda each: each.kind).map(tuple)
products = st.dictionaries(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]), rates, min_size=1)


@st.composite
def levels(draw: st.DrawFn) -> tuple[Link, ...]:
    """Levels of links; shrinks towards none."""
    sizes, found = draw(st.lists(st.integers(2, 8), max_size=3)), []
    for i in range(len(sizes)):
        ranks = 0 if i == len(sizes) - 1 and draw(st.booleans()) else math.prod(sizes[: i + 1])
        pairwise = bool(ranks) and draw(st.booleans())
        found.append(Link(draw(words), ranks, draw(positive), draw(rates), draw(kinds), pairwise, draw(words)))
    return tuple(found)


clusters = st.builds(
    Cluster,
    name=words,
    devices=st.integers(1, 100),
    memory=st.integers(1, 2**50),
    memory_bandwidth=rates,
    host_bandwidth=rates,
    products=products.map(lambda found: tuple(found.items())),
    launch=positive | st.just(0.0),
    links=levels(),
    description=words,
    source=words,
)


@given(clusters)
def test_a_file_reads_back_as_the_cluster_that_was_written(made: Cluster):
    again = Cluster.from_toml(made.to_toml())
    assert again == made and hash(again) == hash(made)


@given(st.floats(1e-15, 1e25) | st.just(0.0), st.sampled_from(["B", "B/s", "FLOP/s", "s"]))
def test_a_quantity_reads_back_exactly(value: float, unit: Unit):
    assert parse_quantity(spell_quantity(value, unit), unit) == value


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("80GB", "B", 80e9),
        ("80 GB", "B", 80e9),
        ("1KiB", "B", 1024),
        ("400Gb/s", "B/s", 50e9),
        ("1.5e3MB/s", "B/s", 1.5e9),
        ("989TFLOP/s", "FLOP/s", 989e12),
        ("5us", "s", 5e-6),
        ("5µs", "s", 5e-6),
        (7, "s", 7.0),
    ],
)
def test_quantities_are_written_as_people_write_them(text: str, unit: Unit, value: float):
    assert parse_quantity(text, unit) == value


@pytest.mark.parametrize(
    ("text", "unit"),
    [("80", "B"), ("80Gb", "B"), ("80gigs", "B"), ("3TB", "B/s"), ("5Ms", "s"), ("1mB", "B"), ("1KiFLOP/s", "FLOP/s")],
)
def test_other_units_are_refused(text: str, unit: Unit):
    with pytest.raises(PlanError, match="give a quantity such as"):
        parse_quantity(text, unit)


def test_numbers_that_are_no_quantity_are_refused():
    for given_value in (True, None, -1.0, math.inf, math.nan):
        with pytest.raises(PlanError, match="give a quantity such as"):
            parse_quantity(given_value, "s")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("80GB", "80 gigs"), 'memory: \'80 gigs\' was given; give a quantity such as "80GB" or "64GiB".'),
        (("bfloat16", "bfloat61"), "products: 'bfloat61' was given as a dtype; give one of torch or numpy"),
        (("launch", "lunch"), '"lunch" is not a key of a cluster, which may have "name", "devices", '),
        (("devices = 8\n", ""), 'a cluster needs "devices", which it does not have.'),
        (('"3.35TB/s"', '{ peak = "3.35TB/s", reached = 1.5 }'), "memory_bandwidth: reached=1.5 was given for a rate"),
        (("= 8", "= true"), '"devices" is True; write a number of devices.'),
        (('launch = "5us"', 'launch = "5us'), "line 5: this is not valid TOML"),
    ],
)
def test_a_wrong_file_says_where_it_is_wrong(change: tuple[str, str], message: str, tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(FIRST.replace(*change))
    with pytest.raises(PlanError) as raised:
        Cluster.load(path)
    assert str(raised.value).startswith(str(path)) and message in str(raised.value)


def test_a_wrong_link_is_named_by_its_number():
    link = '[[links]]\nname = "a"\nlatency = "1us"\nbandwidth = "1GB/s"\n'
    with pytest.raises(PlanError) as raised:
        Cluster.from_toml(f'{FIRST}{link}[links.kinds.all_redoce]\nlatency = "2us"')
    assert str(raised.value) == (
        'cluster given as text: links 1: kinds.all_redoce: "all_redoce" is not a kind of collective; the kinds are '
        "'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', 'broadcast', 'send'. Did you mean \"all_reduce\"?"
    )


def test_a_file_that_is_not_there_and_a_preset_that_is_not_there(tmp_path: Path):
    with pytest.raises(PlanError, match=r'A cluster cannot be read from ".*none": No such file'):
        Cluster.load(tmp_path / "none")
    with pytest.raises(PlanError, match=r'No cluster is called "h10"; there are "a100-40", .* Did you mean "h100"\?'):
        Cluster.preset("h10")


def test_levels_contain_each_other():
    for wrong in ([NETWORK, NVLINK], [NVLINK, NVLINK], [NVLINK, dataclasses.replace(NVLINK, ranks=12)]):
        with pytest.raises(PlanError, match="Give the innermost level first"):
            cluster(*wrong)


def test_what_no_machine_has_is_refused():
    made = cluster()
    for changes in ({"devices": 0}, {"memory": 0}, {"launch": -1.0}, {"launch": math.nan}, {"products": ()}):
        with pytest.raises(PlanError, match='Cluster "c"'):
            made.replace(**changes)
    with pytest.raises(PlanError, match="positive number"):
        Rate(0)
    with pytest.raises(PlanError, match="A latency is -1"):
        Link("x", 0, -1.0, Rate(1))
    with pytest.raises(PlanError, match="two entries for one kind"):
        Link("x", 0, 0.0, Rate(1), kinds=(ByKind("send"), ByKind("send")))
    with pytest.raises(PlanError, match="is pairwise"):
        Link("x", 0, 0.0, Rate(1), pairwise=True)
    with pytest.raises(PlanError, match="joins -1 ranks"):
        Link("x", -1, 0.0, Rate(1))


@given(st.sampled_from(KINDS), st.integers(2, 8), st.integers(1, 2**40))
def test_within_a_node_a_collective_is_steps_and_bytes_of_a_ring(kind: str, size: int, payload: int):
    found = cluster(NVLINK, NETWORK, launch=1e-6).collective_time(kind, payload, range(size))
    sent = ring_bytes(kind, payload, size)
    assert found == pytest.approx(1e-6 + ring_steps(kind, size) * 3e-6 + sent / 400e9, rel=1e-9, abs=1 / 400e9)


def test_one_rank_sends_nothing():
    assert cluster(NVLINK, launch=1.0).collective_time("all_reduce", 2**30, [5]) == 0.0


def test_one_rank_of_each_node_has_its_own_adapter_and_all_ranks_have_all_of_them():
    """A data axis outside of a tensor axis, and a data axis over everything, of four nodes of 8."""
    made, payload = cluster(NVLINK, NETWORK), 2**30
    alone = sl.MeshShape("dp=4,tp=8").groups(("dp",))[0]
    steps = 2 * 3 * 14e-6
    assert made.collective_time("all_reduce", payload, alone) == pytest.approx(steps + 2 * 3 / 4 * payload / 50e9)
    every = sl.MeshShape("dp=32").groups(("dp",))[0]
    steps = 2 * (28 * 3e-6 + 3 * 14e-6)  # as NCCL counts them: 31 steps, 3 of them between nodes
    sent = ring_bytes("all_reduce", payload, 32)
    assert made.collective_time("all_reduce", payload, every) == pytest.approx(steps + sent / 400e9)
    half = [rank for rank in every if rank % 8 < 4]  # of 8 ranks of a node 4: half of the adapters
    sent, steps = ring_bytes("all_reduce", payload, 16), 2 * (12 * 3e-6 + 3 * 14e-6)
    assert made.collective_time("all_reduce", payload, half) == pytest.approx(steps + sent / 200e9)


def test_a_third_level_is_crossed_by_what_pods_have_together():
    pod = dataclasses.replace(NETWORK, ranks=32)
    between = Link("between pods", 0, 30e-6, Rate(10e9))
    made = cluster(NVLINK, pod, between)
    ranks = [0, 8, 16, 24, 32, 40, 48, 56]  # four nodes in each of two pods
    steps = 6 * 14e-6 + 30e-6
    assert made.collective_time("all_gather", 1000, ranks) == pytest.approx(steps + 7000 / 40e9)
    with pytest.raises(PlanError, match=r'The outermost link, "InfiniBand", joins 32 ranks, and the group \[0, 32\]'):
        cluster(NVLINK, pod).collective_time("all_gather", 1, [0, 32])


def test_the_smallest_part_of_an_uneven_group_limits_it():
    made = cluster(NVLINK, NETWORK)
    uneven = [0, 1, 2, 3, 8]  # one rank in the second node
    found = made.collective_time("all_gather", 1000, uneven)
    assert found == pytest.approx(3 * 3e-6 + 14e-6 + 4000 / 50e9)


def test_an_all_to_all_sends_to_each_rank_over_its_own_level():
    made = cluster(NVLINK, NETWORK)
    found = made.collective_time("all_to_all", 16_000, range(16))
    assert found == pytest.approx(7 * 3e-6 + 8 * 14e-6 + max(7_000 / 400e9, 8_000 / 50e9))


def test_stages_of_a_pipeline_send_to_the_next_one():
    made = cluster(NVLINK, NETWORK)
    inside, across = [0, 2, 4, 6], [0, 4, 8, 12]
    assert made.collective_time("send", 1000, inside) == pytest.approx(3e-6 + 1000 / 400e9)
    assert made.collective_time("send", 1000, across) == pytest.approx(14e-6 + 1000 / 50e9)


def test_a_group_uses_the_links_between_its_own_ranks():
    """Of the 7 links of a rank to 7 others, two ranks use one."""
    mesh = Link("Infinity Fabric", 8, 0.0, Rate(448e9), pairwise=True)
    made = cluster(mesh)
    for size in (2, 4, 8):
        found = made.collective_time("all_gather", 1000, range(size))
        assert found == pytest.approx((size - 1) * 1000 / (64e9 * (size - 1)))
        assert made.collective_time("all_to_all", 1000, range(size)) == pytest.approx(1000 / size / 64e9)


def test_figures_of_a_kind_replace_the_general_ones():
    link = dataclasses.replace(NVLINK, kinds=(ByKind("all_to_all", 1e-3), ByKind("send", None, Rate(1e9, 0.5))))
    made = cluster(link)
    assert made.collective_time("all_gather", 0, range(2)) == pytest.approx(3e-6)
    assert made.collective_time("all_to_all", 0, range(2)) == pytest.approx(1e-3)
    assert made.collective_time("send", 1000, range(2)) == pytest.approx(3e-6 + 1000 / 0.5e9)


@given(clusters, st.sampled_from(KINDS), st.sets(st.integers(0, 40), min_size=2, max_size=12), st.integers(0, 2**40))
@settings(deadline=None)
def test_more_bytes_take_no_less_time(made: Cluster, kind: str, ranks: set[int], payload: int):
    assume(made.links and (made.links[-1].ranks or 41) > max(ranks))
    group = sorted(ranks)
    found = made.collective_time(kind, payload, group)
    assert made.launch <= found <= made.collective_time(kind, 2 * payload, group)


def test_ranks_that_are_no_group_are_refused():
    made = cluster(NVLINK, NETWORK)
    for wrong in ([0, 0], [-1, 3]):
        with pytest.raises(PlanError, match="give ranks from 0 on, each once"):
            made.collective_time("all_reduce", 1, wrong)
    with pytest.raises(PlanError, match=r'"allreduce" is not a kind of collective; .* Did you mean "all_reduce"'):
        made.collective_time("allreduce", 1, [0, 1])
    with pytest.raises(PlanError, match="has no links"):
        cluster().collective_time("all_reduce", 1, [0, 1])


def test_a_product_takes_as_long_as_its_operations_or_its_bytes():
    made = Cluster.from_toml(FIRST.replace('"989TFLOP/s"', '{ peak = "1000TFLOP/s", reached = 0.5 }'))
    assert made.product_time(5e14, 0, torch.bfloat16) == pytest.approx(5e-6 + 1.0)
    assert made.product_time(1.0, 3.35e12, "bfloat16") == pytest.approx(5e-6 + 1.0)
    assert made.memory_time(3.35e12) == pytest.approx(5e-6 + 1.0)
    assert made.host_time(63e9) == pytest.approx(5e-6 + 1.0)
    with pytest.raises(PlanError, match=r'has no rate of products in float16; it has "bfloat16"'):
        made.product_time(1, 1, torch.float16)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_source_for_each_figure(name: str):
    made = Cluster.preset(name)
    rates = [made.memory_bandwidth, made.host_bandwidth, *dict(made.products).values()]
    rates += [link.bandwidth for link in made.links]
    rates += [each.bandwidth for link in made.links for each in link.kinds if each.bandwidth]
    assert made.name == name and made.source and made.description
    assert all(rate.source for rate in rates) and all(link.source for link in made.links)
    assert all("reached:" in rate.source or "not verified" in rate.source for rate in rates if rate.reached < 1)
    assert Cluster.from_toml(made.to_toml()) == made


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "cpu"])
def test_presets_of_accelerators_are_nodes_of_8_on_a_network(name: str):
    made = Cluster.preset(name)
    assert made.devices == 8 and [link.ranks for link in made.links] == [8, 0]
    inside = made.collective_time("all_reduce", 2**30, range(8))
    assert inside < made.collective_time("all_reduce", 2**30, range(0, 64, 8))


# Measured by others, as the preset's sources say: bus bandwidths of large payloads in GB/s, and how many ranks.
@pytest.mark.parametrize(
    ("name", "kind", "ranks", "measured"),
    [
        ("h200", "all_reduce", 4, 363.3),
        ("h200", "all_gather", 8, 361.4),
        ("h200", "all_reduce", 32, 369.1),
        ("b200", "all_reduce", 8, 682.2),
        ("b200", "all_reduce", 32, 381.8),
        ("a100-80", "all_reduce", 8, 234.9),
        ("a100-80", "all_reduce", 32, 192.0),
        ("mi300x", "all_reduce", 8, 312.9),
        ("mi300x", "all_reduce", 2, 47.7),
    ],
)
def test_presets_say_what_was_measured_elsewhere(name: str, kind: str, ranks: int, measured: float):
    payload = 2**34 // (ranks if kind == "all_gather" else 1)
    seconds = Cluster.preset(name).collective_time(kind, payload, range(ranks))
    assert ring_bytes(kind, payload, ranks) / seconds / 1e9 == pytest.approx(measured, rel=0.07)


def test_a_cluster_prints_as_a_table():
    made = Cluster.from_toml(FIRST).replace(links=(NVLINK, dataclasses.replace(NETWORK, kinds=(ByKind("send", 1e-5),))))
    assert str(made).splitlines() == [
        "mine",
        "8 devices a node, 80GB each, a kernel takes 5us at least",
        "",
        "                    ranks  latency        peak  reached",
        "products, bfloat16                  989TFLOP/s     100%",
        "memory                                3.35TB/s     100%",
        "host                                    63GB/s     100%",
        "NVLink                  8      3us     400GB/s     100%",
        "InfiniBand            all     14us      50GB/s     100%",
        "  send                        10us      50GB/s     100%",
    ]
