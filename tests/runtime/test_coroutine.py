"""Sub-batches suspend at points, combine there, fail on their own, and unwind when a pass cannot go on."""

from __future__ import annotations

import time

import pytest
import torch

from batchgen_data.errors import DeviceError, InternalError
from batchgen_data.runtime.coroutine import (
    CoroutineCounts,
    Point,
    at_barrier,
    at_yield_point,
    run_sub_batches,
)
from batchgen_data.runtime.trace import Trace


class Layer(Point):
    """Doubles its input, and remembers the batch sizes it was called with."""

    def __init__(self, extra=None, token_dim=1, broken=lambda hidden: None):
        sizes = []

        def run(hidden):
            sizes.append(hidden.shape[token_dim])
            broken(hidden)
            return hidden * 2 if extra is None else (hidden * 2, extra(hidden))

        super().__init__("layer", run, token_dim)
        object.__setattr__(self, "sizes", sizes)


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


def first_values(results):
    return [float(result[0, 0, 0]) for result in results]


def test_sub_batches_run_each_module_once_over_all_of_them():
    layers = [Layer(), Layer()]
    counts = CoroutineCounts()
    results = run_sub_batches([model(layers, 3, 1), model(layers, 1, 5), model(layers, 2, 7)], counts)
    assert [layer.sizes for layer in layers] == [[6], [6]]
    assert [result.shape[1] for result in results] == [3, 1, 2]
    assert first_values(results) == [4.0, 20.0, 28.0]
    assert (counts.yields, counts.combines) == (6, 2)
    assert (counts.calls, counts.combined_tokens, counts.barriers) == (2, 12, 0)


def test_one_sub_batch_runs_straight_through():
    layers = [Layer()]
    counts = CoroutineCounts()
    (result,) = run_sub_batches([model(layers, 4, 1)], counts)
    assert float(result[0, 0, 0]) == 2.0
    assert (counts.yields, counts.combines) == (0, 0)


@pytest.mark.parametrize(
    "most_tokens,sizes",
    [(None, [9]), (9, [9]), (8, [5, 4]), (3, [3, 3, 3]), (2, [2, 2, 2, 2, 1]), (1, [1] * 9)],
)
def test_groups_hold_at_most_so_many_tokens_and_change_no_result(most_tokens, sizes):
    layer = Layer(extra=lambda hidden: torch.arange(hidden.shape[1]))
    counts = CoroutineCounts()
    results = run_sub_batches([model([layer], n, n) for n in (5, 1, 3)], counts, most_tokens=most_tokens)
    assert layer.sizes == sizes
    assert [result.shape for result in results] == [(1, n, 2) for n in (5, 1, 3)]
    assert [result.unique().tolist() for result in results] == [[10.0], [2.0], [6.0]]
    assert (counts.combines, counts.calls, counts.combined_tokens) == (1, len(sizes), 9)


def test_the_most_tokens_hold_for_one_sub_batch_too():
    layer = Layer()
    (result,) = run_sub_batches([model([layer], 5, 1)], CoroutineCounts(), most_tokens=2)
    assert layer.sizes == [2, 2, 1]
    assert result.tolist() == [[[2.0, 2.0]] * 5]


def test_per_token_extras_are_split_and_others_shared():
    per_token = Layer(extra=lambda hidden: torch.arange(hidden.shape[1]))
    shared = Layer(extra=lambda hidden: torch.zeros(1))
    seen = []

    def forward(length):
        def run():
            hidden, places = at_yield_point(per_token, torch.zeros(1, length, 2))
            hidden, other = at_yield_point(shared, hidden)
            seen.append((places.tolist(), other.tolist()))
            return hidden

        return run

    run_sub_batches([forward(2), forward(3)], CoroutineCounts())
    assert per_token.sizes == [5]
    assert seen == [([0, 1], [0.0]), ([2, 3, 4], [0.0])]


def test_tokens_may_be_the_first_dimension():
    layer = Layer(token_dim=0)

    def forward(length):
        return lambda: at_yield_point(layer, torch.full((length, 4), float(length)))

    results = run_sub_batches([forward(2), forward(3)], CoroutineCounts(), most_tokens=4)
    assert layer.sizes == [3, 2]
    assert [result.shape for result in results] == [(2, 4), (3, 4)]
    assert [result.unique().tolist() for result in results] == [[4.0], [6.0]]


def test_a_barrier_lets_nobody_pass_before_all_are_there():
    order = []
    barriers = [Point(f"layer {number}", None) for number in range(3)]

    def forward(name):
        def run():
            for barrier in barriers:
                at_barrier(barrier)
                order.append((barrier.name, name))
            return torch.zeros(1)

        return run

    counts = CoroutineCounts()
    run_sub_batches([forward("a"), forward("b")], counts)
    assert order == [(barrier.name, name) for barrier in barriers for name in "ab"]
    assert (counts.barriers, counts.yields, counts.combines) == (6, 0, 0)


def test_outside_a_sub_batch_points_change_nothing():
    layer = Layer()
    at_barrier(Point("layer 0", None))
    assert at_yield_point(layer, torch.ones(1, 2, 1)).tolist() == [[[2.0], [2.0]]]
    assert layer.sizes == [2]


def test_an_error_in_a_combined_module_unwinds_every_sub_batch():
    unwound = []
    error = RuntimeError("the module broke")

    def broken(hidden):
        raise error

    point = Point("broken", broken)

    def forward(name):
        def run():
            try:
                return at_yield_point(point, torch.zeros(1, 1, 1))
            finally:
                unwound.append(name)

        return run

    counts = CoroutineCounts()
    with pytest.raises(RuntimeError, match="the module broke"):
        run_sub_batches([forward("a"), forward("b")], counts)
    assert sorted(unwound) == ["a", "b"]
    assert (counts.retries, counts.failures) == (1, 2)


