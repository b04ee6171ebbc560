"""The layout's grid, by eye: small, interleaved, with experts, and too large to draw whole."""

import re
import textwrap

from megaswift.parallel.grid import rank_grid_text
from megaswift.parallel.layout import Layout
from megaswift.parallel.pipeline_split import PipelineSplit


def grid(layers, layout):
    return rank_grid_text(layout, layers)


def text(block):
    return textwrap.dedent(block).strip("\n")


def test_one_rank():
    assert grid(4, Layout(1)) == text("""
                 stage 0
        layers   embed+0-3+head
        dp 0     rank 0
    """)


def test_tensor_and_pipeline_parallel():
    assert grid(4, Layout(8, tp=2, pp=2)) == text("""
                 stage 0     stage 1
        layers   embed+0-1   2-3+head
        dp 0     ranks 0-1   ranks 4-5
        dp 1     ranks 2-3   ranks 6-7
    """)


def test_interleaved_with_context_and_expert_parallel():
    assert grid(8, Layout(8, pp=2, vpp=2, cp=2, ep=4)) == text("""
                    stage 0                stage 1
        chunk 0     embed+0-1              2-3
        chunk 1     4-5                    6-7+head
        dp 0 cp 0   rank 0                 rank 4
        dp 0 cp 1   rank 1                 rank 5
        dp 1 cp 0   rank 2                 rank 6
        dp 1 cp 1   rank 3                 rank 7
        experts     ep 4 x etp 1 x edp 1   ep 4 x etp 1 x edp 1
    """)


def test_a_thousand_ranks_fit_a_screen():
    layout = Layout(1024, tp=4, pp=16)
    lines = grid(32, layout).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 140
    assert lines[0].split()[-2:] == ["stage", "15"]
    assert lines[-1].startswith("dp 15")
    assert lines[-1].endswith("ranks 1020-1023")
    assert "..." in lines[0]
    assert lines[-2].split() == ["..."] * 9


def test_the_grid_shows_the_ranks_of_the_layout():
    layout = Layout(24, tp=2, pp=3, cp=2)
    for line in grid(3, layout).splitlines()[2:]:
        dp, cp = map(int, re.match(r"dp (\d+) cp (\d+)", line).groups())
        for pp, (first, last) in enumerate(re.findall(r"ranks (\d+)-(\d+)", line)):
            for tp, rank in enumerate((int(first), int(last))):
                at = layout.coordinates(rank)
                assert (at.tp, at.cp, at.dp, at.pp) == (tp, cp, dp, pp)


def test_uneven_stages():
    assert "embed+0-2   3+head" in rank_grid_text(Layout(2, pp=2), 4, PipelineSplit(first=3))


def test_layers_for_multi_token_prediction_stand_beside_the_head():
    layout = Layout(2, pp=2, vpp=2)
    lines = [line.split() for line in rank_grid_text(layout, 4, prediction_layers=2).splitlines()]
    assert lines[1:3] == [["chunk", "0", "embed+0", "1"], ["chunk", "1", "2", "3+head+2", "mtp"]]
