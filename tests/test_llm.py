"""The runtime in this process on tiny models: tokens, text, reuse, memory."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen_data import LLM, ConfigError, PlanError, SamplingParams
from batchgen_data.config import calls_in_flight
from batchgen_data.runtime.engine import Engine
from batchgen_data.runtime.step import Limits, StepResult
from fake_model import FakeExecutor, row
from tiny_models import EOS_ID, tiny_checkpoint, tiny_tokenizer

SMALL = {"num_threads": 1, "kv_memory": "16MiB", "max_sequences": 64, "max_context_tokens": 256}
PROMPTS = ["the cat", "a dog and the other one", "x", "in the end of it all", "the cat sat", "on and on"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", chat_template=True))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **SMALL) as llm:
        yield llm


def test_greedy_tokens_equal_generate(llm, folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    outcomes = llm.generate(PROMPTS, SamplingParams(max_tokens=20))
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        ids = llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),  # or the id used for padding is masked
                do_sample=False,
                max_new_tokens=20,
                pad_token_id=0,
                eos_token_id=EOS_ID,
            )
        assert outcome.token_ids == out[0, len(ids) :].tolist()
        assert outcome.num_input_tokens == len(ids)


def test_prompts_may_be_text_ids_or_messages(llm):
    messages = [{"role": "user", "content": "the cat"}]
    ids = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    outcomes = llm.generate(["the cat", ids, messages], SamplingParams(max_tokens=5))
    assert len({tuple(outcome.token_ids) for outcome in outcomes}) == 1
    raw = llm.generate(["the cat"], SamplingParams(max_tokens=5), apply_chat_template=False)
    assert raw[0].num_input_tokens < outcomes[0].num_input_tokens
    assert llm.generate("the cat", SamplingParams(max_tokens=5))[0].token_ids == outcomes[0].token_ids


def test_bad_prompts_are_outcomes_and_bad_settings_an_error(llm):
    outcomes = llm.generate(["ok", "", [], [10**6], 5, "x" * 3000], SamplingParams(max_tokens=3))
    assert [o.error_code for o in outcomes[:3]] == [None, "empty_prompt", "empty_prompt"]
    assert outcomes[3].error_code is not None
    assert outcomes[4].error_code == "wrong_type"
    assert outcomes[5].error_code == "prompt_too_long"
    with pytest.raises(ConfigError, match="did you mean 'max_tokens'"):
        llm.generate(["ok"], {"max_token": 3})


def test_settings_may_differ_by_prompt(llm):
    outcomes = llm.generate(
        ["a", "b"], [SamplingParams(max_tokens=2, ignore_eos=True), {"max_tokens": 5, "ignore_eos": True}]
    )
    assert [len(outcome.token_ids) for outcome in outcomes] == [2, 5]


def test_case_29_a_seeded_row_does_not_depend_on_its_neighbours(llm):
    """Row A with a seed; B with one, without one, absent; both orders; twice each."""
    a = SamplingParams(temperature=1.0, seed=42, max_tokens=12, ignore_eos=True)
    seen = set()
    for b in (SamplingParams(temperature=1.0, seed=7, max_tokens=30), SamplingParams(max_tokens=30)):
        for _ in range(2):
            seen.add(tuple(llm.generate(["the cat", "a dog"], [a, b])[0].token_ids))
            seen.add(tuple(llm.generate(["a dog", "the cat"], [b, a])[1].token_ids))
    seen.add(tuple(llm.generate(["the cat"], a)[0].token_ids))
    assert len(seen) == 1


def test_case_28_equal_prompts_draw_differently_and_repeatably(llm):
    settings = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    first = [tuple(o.token_ids) for o in llm.generate(["the cat"] * 8, settings)]
    assert len(set(first)) > 6
    assert first == [tuple(o.token_ids) for o in llm.generate(["the cat"] * 8, settings)]


@pytest.mark.parametrize("pressure", [False, True])
def test_case_68_prefix_reuse_changes_no_token_and_saves_the_work(folder, pressure):
    """64 rows with a shared prefix of about 1,000 tokens, on and off, in a roomy and in a tight pool."""
    prefix = list(range(10, 250)) * 4
    prompts = [[*prefix, 10 + i, 11 + i] for i in range(64)]
    settings = SamplingParams(max_tokens=16, ignore_eos=True)
    results, prefilled = {}, {}
    for reuse in (True, False):
        # A page of 64 tokens of this model is 24 KiB: a tight pool holds two whole rows.
        options = {"num_threads": 1, "kv_memory": "1MiB" if pressure else "64MiB", "prefix_reuse": reuse}
        with LLM(folder, **options) as llm:
            results[reuse] = [o.token_ids for o in llm.generate(prompts, settings)]
            prefilled[reuse] = llm.statistics()["prefill_tokens"]
    assert results[True] == results[False]
    assert prefilled[True] < prefilled[False] / 8
    if not pressure:
        # The prefix of 15 full pages once, and what lies behind it 64 times.
        assert prefilled[True] == len(prefix) + 2 + 63 * 2


def test_case_53_memory_is_flat_over_500_batches(llm):
    """Varied lengths, drawn and greedy rows, failing rows and interrupted calls in the mix."""

    def batch(number):
        prompts = [f"row {number * 3 + i} " + "the " * (number % 17) for i in range(3)] + ["", "y" * 2000]
        temperature = float(number % 2)
        llm.generate(prompts, SamplingParams(max_tokens=1 + number % 5, temperature=temperature))
        if number % 25 == 0:
            ticket = llm._engine.submit([row([number % 200 + 1], max_tokens=200)])
            llm._engine.cancel(ticket)
            assert ticket.wait()[0].error_code in ("cancelled", None)

    process = psutil.Process()
    resident = []
    for number in range(500):
        batch(number)
        if number % 50 == 49:
            gc.collect()
            resident.append(process.memory_info().rss)
    assert resident[-1] < resident[1] * 1.03, [f"{r / 2**20:.1f}" for r in resident]
    assert llm.statistics()["pages_in_use"] == 0


class Scripted(FakeExecutor):
    """Emits given tokens whatever it reads."""

    def __init__(self, script):
        super().__init__(64)
        self.script = script

    def run(self, step):
        return StepResult(
            {c.sequence.seq_id: self.script[c.sequence.num_generated] for c in step.chunks if c.samples}
        )


def scripted(tokenizer, script, **settings):
    engine = Engine(
        Scripted(script),
        Limits(num_pages=16),
        tokenizer,
        context_tokens=512,
        eos_token_ids=frozenset({EOS_ID}),
        vocab_size=1000,
    )
    try:
        return engine.submit([row([5, 6], **settings)]).wait()[0]
    finally:
        engine.close()


TEXT = "🤖 世界 é the end"


def test_case_25_characters_split_over_tokens_come_out_whole():
    tokenizer = tiny_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(TEXT), "the byte-level tokenizer splits these characters"
    outcome = scripted(tokenizer, [*ids, EOS_ID], max_tokens=100)
    assert outcome.text == TEXT
    assert outcome.finish_reason == "stop"


def test_case_25_a_character_cut_by_the_end_becomes_one_mark_at_the_end_only():
    tokenizer = tiny_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    for cut in range(1, len(ids)):
        text = scripted(tokenizer, ids, max_tokens=cut).text
        assert text == tokenizer.decode(ids[:cut])
        whole = text.rstrip("\ufffd")
        assert TEXT.startswith(whole)
        assert len(text) - len(whole) <= 1


def test_case_25_stop_strings_of_such_characters_are_found():
    tokenizer = tiny_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    outcome = scripted(tokenizer, ids, max_tokens=len(ids), stop=("界",))
    assert (outcome.finish_reason, outcome.stop_reason, outcome.text) == ("stop", "界", "🤖 世")
    kept = scripted(tokenizer, ids, max_tokens=len(ids), stop=("界 ",), include_stop_str_in_output=True)
    assert kept.text == "🤖 世界 "


def num_steps(batch_size):
    """Steps to the last of case 4's rows, in calls of `batch_size`, as many at once as `generate` allows."""
    rows = [row([i, 7], max_tokens=512 if i % 64 == 0 else 8) for i in range(512)]
    executor = FakeExecutor(64)
    executor._read = lambda chunk: None  # lengths matter here, not content
    handed_over = threading.Event()  # a fake device is faster than 512 threads can start

    def wait(step):
        handed_over.wait()
        time.sleep(0.001)

    executor.fault = wait
    engine = Engine(
        executor,
        Limits(num_pages=4096, max_sequences=64, max_step_tokens=256),
        tiny_tokenizer(),
        context_tokens=1024,
        eos_token_ids=frozenset(),
        vocab_size=1000,
    )
    slots = threading.Semaphore(calls_in_flight(64, batch_size))
    threads = []

    def call(batch):
        engine.submit(batch).wait()
        slots.release()

    for start in range(0, len(rows), batch_size):
        slots.acquire()
        thread = threading.Thread(target=call, args=(rows[start : start + batch_size],))
        thread.start()
        threads.append(thread)
    handed_over.set()
    for thread in threads:
        thread.join()
    engine.close()
    return executor.num_steps


