"""Callbacks with real (tiny) models: prompt lookup changes no token, and how callbacks are given."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from batchgen_data import LLM, Callbacks, ConfigError, EngineConfig, Int8KV, PromptLookup, SamplingParams
from batchgen_data.callbacks import SequenceView
from batchgen_data.models import kv_pool
from batchgen_data.operator import check_stage
from batchgen_data.runtime.sequence import Sequence
from batchgen_kernels.int8 import quantise
from fake_model import sampling
from tiny_models import tiny_checkpoint

SMALL = {"num_threads": 1, "kv_memory": "16MiB", "max_sequences": 64, "max_context_tokens": 256}
PHRASE = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]


class Replay(Callbacks):
    """Guesses what a run without it gave, with a mistake now and then: tiny models hardly repeat."""

    def __init__(self, known):
        self.known = known

    def on_long_tail(self, runtime):
        return self.guess

    def guess(self, view, most):
        prompt = tuple(view.token_ids(0, view.num_prompt))
        ids = self.known[prompt][view.num_generated :][: min(most, 6)]
        if view.num_generated % 3 == 0 and ids:
            ids = [*ids[:-1], (ids[-1] + 1) % 300]
        return ids


SETTINGS = [
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"min_tokens": 8, "stop": [*"aeiost", "é"]},
    {"min_tokens": 9, "stop_token_ids": [50], "logit_bias": {"50": 30}},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 40, "seed": 11, "repetition_penalty": 1.1},
]


def prompts():
    return [[*PHRASE[: 3 + i], *range(60 + i, 75 + i), *PHRASE[: 3 + i]] for i in range(len(SETTINGS))]


def sampled():
    common = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return [SamplingParams.from_dict({**common, **settings}) for settings in SETTINGS]


def ends(outcomes):
    return [
        (outcome.token_ids, outcome.text, outcome.finish_reason, outcome.stop_reason) for outcome in outcomes
    ]


@pytest.mark.parametrize(
    "family,options",
    [
        ("llama", {"num_threads": 2}),
        ("gemma2", {}),
        ("gpt_oss", {"attention_sub_batch": 2}),
        ("mixtral", {"attention_sub_batch": 1, "moe_batch_tokens": 5}),
        ("deepseek_v3", {}),
        ("mistral", {"kv_residence": "host", "kv_memory": "128KiB", "host_memory": "8MiB"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_drafts_change_nothing_whatever_the_settings(family, options, tmp_path):
    """Penalties, stop strings, minimum lengths, draws; windows, sinks, experts, latents, staging."""
    path = str(tiny_checkpoint(tmp_path / family, family))
    config = {**SMALL, "page_tokens": 16, **options}
    with LLM(path, **config) as llm:
        plain = llm.generate(prompts(), sampled(), apply_chat_template=False)
    known = {tuple(ids): outcome.token_ids for ids, outcome in zip(prompts(), plain, strict=True)}
    with LLM(path, callbacks=[Replay(known)], **config) as llm:
        drafted = llm.generate(prompts(), sampled(), apply_chat_template=False)
        statistics = llm.statistics()
    assert ends(drafted) == ends(plain)
    assert {outcome.finish_reason for outcome in plain} == {"length", "stop"}
    assert statistics["accepted_draft_tokens"] > 30
    assert statistics["drafted_tokens"] > statistics["accepted_draft_tokens"]
    assert statistics["generated_tokens"] == sum(len(outcome.token_ids) for outcome in plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", chat_template=True))


def test_prompt_lookup_changes_nothing_and_saves_passes_where_rows_repeat(folder):
    """A bias towards one token makes a tiny model go round in circles."""
    settings = SamplingParams(max_tokens=80, logit_bias={"40": 60}, ignore_eos=True)
    rows = [[*PHRASE, *range(60, 70 + i)] for i in range(3)]
    with LLM(folder, **SMALL) as llm:
        plain = llm.generate(rows, settings)
        num_steps = llm.statistics()["steps"]
    with LLM(folder, callbacks=[PromptLookup()], **SMALL) as llm:
        looked_up = llm.generate(rows, settings)
        statistics = llm.statistics()
    assert ends(looked_up) == ends(plain)
    assert statistics["steps"] < 0.2 * num_steps
    with LLM(folder, callbacks=["prompt-lookup"], **SMALL) as llm:
        many = llm.generate([[*row, i] for row in rows for i in range(3)], settings)
        assert many[0].finish_reason == "length"
        assert llm.statistics()["drafted_tokens"] == 0, "nine rows are no tail"


def view(ids, num_prompt=1):
    sequence = Sequence(0, ids[:num_prompt], sampling(max_tokens=500), limit_tokens=1000)
    sequence.token_ids += ids[num_prompt:]
    return SequenceView(sequence), sequence


def test_prompt_lookup_guesses_what_came_after_the_longest_latest_match():
    lookup = PromptLookup(max_match=3)
    for ids, most, guess in (
        ([1, 2, 3, 4, 5, 1, 2], 9, [3, 4, 5, 1]),  # at most 4 at first
        ([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 2, [7, 2]),  # three tokens match before two
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, [8]),  # the later place
        ([9, 5, 5, 5], 4, [5, 5, 5, 5]),  # in circles
        ([1, 2, 3, 4], 5, []),
        ([1], 5, []),
        ([4], 1, []),
        # As bytes, 0x00010000 0x00000100 holds 0x00000001 0x00000000 between two tokens.
        ([256, 65536, 7, 1, 256], 5, []),
        ([0x01000000, 0x02000000, 3, 0x01, 0x02], 5, []),
    ):
        assert lookup.draft(view(ids)[0], most) == guess, ids


def test_prompt_lookup_rests_after_wrong_guesses():
    lookup = PromptLookup()
    seen, sequence = view([1, 2, 3, 1, 2])
    asked = []
    for _ in range(60):
        asked.append(bool(lookup.draft(seen, 8)))
        sequence.token_ids += [len(asked) + 100] if len(asked) % 2 else [1]
        sequence.token_ids[-2:] = [1, 2]  # a match each time, and never what comes
    assert asked[0]
    assert sum(asked) < 10


@pytest.mark.parametrize(
    "given,message",
    [
        (["prompt_lookup"], "did you mean 'prompt-lookup'"),
        ([PromptLookup], r"write PromptLookup\(\)"),
        ([5], "subclasses of Callbacks, not int"),
        (5, "must be a list of callbacks"),
    ],
)
def test_what_is_no_callback_is_refused_before_anything_loads(given, message, folder):
    for refuse in (
        lambda: EngineConfig(callbacks=given),
        lambda: LLM(folder, callbacks=given),
        lambda: check_stage({"prompt_column": "p", "callbacks": given}, folder),
    ):
        with pytest.raises(ConfigError, match=message):
            refuse()


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: PromptLookup(max_draft=0), "max_draft must be a whole number"),
        (lambda: PromptLookup(min_match=5), "min_match=5 is above max_match=4"),
        (lambda: Int8KV(when="never"), '"pressure" or "start"'),
    ],
)
def test_options_of_shipped_callbacks_are_checked(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_shipped_callbacks_can_be_sent_and_recorded():
    for callback in (PromptLookup(max_draft=3), Int8KV(when="start")):
        again = pickle.loads(pickle.dumps(callback))
        assert vars(again) == vars(callback)
        assert repr(again) == repr(callback)
    assert EngineConfig(callbacks="prompt-lookup").callbacks == ("prompt-lookup",)
    assert isinstance(EngineConfig(callbacks=[PromptLookup()]).callbacks[0], PromptLookup)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mixtral"])
def test_int8_from_the_start_rounds_keys_and_values_and_nothing_else(family, tmp_path, monkeypatch):
    """As full pages into which rounded keys and values are written; with windows, sinks, experts."""
    path = str(tiny_checkpoint(tmp_path / family, family))
    rows = [[*range(5 + i, 45 + i)] for i in range(6)]
    settings = SamplingParams(max_tokens=12, ignore_eos=True)
    options = {"num_threads": 1, "kv_memory": "300KB", "page_tokens": 16, "max_context_tokens": 128}
    with LLM(path, max_sequences=8, callbacks=[Int8KV(when="start")], **options) as llm:
        int8, statistics = llm.generate(rows, settings), llm.statistics()
    append = kv_pool.kv_append

    def append_rounded(k, v, *rest):
        rounded = [values * scales.unsqueeze(-1) for values, scales in map(quantise, (k, v))]
        append(*rounded, *rest)

    with LLM(path, max_sequences=8, **options) as llm:
        monkeypatch.setattr(kv_pool, "kv_append", append_rounded)
        rounded, full = llm.generate(rows, settings), llm.statistics()
    assert ends(int8) == ends(rounded)
    assert statistics["kv_int8"]
    # Heads of 16 numbers: 64 bytes, or 16 and a scale of 4.
    assert 3.0 < statistics["pages"] / full["pages"] < 3.3


def test_int8_under_pressure_keeps_rows_that_would_have_yielded(folder, caplog):
    # All come in at once: pages are short at a later boundary.
    rows = [[*range(5 + i, 13 + i)] for i in range(4)]
    settings = SamplingParams(max_tokens=82, ignore_eos=True)
    options = {"num_threads": 1, "kv_memory": "150KB", "page_tokens": 16, "max_context_tokens": 96}
    with LLM(folder, max_sequences=4, **options) as llm:
        full, plain = llm.generate(rows, settings), llm.statistics()
    assert plain["yields"] > 0
    assert not plain["kv_int8"]
    assert caplog.text.count("KV memory is short") == 1, "said once"
    with LLM(folder, max_sequences=4, callbacks=["int8-kv"], **options) as llm:
        int8, statistics = llm.generate(rows, settings), llm.statistics()
        assert statistics["yields"] == 0
        assert statistics["kv_int8"]
        assert statistics["pages"] > 3 * plain["pages"]
        # Pages keep what they held: a row that ran before the change goes on as it began.
        assert [row.token_ids[:16] for row in int8] == [row.token_ids[:16] for row in full]
        one_by_one = [llm.generate([row], settings)[0] for row in rows]
        together = llm.generate(rows, settings)
    assert ends(one_by_one) == ends(together), "from then on nothing depends on the load"
    assert "int8 from now on" in caplog.text


def test_without_pressure_nothing_is_rounded(folder):
    settings = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(folder, **SMALL) as llm:
        full = llm.generate(["the cat", "a dog"], settings)
    with LLM(folder, callbacks=[Int8KV()], **SMALL) as llm:
        assert ends(llm.generate(["the cat", "a dog"], settings)) == ends(full)
        assert not llm.statistics()["kv_int8"]


def test_int8_is_refused_where_it_cannot_be(folder, tmp_path):
    host = {"kv_residence": "host", "kv_memory": "128KiB", "host_memory": "8MiB", "max_context_tokens": 128}
    with pytest.raises(ConfigError, match=r"callback Int8KV\.on_start: .* host tier"):
        LLM(folder, callbacks=["int8-kv"], num_threads=1, **host)
    latents = str(tiny_checkpoint(tmp_path / "deepseek", "deepseek_v3"))
    with pytest.raises(ConfigError, match="compressed latents"):
        LLM(latents, callbacks=["int8-kv"], **SMALL)


def test_the_example_of_the_documentation_runs(folder, monkeypatch):
    text = (Path(__file__).resolve().parent.parent / "docs/callbacks.md").read_text()
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class " in code]
    names = {"MODEL": folder}
    exec(example, names)
    recorded = names["shortest_first"]
    assert recorded.order == sorted(recorded.order)
    assert len(recorded.order) == 4
    assert recorded.tail[0] <= 2
    assert recorded.suspended == []
    assert [outcome.error_code for outcome in names["outcomes"]] == [None] * 4
