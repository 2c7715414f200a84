"""Passes of real (tiny) models cut into sub-batches and lanes: same tokens, and whose failure is whose."""

from __future__ import annotations

import json
import re

import pytest
import torch

from batchgen_data import LLM, ConfigError, PlanError, SamplingParams
from batchgen_data.models import attention, weight_files
from batchgen_data.models.experts import install_experts
from batchgen_data.models.kv_pool import KVPool
from batchgen_data.models.kv_staging import StagedKVPool
from batchgen_data.models.wrap import install_yield_points
from batchgen_data.runtime import executor as executor_module
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.faults import first_line
from batchgen_data.runtime.scheduler import Scheduler
from batchgen_data.runtime.sequence import Sequence
from batchgen_data.runtime.step import Limits
from batchgen_data.runtime.trace import Trace
from fake_model import sampling
from tiny_models import VOCAB_SIZE, tiny_checkpoint, tiny_model

PAGE_TOKENS = 4
NEW_TOKENS = 8
NUM_ROWS = 6
POISON = 4  # a token that no other prompt holds


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 9, 1, 14, 6, 2)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def sequences() -> list[Sequence]:
    return [
        Sequence(number, ids, sampling(max_tokens=NEW_TOKENS), limit_tokens=len(ids) + NEW_TOKENS)
        for number, ids in enumerate(prompts())
    ]


def paged_model(family="mixtral", patterns=None):
    model = tiny_model(family)
    shapes = attention.install(model)
    install_yield_points(model, patterns)
    return model, shapes


def make_executor(model, shapes, *, staged=False, **options) -> TorchExecutor:
    pool = KVPool(shapes, 64, PAGE_TOKENS, torch.device("cpu"))
    if staged:
        widest_bytes = PAGE_TOKENS * max(shape.token_bytes for shape in shapes.values())
        pool = StagedKVPool(shapes, 64, PAGE_TOKENS, torch.device("cpu"), staging_bytes=64 * widest_bytes)
    for pages in (*pool.k.values(), *pool.v.values()):
        pages.fill_(float("nan"))
    return TorchExecutor(model, pool, **options)


@torch.inference_mode()
def greedy(executor, rows) -> Scheduler:
    """Run `rows` to their end."""
    limits = Limits(num_pages=64, page_tokens=PAGE_TOKENS, max_sequences=NUM_ROWS, max_step_tokens=48)
    scheduler = Scheduler(limits)
    for row in rows:
        assert scheduler.add(row)
    while (step := scheduler.plan_step()) is not None:
        try:
            result = executor.run(step)
        except ValueError as error:  # as the engine does
            scheduler.step_failed(step, first_line(error))
        else:
            scheduler.complete(step, result.tokens, result.failed)
        scheduler.check()
    torch.set_num_threads(1)
    return scheduler


@torch.inference_mode()
def plain_greedy(model, prompt) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected():
    """By family: what each prompt goes on with, computed alone by the unchanged model."""
    found = {}

    def of(family):
        if family not in found:
            model = tiny_model(family)
            found[family] = [plain_greedy(model, prompt) for prompt in prompts()]
        return found[family]

    return of


@pytest.mark.parametrize(
    "family,patterns",
    [
        ("mixtral", None),
        ("gpt_oss", None),
        ("deepseek_v3", None),
        ("llama", ["model.layers.*.mlp"]),
        ("gpt2", ["transformer.h.*.mlp"]),
        ("opt", ["model.decoder.layers.*.fc1"]),
        ("qwen3_moe", ["model.layers.*.mlp", "model.layers.*.input_layernorm"]),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{"sub_batch": 2}, {"sub_batch": 1}, {"sub_batch": 2, "moe_batch_tokens": 3}, {"moe_batch_tokens": 5}],
    ids=str,
)
def test_tokens_do_not_depend_on_how_a_pass_is_cut(family, patterns, options, expected):
    model, shapes = paged_model(family, patterns)
    executor = make_executor(model, shapes, **options)
    rows = sequences()
    greedy(executor, rows)
    assert [row.generated_ids for row in rows] == expected(family)
    assert executor.coroutine.combines > 0
    if "moe_batch_tokens" in options:
        assert executor.coroutine.calls > executor.coroutine.combines
        assert executor.coroutine.combined_tokens <= executor.coroutine.calls * options["moe_batch_tokens"]
    else:
        assert executor.coroutine.calls == executor.coroutine.combines


