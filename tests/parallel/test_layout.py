"""Rank arithmetic against Megatron-Core's own RankGenerator, which needs no process group."""

from types import SimpleNamespace

import pytest

from megaswift.errors import LayoutError
from megaswift.parallel.layout import FLAGS, GRIDS, Layout

ORDER = "tp-cp-ep-dp-pp"
DENSE = ["tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-pp", "tp-cp-dp", "tp-dp", "tp-cp-dp-pp"]
EXPERT = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp", "etp-ep": "tp-ep", "etp-ep-pp": "tp-ep-pp"}


def layouts(*worlds):
    sizes = (1, 2, 3, 4)
    for world in worlds:
        for tp in sizes:
            for cp in sizes:
                for pp in sizes:
                    if world % (tp * cp * pp):
                        continue
                    for ep in sizes:
                        for etp in (1, 2):
                            if world % (etp * ep * pp) == 0:
                                yield Layout(world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


@pytest.fixture(scope="module")
def generator(megatron):
    return megatron.parallel_state.RankGenerator


def test_groups_are_megatrons(generator):
    tried = 0
    for layout in layouts(1, 2, 6, 8, 12, 16):
        dense = generator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=ORDER)
        for axes in DENSE:
            assert layout.groups(axes) == dense.get_ranks(axes), (layout, axes)
        expert = generator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=ORDER)
        for ours, theirs in EXPERT.items():
            assert layout.groups(ours) == expert.get_ranks(theirs), (layout, ours)
        tried += 1
    assert tried > 150


def test_coordinates_are_positions_in_groups():
    for layout in layouts(8, 12):
        for rank in range(layout.world_size):
            at = layout.coordinates(rank)
            for axis in {axis for grid in GRIDS.values() for axis in grid}:
                assert layout.group(axis, rank)[getattr(at, axis)] == rank
            assert layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank


def test_sizes_of_groups():
    layout = Layout(24, tp=2, cp=2, pp=3, ep=4)
    assert (layout.dp, layout.edp) == (2, 2)
    assert layout.size("dp-cp") == 4 == len(layout.groups("dp-cp")[0])
    assert layout.size("etp-ep") == 4


def test_neighbours_share_a_tensor_parallel_group():
    layout = Layout(16, tp=2, pp=2, cp=2)
    assert layout.groups("tp")[:2] == [[0, 1], [2, 3]]
    assert layout.groups("cp")[:2] == [[0, 2], [1, 3]]
    assert layout.groups("pp")[0] == [0, 8]


@pytest.mark.parametrize(
    ("world", "sizes", "text"),
    [
        (8, {"tp": 3}, ["--tp 3: requires a multiple of 3 processes; there are 8", "use 6 or 9 processes"]),
        (4, {"tp": 2, "pp": 4}, ["--tp 2 --pp 4", "2 x 4 = 8", "8 processes"]),
        (8, {"ep": 3}, ["--ep 3"]),
        (8, {"vpp": 2}, ["--vpp 2", "--pp is 1"]),
        (8, {"tp": 0, "cp": -1}, ["--tp 0", "--cp -1"]),
        (8, {"tp": 3, "ep": 5}, ["--tp 3", "--ep 5"]),
    ],
)
def test_impossible_sizes_are_refused_with_numbers(world, sizes, text):
    with pytest.raises(LayoutError) as error:
        Layout(world, **sizes)
    for part in text:
        assert part in str(error.value)


def config(**given):
    names = dict(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        virtual_pipeline_parallel_size=None,
        context_parallel_size=1,
        expert_parallel_size=1,
        expert_tensor_parallel_size=1,
        sequence_parallel=None,
        pipeline_layout=None,
    )
    return SimpleNamespace(**{**names, **given})


def test_from_config():
    assert Layout.from_config(config(), 4) == Layout(4)
    assert Layout.from_config(config(tensor_parallel_size=2), 4) == Layout(4, tp=2, sequence_parallel=True)
    assert not Layout.from_config(config(tensor_parallel_size=2, sequence_parallel=False), 4).sequence_parallel
    interleaved = config(pipeline_parallel_size=2, pipeline_layout="Et|t|t|tL")
    assert Layout.from_config(interleaved, 2).vpp == 2


def test_describe():
    assert Layout(1).describe() == "DP1"
    assert Layout(16, tp=2, pp=2, vpp=2, ep=2, sequence_parallel=True).describe() == "TP2 SP PP2 VPP2 EP2 DP4"
    assert set(FLAGS) <= set(Layout.__dataclass_fields__)
