"""Callbacks on a fake device: what they are asked, what they may decide, and that no answer breaks a row."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_data.callbacks import Callbacks
from batchgen_data.errors import BatchgenError, CallbackError, ConfigError, RowError
from batchgen_data.runtime.engine import Engine
from batchgen_data.runtime.hooks import Hooks
from batchgen_data.runtime.scheduler import Scheduler
from batchgen_data.runtime.sequence import Sequence, State
from batchgen_data.runtime.step import Limits
from fake_model import VOCAB_SIZE, FakeExecutor, expected, next_token, row, sampling
from tiny_models import tiny_tokenizer

PAGE_TOKENS = 4


def sequence(seq_id, prompt, max_tokens, **options) -> Sequence:
    settings = sampling(max_tokens=max_tokens, **options)
    return Sequence(seq_id, list(prompt), settings, limit_tokens=len(prompt) + max_tokens)


def make_scheduler(*callbacks, kv=None, **options) -> Scheduler:
    hooks = Hooks(callbacks, vocab_size=VOCAB_SIZE, kv=kv)
    limits = {"num_pages": 64, "page_tokens": PAGE_TOKENS, "max_sequences": 8, "max_step_tokens": 16}
    scheduler = Scheduler(Limits(**{**limits, **options}), hooks)
    hooks.start(scheduler)
    return scheduler


def drain(scheduler, executor=None, *, max_steps=10_000):
    """Run to the end, asserting every invariant after each step; the passes that ran."""
    executor = executor or FakeExecutor(PAGE_TOKENS)
    steps = []
    while (step := scheduler.plan_step()) is not None:
        assert 0 < step.num_tokens <= scheduler.limits.max_step_tokens
        assert [chunk.singly for chunk in step.chunks] == sorted(
            (chunk.singly for chunk in step.chunks), reverse=True
        )
        steps.append(step)
        assert len(steps) < max_steps, "no end"
        try:
            result = executor.run(step)
        except ZeroDivisionError as error:
            scheduler.step_failed(step, repr(error))
        else:
            scheduler.complete(step, result.tokens, result.failed)
        scheduler.check()
    return steps


class Oracle(Callbacks):
    """Guesses right, but for every `wrong`-th token, and up to `longest` tokens."""

    def __init__(self, longest=5, wrong=0):
        self.longest, self.wrong = longest, wrong

    def on_long_tail(self, runtime):
        assert not runtime.waiting
        assert not runtime.suspended
        return self.guess

    def guess(self, view, most):
        ids = view.token_ids()
        for number in range(1, min(most, self.longest) + 1):
            token = next_token(ids)
            ids.append((token + 1) % VOCAB_SIZE if self.wrong and number % self.wrong == 0 else token)
        return ids[view.num_tokens :]


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 25), st.integers(0, 3)), max_size=8),
    num_pages=st.integers(14, 60),
    page_tokens=st.sampled_from([1, 3, 4]),
    max_sequences=st.integers(1, 6),
    extra_tokens=st.integers(0, 40),
    longest=st.integers(1, 12),
    wrong=st.integers(0, 4),
    faults=st.sets(st.integers(0, 40), max_size=3),
    part_faults=st.sets(st.integers(0, 40), max_size=3),
)
def test_any_schedule_with_drafts_ends_with_the_right_tokens(
    rows, num_pages, page_tokens, max_sequences, extra_tokens, longest, wrong, faults, part_faults
):
    """Drafts right and wrong, pages of one token and more, failing passes and failing parts of passes."""
    scheduler = make_scheduler(
        Oracle(longest, wrong),
        num_pages=num_pages,
        page_tokens=page_tokens,
        max_sequences=max_sequences,
        max_step_tokens=max_sequences + extra_tokens,
    )
    executor = FakeExecutor(page_tokens)

    def fault(step):
        if executor.num_steps in faults and len(step.chunks) > 1:
            raise ZeroDivisionError("a pass failed")

    def part_fault(step):
        half = step.chunks[: len(step.chunks) // 2] if executor.num_steps in part_faults else ()
        return {chunk.sequence.seq_id: "a part failed" for chunk in half}

    executor.fault, executor.part_fault = fault, part_fault
    sequences = []
    for seq_id, (num_prompt, max_tokens, family) in enumerate(rows):
        prompt = [family] * (num_prompt // 2) + list(range(num_prompt - num_prompt // 2))
        sequences.append(sequence(seq_id, prompt, max_tokens))
    accepted = [s for s in sequences if scheduler.add(s)]
    drain(scheduler, executor)
    for s in accepted:
        assert s.state is State.FINISHED
        assert s.error is None
        assert s.generated_ids == expected(s.token_ids[: s.num_prompt], s.sampling.max_tokens)
    assert scheduler.num_unfinished == 0
    assert scheduler.pool.num_in_use == 0


def test_right_drafts_save_passes_and_wrong_ones_cost_none():
    counts = {}
    for wrong in (0, 1):
        scheduler = make_scheduler(Oracle(5, wrong))
        scheduler.add(sequence(0, [7], 31))
        counts[wrong] = len(drain(scheduler))
        statistics = scheduler.statistics()
        assert statistics["accepted_draft_tokens"] == (25 if wrong == 0 else 0)
        assert statistics["drafted_tokens"] >= statistics["accepted_draft_tokens"]
    # 6 tokens a pass; the last pass may guess no more than the row has left.
    assert counts == {0: 6, 1: 31}


def test_drafts_wait_for_the_tail_and_take_only_tokens_to_spare():
    scheduler = make_scheduler(Oracle(8), max_sequences=2, max_step_tokens=6)
    for seq_id in range(4):
        scheduler.add(sequence(seq_id, [seq_id], 12))
    while scheduler.waiting:
        step = scheduler.plan_step()
        assert all(not chunk.draft for chunk in step.chunks) or not scheduler.waiting
        scheduler.complete(step, {c.sequence.seq_id: next_token(c.sequence.token_ids) for c in step.chunks})
    executor = FakeExecutor(PAGE_TOKENS)
    executor._read = lambda chunk: None  # the passes above wrote nothing
    steps = drain(scheduler, executor)
    assert max(step.num_tokens for step in steps) == 6
    assert any(len(chunk.draft) == 2 for step in steps for chunk in step.chunks)


def test_a_stop_inside_a_draft_ends_the_row_there():
    """Tokens after the stop are dropped, and a row's failure counts only where it is reached."""
    tokens = expected([7, 7], 6)
    scheduler = make_scheduler(Oracle(8))
    s = sequence(0, [7, 7], 20, stop_token_ids=(tokens[3],))
    scheduler.add(s)
    drain(scheduler)
    assert (s.generated_ids, s.finish_reason, s.stop_reason) == (tokens[:4], "stop", str(tokens[3]))
    assert scheduler.statistics()["accepted_draft_tokens"] == 2

    scheduler = make_scheduler(Oracle(8))
    s = sequence(0, [7, 7], 20)
    scheduler.add(s)
    step = scheduler.plan_step()
    scheduler.complete(step, {0: tokens[0]})
    step = scheduler.plan_step()
    assert len(step.chunks[0].draft) == 8
    scheduler.complete(step, {0: (tokens[1], tokens[2], RowError("non_finite_logits", "NaN"))})
    scheduler.check()
    assert s.generated_ids == tokens[:3]
    assert (s.finish_reason, s.error.code) == ("error", "non_finite_logits")


