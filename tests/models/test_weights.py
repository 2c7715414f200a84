"""Streamed weights: the same logits as resident ones, within a budget, and never wrong ones."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from batchgen_data import LLM, SamplingParams
from batchgen_data.errors import BatchgenError, ConfigError, DeviceError, PlanError
from batchgen_data.models import checkpoint_map, weight_files, weight_units
from batchgen_data.models import experts as experts_module
from batchgen_data.models.checkpoint_map import Part, Piece, StoredTensor, stored_tensors
from batchgen_data.models.experts import install_experts, run_experts
from batchgen_data.models.load import LoadedModel, load_model, resolve_source
from batchgen_data.models.weight_files import WeightFiles, copy_weights, plan_reads, read_buffer
from tiny_models import FAMILIES, tiny_checkpoint, tiny_model

CPU = torch.device("cpu")
IDS = torch.arange(5, 45)[None]
SMALL: dict[str, Any] = {
    "num_threads": 1,
    "kv_memory": "16MiB",
    "max_sequences": 16,
    "max_context_tokens": 256,
}
PROMPTS = ["the cat", "a dog and the other one", "x", "in the end of it all"]


@pytest.fixture
def opened() -> Iterator[list[LoadedModel]]:
    """Models whose streams are closed after the test."""
    models: list[LoadedModel] = []
    yield models
    for loaded in models:
        assert loaded.weights is not None
        loaded.weights.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep(tmp_path_factory.mktemp("mixtral"), "mixtral")


def deep(folder: Path, family: str, **changes: Any) -> Path:
    """Enough layers that most of them are streamed."""
    return tiny_checkpoint(folder, family, num_hidden_layers=8, **changes)


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(resolve_source(folder), device=CPU, **options)


def least_bytes(folder: Path) -> int:
    """The budget that the error about a smaller one names."""
    with pytest.raises(PlanError, match="set weights_memory to at least") as caught:
        load(folder, weights_memory=1)
    found = re.search(r"at least ([\d,]+) bytes", str(caught.value))
    assert found is not None
    return int(found[1].replace(",", ""))


def streamed(opened: list[LoadedModel], folder: Path, budget: int | None = None) -> LoadedModel:
    loaded = load(folder, weights_memory=budget or least_bytes(folder))
    assert loaded.weights is not None
    opened.append(loaded)
    return loaded


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS, use_cache=False).logits


def resident_logits(folder: Path) -> torch.Tensor:
    """Of the same products in the same order, from weights that are all there."""
    model = load(folder).model
    install_experts(model)
    return logits(model)


def fail_reads(monkeypatch: pytest.MonkeyPatch, failures: list[BaseException | None]) -> list[int]:
    """Make reads fail with `failures` in turn (None: they succeed), the last for ever; count the reads."""
    real = weight_files._pread
    calls: list[int] = []

    def pread(descriptor: int, memory: Any, offset: int) -> int:
        calls.append(offset)
        failure = failures[0] if len(failures) == 1 else failures.pop(0)
        if failure is not None:
            raise failure
        return real(descriptor, memory, offset)

    monkeypatch.setattr(weight_files, "_pread", pread)
    monkeypatch.setattr(weight_files, "_RETRY_PAUSES_S", (0.0, 0.0))
    return calls


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_are_those_of_resident_weights(
    tmp_path: Path,
    family: str,
    dtype: torch.dtype,
    opened: list[LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Else the reader's buffers are half as large as these models.
    monkeypatch.setattr(weight_files, "_MOST_READ_BYTES", 8192)
    folder = tiny_checkpoint(tmp_path, family)
    if dtype != torch.float32:
        tiny_model(family).to(dtype).save_pretrained(folder)
    want = resident_logits(folder)
    least = least_bytes(folder)
    total = sum(parameter.nbytes for parameter in load(folder).model.parameters())
    for budget in (least, (least + total) // 2):
        loaded = streamed(opened, folder, budget)
        assert loaded.weights is not None
        for _ in range(3):  # the ring goes round
            assert torch.equal(logits(loaded.model), want)
        counts = loaded.weights.counts
        assert counts.resident_bytes + counts.ring_bytes <= budget
        assert counts.resident_bytes + counts.streamed_bytes == pytest.approx(total, rel=0.01)
        assert loaded.eos_token_ids == {1}


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_parts_that_are_read_to_their_places_are_whole(
    tmp_path: Path, family: str, opened: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that begin anywhere in a block, in reads that end anywhere in the part."""
    monkeypatch.setattr(weight_files, "_LEAST_PLACED_BYTES", 1)
    monkeypatch.setattr(weight_files, "_MOST_READ_BYTES", 8192)
    folder = deep(tmp_path, family)
    placed = []
    real = weight_units.plan_placed
    monkeypatch.setattr(
        weight_units, "plan_placed", lambda part, *rest: placed.append(part.name) or real(part, *rest)
    )
    loaded = streamed(opened, folder)
    want = resident_logits(folder)
    for _ in range(3):
        assert torch.equal(logits(loaded.model), want)
    # Of Mixtral's gate and up projections another tensor lies in between.
    assert any("down_proj" in name for name in placed)
    assert any("gate_up" in name for name in placed) == (family == "qwen3_moe")


