"""Which passes a workload makes: every token is computed once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_data.errors import ConfigError
from batchgen_data.planner.workload import MOST_ROWS, PassShape, Workload, passes

ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 80)), min_size=1, max_size=40)


@given(ROWS, st.sampled_from((1, 3, 16, 64)), st.sampled_from((16, 64, 512)), st.floats(50, 1e6))
def test_every_token_is_computed_once(
    rows: list[tuple[int, int]], max_sequences: int, max_step_tokens: int, capacity: float
) -> None:
    workload = Workload(
        prompt_tokens=tuple(p for p, _ in rows), output_tokens=tuple(o for _, o in rows), num_rows=len(rows)
    )
    shapes = passes(
        workload, max_sequences=max_sequences, max_step_tokens=max_step_tokens, capacity_tokens=capacity
    )
    prefilled = sum(count * shape.prefill_tokens for shape, count in shapes.items())
    decoded = sum(count * shape.decoding for shape, count in shapes.items())
    assert prefilled == pytest.approx(sum(p for p, _ in rows))
    # The pass that ends a prompt samples its first token.
    assert decoded == pytest.approx(sum(o - 1 for _, o in rows))
    assert all(shape.num_sequences <= max_sequences + 1e-9 for shape in shapes)
    assert all(shape.num_tokens <= max(max_step_tokens, shape.decoding + 1) + 1e-9 for shape in shapes)


def test_equal_rows_at_once_are_few_passes() -> None:
    shapes = passes(Workload.uniform(8, 10, 5), max_sequences=8, max_step_tokens=80, capacity_tokens=1e6)
    assert sum(shapes.values()) == 5
    assert shapes[PassShape(0, 0.0, 80, 5.5, 8)] == 1
    (decode,) = (shape for shape in shapes if shape.decoding)
    assert decode == PassShape(8, 11.5)


def test_a_small_pool_runs_rows_one_after_another() -> None:
    shapes = passes(Workload.uniform(4, 10, 5), max_sequences=8, max_step_tokens=80, capacity_tokens=1)
    assert sum(shapes.values()) == 4 * 5


def test_a_sample_stands_for_all_rows() -> None:
    workload = Workload.uniform(10 * MOST_ROWS, 10, 5)
    assert len(workload.prompt_tokens) == MOST_ROWS
    assert workload.generated_tokens == 10 * MOST_ROWS * 5
    shapes = passes(workload, max_sequences=64, max_step_tokens=512, capacity_tokens=1e9)
    decoded = sum(count * shape.decoding for shape, count in shapes.items())
    assert decoded == pytest.approx(10 * MOST_ROWS * 4)


def test_rows_are_cut_to_the_context() -> None:
    workload = Workload(prompt_tokens=(10, 100), output_tokens=(50, 50), num_rows=2).within(40)
    assert (workload.prompt_tokens, workload.output_tokens) == ((10, 39), (30, 1))


@pytest.mark.parametrize(
    "given",
    [
        {"prompt_tokens": (), "output_tokens": (), "num_rows": 0},
        {"prompt_tokens": (1,), "output_tokens": (1, 2), "num_rows": 2},
        {"prompt_tokens": (0,), "output_tokens": (1,), "num_rows": 1},
        {"prompt_tokens": (1, 1), "output_tokens": (1, 1), "num_rows": 1},
    ],
)
def test_impossible_workloads_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Workload(**given)  # type: ignore[arg-type]