@pytest.mark.parametrize("options", [{"sub_batch": 2}, {"sub_batch": 2, "moe_batch_tokens": 3}], ids=str)
def test_an_expert_that_is_never_routed_to_is_never_used(options, expected):
    rows = sequences()
    model, shapes = paged_model("deepseek_v3")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[3] = -1e4
    want = [plain_greedy_paged(model, shapes, prompt) for prompt in prompts()]
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
            parameter.data[3] = float("nan")
    executor = make_executor(model, shapes, **options)
    greedy(executor, rows)
    assert [row.error for row in rows] == [None] * NUM_ROWS
    assert [row.generated_ids for row in rows] == want
    assert want != expected("deepseek_v3"), "the expert was in use before"


def plain_greedy_paged(model, shapes, prompt) -> list[int]:
    """The same model, one row alone and as one unit."""
    row = Sequence(0, prompt, sampling(max_tokens=NEW_TOKENS), limit_tokens=len(prompt) + NEW_TOKENS)
    greedy(make_executor(model, shapes), [row])
    return row.generated_ids


# Whose failure is whose. Row 1 is the victim. Single-token chunks come first: sub-batches of two are the rows
# (2, 0), (1, 3), (4, 5). Lanes are (3, 0, 2) and (1, 4, 5).

VICTIM = 1
WAYS = {
    "sub-batches": ({"sub_batch": 2}, {1, 3}),
    "sub-batches of one": ({"sub_batch": 1}, {1}),
    "groups": ({"sub_batch": 2, "moe_batch_tokens": 3}, {1, 3}),
    "lanes": ({"num_threads": 2}, {1, 4, 5}),
    "KV in the host tier": ({"sub_batch": 2, "staged": True}, {1, 3}),
}


@pytest.fixture(autouse=True)
def small_lanes(monkeypatch):
    """Passes of these tests are small: without this they would never be cut into lanes."""
    monkeypatch.setattr(executor_module, "_LEAST_LANE_TOKENS", 2)
    monkeypatch.setattr(executor_module, "_LEAST_EXPERT_TOKENS", 0)
    monkeypatch.setattr(executor_module, "_MOST_LANE_SHARE", 10.0)


def raise_in_attention(monkeypatch, executor, rows, error):
    """The second layer's attention raises in whatever part of a pass writes a page of the victim."""
    # A staged part, which knows the pages by their own numbers, comes before the layer.
    name = "append_part" if isinstance(executor.pool, StagedKVPool) else "append"
    real_append = getattr(executor.pool, name)

    def append(*given):
        layer, page_idx = given[-4], (given[0] if len(given) == 5 else given[-1]).page_idx
        if layer == 1 and set(page_idx.tolist()) & set(rows[VICTIM].pages):
            raise error
        return real_append(*given)

    monkeypatch.setattr(executor.pool, name, append)


def raise_in_sampling(monkeypatch, executor, rows, error):
    """Sampling raises for whatever part of a pass holds the victim."""
    real_sample = executor_module.sample

    def sample(logits, sequences):
        if rows[VICTIM] in sequences:
            raise error
        return real_sample(logits, sequences)

    monkeypatch.setattr(executor_module, "sample", sample)


def assert_only_the_victim_failed(rows, expected_tokens, suspected):
    assert [row.error.code if row.error else None for row in rows] == [
        "model_error" if row is rows[VICTIM] else None for row in rows
    ]
    assert "ValueError: not this one" in rows[VICTIM].error.message
    for row in rows:
        if row is not rows[VICTIM]:
            assert row.generated_ids == expected_tokens[row.seq_id]
    assert {row.seq_id for row in rows if row.num_yields} == suspected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fail", [raise_in_attention, raise_in_sampling])
def test_a_part_that_raises_leaves_its_neighbours_untouched(way, fail, monkeypatch, expected):
    options, suspected = WAYS[way]
    model, shapes = paged_model()
    executor = make_executor(model, shapes, **options)
    rows = sequences()
    fail(monkeypatch, executor, rows, ValueError("not this one"))
    greedy(executor, rows)
    assert_only_the_victim_failed(rows, expected("mixtral"), suspected)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "lanes"])
