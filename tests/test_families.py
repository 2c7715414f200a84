"""Every mixture-of-experts family through every tier: greedy tokens equal transformers' own generate.

Resident; sub-batches that combine at the sparse blocks; more rows than the KV pages hold; all KV in the host
tier; weights streamed from the checkpoint; and both at once. Each mode also shows that it took place.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchgen_data import LLM, PlanError, SamplingParams
from batchgen_data.models import attention, weight_files
from batchgen_data.models.kv_pool import LayerShape
from tiny_models import VOCAB_SIZE, tiny_checkpoint, tiny_config

MOE_FAMILIES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "granitemoe",
    "glm4_moe",
)
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
PAGE_TOKENS = 4
NEW_TOKENS = 20
# The longest row, 60 tokens, takes 15 pages.
TIGHT_PAGES = 30
STAGED_PAGES = 16

MODES = (
    "resident",
    "yields",
    "yields, few KV pages",
    "KV in the host tier",
    "weights streamed",
    "KV in the host tier, weights streamed",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint and what transformers generates from it."""

    family: str
    folder: Path
    shapes: dict[int, LayerShape]
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=MOE_FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(5, VOCAB_SIZE, (17,), generator=generator).tolist()
    prompts = [
        (shared if length % 2 else []) + torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in (23, 8, 1, 16, 40, 3, 5, 30)
    ]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every row to its full length
    expected = [generated(model, prompt) for prompt in prompts]
    return Case(request.param, folder, attention.install(model), prompts, expected)


def generated(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def options(mode: str, case: Case) -> dict[str, Any]:
    """Engine options of a mode, in sizes that this model really outgrows."""
    page_bytes = PAGE_TOKENS * sum(shape.token_bytes for shape in case.shapes.values())
    widest_bytes = PAGE_TOKENS * max(shape.token_bytes for shape in case.shapes.values())
    chosen: dict[str, Any] = {
        "num_threads": 1,
        "page_tokens": PAGE_TOKENS,
        "max_sequences": 6,
        "max_step_tokens": 24,
        "max_context_tokens": 64,
        "kv_memory": "16MiB",
    }
    if mode.startswith("yields"):
        chosen["attention_sub_batch"] = 2
    if "few KV pages" in mode:
        chosen["kv_memory"] = TIGHT_PAGES * page_bytes
    if mode.startswith("KV in the host tier"):
        chosen |= {
            "kv_residence": "host",
            "host_memory": "16MiB",
            "kv_memory": 2 * STAGED_PAGES * widest_bytes,
        }
    if "weights streamed" in mode:
        chosen["weights_memory"] = least_weights_bytes(case.folder, chosen)
    return chosen


def least_weights_bytes(folder: Path, chosen: dict[str, Any]) -> int:
    """The budget that the error about a smaller one names."""
    with pytest.raises(PlanError, match="set weights_memory to at least") as caught:
        LLM(str(folder), **chosen, weights_memory=1)
    found = re.search(r"at least ([\d,]+) bytes", str(caught.value))
    assert found is not None
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_equal_generate(case: Case, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else the reader's buffers are half as large as these models.
    monkeypatch.setattr(weight_files, "_MOST_READ_BYTES", 32768)
    with LLM(str(case.folder), **options(mode, case)) as llm:
        outcomes = llm.generate(case.prompts, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        statistics = llm.statistics()
    assert [outcome.error_message for outcome in outcomes] == [None] * len(outcomes)
    assert [outcome.token_ids for outcome in outcomes] == case.expected
    check_mode(mode, statistics)


def check_mode(mode: str, statistics: dict[str, Any]) -> None:
    """What the mode names did happen, and nothing else."""
    in_turns = mode.startswith(("yields", "KV in the host tier"))
    assert (statistics["coroutine"]["combines"] > 0) == in_turns
    assert (statistics["yields"] > 0) == ("few KV pages" in mode)
    assert ("weights" in statistics) == ("weights streamed" in mode)
    if "weights streamed" in mode:
        assert statistics["weights"]["bytes_read"] > statistics["weights"]["streamed_bytes"] > 0


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_pages_hold_latents_and_not_the_heads_they_expand_to(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    heads = config.num_attention_heads
    expanded_bytes = 4 * heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(tmp_path, family), dtype=torch.float32)
    for shape in attention.install(model.eval()).values():
        assert shape.token_bytes == 4 * (config.kv_lora_rank + config.qk_rope_head_dim)
        assert 4 * shape.token_bytes < expanded_bytes


@pytest.mark.parametrize("mode", ["yields", "weights streamed"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_case_41_routers_choose_as_transformers_does_in_half_precision(
    family: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_MOST_READ_BYTES", 32768)
    folder = tiny_checkpoint(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for router in routers(reference):
            # Neighbours' scores differ by less than bfloat16 can tell of numbers of their size.
            router.weight[1::2] = router.weight[::2]
            router.weight[1::2, 0] *= 1 + 2**-7
    reference.save_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    seen: dict[int, list[tuple[torch.Tensor, Any]]] = {}

    def keep(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if is_router(module):
            seen.setdefault(id(module), []).append((inputs[0].clone(), output))

    case = Case(family, folder, attention.install(reference), [], [])
    chosen = options(mode, case) | {"dtype": "bfloat16"}
    with LLM(str(folder), **chosen) as llm:
        hook = torch.nn.modules.module.register_module_forward_hook(keep)
        try:
            llm.generate([[5 + i, 90 - i, 7 * i] for i in range(8)], SamplingParams(max_tokens=4))
        finally:
            hook.remove()
    assert len(seen) == len(routers(reference)) > 0
    gaps = []
    with torch.inference_mode():
        # Layers run in order, so that routers were first seen in theirs.
        for router, calls in zip(routers(reference), seen.values(), strict=True):
            for hidden, output in calls:
                expected = router(hidden)
                assert [part.dtype for part in output] == [part.dtype for part in expected]
                assert all(torch.equal(*parts) for parts in zip(output, expected, strict=True))
                scores = torch.nn.functional.linear(hidden.float(), router.weight.float())
                gaps.append(torch.diff(scores.sort().values, dim=-1).min())
    assert min(gaps) < 2**-8, "no two scores were close enough to be told apart by their precision"


def is_router(module: torch.nn.Module) -> bool:
    return type(module).__name__.lower().endswith("router")


def routers(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_router(module)]
