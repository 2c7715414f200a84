"""Upcycling: a dense checkpoint made a mixture of experts computes the same, whatever its router picks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from upcycle import upcycle

from batchgen_data import LLM, SamplingParams
from batchgen_data.models import weight_files
from tiny_models import tiny_checkpoint

PROMPTS = ["the cat", "a dog and the other one", "x", "in the end of it all", "the cat sat", "on and on"]
SMALL: dict[str, Any] = {"num_threads": 1, "page_tokens": 8, "max_sequences": 6, "max_context_tokens": 128}
MODES: dict[str, dict[str, Any]] = {
    "resident": {"kv_memory": "16MiB"},
    "yields": {"kv_memory": "16MiB", "attention_sub_batch": 2},
    "KV in the host tier": {"kv_residence": "host", "host_memory": "16MiB", "kv_memory": "128KiB"},
    # Of 2 MiB.
    "weights streamed": {"kv_memory": "16MiB", "weights_memory": "640KiB"},
}


def tokens(folder: Path, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with LLM(str(folder), **SMALL, **options) as llm:
        outcomes = llm.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
        return [outcome.token_ids for outcome in outcomes], llm.statistics()


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("upcycle")
    dense = tiny_checkpoint(base / "dense", "llama", tie_word_embeddings=request.param, rms_norm_eps=1e-3)
    return dense, upcycle(dense, base / "sparse")


def test_logits_equal_the_dense_model_and_every_expert_is_used(folders: tuple[Path, Path]) -> None:
    dense, sparse = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    assert type(sparse).__name__ == "MixtralForCausalLM"
    picked: set[int] = set()
    for block in (layer.mlp for layer in sparse.model.layers):
        block.gate.register_forward_hook(lambda _, __, output: picked.update(output[2].flatten().tolist()))
    ids = torch.arange(4, 260)[None]
    with torch.inference_mode():
        torch.testing.assert_close(sparse(ids).logits, dense(ids).logits, atol=1e-4, rtol=0)
    assert picked == set(range(8))


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_equal_the_dense_model(
    folders: tuple[Path, Path], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_MOST_READ_BYTES", 32768)  # larger buffers would be half the budget
    dense, sparse = folders
    want, _ = tokens(dense, **MODES["resident"])
    got, statistics = tokens(sparse, **MODES[mode])
    assert got == want
    assert ("weights" in statistics) == (mode == "weights streamed")


def test_what_cannot_be_upcycled_is_refused(tmp_path: Path) -> None:
    dense = tiny_checkpoint(tmp_path / "dense", "llama")
    with pytest.raises(ValueError, match="is not empty"):
        upcycle(dense, dense)
    with pytest.raises(ValueError, match="top_k=3"):
        upcycle(dense, tmp_path / "out", num_experts=2, top_k=3)
    biased = json.loads((dense / "config.json").read_text()) | {"mlp_bias": True}
    (dense / "config.json").write_text(json.dumps(biased))
    with pytest.raises(ValueError, match="no Llama without biases"):
        upcycle(dense, tmp_path / "out")