class Shortest(Callbacks):
    """Short prompts first; remembers who came in, and who was about to go."""

    def __init__(self):
        self.combined, self.yielded = [], []

    def on_refill(self, runtime):
        assert runtime.num_free_pages <= runtime.num_pages
        return sorted(runtime.waiting, key=lambda view: view.num_tokens)[:3]

    def on_combine(self, runtime, sequence):
        assert sequence in runtime.active
        self.combined.append((sequence.id, sequence.num_yields))

    def on_yield(self, runtime, sequence):
        assert sequence.num_pages > 0
        self.yielded.append(sequence.id)


def test_refill_chooses_who_comes_first():
    asked = Shortest()
    scheduler = make_scheduler(asked, max_sequences=1)
    for seq_id, length in enumerate([9, 5, 2, 7, 3, 8]):
        scheduler.add(sequence(seq_id, range(length), 3))
    assert [view.id for view in asked_runtime(scheduler).waiting[1:3]] == [1, 2]
    assert asked_runtime(scheduler).waiting[-1].id == 5
    drain(scheduler)
    assert [seq_id for seq_id, _ in asked.combined] == [2, 4, 1, 3, 5, 0]


def asked_runtime(scheduler):
    return scheduler._hooks._runtime


def test_yield_and_combine_are_told():
    asked = Shortest()
    scheduler = make_scheduler(asked, num_pages=16)
    sequences = [sequence(i, [i] * 6, 40) for i in range(4)]
    for s in sequences:
        scheduler.add(s)
    drain(scheduler)
    assert len(asked.yielded) == scheduler.statistics()["yields"] > 0
    assert 0 not in asked.yielded, "the oldest is never driven out"
    assert sorted(asked.combined) == sorted(
        (s.seq_id, count) for s in sequences for count in range(s.num_yields + 1)
    )


