"""Sub-batches suspend at yield points, combine there, and unwind when something raises."""

from __future__ import annotations

import pytest
import torch

from batchgen_data.errors import InternalError
from batchgen_data.runtime.coroutine import CoroutineCounts, at_yield_point, run_sub_batches


class Layer:
    """Doubles its input, and remembers the batch sizes it was called with."""

    def __init__(self, extra=None):
        self.sizes = []
        self.extra = extra

    def __call__(self, hidden):
        self.sizes.append(hidden.shape[1])
        if self.extra is not None:
            return hidden * 2, self.extra(hidden)
        return hidden * 2


def model(layers, length, value):
    def forward():
        hidden = torch.full((1, length, 2), float(value))
        for layer in layers:
            hidden = at_yield_point(layer, hidden)
            if isinstance(hidden, tuple):
                hidden, extra = hidden
                assert len(extra) in (1, length)
        return hidden

    return forward


def test_sub_batches_run_each_module_once_over_all_of_them():
    layers = [Layer(), Layer()]
    counts = CoroutineCounts()
    results = run_sub_batches([model(layers, 3, 1), model(layers, 1, 5), model(layers, 2, 7)], counts)
    assert [layer.sizes for layer in layers] == [[6], [6]]
    assert [result.shape[1] for result in results] == [3, 1, 2]
    assert [float(result[0, 0, 0]) for result in results] == [4.0, 20.0, 28.0]
    assert (counts.yields, counts.combines) == (6, 2)


def test_one_sub_batch_runs_straight_through():
    layers = [Layer()]
    counts = CoroutineCounts()
    (result,) = run_sub_batches([model(layers, 4, 1)], counts)
    assert float(result[0, 0, 0]) == 2.0
    assert (counts.yields, counts.combines) == (0, 0)


def test_per_token_extras_are_split_and_others_shared():
    per_token = Layer(extra=lambda hidden: torch.arange(hidden.shape[1]))
    shared = Layer(extra=lambda hidden: torch.zeros(1))
    run_sub_batches([model([per_token, shared], n, 1) for n in (2, 3)], CoroutineCounts())
    assert per_token.sizes == [5]


def test_an_error_in_a_combined_module_unwinds_every_sub_batch():
    unwound = []

    def broken(hidden):
        raise RuntimeError("the module broke")

    def forward(name):
        def run():
            try:
                return at_yield_point(broken, torch.zeros(1, 1, 1))
            finally:
                unwound.append(name)

        return run

    with pytest.raises(RuntimeError, match="the module broke"):
        run_sub_batches([forward("a"), forward("b")], CoroutineCounts())
    assert sorted(unwound) == ["a", "b"]


def test_an_error_in_one_sub_batch_surfaces_with_its_own_type():
    layer = Layer()

    def broken():
        at_yield_point(layer, torch.zeros(1, 1, 2))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_sub_batches([model([layer, layer], 2, 1), broken], CoroutineCounts())
    # And the next pass is not disturbed.
    assert len(run_sub_batches([model([layer], 2, 1)] * 2, CoroutineCounts())) == 2


def test_sub_batches_that_part_ways_are_a_bug_of_ours():
    with pytest.raises(InternalError, match="different modules"):
        run_sub_batches([model([Layer()], 1, 1), model([Layer()], 1, 1)], CoroutineCounts())


def test_inference_mode_holds_on_both_sides_of_a_switch():
    seen = []

    def layer(hidden):
        seen.append(torch.is_inference_mode_enabled())
        return hidden

    def forward():
        seen.append(torch.is_inference_mode_enabled())
        hidden = at_yield_point(layer, torch.zeros(1, 1, 1))
        seen.append(torch.is_inference_mode_enabled())
        return hidden

    with torch.inference_mode():
        run_sub_batches([forward, forward], CoroutineCounts())
    assert seen == [True] * 5
    assert not torch.is_inference_mode_enabled()
