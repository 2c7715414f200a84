"""Scheduling on a fake device: every row ends, with the right tokens, and pages never leak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_data.errors import InternalError, RowError
from batchgen_data.runtime.scheduler import Scheduler
from batchgen_data.runtime.sequence import Sequence, State
from batchgen_data.runtime.step import Limits
from fake_model import FakeExecutor, expected, sampling


def limits(**options) -> Limits:
    return Limits(**{"num_pages": 64, "page_tokens": 4, "max_sequences": 8, "max_step_tokens": 16, **options})


def sequence(seq_id, prompt, max_tokens, **options) -> Sequence:
    return Sequence(
        seq_id,
        list(prompt),
        sampling(max_tokens=max_tokens),
        limit_tokens=len(prompt) + max_tokens,
        **options,
    )


def drain(scheduler, executor, *, max_steps=10_000):
    """Run to the end, asserting every invariant after each step."""
    for _ in range(max_steps):
        step = scheduler.plan_step()
        if step is None:
            return
        assert 0 < step.num_tokens <= max(scheduler.limits.max_step_tokens, 1)
        assert len({chunk.sequence.seq_id for chunk in step.chunks}) == len(step.chunks)
        try:
            result = executor.run(step)
        except ZeroDivisionError as error:
            scheduler.step_failed(step, repr(error))
        else:
            scheduler.complete(step, result.tokens, result.failed)
        scheduler.check()
    raise AssertionError("no end")


rows = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25), st.integers(0, 3)), min_size=0, max_size=14)


@settings(max_examples=150, deadline=None)
@given(
    rows=rows,
    num_pages=st.integers(14, 60),
    page_tokens=st.sampled_from([1, 3, 4]),
    max_sequences=st.integers(1, 6),
    extra_tokens=st.integers(0, 20),
    reuse=st.booleans(),
    max_chunk_tokens=st.sampled_from([None, 1, 3, 8]),
    faults=st.sets(st.integers(0, 40), max_size=3),
    part_faults=st.sets(st.integers(0, 40), max_size=3),
)
def test_any_schedule_ends_with_the_right_tokens(
    rows, num_pages, page_tokens, max_sequences, extra_tokens, reuse, max_chunk_tokens, faults, part_faults
):
    """Random rows (many with equal prefixes), pools, budgets, failing passes and failing parts of passes."""
    config = limits(
        num_pages=num_pages,
        page_tokens=page_tokens,
        max_sequences=max_sequences,
        max_step_tokens=max_sequences + extra_tokens,
        prefix_reuse=reuse,
        max_chunk_tokens=max_chunk_tokens,
    )
    scheduler = Scheduler(config)
    executor = FakeExecutor(page_tokens)

    def fault(step):
        if executor.num_steps in faults and len(step.chunks) > 1:
            raise ZeroDivisionError("a pass failed")

    def part_fault(step):
        half = step.chunks[: len(step.chunks) // 2] if executor.num_steps in part_faults else ()
        return {chunk.sequence.seq_id: "a part failed" for chunk in half}

    executor.fault = fault
    executor.part_fault = part_fault
    sequences = []
    for seq_id, (num_prompt, max_tokens, family) in enumerate(rows):
        prompt = [family] * (num_prompt // 2) + list(range(num_prompt - num_prompt // 2))
        sequences.append(sequence(seq_id, prompt, max_tokens))
    accepted = [s for s in sequences if scheduler.add(s)]
    drain(scheduler, executor)
    for s in sequences:
        assert s.state is State.FINISHED
        if s in accepted:
            assert s.error is None
            assert s.generated_ids == expected(s.token_ids[: s.num_prompt], s.sampling.max_tokens)
        else:
            assert s.error.code == "exceeds_kv_memory"
            assert -(-(s.limit_tokens - 1) // page_tokens) > num_pages
    assert scheduler.num_unfinished == 0
    assert scheduler.pool.num_in_use == 0


def test_zero_rows_end_at_once():
    assert Scheduler(limits()).plan_step() is None


def test_a_small_pool_makes_the_youngest_yield_and_changes_no_token():
    scheduler = Scheduler(limits(num_pages=16))
    executor = FakeExecutor(4)
    sequences = [sequence(i, [i] * 6, 40) for i in range(4)]
    for s in sequences:
        scheduler.add(s)
    drain(scheduler, executor)
    assert scheduler.statistics()["yields"] > 0
    assert sequences[0].num_yields == 0, "the oldest is never driven out"
    for s in sequences:
        assert s.generated_ids == expected(s.token_ids[:6], 40)


def test_one_row_is_not_driven_out_again_and_again():
    """Case 38: a cache for about four sequences, 32 rows with long outputs."""
    scheduler = Scheduler(limits(num_pages=44, max_sequences=32, max_step_tokens=64))
    sequences = [sequence(i, [i] * 5, 38) for i in range(32)]
    for s in sequences:
        scheduler.add(s)
    drain(scheduler, FakeExecutor(4))
    assert max(s.num_yields for s in sequences) <= 2
    statistics = scheduler.statistics()
    assert 0 < statistics["yields_for_pages"] == statistics["yields"]


def test_the_first_wave_shares_its_prefix():
    """Case 68: rows that arrive together compute their common prefix once."""
    prefix = list(range(100, 140))
    scheduler = Scheduler(limits(max_step_tokens=64))
    executor = FakeExecutor(4)
    sequences = [sequence(i, [*prefix, i], 3) for i in range(8)]
    for s in sequences:
        scheduler.add(s)
    sizes = []
    for _ in range(2):
        step = scheduler.plan_step()
        sizes.append(sorted(chunk.end - chunk.start for chunk in step.chunks))
        scheduler.complete(step, executor.run(step).tokens)
    assert sizes == [[41], [1] * 8]
    drain(scheduler, executor)
    statistics = scheduler.statistics()
    assert statistics["reused_tokens"] == 7 * 40
    assert statistics["prefill_tokens"] == 41 + 7


def test_without_reuse_every_prompt_is_computed():
    scheduler = Scheduler(limits(prefix_reuse=False))
    for i in range(3):
        scheduler.add(sequence(i, [7] * 20, 2))
    drain(scheduler, FakeExecutor(4))
    assert scheduler.statistics()["prefill_tokens"] == 60
    assert scheduler.statistics()["reused_tokens"] == 0


def test_rows_start_in_order_of_arrival():
    scheduler = Scheduler(limits(max_sequences=2, max_step_tokens=4))
    sequences = [sequence(i, [i] * 3, 3 + i) for i in range(6)]
    for s in sequences:
        scheduler.add(s)
    started = []
    executor = FakeExecutor(4)
    while (step := scheduler.plan_step()) is not None:
        new = {chunk.sequence.seq_id for chunk in step.chunks} - set(started)
        started += sorted(new)
        scheduler.complete(step, executor.run(step).tokens)
    assert started == sorted(started)


def test_a_row_that_can_never_fit_fails_at_once_and_others_run():
    scheduler = Scheduler(limits(num_pages=4))
    big, small = sequence(0, [1] * 10, 20), sequence(1, [2] * 3, 3)
    assert not scheduler.add(big)
    assert scheduler.add(small)
    assert "lower max_tokens or raise kv_memory" in big.error.message
    drain(scheduler, FakeExecutor(4))
    assert small.finish_reason == "length"


def test_without_max_tokens_the_pool_bounds_the_output():
    scheduler = Scheduler(limits(num_pages=4))
    s = Sequence(0, [1, 2, 3], sampling(max_tokens=None), limit_tokens=1000)
    assert scheduler.add(s)
    drain(scheduler, FakeExecutor(4))
    assert (s.finish_reason, s.stop_reason) == ("length", "kv_memory")
    assert s.num_tokens == 16


def test_a_row_longer_than_the_staging_is_refused_though_the_host_tier_would_hold_it():
    scheduler = Scheduler(limits(num_pages=64, max_sequence_pages=4))
    long, fits = sequence(0, [1] * 10, 8), sequence(1, [2] * 10, 7)
    open_end = Sequence(2, [3, 4], sampling(max_tokens=None), limit_tokens=1000)
    assert not scheduler.add(long)
    assert long.error.code == "exceeds_kv_memory"
    assert "need 5 KV pages (18 tokens), and the staging that attention reads them from holds 4" in (
        long.error.message
    )
    assert scheduler.add(fits)
    assert scheduler.add(open_end)
    drain(scheduler, FakeExecutor(4))
    assert fits.num_generated == 7
    assert (open_end.stop_reason, open_end.num_tokens) == ("kv_memory", 16)


def test_a_failed_pass_costs_only_the_row_that_fails_alone():
    scheduler = Scheduler(limits())
    executor = FakeExecutor(4)

    def fault(step):
        if any(chunk.sequence.seq_id == 2 for chunk in step.chunks):
            raise ZeroDivisionError("row 2 is poison")

    executor.fault = fault
    sequences = [sequence(i, [5] * 9 + [i], 6) for i in range(5)]
    for s in sequences:
        scheduler.add(s)
    drain(scheduler, executor)
    assert [s.finish_reason for s in sequences] == ["length", "length", "error", "length", "length"]
    assert sequences[2].error.code == "model_error"
    for s in sequences[:2] + sequences[3:]:
        assert s.generated_ids == expected(s.token_ids[:10], 6)


def test_a_part_that_raises_keeps_its_neighbours_out_of_it():
    """Only the rows of that part run alone afterwards; of these only the culprit fails."""
    scheduler = Scheduler(limits())
    executor = FakeExecutor(4)

    def part_fault(step):
        parts = (step.chunks[:2], step.chunks[2:])
        bad = [part for part in parts if any(chunk.sequence.seq_id == 1 for chunk in part)]
        return {chunk.sequence.seq_id: "no 1" for part in bad for chunk in part}

    executor.part_fault = part_fault
    sequences = [sequence(i, [i] * 2, 6) for i in range(4)]
    for s in sequences:
        scheduler.add(s)
    drain(scheduler, executor)
    assert [s.error.code if s.error else None for s in sequences] == [None, "model_error", None, None]
    assert "no 1" in sequences[1].error.message
    assert [s.num_yields for s in sequences] == [1, 1, 0, 0]
    for s in sequences[:1] + sequences[2:]:
        assert s.generated_ids == expected(s.token_ids[:2], 6)


def test_a_row_with_bad_logits_ends_alone_and_leaves_no_page_behind_by_name():
    scheduler = Scheduler(limits())
    executor = FakeExecutor(4)
    executor.non_finite = {1}
    sequences = [sequence(i, [i] * 12, 6) for i in range(3)]
    for s in sequences:
        scheduler.add(s)
    drain(scheduler, executor)
    assert [s.finish_reason for s in sequences] == ["length", "error", "length"]
    names = sequences[1].page_names(4, 3)
    assert scheduler.pool.match(names) == []


@pytest.mark.parametrize("after_steps", [0, 1, 3])
def test_cancelled_rows_leave_and_others_go_on(after_steps):
    scheduler = Scheduler(limits(num_pages=12, max_sequences=3))
    executor = FakeExecutor(4)
    sequences = [sequence(i, [i] * 6, 20) for i in range(5)]
    for s in sequences:
        scheduler.add(s)
    for _ in range(after_steps):
        step = scheduler.plan_step()
        scheduler.complete(step, executor.run(step).tokens)
    for s in sequences[::2]:
        scheduler.cancel(s, RowError("cancelled", "gone"))
        scheduler.check()
    drain(scheduler, executor)
    assert [s.error.code if s.error else None for s in sequences] == ["cancelled", None] * 2 + ["cancelled"]
    for s in sequences[1::2]:
        assert s.generated_ids == expected(s.token_ids[:6], 20)


def test_the_check_finds_a_sequence_that_claims_too_much():
    scheduler = Scheduler(limits())
    s = sequence(0, [1] * 6, 4)
    scheduler.add(s)
    scheduler.plan_step()
    s.num_computed = 1000
    with pytest.raises(InternalError):
        scheduler.check()


def test_the_same_calls_give_the_same_decisions():
    def decisions():
        scheduler = Scheduler(limits(num_pages=16))
        executor = FakeExecutor(4)
        for i in range(6):
            scheduler.add(sequence(i, [i % 2] * (5 + i), 20))
        trace = []
        while (step := scheduler.plan_step()) is not None:
            trace.append([(c.sequence.seq_id, c.start, c.end, tuple(c.sequence.pages)) for c in step.chunks])
            scheduler.complete(step, executor.run(step).tokens)
        return trace

    assert decisions() == decisions()


def test_rows_behind_one_that_waits_for_a_prefix_go_first():
    scheduler = Scheduler(limits(num_pages=200, max_step_tokens=16, max_chunk_tokens=8))
    shared = list(range(100, 160))
    for seq_id in range(3):
        scheduler.add(sequence(seq_id, [*shared, seq_id], 2))
    scheduler.add(sequence(3, [7, 8, 9], 2))
    step = scheduler.plan_step()
    assert [chunk.sequence.seq_id for chunk in step.chunks] == [0, 3]
    assert step.num_tokens == 16, "what nobody else can use goes to the chunk that was cut short"
    executor = FakeExecutor(4)
    scheduler.complete(step, executor.run(step).tokens)
    drain(scheduler, executor)
    assert scheduler.statistics()["reused_tokens"] == 2 * 60


def test_one_long_prompt_alone_gets_the_whole_pass():
    scheduler = Scheduler(limits(max_step_tokens=16, max_chunk_tokens=2))
    scheduler.add(sequence(0, range(40), 2))
    assert scheduler.plan_step().num_tokens == 16