def test_threads_share_streamed_experts(
    tmp_path: Path, opened: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = deep(tmp_path, "mixtral")
    total = sum(parameter.nbytes for parameter in load(folder).model.parameters())
    loaded = streamed(opened, folder, total // 2)
    block = loaded.model.model.layers[4].mlp.experts
    assert block.most_expert_threads > 2
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 64, generator=generator)
    index = torch.rand(40, 8, generator=generator).argsort()[:, :2]
    gates = torch.rand(40, 2, generator=generator)
    names = set()
    run_expert = experts_module._run_expert

    def watched(*args: Any) -> torch.Tensor:
        names.add(threading.current_thread().name)
        both.wait(10)  # so that neither thread does all the work
        return run_expert(*args)

    both = threading.Barrier(2)
    with torch.inference_mode():
        want = run_experts(block, hidden, index, gates)
        monkeypatch.setattr(experts_module, "_run_expert", watched)
        torch.set_num_threads(2)
        try:
            for _ in range(3):
                assert torch.equal(run_experts(block, hidden, index, gates), want)
        finally:
            torch.set_num_threads(1)
    assert len(names) == 2


def test_a_budget_for_everything_streams_nothing(llama: Path) -> None:
    assert load(llama, weights_memory=2**30).weights is None


def test_a_sharded_checkpoint_is_streamed(
    tmp_path: Path, opened: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = deep(tmp_path, "qwen3_moe")
    (folder / "model.safetensors").unlink()
    tiny_model("qwen3_moe", num_hidden_layers=8).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    # Smaller than any tensor, so that each is cut into several reads.
    monkeypatch.setattr(weight_files, "_MOST_READ_BYTES", 4096)
    assert torch.equal(logits(streamed(opened, folder).model), resident_logits(folder))


def test_tied_heads_stay_tied(tmp_path: Path, opened: list[LoadedModel]) -> None:
    model = streamed(opened, deep(tmp_path, "llama", tie_word_embeddings=True)).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_case_40_missing_unexpected_and_mismatched_weights_are_named(tmp_path: Path) -> None:
    folder = deep(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    tensors["model.layers.2.extra.weight"] = torch.zeros(2)
    tensors["model.layers.5.mlp.down_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        load(folder, weights_memory=1)
    for part in (
        "missing from the checkpoint: model.layers.3.mlp.up_proj.weight",
        "not in the model: model.layers.2.extra.weight",
        "model.layers.5.mlp.down_proj.weight (3, 3), expected (64, 96)",
    ):
        assert part in str(caught.value)


def test_a_missing_expert_is_an_error_that_names_the_experts(tmp_path: Path) -> None:
    folder = deep(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.block_sparse_moe.experts.2.w1.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.layers.3.mlp.experts.gate_up_proj"):
        load(folder, weights_memory=1)


def test_missing_and_truncated_shards_are_refused_before_anything_runs(tmp_path: Path) -> None:
    folder = deep(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    tiny_model("llama", num_hidden_layers=8).save_pretrained(folder, max_shard_size="200KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ConfigError, match=f"{shard.name} is truncated"):
        load(folder, weights_memory=1)
    with pytest.raises(ConfigError, match=f"{shard.name} is truncated: it has {len(whole) - 10} bytes"):
        stored_tensors([shard])
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name} is missing"):
        load(folder, weights_memory=1)


def test_a_parameter_is_without_data_outside_its_turn(llama: Path, opened: list[LoadedModel]) -> None:
    model = streamed(opened, llama).model
    layers = model.model.layers
    assert all(parameter.is_meta for parameter in layers.parameters())
    logits(model)
    assert not any(parameter.is_meta for parameter in layers[-1].parameters())
    assert all(parameter.is_meta for parameter in layers[:-1].parameters())


def test_layers_may_be_entered_in_any_order(llama: Path, opened: list[LoadedModel]) -> None:
    loaded = streamed(opened, llama)
    weights = load_file(llama / "model.safetensors")
    assert loaded.weights is not None
    for number in (0, 0, 5, 4, 7, 7, 1, 0, 3):
        loaded.weights.enter_layer(number)
        name = f"model.layers.{number}.mlp.up_proj.weight"
        assert torch.equal(loaded.model.get_parameter(name), weights[name])


def test_buffers_are_never_allocated_again(mixtral: Path, opened: list[LoadedModel]) -> None:
    loaded = streamed(opened, mixtral)
    assert loaded.weights is not None
    rings = (loaded.weights._layer_ring, loaded.weights._expert_ring)
    before = [slot.memory.data_ptr() for ring in rings for slot in ring.slots]
    for _ in range(3):
        logits(loaded.model)
    assert [slot.memory.data_ptr() for ring in rings for slot in ring.slots] == before
    assert len(before) == 4


def test_each_layer_is_read_once_per_pass(llama: Path, opened: list[LoadedModel]) -> None:
    loaded = streamed(opened, llama)
    assert loaded.weights is not None
    for _ in range(5):
        logits(loaded.model)
    counts = loaded.weights.counts
    assert counts.hits + counts.waits == 5 * 8
    # Beyond the five passes at most the buffers are filled with what comes next.
    assert 0 <= counts.bytes_read / counts.streamed_bytes - 5 <= 2 / 8


def test_only_experts_that_get_tokens_are_read(mixtral: Path, opened: list[LoadedModel]) -> None:
    loaded = streamed(opened, mixtral)
    weights = loaded.weights
    assert weights is not None
    experts = loaded.model.model.layers[4].mlp.experts
    hidden = torch.randn(6, 64)
    index = torch.tensor([[1, 6], [6, 1], [1, 6], [3, 1], [6, 3], [1, 3]])
    gates = torch.rand(6, 2)
    with torch.inference_mode():
        got = run_experts(experts, hidden, index, gates)
    one_expert = 3 * 64 * 96 * 4
    assert weights.counts.bytes_read == 3 * one_expert
    assert (weights.counts.hits, weights.counts.waits) in ((0, 3), (1, 2), (2, 1))
    stored = load_file(mixtral / "model.safetensors")

    def expert(number: int, x: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = (
            stored[f"model.layers.4.block_sparse_moe.experts.{number}.w{i}.weight"] for i in (1, 2, 3)
        )
        return (torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T

    want = torch.stack(
        [
            sum(g * expert(int(e), h) for g, e in zip(gs, es, strict=True))
            for h, gs, es in zip(hidden, gates, index, strict=True)
        ]  # type: ignore[misc]
    )
    torch.testing.assert_close(got, want)


def test_a_call_that_was_broken_off_disturbs_no_later_one(mixtral: Path, opened: list[LoadedModel]) -> None:
    weights = streamed(opened, mixtral).weights
    assert weights is not None
    stored = load_file(mixtral / "model.safetensors")
    broken = weights.experts(4, [5, 6])
    assert next(broken)[0] == 5
    for expert, parameters in weights.experts(4, [3, 5, 6]):
        if expert == 5:
            broken.close()
        name = f"model.layers.4.block_sparse_moe.experts.{expert}.w2.weight"
        assert torch.equal(parameters["down_proj"], stored[name])


def test_buffers_that_hold_later_experts_make_room_for_earlier_ones(
    mixtral: Path, opened: list[LoadedModel]
) -> None:
    weights = streamed(opened, mixtral).weights
    assert weights is not None
    # Nothing between the calls uses the ring: the last experts of the first lie in all its buffers.
    assert [expert for expert, _ in weights.experts(4, list(range(8)))] == list(range(8))
    assert [expert for expert, _ in weights.experts(4, list(range(8)))] == list(range(8))


def test_experts_without_tokens_are_no_call_at_all(mixtral: Path, opened: list[LoadedModel]) -> None:
    experts = streamed(opened, mixtral).model.model.layers[4].mlp.experts
    none = torch.empty(0, 2, dtype=torch.long)
    assert run_experts(experts, torch.empty(0, 64), none, torch.empty(0, 2)).shape == (0, 64)
    # Ids beyond the last expert mark choices that another process computes.
    hidden, beyond = torch.randn(2, 64), torch.full((2, 2), 8)
    assert torch.equal(run_experts(experts, hidden, beyond, torch.ones(2, 2)), torch.zeros(2, 64))


def test_a_read_that_fails_twice_is_repaired(
    llama: Path, opened: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = streamed(opened, llama)
    want = resident_logits(llama)
    calls = fail_reads(monkeypatch, [OSError(5, "Input/output error"), OSError(5, "again"), None])
    assert torch.equal(logits(loaded.model), want)
    assert len(calls) > 8


def test_a_read_that_comes_back_short_goes_on(
    llama: Path, opened: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = weight_files._pread
    monkeypatch.setattr(weight_files, "_pread", lambda fd, memory, at: real(fd, memory[:4096], at))
    assert torch.equal(logits(streamed(opened, llama).model), resident_logits(llama))


def test_a_file_that_cannot_be_read_any_more_is_named(
    llama: Path, opened: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = streamed(opened, llama)
    logits(loaded.model)
    fail_reads(monkeypatch, [OSError(5, "Input/output error")])
    with pytest.raises(
        DeviceError, match=r"model\.safetensors failed 3 times at byte \d+: Input/output error"
    ):
        logits(loaded.model)
    monkeypatch.undo()
    assert torch.equal(logits(loaded.model), resident_logits(llama))


def test_files_that_change_or_shrink_under_way_are_never_used(
    tmp_path: Path, opened: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_RETRY_PAUSES_S", (0.0, 0.0))
    folder = deep(tmp_path, "llama")
    loaded = streamed(opened, folder)
    logits(loaded.model)
    file = folder / "model.safetensors"
    with file.open("r+b") as raw:
        raw.seek(-100, os.SEEK_END)
        raw.write(bytes(100))
    with pytest.raises(DeviceError, match="was changed while it was in use"):
        logits(loaded.model)
    monkeypatch.setattr(weight_files, "_state", lambda descriptor: (0, 0))
    reader = WeightFiles([file])
    os.truncate(file, 9000)
    tensor = max(stored_tensors_of(loaded, folder), key=lambda stored: stored.offset)
    with pytest.raises(DeviceError, match=r"failed 3 times at byte \d+: the file ends at byte \d+"):
        reader.tensor(tensor)
    reader.close()


def stored_tensors_of(loaded: LoadedModel, folder: Path) -> list[StoredTensor]:
    assert loaded.weights is not None
    return [piece.source for unit in loaded.weights._units for part in unit.parts for piece in part.pieces]


def test_a_failed_read_while_loading_is_a_config_error(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = least_bytes(llama)
    fail_reads(monkeypatch, [OSError(5, "Input/output error")])
    with pytest.raises(ConfigError, match=r"model\.safetensors failed 3 times"):
        load(llama, weights_memory=least)


def test_where_the_page_cache_cannot_be_passed_by_it_is_used(
    llama: Path, opened: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_pread = os.open, weight_files._pread
    refused: list[str] = []

    def pread(descriptor: int, memory: Any, offset: int) -> int:
        if not refused:
            refused.append("read")
            raise OSError(22, "Invalid argument")
        return real_pread(descriptor, memory, offset)

    monkeypatch.setattr(weight_files, "_pread", pread)
    want = resident_logits(llama)
    assert torch.equal(logits(streamed(opened, llama).model), want)
    assert refused == ["read"]

    def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            refused.append("open")
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_)
    assert torch.equal(logits(streamed(opened, llama).model), want)
    assert refused == ["read", "open"]


def test_closing_stops_the_threads_and_the_model(mixtral: Path) -> None:
    before = threading.active_count()
    loaded = load(mixtral, weights_memory=least_bytes(mixtral))
    assert loaded.weights is not None
    logits(loaded.model)
    assert threading.active_count() > before
    loaded.weights.close()
    loaded.weights.close()
    assert threading.active_count() == before
    with pytest.raises(BatchgenError, match="closed"):
        logits(loaded.model)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3", "gpt_oss"])
def test_tokens_of_an_engine_are_those_of_resident_weights(tmp_path: Path, family: str) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    settings = SamplingParams(max_tokens=12)
    with LLM(str(folder), **SMALL) as llm:
        want = [outcome.token_ids for outcome in llm.generate(PROMPTS, settings)]
        assert "weights" not in llm.statistics()
    threads = threading.active_count()
    with LLM(str(folder), weights_memory=least_bytes(folder), **{**SMALL, "num_threads": 2}) as llm:
        assert [outcome.token_ids for outcome in llm.generate(PROMPTS, settings)] == want
        weights = llm.statistics()["weights"]
        assert weights["bytes_read"] > weights["streamed_bytes"] > 0
        assert weights["resident_bytes"] > 0
    assert threading.active_count() == threads


def test_an_engine_whose_weights_cannot_be_read_stops_with_the_cause(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(llama), weights_memory=least_bytes(llama), **SMALL) as llm:
        assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=3))[0].error_code is None
        fail_reads(monkeypatch, [OSError(5, "Input/output error")])
        for _ in range(2):
            with pytest.raises(DeviceError, match=r"model\.safetensors failed 3 times at byte"):
                llm.generate(PROMPTS, SamplingParams(max_tokens=3))


def test_an_engine_goes_on_after_reads_that_fail_twice(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SamplingParams(max_tokens=6)
    with LLM(str(llama), **SMALL) as llm:
        want = [outcome.token_ids for outcome in llm.generate(PROMPTS, settings)]
    with LLM(str(llama), weights_memory=least_bytes(llama), **SMALL) as llm:
        failures: dict[int, int] = {}
        real = weight_files._pread

        def pread(descriptor: int, memory: Any, offset: int) -> int:
            # By place, each at most twice: two threads read, and their order differs from run to run.
            if failures.setdefault(offset, 0) < 2 and len(failures) % 3 == 0:
                failures[offset] += 1
                raise OSError(5, "Input/output error")
            return real(descriptor, memory, offset)

        monkeypatch.setattr(weight_files, "_pread", pread)
        assert [outcome.token_ids for outcome in llm.generate(PROMPTS, settings)] == want
    assert sum(failures.values()) >= 2


def test_a_start_that_fails_leaves_no_threads(llama: Path) -> None:
    least, before = least_bytes(llama), threading.active_count()
    with pytest.raises(PlanError, match="kv_memory"):
        LLM(str(llama), weights_memory=least, **{**SMALL, "kv_memory": 10})
    assert threading.active_count() == before


def test_reads_cover_every_piece_once(tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    content = torch.randn(20_000)
    file.write_bytes(bytes(16) + content.numpy().tobytes())
    sources = [StoredTensor(f"t{i}", file, 16 + 4 * i * 2500, torch.float32, (2500,)) for i in range(8)]
    # The second half of each odd tensor, then the first of each even one, in half precision.
    parts = [
        Part(
            "odd",
            (4, 1250),
            torch.float32,
            tuple(Piece(sources[2 * i + 1], 1250, 1250 * i, 1250) for i in range(4)),
        ),
        Part(
            "even", (5000,), torch.bfloat16, tuple(Piece(sources[2 * i], 0, 1250 * i, 1250) for i in range(4))
        ),
    ]
    destinations = [torch.full(part.shape, torch.nan, dtype=part.dtype) for part in parts]
    reader, buffer = WeightFiles([file]), read_buffer(8192)
    reads = plan_reads(parts, 8192)
    for read in reads:
        assert read.length <= 8192
        reader.read(read, buffer)
        copy_weights(read, buffer, destinations)
    reader.close()
    rows = content.view(8, 2500)
    assert torch.equal(destinations[0], rows[1::2, 1250:])
    assert torch.equal(destinations[1], rows[0::2, :1250].reshape(-1).bfloat16())
    assert sum(read.weight_bytes for read in reads) == 8 * 1250 * 4


def test_conversions_that_move_elements_are_left_to_transformers(tmp_path: Path) -> None:
    tensor = StoredTensor("w", tmp_path, 0, torch.float32, (4, 6))
    turned = WeightConverter(["w"], ["v"], [Transpose()])
    assert checkpoint_map._place({"w": [tensor]}, turned, (6, 4)) is None
    fused = WeightConverter(["a", "b"], ["c"], [MergeModulelist(dim=0), Concatenate(dim=1)])
    assert checkpoint_map._place({"a": [tensor], "b": [tensor]}, fused, (1, 8, 6)) is not None
    assert checkpoint_map._place({"a": [tensor, tensor], "b": [tensor]}, fused, (2, 8, 6)) is None