def test_case_4_a_straggler_does_not_hold_back_other_rows():
    """Steps to the last row are the straggler's own 512 and a little, whatever the batch size."""
    steps = {batch_size: num_steps(batch_size) for batch_size in (1, 16, 64, 256)}
    assert max(steps.values()) <= 1.1 * min(steps.values()), steps
    assert max(steps.values()) < 650, steps


def test_memory_that_holds_no_page_is_refused_with_the_bytes(folder):
    with pytest.raises(PlanError, match="set kv_memory to at least"):
        LLM(folder, num_threads=1, kv_memory=1000)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:99"}, "CUDA"),
        ({"prefix_reuse": 1}, "true or false"),
        ({"attention_sub_batch": 2}, "has none"),
        ({"max_context_tokens": 10**6}, "1024"),
        ({"dtype": "float8"}, "unknown dtype"),
        ({"kv_memory": "lots"}, "4GiB"),
        ({"max_sequences": 0}, "positive whole number"),
        ({"max_step_tokens": 4}, "at least max_sequences"),
        ({"kv_memory_fraction": 2}, "above 0 and at most 1"),
        ({"thread": 2}, "did you mean 'num_threads'"),
    ],
)
def test_bad_options_are_named(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(folder, **options)


def test_settings_of_a_whole_job_are_checked_against_the_vocabulary(llm):
    for settings in ({"stop_token_ids": [10**6]}, {"logit_bias": {"1000000": 1}}):
        with pytest.raises(ConfigError, match="vocabulary has 300 tokens"):
            llm.generate(["ok"], settings)
    outcomes = llm.generate(["ok", "ok"], [{"stop_token_ids": [10**6]}, {"max_tokens": 2}])
    assert [outcome.error_code for outcome in outcomes] == ["invalid_sampling", None]


def test_closing_frees_the_model(folder):
    llm = LLM(folder, **SMALL)
    llm.generate(["x"], SamplingParams(max_tokens=2))
    model = weakref.ref(llm._engine._executor.model)
    pool = weakref.ref(llm._engine._executor.pool)
    llm.close()
    gc.collect()
    assert model() is None
    assert pool() is None
    forgotten = LLM(folder, **SMALL)
    thread = forgotten._engine._thread
    del forgotten
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive(), "an LLM that was not closed stops with its last reference"


WINDOWED = {"sliding_window": 16, "use_sliding_window": True}


def test_a_window_that_only_the_mask_knows_is_refused(tmp_path):
    """qwen2_moe passes no window to its attention; without its mask it would attend to everything."""
    path = tiny_checkpoint(tmp_path / "windowed", "qwen2_moe", **WINDOWED)
    with pytest.raises(ConfigError, match="sliding window of 16"):
        LLM(str(path), **SMALL)


def test_longrope_is_cut_where_its_factors_would_depend_on_neighbours(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 32,
    }
    path = tiny_checkpoint(
        tmp_path / "long", "phi3", rope_parameters=rope, original_max_position_embeddings=32
    )
    options = {"num_threads": 1, "kv_memory": "16MiB"}
    with LLM(str(path), **options) as llm:
        together = llm.generate([[5] * 10, [6] * 20, [7] * 60], SamplingParams(max_tokens=12))
        alone = llm.generate([[5] * 10], SamplingParams(max_tokens=12))
    assert together[0].token_ids == alone[0].token_ids
    assert together[2].error_code == "prompt_too_long"
    with pytest.raises(ConfigError, match="beyond the 32 tokens"):
        LLM(str(path), max_context_tokens=64, **options)