class FakeMemory:
    """KV memory that holds 4 times as many pages as int8."""

    quantise_obstacle = None

    def __init__(self, num_pages):
        self.num_pages, self.quantised = num_pages, False

    def quantise(self):
        if not self.quantised:
            self.num_pages, self.quantised = 4 * self.num_pages, True
        return self.num_pages


class UnderPressure(Callbacks):
    def on_pressure(self, runtime, sequence):
        self.asked_about = (sequence.num_pages > 0, sequence in runtime.active)
        self.added = [runtime.quantise_kv(), runtime.quantise_kv()]
        assert runtime.num_pages == 64


def test_more_pages_under_pressure_keep_every_row_running():
    asked = UnderPressure()
    scheduler = make_scheduler(asked, kv=FakeMemory(16), num_pages=16)
    sequences = [sequence(i, [i] * 6, 40) for i in range(4)]
    for s in sequences:
        scheduler.add(s)
    drain(scheduler)
    assert asked.added == [48, 0]
    assert asked.asked_about == (True, True)
    assert scheduler.statistics()["yields"] == 0
    for s in sequences:
        assert s.generated_ids == expected(s.token_ids[:6], 40)


def test_a_row_that_cannot_be_admitted_is_pressure_too():
    asked = UnderPressure()
    scheduler = make_scheduler(asked, kv=FakeMemory(16), num_pages=16)
    for i in range(4):
        scheduler.add(sequence(i, [i] * 24, 4))
    step = scheduler.plan_step()
    # No more tokens fit in this pass; the first row holds all its 7 pages.
    assert [chunk.sequence.seq_id for chunk in step.chunks] == [0]
    drain_from(scheduler, step)
    assert asked.added == [48, 0]
    assert asked.asked_about == (False, False)
    assert scheduler.statistics()["yields"] == 0


def test_pressure_that_nobody_relieves_is_told_once_a_boundary():
    class Counting(Callbacks):
        waiting = 0

        def on_pressure(self, runtime, sequence):
            self.waiting += sequence.num_pages == 0

    counting = Counting()
    scheduler = make_scheduler(counting, num_pages=8)
    for i in range(3):
        scheduler.add(sequence(i, [i] * 16, 13))
    steps = drain(scheduler)
    assert 2 <= counting.waiting <= scheduler.statistics()["page_boundaries"] < len(steps)


def drain_from(scheduler, step):
    """Run this pass and all others."""
    executor = FakeExecutor(PAGE_TOKENS)
    scheduler.complete(step, executor.run(step).tokens)
    drain(scheduler, executor)


def make_engine(*callbacks):
    executor = FakeExecutor(PAGE_TOKENS)
    engine = Engine(
        executor,
        Limits(num_pages=64, page_tokens=PAGE_TOKENS, max_sequences=8, max_step_tokens=16),
        tiny_tokenizer(),
        context_tokens=100,
        eos_token_ids=frozenset(),
        vocab_size=VOCAB_SIZE,
        callbacks=callbacks,
        check=True,
    )
    return engine


