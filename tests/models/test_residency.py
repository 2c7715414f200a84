"""What stays on the device: budgets are kept, used, and refused with numbers when they are too small."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_data.errors import PlanError
from batchgen_data.models.residency import Residency, WeightSizes, choose_residency


def sizes(
    layer_bytes: list[int], experts: list[tuple[int, int]] | None = None, fixed_bytes: int = 100
) -> WeightSizes:
    experts = experts or [(0, 0)] * len(layer_bytes)
    return WeightSizes(
        fixed_bytes=fixed_bytes,
        layer_bytes=tuple(layer_bytes),
        expert_bytes=tuple(size for size, _ in experts),
        num_experts=tuple(count for _, count in experts),
        staging_bytes=3,
    )


def planned(budget_bytes: int, of: WeightSizes) -> Residency:
    residency = choose_residency(of, budget_bytes)
    assert residency is not None
    return residency


def test_nothing_is_streamed_where_everything_fits() -> None:
    assert choose_residency(sizes([10] * 8), 180) is None
    assert choose_residency(sizes([10] * 8), 179) is not None


def test_resident_layers_are_spread_over_the_model() -> None:
    residency = planned(100 + 3 + 20 + 40, sizes([10] * 8))
    assert residency.streamed_layers == {0, 2, 4, 6}
    assert (residency.layer_slots, residency.expert_slots) == (2, 0)
    assert (residency.resident_bytes, residency.ring_bytes) == (140, 23)


def test_layers_stay_before_experts_do() -> None:
    of = sizes([20] * 4, [(5, 16)] * 4)
    residency = planned(100 + 3 + 10 + 80 + 3 * 5, of)
    assert residency.streamed_layers == set()
    assert residency.layer_slots == 0
    assert residency.resident_experts == (1, 1, 1, 0)
    assert residency.expert_slots == 2
    tight = planned(100 + 3 + 10 + 79, of)
    assert tight.streamed_layers
    assert tight.layer_slots == 2


def test_dense_layers_among_sparse_ones_have_no_experts_to_keep() -> None:
    residency = planned(100 + 3 + 10 + 90 + 40, sizes([40, 20, 30], [(0, 0), (5, 16), (5, 16)]))
    assert residency.resident_experts[0] == 0
    assert max(residency.resident_experts) - min(residency.resident_experts[1:]) <= 1


@pytest.mark.parametrize("experts", [None, [(5, 16)] * 8])
def test_a_budget_below_the_least_is_refused_with_the_least_one(
    experts: list[tuple[int, int]] | None,
) -> None:
    of = sizes([10] * 8, experts)
    with pytest.raises(
        PlanError, match=r"weights_memory of 50 bytes .* M \(\d+ bytes.*100 bytes always stay"
    ) as e:
        choose_residency(of, 50, "M")
    least = int(re.search(r"at least (\d+) bytes", str(e.value))[1])  # type: ignore[index]
    assert choose_residency(of, least) is not None
    with pytest.raises(PlanError):
        choose_residency(of, least - 1)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=9),
    st.integers(1, 2000),
)
def test_budgets_are_kept(layers: list[tuple[int, int, int]], budget_bytes: int) -> None:
    of = sizes([own for own, _, _ in layers], [(size if n else 0, n if size else 0) for _, size, n in layers])
    try:
        residency = choose_residency(of, budget_bytes)
    except PlanError:
        return
    if residency is None:
        assert of.total_bytes <= budget_bytes
        return
    kept = sum(
        (0 if number in residency.streamed_layers else own)
        + residency.resident_experts[number] * of.expert_bytes[number]
        for number, own in enumerate(of.layer_bytes)
    )
    assert residency.resident_bytes == of.fixed_bytes + kept
    assert residency.resident_bytes + residency.ring_bytes <= budget_bytes
    assert all(mine <= all_ for mine, all_ in zip(residency.resident_experts, of.num_experts, strict=True))
    assert not residency.streamed_layers or residency.layer_slots == 2
