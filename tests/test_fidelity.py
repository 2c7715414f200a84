"""Every architecture through the runtime: logits equal to the model's own forward pass.

Prefill in chunks, decode, after suspension, with and without prefix reuse, as one unit, in lanes side by
side, as sub-batches that combine at the sparse blocks, and with all KV in the host tier.
"""

from __future__ import annotations

import pytest
import torch

from batchgen_data.models import attention
from batchgen_data.models.kv_pool import KVPool
from batchgen_data.models.kv_staging import StagedKVPool
from batchgen_data.models.wrap import install_yield_points, sparse_blocks
from batchgen_data.runtime import executor as executor_module
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.scheduler import Scheduler
from batchgen_data.runtime.sequence import Sequence
from batchgen_data.runtime.step import Limits
from fake_model import sampling
from tiny_models import FAMILIES, VOCAB_SIZE, tiny_model

PAGE_TOKENS = 4
NEW_TOKENS = 26
TIGHT_PAGES = 18
# The longest sequence, 66 tokens, uses 17.
STAGED_PAGES = 17
TOLERANCE = 1e-4

MODES = {
    "roomy": {"num_pages": 128, "prefix_reuse": True},
    "no reuse": {"num_pages": 128, "prefix_reuse": False},
    "tight": {"num_pages": TIGHT_PAGES, "prefix_reuse": True},
    "tight, no reuse": {"num_pages": TIGHT_PAGES, "prefix_reuse": False},
    "lanes": {"num_pages": TIGHT_PAGES, "prefix_reuse": True, "num_threads": 2},
    "sub-batches": {"num_pages": TIGHT_PAGES, "prefix_reuse": True, "sub_batch": 2},
    "host-resident KV": {"num_pages": 128, "prefix_reuse": True, "staged": True},
    "host-resident KV, tight": {
        "num_pages": TIGHT_PAGES,
        "prefix_reuse": False,
        "sub_batch": 2,
        "staged": True,
    },
}


def prompts() -> list[list[int]]:
    """Lengths around page and window edges; half of them share a prefix of 21 tokens."""
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(5, VOCAB_SIZE, (21,), generator=generator).tolist()
    own = [torch.randint(5, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (1, 8, 17, 40, 3, 12, 1)]
    return [own[0], shared + own[4], own[1], shared + own[5], own[2], own[3], shared + own[6]]


def kv_pool(shapes, num_pages, staged):
    """A pool full of NaN: whatever is read before it is written shows."""
    device = torch.device("cpu")
    if not staged:
        pool = KVPool(shapes, num_pages, PAGE_TOKENS, device)
    else:
        widest_bytes = PAGE_TOKENS * max(shape.token_bytes for shape in shapes.values())
        staging_bytes = 2 * STAGED_PAGES * widest_bytes
        pool = StagedKVPool(shapes, num_pages, PAGE_TOKENS, device, staging_bytes=staging_bytes)
        for half in pool.staging:
            half.fill_(255)  # NaN in every float type
    for pages in (*pool.k.values(), *pool.v.values()):
        pages.fill_(float("nan"))
    return pool


def run(model, shapes, monkeypatch, *, num_pages, prefix_reuse, sub_batch=None, num_threads=1, staged=False):
    """Greedy decoding of all prompts; returns the sequences and every logit row that was sampled from."""
    recorded: dict[tuple[int, int], torch.Tensor] = {}
    real_sample = executor_module.sample

    def sample(logits, sequences):
        for row, sequence in zip(logits, sequences, strict=True):
            recorded[sequence.seq_id, sequence.num_tokens - 1] = row.clone()
        return real_sample(logits, sequences)

    monkeypatch.setattr(executor_module, "sample", sample)
    # Passes of this test are small: without the limit they would never be cut.
    monkeypatch.setattr(executor_module, "_LEAST_LANE_TOKENS", 2)
    monkeypatch.setattr(executor_module, "_LEAST_EXPERT_TOKENS", 0)
    pool = kv_pool(shapes, num_pages, staged)
    limits = Limits(
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        max_sequences=6,
        max_step_tokens=20,
        prefix_reuse=prefix_reuse,
    )
    scheduler = Scheduler(limits)
    executor = TorchExecutor(model, pool, sub_batch=sub_batch, num_threads=num_threads)
    sequences = [
        Sequence(i, ids, sampling(max_tokens=NEW_TOKENS), limit_tokens=len(ids) + NEW_TOKENS)
        for i, ids in enumerate(prompts())
    ]
    with torch.inference_mode():
        for sequence in sequences:
            assert scheduler.add(sequence)
        while (step := scheduler.plan_step()) is not None:
            scheduler.complete(step, executor.run(step).tokens)
            scheduler.check()
    torch.set_num_threads(1)
    return sequences, recorded, scheduler.statistics(), executor.coroutine


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_plain_forward(family, monkeypatch):
    plain = tiny_model(family)
    model = tiny_model(family)
    shapes = attention.install(model)
    install_yield_points(model)
    references: dict[tuple[int, ...], torch.Tensor] = {}
    for name, mode in MODES.items():
        with monkeypatch.context() as patch:
            sequences, recorded, statistics, counts = run(model, shapes, patch, **mode)
        for sequence in sequences:
            assert sequence.finish_reason == "length", name
            assert sequence.num_generated == NEW_TOKENS
            ids = tuple(sequence.token_ids)
            if ids not in references:
                with torch.inference_mode():
                    references[ids] = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            for position in range(sequence.num_prompt - 1, len(ids) - 1):
                want, got = references[ids][position], recorded[sequence.seq_id, position]
                assert float((want - got).abs().max()) < TOLERANCE, (name, sequence.seq_id, position)
                assert int(want.argmax()) == ids[position + 1], (name, sequence.seq_id, position)
        assert (statistics["yields"] > 0) == (mode["num_pages"] == TIGHT_PAGES), name
        assert (statistics["reused_tokens"] > 0) == mode["prefix_reuse"], name
        combined = ("sub_batch" in mode or "staged" in mode) and bool(sparse_blocks(model))
        assert (counts.combines > 0) == combined, name