def test_an_error_in_one_sub_batch_is_its_own():
    layer = Layer()

    def broken():
        at_yield_point(layer, torch.zeros(1, 1, 2))
        raise KeyError("mine")

    counts = CoroutineCounts()
    first, failure, last = run_sub_batches(
        [model([layer, layer], 2, 1), broken, model([layer, layer], 3, 5)], counts
    )
    assert isinstance(failure, KeyError)
    assert failure.args == ("mine",)
    assert first_values([first, last]) == [4.0, 20.0]
    assert layer.sizes == [6, 5], "the others go on together"
    assert (counts.failures, counts.retries) == (1, 0)
    # And the next pass is not disturbed.
    assert len(run_sub_batches([model([layer], 2, 1)] * 2, CoroutineCounts())) == 2


def test_an_error_before_the_first_point_is_its_own_too():
    layer = Layer()

    def broken():
        raise KeyError("early")

    failure, result = run_sub_batches([broken, model([layer], 2, 1)], CoroutineCounts())
    assert isinstance(failure, KeyError)
    assert first_values([result]) == [2.0]


def test_only_those_for_which_a_combined_module_raises_alone_are_at_fault():
    unwound = []

    def refuses(hidden):
        if (hidden == 14).any():
            raise ValueError("not this one")

    layers = [Layer(), Layer(broken=refuses), Layer()]

    def forward(length, value):
        inner = model(layers, length, value)

        def run():
            try:
                return inner()
            finally:
                unwound.append(value)

        return run

    counts = CoroutineCounts()
    results = run_sub_batches([forward(2, 1), forward(1, 7), forward(3, 3)], counts)
    assert isinstance(results[1], ValueError)
    assert first_values([results[0], results[2]]) == [8.0, 24.0]
    assert layers[1].sizes == [6, 2, 1, 3], "together, then each alone"
    assert layers[2].sizes == [5], "then the two that are left together"
    assert sorted(unwound) == [1, 3, 7]
    assert (counts.retries, counts.failures) == (1, 1)


def test_a_combined_module_that_raises_once_costs_nobody():
    tries = []

    def raises_once(hidden):
        tries.append(hidden)
        if len(tries) == 1:
            raise RuntimeError("a passing fault")

    layer = Layer(broken=raises_once)
    counts = CoroutineCounts()
    results = run_sub_batches([model([layer], 2, 1), model([layer], 1, 2)], counts)
    assert first_values(results) == [2.0, 4.0]
    assert (counts.retries, counts.failures) == (1, 0)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("none left"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        DeviceError("the disk is gone"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("place", ["sub-batch", "module"])
def test_what_ends_the_whole_pass_is_raised_at_once(error, place):
    unwound = []

    def fail(hidden):
        raise error

    layer = Layer(broken=fail if place == "module" else lambda hidden: None)

    def forward(name, raises):
        def run():
            try:
                at_yield_point(layer, torch.zeros(1, 1, 1))
                if raises:
                    raise error
                at_yield_point(layer, torch.zeros(1, 1, 1))
                raise AssertionError("the pass went on")
            finally:
                unwound.append(name)

        return run

    with pytest.raises(type(error)) as caught:
        run_sub_batches([forward("a", False), forward("b", True), forward("c", False)], CoroutineCounts())
    assert caught.value is error
    assert sorted(unwound) == ["a", "b", "c"]


def test_sub_batches_that_part_ways_are_a_bug_of_ours():
    with pytest.raises(InternalError, match="wait at layer and layer"):
        run_sub_batches([model([Layer()], 1, 1), model([Layer()], 1, 1)], CoroutineCounts())


def test_inference_mode_holds_on_both_sides_of_a_switch():
    seen = []

    def layer(hidden):
        seen.append(torch.is_inference_mode_enabled())
        return hidden

    point = Point("layer", layer)

    def forward():
        seen.append(torch.is_inference_mode_enabled())
        hidden = at_yield_point(point, torch.zeros(1, 1, 1))
        seen.append(torch.is_inference_mode_enabled())
        return hidden

    with torch.inference_mode():
        run_sub_batches([forward, forward], CoroutineCounts())
    assert seen == [True] * 5
    assert not torch.is_inference_mode_enabled()


def test_seconds_are_counted_where_they_were_spent():
    layer = Layer(broken=lambda hidden: time.sleep(0.02))

    def slow():
        hidden = at_yield_point(layer, torch.zeros(1, 1, 2))
        time.sleep(0.01)
        return at_yield_point(layer, hidden)

    counts = CoroutineCounts()
    run_sub_batches([slow, slow], counts)
    assert 0.04 <= counts.run_s < 0.5
    # Both wait for the module twice; the second for the first one's sleep, the first for the second's.
    assert counts.wait_s >= 2 * 0.04 + 2 * 0.01
    assert 0 < counts.copy_s < counts.run_s


def test_a_trace_shows_each_stretch_of_a_sub_batch_and_each_combined_call():
    trace = Trace()
    layer = Layer()
    run_sub_batches([model([layer], 2, 1), model([layer], 1, 2)], CoroutineCounts(), trace=trace)
    found = [(name, track, args) for name, track, _, _, args in trace._spans]
    assert found == [
        ("sub-batch 0", "sub-batches", {"until": "layer"}),
        ("sub-batch 1", "sub-batches", {"until": "layer"}),
        ("layer", "combined", {"tokens": 3, "sub_batches": 2}),
        ("sub-batch 0", "sub-batches", {"until": "the end"}),
        ("sub-batch 1", "sub-batches", {"until": "the end"}),
    ]
    ends = [span[3] for span in trace._spans]
    starts = [span[2] for span in trace._spans]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), "one after another"