def test_a_combined_module_that_raises_costs_only_those_for_which_it_raises_alone(way, monkeypatch, expected):
    options, suspected = WAYS[way]
    model = tiny_model("mixtral")
    shapes = attention.install(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
    block = model.model.layers[1].mlp
    real_forward = block.forward

    def forward(hidden_states):
        if not torch.isfinite(hidden_states).all():
            raise ValueError("not this one")
        return real_forward(hidden_states)

    monkeypatch.setattr(block, "forward", forward)
    install_yield_points(model)
    executor = make_executor(model, shapes, **options)
    rows = sequences()
    rows[VICTIM].token_ids[0] = POISON
    greedy(executor, rows)
    assert_only_the_victim_failed(rows, expected("mixtral"), suspected)
    assert executor.coroutine.retries == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "error",
    [MemoryError("none left"), RuntimeError("CUDA error: an illegal memory access was encountered")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("fail", [raise_in_attention, raise_in_sampling])
@torch.inference_mode()
def test_no_memory_and_device_faults_end_the_whole_pass(way, error, fail, monkeypatch):
    model, shapes = paged_model()
    executor = make_executor(model, shapes, **WAYS[way][0])
    scheduler = Scheduler(Limits(num_pages=64, page_tokens=PAGE_TOKENS, max_step_tokens=256))
    rows = sequences()
    for row in rows:
        scheduler.add(row)
    step = scheduler.plan_step()
    with monkeypatch.context() as patch:
        fail(patch, executor, rows, error)
        with pytest.raises(type(error)) as caught:
            executor.run(step)
    torch.set_num_threads(1)
    assert caught.value is error
    assert len(executor.run(step).tokens) == NUM_ROWS, "the next pass is not disturbed"
    torch.set_num_threads(1)


@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_a_pass_whose_parts_all_raise_raises(way, monkeypatch):
    model, shapes = paged_model()
    executor = make_executor(model, shapes, **WAYS[way][0])
    scheduler = Scheduler(Limits(num_pages=64, page_tokens=PAGE_TOKENS, max_step_tokens=256))
    for row in sequences():
        scheduler.add(row)

    def append(*_):
        raise ValueError("for everyone")

    for name in ("append", "append_part"):
        monkeypatch.setattr(executor.pool, name, append, raising=False)
    with pytest.raises(ValueError, match="for everyone"):
        executor.run(scheduler.plan_step())
    torch.set_num_threads(1)


def test_lanes_and_sub_batches_are_traced():
    model, shapes = paged_model()
    for options, tracks in (
        ({"sub_batch": 2}, ["passes", "forward", "sub-batches", "combined", "sampling"]),
        ({"num_threads": 2}, ["passes", "lane 0", "lane 1"]),
    ):
        trace = Trace()
        greedy(make_executor(model, shapes, trace=trace, **options), sequences())
        assert {span[1] for span in trace._spans} == set(tracks)
        passes = [span for span in trace._spans if span[1] == "passes"]
        assert passes[0][4] == {"sequences": NUM_ROWS, "tokens": sum(map(len, prompts()))}
        for _, track, started_s, ended_s, _ in trace._spans:
            inside = any(outer[2] <= started_s <= ended_s <= outer[3] for outer in passes)
            assert inside, f"a span of {track} lies outside all passes"


# From options to passes.

SMALL = {"num_threads": 1, "kv_memory": "4MiB", "page_tokens": PAGE_TOKENS, "max_sequences": 6}
SETTINGS = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            made[family] = str(tiny_checkpoint(tmp_path_factory.mktemp(family), family))
        return made[family]

    return of


def generate(folder, **options):
    with LLM(folder, **SMALL, **options) as llm:
        outcomes = llm.generate(prompts(), SETTINGS)
        return [outcome.token_ids for outcome in outcomes], llm.statistics()


@pytest.mark.parametrize(
    "family,options",
    [
        ("llama", {"attention_sub_batch": 2, "yield_at": "model.layers.*.mlp"}),
        ("llama", {"moe_batch_tokens": 3, "yield_at": ["model.layers.*.mlp"]}),
        ("mixtral", {"attention_sub_batch": 2, "moe_batch_tokens": 3}),
        ("mixtral", {"attention_sub_batch": 1, "yield_at": ["model.layers.*.mlp.gate"]}),
    ],
)
def test_options_choose_where_and_how_much_is_combined(family, options, folders):
    want, plain = generate(folders(family))
    found, statistics = generate(folders(family), **options)
    assert found == want
    assert plain["coroutine"]["combines"] == 0
    assert statistics["coroutine"]["combines"] == 3 * statistics["steps"]
    assert (statistics["coroutine"]["calls"] > statistics["coroutine"]["combines"]) == (
        "moe_batch_tokens" in options
    )


@pytest.mark.parametrize(
    "family,options,message",
    [
        ("llama", {"attention_sub_batch": 2}, "attention_sub_batch needs a model with experts"),
        ("llama", {"moe_batch_tokens": 2}, "moe_batch_tokens needs a model with experts.*yield_at"),
        ("llama", {"yield_at": ["model.layers.*.mlp"]}, "yield_at has no effect .*set attention_sub_batch"),
        ("llama", {"attention_sub_batch": 2, "yield_at": "*.mpl"}, "the nearest yield points are"),
        ("llama", {"attention_sub_batch": 2, "yield_at": "*.self_attn"}, "cannot be combined"),
        ("llama", {"yield_at": 3}, "must be a pattern or a list of patterns"),
        ("llama", {"yield_at": []}, "must be a pattern or a list of patterns"),
        ("llama", {"yield_at": ["a", ""]}, "must be a pattern or a list of patterns"),
        ("llama", {"moe_batch_tokens": 0}, "positive whole number"),
        ("llama", {"trace": 5}, "trace must be the path of a file"),
        ("llama", {"trace": "/no/such/folder/out.json"}, "trace: there is no folder /no/such/folder"),
    ],
)
def test_options_that_cannot_work_are_refused(family, options, message, folders):
    with pytest.raises(ConfigError, match=message):
        LLM(folders(family), **SMALL, **options)


def least_weights_memory(folder) -> int:
    with pytest.raises(PlanError) as caught:
        LLM(folder, **SMALL, weights_memory=1)
    return int(re.search(r"at least ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_streamed_weights_are_read_once_for_all_sub_batches(family, folders, monkeypatch):
    monkeypatch.setattr(weight_files, "_MOST_READ_BYTES", 32768)
    want, _ = generate(folders(family))
    least = least_weights_memory(folders(family))
    found, statistics = generate(folders(family), weights_memory=least, attention_sub_batch=1)
    assert found == want
    assert statistics["weights"]["streamed_bytes"] > 0
    assert statistics["coroutine"]["barriers"] > 0
    # Bytes depend on how far reading ahead has come; what was asked for does not.
    _, as_one = generate(folders(family), weights_memory=least)
    asked = [run["weights"]["hits"] + run["weights"]["waits"] for run in (statistics, as_one)]
    assert asked[0] == asked[1]


def test_the_trace_is_written_when_the_engine_closes(folders, tmp_path):
    path = tmp_path / "out.json"
    with LLM(folders("mixtral"), **SMALL, trace=str(path), attention_sub_batch=2) as llm:
        llm.generate(prompts(), SETTINGS)
        assert not path.exists()
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert names >= {"pass", "forward", "sampling", "sub-batch 0", "sub-batch 2", "model.layers.1.mlp"}


def test_the_trace_shows_weight_reads_and_kv_copies_on_lines_of_their_own(folders, tmp_path):
    path = tmp_path / "out.json"
    options = {**SMALL, "kv_memory": "64KiB", "kv_residence": "host", "host_memory": "1MiB"}
    options["weights_memory"] = least_weights_memory(folders("mixtral"))
    with LLM(folders("mixtral"), **options, trace=str(path), attention_sub_batch=2) as llm:
        llm.generate(prompts(), SETTINGS)
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = {name: [] for name in ("prefetch", "stage", "write back", "model.layers.1.mlp", "sub-batch 1")}
    for event in events:
        if event["ph"] == "X" and event["name"] in found:
            found[event["name"]].append(event)
    assert all(found.values())
    lines = {name: {tracks[event["tid"]] for event in spans} for name, spans in found.items()}
    assert lines["stage"] == lines["write back"] == {"KV copies"}
    assert all(line.startswith("batchgen-read") for line in lines["prefetch"])
    assert min(event["args"]["bytes"] for event in found["prefetch"]) > 0
    assert sum(event["args"]["bytes"] for event in found["stage"]) > 0
    assert min(event["args"]["bytes"] for event in found["write back"]) > 0


def test_a_trace_that_cannot_be_written_is_said_and_costs_no_row(folders, tmp_path, caplog):
    path = tmp_path / "out.json"
    with LLM(folders("mixtral"), **SMALL, trace=str(path)) as llm:
        outcomes = llm.generate(prompts(), SETTINGS)
        path.mkdir()
    assert [outcome.error_code for outcome in outcomes] == [None] * NUM_ROWS
    assert "the trace could not be written" in caplog.text


def test_lanes_need_enough_tokens_for_each_expert(monkeypatch):
    monkeypatch.setattr(executor_module, "_LEAST_EXPERT_TOKENS", 32)
    model, shapes = paged_model("mixtral")  # 8 experts, 2 for a token
    assert make_executor(model, shapes, num_threads=2).least_lane_tokens == 2
    install_experts(model)
    executor = make_executor(model, shapes, num_threads=2)
    assert executor.least_lane_tokens == 128
    dense, shapes = paged_model("llama", ["model.layers.*.mlp"])
    assert make_executor(dense, shapes, num_threads=2).least_lane_tokens == 2
