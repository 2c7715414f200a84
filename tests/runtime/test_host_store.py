"""Checkpoints of suspended sequences on a fake device: same tokens, fewer of them prefilled, no page lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_data.errors import InternalError, RowError
from batchgen_data.runtime.scheduler import Scheduler
from batchgen_data.runtime.sequence import Sequence, State
from batchgen_data.runtime.step import Limits
from fake_model import FakeExecutor, expected, sampling

PAGE_TOKENS = 4


def limits(**options) -> Limits:
    base = {"num_pages": 16, "page_tokens": PAGE_TOKENS, "max_sequences": 8, "max_step_tokens": 16}
    return Limits(**{**base, "host_pages": 64, **options})


def sequence(seq_id, prompt, max_tokens) -> Sequence:
    limit = len(prompt) + max_tokens
    return Sequence(seq_id, list(prompt), sampling(max_tokens=max_tokens), limit_tokens=limit)


def advance(scheduler, executor) -> bool:
    """One step, with every invariant asserted; False when there is nothing left."""
    step = scheduler.plan_step()
    if step is None:
        return False
    try:
        result = executor.run(step)
    except ZeroDivisionError as error:
        scheduler.step_failed(step, repr(error))
    except MemoryError:
        scheduler.step_too_large(step)
    else:
        scheduler.complete(step, result.tokens, result.failed, result.copied)
    scheduler.check()
    return True


def drain(scheduler, executor):
    for _ in range(10_000):
        if not advance(scheduler, executor):
            return
    raise AssertionError("no end")


def run(rows, *, copy_passes=0, **options):
    """Run rows of (prompt, new tokens) to their end; the tokens are the right ones."""
    scheduler = Scheduler(limits(**options))
    executor = FakeExecutor(PAGE_TOKENS)
    executor.copy_passes = (0, copy_passes)
    sequences = [sequence(seq_id, *row) for seq_id, row in enumerate(rows)]
    for one in sequences:
        assert scheduler.add(one)
    drain(scheduler, executor)
    for one in sequences:
        assert one.generated_ids == expected(one.token_ids[: one.num_prompt], one.sampling.max_tokens)
    return scheduler, executor


ROWS = [([i] * 6, 40) for i in range(4)]


@pytest.mark.parametrize("copy_passes", [0, 1, 9])
def test_what_was_suspended_is_restored_instead_of_prefilled(copy_passes):
    recomputed, _ = run(ROWS, host_pages=0)
    restored, executor = run(ROWS, copy_passes=copy_passes)
    before, after = recomputed.statistics(), restored.statistics()
    assert before["yields"] > 0
    assert before["recomputed_tokens"] > 0
    assert after["yields"] > 0
    assert after["recomputed_tokens"] == 0
    # The newest token of a row that comes back while its pages are still there counts as prefilled.
    assert 4 * 6 <= after["prefill_tokens"] <= 4 * 6 + after["yields"] < before["prefill_tokens"]
    assert after["restored_tokens"] > 0
    assert executor.num_restored > 0
    assert after["host_pages_in_use"] == 0
    assert restored.pool.num_in_use == 0


def test_without_a_host_tier_nothing_is_copied():
    scheduler, executor = run(ROWS, host_pages=0)
    assert executor.num_copies == 0
    statistics = scheduler.statistics()
    assert statistics["checkpointed_tokens"] == statistics["host_pages"] == statistics["host_full"] == 0


def test_a_host_tier_that_is_full_costs_the_computation_only():
    scheduler, executor = run(ROWS, host_pages=1)
    assert executor.num_copies == 0
    statistics = scheduler.statistics()
    assert statistics["host_full"] == statistics["yields"] > 0
    assert statistics["recomputed_tokens"] > 0


def test_few_tokens_are_computed_again_instead_of_copied():
    scheduler, executor = run(ROWS, least_restored_tokens=1000)
    assert executor.num_copies == 0
    assert scheduler.statistics()["recomputed_tokens"] > 0


def test_a_second_checkpoint_copies_only_what_was_gained():
    """Two rows that take turns for the pool: the same one yields again and again."""
    rows = [([1] * 8, 60), ([2] * 4, 12), ([3] * 4, 12), ([4] * 30, 30)]
    scheduler, _ = run(rows, num_pages=20)
    again = max(scheduler.statistics()["yields"], 1)
    checkpointed = scheduler.statistics()["checkpointed_tokens"]
    without_names, _ = run(rows, num_pages=20, prefix_reuse=False)
    assert again > 1
    assert checkpointed < without_names.statistics()["checkpointed_tokens"]


def test_equal_prefixes_are_stored_once():
    prefix = list(range(100, 116))
    rows = [([*prefix, i], 30) for i in range(5)]
    scheduler, executor = run(rows, num_pages=22)
    statistics = scheduler.statistics()
    assert statistics["recomputed_tokens"] == 0
    assert statistics["yields"] > 1
    stored_prefixes = sum(1 for tokens in executor.host.values() if tokens == tuple(prefix))
    assert stored_prefixes <= 2, "rows that yield in the same pass may both copy it"


def test_a_checkpoint_that_fails_is_computed_again():
    scheduler = Scheduler(limits())
    executor = FakeExecutor(PAGE_TOKENS)
    executor.copy_fault = lambda copy: copy.to_host
    sequences = [sequence(i, *row) for i, row in enumerate(ROWS)]
    for one in sequences:
        scheduler.add(one)
    drain(scheduler, executor)
    assert [one.generated_ids for one in sequences] == [expected(*row) for row in ROWS]
    statistics = scheduler.statistics()
    assert statistics["failed_copies"] == executor.num_copies == statistics["yields"] > 0
    assert statistics["restored_tokens"] == statistics["checkpointed_tokens"] == 0
    assert statistics["recomputed_tokens"] > 0


def test_a_restore_that_fails_is_computed_again_and_its_pages_are_not_matched():
    scheduler = Scheduler(limits())
    executor = FakeExecutor(PAGE_TOKENS)
    failed = []

    def fail(copy):
        failed.append(copy)
        return not copy.to_host

    executor.copy_fault = fail
    sequences = [sequence(i, *row) for i, row in enumerate(ROWS)]
    for one in sequences:
        scheduler.add(one)
    while advance(scheduler, executor):
        named = scheduler.store._host._name_of
        assert not any(page in named for copy in failed if not copy.to_host for page in copy.host_pages)
        failed.clear()
    assert [one.generated_ids for one in sequences] == [expected(*row) for row in ROWS]
    statistics = scheduler.statistics()
    assert statistics["failed_copies"] > 0
    assert statistics["restored_tokens"] == 0
    assert statistics["recomputed_tokens"] > 0


def test_pages_under_way_are_nobodys_until_they_have_arrived():
    scheduler = Scheduler(limits())
    executor = FakeExecutor(PAGE_TOKENS)
    executor.copy_passes = (0, 3)
    for i, row in enumerate(ROWS):
        scheduler.add(sequence(i, *row))
    seen = 0
    while (step := scheduler.plan_step()) is not None:
        result = executor.run(step)
        computed = {page for chunk in step.chunks for page in chunk.sequence.pages}
        for copy in executor.copies:
            if copy.to_host and not set(copy.device_pages) & set(result.copied):
                seen += 1
                assert not computed & set(copy.device_pages)
        scheduler.complete(step, result.tokens, result.failed, result.copied)
        scheduler.check()
    assert seen > 0


def test_rows_wait_for_a_copy_where_nothing_else_can_run():
    """One page of reserve, copies slower than a page of tokens."""
    scheduler, executor = run([([i] * 3, 40) for i in range(3)], num_pages=12, copy_passes=30)
    assert scheduler.statistics()["restored_tokens"] > 0
    assert executor.num_copies > 0


def suspended(scheduler, executor, *, copying, at_least=2) -> list[Sequence]:
    """Run rows until some have checkpoints, whose copies are under way or have ended."""
    sequences = [sequence(i, *row) for i, row in enumerate(ROWS)]
    for one in sequences:
        assert scheduler.add(one)
    executor.copy_passes = (1000, 1000) if copying else (0, 0)
    while sum(one.num_stored > 0 for one in sequences) < at_least:
        assert advance(scheduler, executor)
    stored = [one for one in sequences if one.num_stored]
    assert all(scheduler.store.waits(one) is copying for one in stored)
    return sequences


def test_a_cancelled_row_leaves_its_pages_to_the_copy_until_that_has_ended():
    """Else the next checkpoint would share host pages with a copy that still writes them."""
    scheduler, executor = Scheduler(limits(host_pages=8)), FakeExecutor(PAGE_TOKENS)
    sequences = suspended(scheduler, executor, copying=True)
    in_use = scheduler.statistics()["host_pages_in_use"], scheduler.pool.num_in_use
    victim = next(one for one in sequences if one.num_stored)
    scheduler.cancel(victim, RowError("cancelled", "gone"))
    scheduler.check()
    assert (scheduler.statistics()["host_pages_in_use"], scheduler.pool.num_in_use) == in_use
    drain(scheduler, executor)
    for one, row in zip(sequences, ROWS, strict=True):
        assert one is victim or one.generated_ids == expected(*row)
    assert scheduler.statistics()["host_pages_in_use"] == scheduler.pool.num_in_use == 0


def test_a_cancelled_row_frees_its_checkpoint():
    scheduler, executor = Scheduler(limits()), FakeExecutor(PAGE_TOKENS)
    sequences = suspended(scheduler, executor, copying=False)
    for one in sequences:
        scheduler.cancel(one, RowError("cancelled", "gone"))
        scheduler.check()
    assert scheduler.statistics()["host_pages_in_use"] == scheduler.pool.num_in_use == 0
    assert scheduler.plan_step() is None


def test_a_row_is_cancelled_while_it_is_restored():
    scheduler, executor = Scheduler(limits()), FakeExecutor(PAGE_TOKENS)
    sequences = suspended(scheduler, executor, copying=False)
    executor.copy_passes = (0, 1000)

    def restoring():
        return [one for one in sequences if one.state is State.ACTIVE and scheduler.store.waits(one)]

    while not restoring():
        assert advance(scheduler, executor)
    victim = restoring()[0]
    scheduler.cancel(victim, RowError("cancelled", "gone"))
    scheduler.check()
    drain(scheduler, executor)
    for one, row in zip(sequences, ROWS, strict=True):
        assert one is victim or one.generated_ids == expected(*row)
    assert scheduler.statistics()["host_pages_in_use"] == scheduler.pool.num_in_use == 0


def test_after_a_failed_pass_a_row_that_runs_alone_waits_for_pages_under_way():
    """Rather than taking those of a row that was found innocent."""
    scheduler, executor = Scheduler(limits(num_pages=13)), FakeExecutor(PAGE_TOKENS)
    sequences = suspended(scheduler, executor, copying=True, at_least=1)
    for _ in range(3):
        assert advance(scheduler, executor)
    num_copies, fails_at = executor.num_copies, executor.num_steps + 1

    def fault(step):
        if executor.num_steps == fails_at:
            raise ZeroDivisionError("a pass failed")

    executor.fault = fault
    assert advance(scheduler, executor)
    assert executor.num_copies == num_copies, "nothing a failed pass computed is kept"
    before = [one.num_yields for one in sequences]
    waited = 0
    while scheduler._suspects:
        step = scheduler.plan_step()
        waited += not step.chunks
        result = executor.run(step)
        scheduler.complete(step, result.tokens, result.failed, result.copied)
        scheduler.check()
    assert waited > 0
    assert [one.num_yields for one in sequences] == before
    drain(scheduler, executor)
    assert [one.generated_ids for one in sequences] == [expected(*row) for row in ROWS]


def test_the_check_finds_a_checkpoint_without_an_owner():
    scheduler = Scheduler(limits())
    executor = FakeExecutor(PAGE_TOKENS)
    sequences = [sequence(i, *row) for i, row in enumerate(ROWS)]
    for one in sequences:
        scheduler.add(one)
    while not any(one.num_stored for one in sequences):
        assert advance(scheduler, executor)
    owner = next(one for one in sequences if one.num_stored)
    owner.num_stored = 0
    with pytest.raises(InternalError, match="a checkpoint"):
        scheduler.check()


rows = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25), st.integers(0, 3)), min_size=1, max_size=14)
events = st.sets(st.integers(0, 60), max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    rows=rows,
    num_pages=st.integers(14, 40),
    host_pages=st.integers(1, 60),
    page_tokens=st.sampled_from([1, 3, 4]),
    max_sequences=st.integers(1, 6),
    extra_tokens=st.integers(0, 20),
    reuse=st.booleans(),
    least=st.sampled_from([1, 5]),
    copy_passes=st.integers(0, 12),
    seed=st.integers(0, 1000),
    faults=events,
    too_large=events,
    part_faults=events,
    copy_faults=events,
    cancels=events,
)
def test_any_schedule_ends_with_the_right_tokens_and_every_page_in_its_place(
    rows,
    num_pages,
    host_pages,
    page_tokens,
    max_sequences,
    extra_tokens,
    reuse,
    least,
    copy_passes,
    seed,
    faults,
    too_large,
    part_faults,
    copy_faults,
    cancels,
):
    """Copies that take any time and fail, failing passes and parts, too little memory, rows taken out."""
    scheduler = Scheduler(
        limits(
            num_pages=num_pages,
            host_pages=host_pages,
            page_tokens=page_tokens,
            max_sequences=max_sequences,
            max_step_tokens=max_sequences + extra_tokens,
            prefix_reuse=reuse,
            least_restored_tokens=least,
        )
    )
    executor = FakeExecutor(page_tokens, seed)
    executor.copy_passes = (0, copy_passes)

    def fault(step):
        if len(step.chunks) > 1 and executor.num_steps in faults:
            raise ZeroDivisionError("a pass failed")
        if len(step.chunks) > 1 and executor.num_steps in too_large:
            raise MemoryError

    def part_fault(step):
        half = step.chunks[: len(step.chunks) // 2] if executor.num_steps in part_faults else ()
        return {chunk.sequence.seq_id: "a part failed" for chunk in half}

    executor.fault = fault
    executor.part_fault = part_fault
    executor.copy_fault = lambda copy: executor.num_copies in copy_faults
    sequences = []
    for seq_id, (num_prompt, max_tokens, family) in enumerate(rows):
        prompt = [family] * (num_prompt // 2) + list(range(num_prompt - num_prompt // 2))
        sequences.append(sequence(seq_id, prompt, max_tokens))
    accepted = [one for one in sequences if scheduler.add(one)]
    cancelled = set()
    for number in range(10_000):
        if number in cancels and accepted:
            stored = [one for one in accepted if one.num_stored] or accepted
            victim = stored[(number * 7 + seed) % len(stored)]
            if victim.state is not State.FINISHED:
                cancelled.add(victim.seq_id)
            scheduler.cancel(victim, RowError("cancelled", "gone"))
            scheduler.check()
        if not advance(scheduler, executor):
            break
    else:
        raise AssertionError("no end")
    for one in accepted:
        assert one.state is State.FINISHED
        if one.seq_id in cancelled:
            assert one.error.code == "cancelled"
        else:
            assert one.error is None
            assert one.generated_ids == expected(one.token_ids[: one.num_prompt], one.sampling.max_tokens)
    assert scheduler.num_unfinished == scheduler.store.num_under_way == 0
    assert scheduler.pool.num_in_use == 0
    assert scheduler.statistics()["host_pages_in_use"] == 0
