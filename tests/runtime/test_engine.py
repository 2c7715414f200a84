"""The engine on a fake device: callers, endings, failures, memory."""

from __future__ import annotations

import gc
import threading
import time

import psutil
import pytest

from batchgen_data.errors import BatchgenError, DeviceError, InternalError, PromptError
from batchgen_data.runtime.engine import Engine
from batchgen_data.runtime.step import Limits, StepResult
from fake_model import VOCAB_SIZE, FakeExecutor, expected, row

PAGE_TOKENS = 4


class Letters:
    """Each token is one letter, so that stop strings can be placed anywhere."""

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(chr(97 + token % 26) for token in token_ids)


@pytest.fixture
def make_engine():
    engines = []

    def make(executor=None, *, context_tokens=256, eos=frozenset(), **options):
        options = {
            "num_pages": 200,
            "page_tokens": PAGE_TOKENS,
            "max_sequences": 8,
            "max_step_tokens": 64,
        } | options
        engine = Engine(
            executor or FakeExecutor(PAGE_TOKENS),
            Limits(**options),
            Letters(),
            context_tokens=context_tokens,
            eos_token_ids=eos,
            vocab_size=VOCAB_SIZE,
            check=True,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def run(engine, rows):
    return engine.submit(rows).wait()


def test_outcomes_come_in_the_order_of_the_rows(make_engine):
    engine = make_engine()
    rows = [row([i, i + 1], max_tokens=20 - i) for i in range(12)]
    outcomes = run(engine, rows)
    assert [o.token_ids for o in outcomes] == [expected([i, i + 1], 20 - i) for i in range(12)]
    assert {o.finish_reason for o in outcomes} == {"length"}
    assert [o.num_input_tokens for o in outcomes] == [2] * 12


def test_case_52_each_call_returns_its_own_rows(make_engine):
    engine = make_engine()
    for size in (3, 0, 1, 7, 2):
        outcomes = run(engine, [row([size, i], max_tokens=4) for i in range(size)])
        assert [o.token_ids for o in outcomes] == [expected([size, i], 4) for i in range(size)]


def test_calls_from_many_threads_share_passes(make_engine):
    executor = FakeExecutor(PAGE_TOKENS)
    executor.fault = lambda step: time.sleep(0.002)
    engine = make_engine(executor)
    results = {}

    def call(name):
        results[name] = run(engine, [row([name, i], max_tokens=30) for i in range(2)])

    threads = [threading.Thread(target=call, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, outcomes in results.items():
        assert [o.token_ids for o in outcomes] == [expected([name, i], 30) for i in range(2)]
    assert max(executor.active_sizes) > 2, "rows of several calls ran in one pass"


def test_errors_that_came_in_pass_through_beside_good_rows(make_engine):
    bad = PromptError("empty_prompt", "the prompt is an empty string")
    outcomes = run(make_engine(), [row([1], max_tokens=2), bad, row([2], max_tokens=2)])
    assert [o.finish_reason for o in outcomes] == ["length", "error", "length"]
    assert outcomes[1].error_code == "empty_prompt"


@pytest.mark.parametrize("max_tokens", [16, None])
def test_case_47_the_context_limit_is_met_exactly(make_engine, max_tokens):
    engine = make_engine(context_tokens=64)
    outcomes = run(engine, [row(range(n), max_tokens=max_tokens) for n in (63, 64, 65, 10)])
    assert [o.finish_reason for o in outcomes] == ["length", "error", "error", "length"]
    assert len(outcomes[0].token_ids) == 1
    assert outcomes[1].error_code == outcomes[2].error_code == "prompt_too_long"
    assert "65" in outcomes[2].error_message
    assert "64" in outcomes[2].error_message
    assert len(outcomes[3].token_ids) == (max_tokens or 54)


def test_case_1_one_long_prompt_of_a_hundred(make_engine):
    engine = make_engine(context_tokens=64)
    rows = [row([i] * (65 if i == 57 else 5), max_tokens=3) for i in range(100)]
    outcomes = run(engine, rows)
    assert [i for i, o in enumerate(outcomes) if o.finish_reason == "error"] == [57]
    assert sum(o.text is not None for o in outcomes) == 99
    assert engine.statistics()["rows_failed"] == 1


def test_an_end_token_stops_and_is_not_in_the_text(make_engine):
    tokens = expected([5], 10)
    engine = make_engine(eos=frozenset({tokens[3], 999}))
    (outcome,) = run(engine, [row([5], max_tokens=10)])
    assert outcome.finish_reason == "stop"
    assert outcome.stop_reason is None
    assert outcome.token_ids == tokens[:4]
    assert outcome.text == Letters().decode(tokens[:3], skip_special_tokens=True)


def test_ignore_eos_goes_on(make_engine):
    tokens = expected([5], 10)
    engine = make_engine(eos=frozenset({tokens[3]}))
    (outcome,) = run(engine, [row([5], max_tokens=10, ignore_eos=True)])
    assert outcome.token_ids == tokens


def test_a_stop_token_id_is_named(make_engine):
    tokens = expected([5], 10)
    (outcome,) = run(make_engine(), [row([5], max_tokens=10, stop_token_ids=(tokens[2],))])
    assert (outcome.finish_reason, outcome.stop_reason) == ("stop", str(tokens[2]))
    assert outcome.token_ids == tokens[:3]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_several_tokens_cuts_the_text(make_engine, include):
    tokens = expected([5], 30)
    text = Letters().decode(tokens, skip_special_tokens=True)
    stop = text[11:14]
    at = text.find(stop)
    settings = {"stop": ("no such", stop), "include_stop_str_in_output": include}
    (outcome,) = run(make_engine(), [row([5], max_tokens=30, **settings)])
    assert outcome.finish_reason == "stop"
    assert outcome.stop_reason == stop
    assert outcome.text == text[: at + (3 if include else 0)]
    assert outcome.token_ids == tokens[: at + 3]


def test_stop_strings_before_min_tokens_do_not_count(make_engine):
    tokens = expected([5], 30)
    text = Letters().decode(tokens, skip_special_tokens=True)
    (outcome,) = run(make_engine(), [row([5], max_tokens=30, min_tokens=20, stop=(text[2:5],))])
    assert len(outcome.token_ids) > 20


def test_equal_greedy_prompts_run_once_in_flight_and_afterwards(make_engine):
    engine = make_engine()
    outcomes = run(engine, [row([1, 2], max_tokens=5)] * 6 + [row([1, 2], max_tokens=4)])
    again = run(engine, [row([1, 2], max_tokens=5, seed=9)])
    assert {tuple(o.token_ids) for o in outcomes[:6]} == {tuple(expected([1, 2], 5))}
    assert again[0].token_ids == outcomes[0].token_ids
    assert outcomes[6].token_ids == expected([1, 2], 4)
    statistics = engine.statistics()
    assert statistics["rows_shared"] == 6
    assert statistics["generated_tokens"] == 9
    assert statistics["rows_done"] == 8


def test_rows_that_draw_are_never_shared(make_engine):
    engine = make_engine()
    run(engine, [row([1, 2], max_tokens=5, temperature=1.0)] * 3)
    assert engine.statistics()["rows_shared"] == 0


def test_a_poison_row_fails_alone(make_engine):
    executor = FakeExecutor(PAGE_TOKENS)

    def fault(step):
        if any(chunk.sequence.token_ids[0] == 13 for chunk in step.chunks):
            raise ValueError("no 13\nsecond line")

    executor.fault = fault
    outcomes = run(make_engine(executor), [row([i, 1], max_tokens=6) for i in range(10, 16)])
    assert [o.error_code for o in outcomes] == [None, None, None, "model_error", None, None]
    assert outcomes[3].error_message.endswith("ValueError: no 13")
    assert outcomes[0].token_ids == expected([10, 1], 6)


def test_a_part_of_a_pass_that_raises_costs_its_own_row_only(make_engine):
    executor = FakeExecutor(PAGE_TOKENS)
    executor.part_fault = lambda step: {
        chunk.sequence.seq_id: "ValueError: no 13"
        for chunk in step.chunks
        if chunk.sequence.token_ids[0] == 13
    }
    engine = make_engine(executor)
    outcomes = run(engine, [row([i, 1], max_tokens=6) for i in range(10, 16)])
    assert [o.error_code for o in outcomes] == [None, None, None, "model_error", None, None]
    assert outcomes[3].error_message.endswith("ValueError: no 13")
    assert [o.token_ids for o in outcomes[:3]] == [expected([i, 1], 6) for i in range(10, 13)]
    assert engine.statistics()["yields"] == 1, "the others never left"
    assert engine.statistics()["generated_tokens"] == 5 * 6


def test_a_device_fault_stops_the_engine_and_wakes_every_caller(make_engine):
    executor = FakeExecutor(PAGE_TOKENS)

    def fault(step):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    executor.fault = fault
    engine = make_engine(executor)
    ticket = engine.submit([row([1], max_tokens=4)])
    with pytest.raises(DeviceError, match="illegal memory access"):
        ticket.wait()
    with pytest.raises(DeviceError):
        engine.submit([row([1], max_tokens=4)])


def test_an_error_while_taking_rows_in_wakes_their_caller(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine, "_refusal", lambda row: 1 // 0)
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        run(engine, [row([1], max_tokens=4)])


@pytest.mark.parametrize("settings", [{}, {"stop": ("zz",)}])
def test_text_that_cannot_be_decoded_fails_its_row_only(make_engine, settings):
    engine = make_engine()
    poison = expected([5], 3)[2]

    def decode(token_ids, *, skip_special_tokens):
        if poison in token_ids:
            raise ValueError("not text")
        return "".join(chr(97 + token % 26) for token in token_ids)

    engine._tokenizer.decode = decode
    outcomes = run(engine, [row([5], max_tokens=6, **settings), row([6], max_tokens=6, **settings)])
    assert [o.error_code for o in outcomes] == ["decode_error", None]


def test_a_device_without_memory_gets_smaller_passes(make_engine):
    executor = FakeExecutor(PAGE_TOKENS)

    def fault(step):
        if step.num_tokens > 6:
            raise MemoryError("out of memory")

    executor.fault = fault
    engine = make_engine(executor)
    outcomes = run(engine, [row([i] * 9, max_tokens=8) for i in range(8)])
    assert [o.token_ids for o in outcomes] == [expected([i] * 9, 8) for i in range(8)]
    assert engine.statistics()["max_step_tokens"] <= 6
    executor.fault = lambda step: (_ for _ in ()).throw(MemoryError("none at all"))
    (outcome,) = run(engine, [row([77], max_tokens=8)])
    assert outcome.error_code == "model_error"


def test_stop_text_hidden_behind_tokens_without_text_is_found(make_engine):
    tokens = expected([5], 60)
    silent = set(tokens[10:45])
    engine = make_engine()
    engine._tokenizer.decode = lambda ids, *, skip_special_tokens: "".join(
        chr(97 + token % 26) for token in ids if token not in silent
    )
    text = engine._tokenizer.decode(tokens, skip_special_tokens=True)
    (outcome,) = run(engine, [row([5], max_tokens=60, stop=(text[8:12],))])
    assert outcome.finish_reason == "stop"


def test_a_bug_of_ours_is_raised_not_hung_on(make_engine):
    executor = FakeExecutor(PAGE_TOKENS)
    executor.run = lambda step: StepResult({})
    with pytest.raises(InternalError, match="KeyError"):
        run(make_engine(executor), [row([1], max_tokens=4)])


def test_an_interrupted_wait_takes_its_rows_out(make_engine, monkeypatch):
    engine = make_engine(context_tokens=100_000, num_pages=50_000)
    ticket = engine.submit([row([i], max_tokens=50_000) for i in range(3)])
    monkeypatch.setattr(ticket.done, "wait", lambda timeout: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    (outcome,) = run(engine, [row([9], max_tokens=3)])
    assert outcome.token_ids == expected([9], 3)
    statistics = engine.statistics()
    assert statistics["active"] == statistics["waiting"] == statistics["pages_in_use"] == 0


def test_cancelling_one_call_keeps_a_row_that_another_shares(make_engine):
    executor = FakeExecutor(PAGE_TOKENS)
    gate = threading.Event()
    executor.fault = lambda step: gate.wait()
    engine = make_engine(executor)
    first = engine.submit([row([4], max_tokens=5)])
    second = engine.submit([row([4], max_tokens=5)])
    engine.cancel(first)
    gate.set()
    assert second.wait()[0].token_ids == expected([4], 5)
    assert first.wait()[0].error_code == "cancelled"


def test_closing_wakes_callers_and_refuses_new_rows(make_engine):
    executor = FakeExecutor(PAGE_TOKENS)
    executor.fault = lambda step: time.sleep(0.01)
    engine = make_engine(executor)
    ticket = engine.submit([row([1], max_tokens=200)])
    engine.close()
    engine.close()
    with pytest.raises(BatchgenError, match="closed"):
        ticket.wait()
    with pytest.raises(BatchgenError, match="closed"):
        engine.submit([row([1], max_tokens=2)])


def test_case_53_memory_is_flat_over_500_batches(make_engine):
    """Varied lengths, failing and cancelled rows in the mix."""
    executor = FakeExecutor(PAGE_TOKENS)
    engine = make_engine(executor, context_tokens=64, num_pages=40)

    def batch(number):
        rows = [row([number % 50, i], max_tokens=1 + (number * 7 + i) % 30) for i in range(6)]
        rows.append(row(range(70)))
        rows.append(PromptError("empty_prompt", "empty"))
        ticket = engine.submit(rows)
        if number % 10 == 0:
            engine.cancel(ticket)
        assert len(ticket.wait()) == 8

    def resident():
        gc.collect()
        return psutil.Process().memory_info().rss

    for number in range(100):
        batch(number)
    before, objects_before = resident(), len(gc.get_objects())
    for number in range(100, 500):
        batch(number)
    assert resident() < before * 1.03
    assert len(gc.get_objects()) < objects_before * 1.05
    assert not engine._owners
    assert not engine._sequences
    assert not engine._leaders
    assert engine.statistics()["pages_in_use"] == 0


@pytest.mark.parametrize("copy_passes", [0, 40])
def test_suspended_rows_come_back_from_the_host_tier(copy_passes, make_engine):
    executor = FakeExecutor(PAGE_TOKENS)
    executor.copy_passes = (0, copy_passes)
    engine = make_engine(executor, num_pages=16, host_pages=100)
    prompts = [[i] * 6 for i in range(6)]
    outcomes = run(engine, [row(prompt, max_tokens=40) for prompt in prompts])
    assert [outcome.token_ids for outcome in outcomes] == [expected(prompt, 40) for prompt in prompts]
    statistics = engine.statistics()
    assert statistics["restored_tokens"] > 0
    assert statistics["recomputed_tokens"] == 0
    assert statistics["host_pages_in_use"] == 0
