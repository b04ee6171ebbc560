"""The zigzag cut: hand-worked positions, and every token exactly once."""

import pytest
import torch

from megaswift.engine.megatron.context_parallel import gather_order, local_row_positions, zigzag_positions


def test_zigzag_by_hand():
    assert zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 2, 1).tolist() == [2, 3, 4, 5]


def test_documents_are_cut_each_by_itself():
    bounds = torch.tensor([0, 4, 12])
    assert local_row_positions(12, bounds, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert local_row_positions(12, bounds, 2, 1).tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("bounds", [None, [0, 8, 24, 32], [0, 32]])
def test_join_order_is_the_inverse(cp, bounds):
    cu = None if bounds is None else torch.tensor(bounds)
    joined = torch.cat([local_row_positions(32, cu, cp, r) for r in range(cp)])
    assert sorted(joined.tolist()) == list(range(32))
    assert joined[gather_order(32, cu, cp)].tolist() == list(range(32))


def test_a_length_that_does_not_divide_is_ours_to_prevent():
    with pytest.raises(AssertionError, match="not a multiple of 4"):
        zigzag_positions(6, 2, 0)
