"""Products under way: a wrong one is noticed, one that is under way is told from one that is done, and a thread that
failed is not waited for. On the host; what is launched ahead of a device only a device can show.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu import products
from tests.gpu.products import Products


@pytest.fixture
def matrix(monkeypatch):
    monkeypatch.setitem(products.LASTING_S, "cpu", 0.05)
    return torch.ones(512, 512)


def test_one_that_is_under_way_is_not_done_and_is_later(matrix):
    with Products(matrix) as computing:
        computing.wait_for(2)
        under_way = computing.under_way()
        assert [product.done for product in under_way] == [False]
        computing.wait_for(1)
        assert [product.done for product in under_way] == [True]
    assert computing.finished >= 3


def test_one_that_comes_out_other_than_the_first_is_counted(matrix):
    def change_a_weight():
        with Products(matrix) as computing:
            computing.wait_for(1)
            matrix[0, 0] = 2
            computing.wait_for(2)

    with pytest.raises(AssertionError, match="products came out other than the first"):
        change_a_weight()


def test_a_launch_that_fails_is_raised_where_it_is_waited_for(matrix):
    def lose_the_weights():
        with Products(matrix) as computing:
            matrix.resize_(0)
            computing.wait_for(1000)

    with pytest.raises(RuntimeError, match="must be a matrix"):
        lose_the_weights()