def test_generated_tokens_are_counted_with_drafts():
    engine = make_engine(Oracle(6))
    outcomes = engine.submit([row([i], max_tokens=20) for i in range(3)]).wait()
    assert [outcome.token_ids for outcome in outcomes] == [expected([i], 20) for i in range(3)]
    statistics = engine.statistics()
    assert statistics["generated_tokens"] == 60
    assert statistics["accepted_draft_tokens"] > 20
    engine.close()


def failing(name, what):
    def method(self, runtime, *arguments):
        return what(runtime)

    return type(f"Failing_{name}", (Callbacks,), {name: method})()


def boom(runtime):
    raise KeyError("missing\nsecond line")


@pytest.mark.parametrize(
    "name,what,message",
    [
        ("on_refill", boom, r"callback Failing_on_refill\.on_refill raised KeyError: 'missing"),
        ("on_long_tail", boom, r"callback Failing_on_long_tail\.on_long_tail raised KeyError"),
        ("on_combine", boom, r"callback Failing_on_combine\.on_combine raised KeyError"),
        ("on_refill", lambda runtime: [1], "must return sequences of runtime.waiting"),
        ("on_refill", lambda runtime: 1, "on_refill raised TypeError"),
        ("on_long_tail", lambda runtime: [1], "must return a function"),
        ("on_long_tail", lambda runtime: boom, r"on_long_tail \(its drafter\) raised TypeError"),
        ("on_long_tail", lambda runtime: lambda view, most: [VOCAB_SIZE], "not below 1000"),
        ("on_long_tail", lambda runtime: lambda view, most: [-1], "not below 1000"),
        ("on_long_tail", lambda runtime: lambda view, most: [1.5], "its drafter"),
        ("on_refill", lambda runtime: runtime.quantise_kv(), "on_refill: keys and values cannot be kept"),
    ],
)
def test_a_failing_callback_stops_the_run_and_is_named(name, what, message):
    engine = make_engine(failing(name, what))
    ticket = engine.submit([row([i], max_tokens=20) for i in range(3)])
    with pytest.raises(CallbackError, match=message):
        ticket.wait()
    with pytest.raises(ConfigError, match=f"Failing_{name}"):
        engine.submit([row([1], max_tokens=2)])
    engine.close()


def test_a_callback_that_fails_at_the_start_fails_the_constructor():
    with pytest.raises(CallbackError, match=r"Failing_on_start\.on_start raised KeyError"):
        make_engine(failing("on_start", boom))


def test_a_callback_that_generates_is_an_error_and_not_a_deadlock():
    engine = None

    def generate(runtime):
        engine.submit([row([1], max_tokens=2)]).wait()

    engine = make_engine(failing("on_refill", generate))
    with pytest.raises(BatchgenError, match="must not generate with the engine it runs in"):
        engine.submit([row([5], max_tokens=2)]).wait()
    engine.close()


def test_notes_go_with_their_sequence_and_views_compare_by_it():
    class Counting(Callbacks):
        seen = 0

        def on_long_tail(self, runtime):
            def guess(view, most):
                assert view == next(iter(runtime.active))
                assert len({view, next(iter(runtime.active))}) == 1
                view.notes["asked"] = view.notes.get("asked", 0) + 1
                self.seen = max(self.seen, view.notes["asked"])
                return ()

            return guess

    counting = Counting()
    for _ in range(2):
        scheduler = make_scheduler(counting)
        scheduler.add(sequence(0, [1, 2], 9))
        drain(scheduler)
    assert counting.seen == 7


def test_random_drafters_never_change_tokens_of_drawn_rows():
    """The device says what follows what; the row's settings do not matter to the scheduler."""
    rng = random.Random(3)

    class Noise(Callbacks):
        def on_long_tail(self, runtime):
            return lambda view, most: [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(9))]

    scheduler = make_scheduler(Noise())
    sequences = [sequence(i, [i, 5], 30, temperature=1.0) for i in range(3)]
    for s in sequences:
        scheduler.add(s)
    drain(scheduler)
    assert all(s.generated_ids == expected(s.token_ids[:2], 30) for s in sequences)
