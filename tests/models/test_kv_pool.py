"""KV in the host tier: staged pages give what resident pages give, in any order of turns."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from batchgen_data import LLM, ConfigError, PlanError, SamplingParams
from batchgen_data.errors import DeviceError, InternalError
from batchgen_data.models.kv_pool import KVPool, LayerShape, PagedBatch, Prefill
from batchgen_data.models.kv_staging import StagedKVPool, sub_batch_pages
from batchgen_data.runtime import host_memory
from batchgen_data.runtime.host_memory import allocate_host
from batchgen_kernels import paged_attention_decode, paged_attention_extend
from tiny_models import tiny_checkpoint

CPU = torch.device("cpu")
PAGE_TOKENS = 4
NUM_PAGES = 24
NUM_HEADS = 4
# Layers of different sizes; keys wider than values in one.
SHAPES = {
    0: LayerShape(2, 8, 8, torch.float32),
    1: LayerShape(2, 24, 12, torch.float32),
    2: LayerShape(4, 8, 8, torch.float32),
}
WIDEST_BYTES = PAGE_TOKENS * 2 * 36 * 4
SPAN = tuple[list[int], int, int]


def staged_pool(shapes=SHAPES, *, num_staged=6, host_path=None) -> StagedKVPool:
    """A pool full of NaN, so that whatever is read before it is written shows."""
    widest_bytes = PAGE_TOKENS * max(shape.token_bytes for shape in shapes.values())
    pool = StagedKVPool(
        shapes, NUM_PAGES, PAGE_TOKENS, CPU, staging_bytes=2 * num_staged * widest_bytes, host_path=host_path
    )
    for half in pool.staging:
        half.fill_(255)
    for pages in (*pool.k.values(), *pool.v.values()):
        pages.fill_(float("nan"))
    return pool


def batch(pool, spans: list[SPAN]) -> PagedBatch:
    """Sequences (pages, start, end), those of one new token first, as the executor packs them."""
    decodes = [span for span in spans if span[2] - span[1] == 1]
    widest = max((len(pages) for pages, _, _ in decodes), default=0)
    places = [(pages, at) for pages, start, end in spans for at in range(start, end)]
    prefills, first = [], len(decodes)
    for pages, start, end in spans[len(decodes) :]:
        page_ids = torch.tensor(pages[: -(-end // PAGE_TOKENS)])
        prefills.append(Prefill(first, first + end - start, page_ids, end))
        first += end - start
    return PagedBatch(
        pool=pool,
        page_idx=torch.tensor([pages[at // PAGE_TOKENS] for pages, at in places]),
        offset=torch.tensor([at % PAGE_TOKENS for _, at in places]),
        num_decode=len(decodes),
        block_tables=torch.tensor(
            [pages + [0] * (widest - len(pages)) for pages, _, _ in decodes], dtype=torch.int32
        ),
        lengths=torch.tensor([end for _, _, end in decodes], dtype=torch.int32),
        prefills=tuple(prefills),
    )


def attend(shapes, layer: int, spans: list[SPAN], paged: PagedBatch) -> torch.Tensor:
    """Attention of one layer over keys and values that depend on layer and place only."""
    shape = shapes[layer]
    num_tokens = sum(end - start for _, start, end in spans)
    generator = torch.Generator().manual_seed(layer * 1000 + sum(pages[0] + end for pages, _, end in spans))

    def draw(heads, size):
        return torch.randn(num_tokens, heads, size, generator=generator).to(shape.dtype)

    q, k, v = (
        draw(NUM_HEADS, shape.size_k),
        draw(shape.num_kv_heads, shape.size_k),
        draw(shape.num_kv_heads, shape.size_v),
    )
    k_pages, v_pages = paged.pool.append(layer, k, v, paged)
    outs = []
    if paged.num_decode:
        tables, lengths = paged.block_tables, paged.lengths
        outs.append(
            paged_attention_decode(q[: paged.num_decode], k_pages, v_pages, tables, lengths, scale=0.3)
        )
    outs += [
        paged_attention_extend(
            q[chunk.first : chunk.last], k_pages, v_pages, chunk.page_ids, chunk.length, scale=0.3
        )
        for chunk in paged.prefills
    ]
    return torch.cat(outs)


def run_pass(pool, shapes, parts: list[list[SPAN]], turns: list[list[int]], *, lost: int | None = None):
    """One pass: every sub-batch runs the layers of a turn before the next turn begins.

    `lost`: a sub-batch that raised in its first turn and is not resumed.
    """
    pool.begin_pass()
    placed = [pool.place(batch(pool, spans)) for spans in parts]
    outs = {}
    for number, layers in enumerate(turns):
        for index, (spans, paged) in enumerate(zip(parts, placed, strict=True)):
            if index == lost and number:
                continue
            for layer in layers:
                outs[layer, index] = attend(shapes, layer, spans, paged)
    return outs


# Five sequences: two prefill, one in chunks, three share page 7 as their first.
A, B, C, D, E = [3, 5, 1], [7, 0], [7, 2, 9], [7, 20], [23, 11, 14, 8]
PASSES: list[list[list[SPAN]]] = [
    [[(B, 0, 5)], [(E, 0, 6)]],
    [[(A, 0, 7), (C, 4, 6)], [(D, 4, 7)], [(E, 6, 11)]],
    [[(A, 7, 8), (B, 5, 6), (D, 7, 8)], [(C, 6, 7), (E, 11, 15)]],
    [[(A, 8, 9)], [(B, 6, 7), (C, 7, 8)], [(E, 15, 16)]],
    [[(A, 9, 10), (B, 7, 8)]],
    [[(A, 10, 11)], [(C, 8, 9)]],
]
BY_LAYER = [[0], [1], [2]]
TURNS = {"each layer": BY_LAYER, "whole model": [[0, 1, 2]], "first two together": [[0, 1], [2]]}


def same(shapes, resident, staged, turns):
    for parts in PASSES:
        want = run_pass(resident, shapes, parts, turns)
        got = run_pass(staged, shapes, parts, turns)
        assert want.keys() == got.keys()
        for key, out in want.items():
            assert torch.isfinite(out).all()
            assert torch.equal(out, got[key]), key


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
def test_attention_over_staged_pages_equals_resident_pages(turns, in_file, tmp_path):
    resident = KVPool(SHAPES, NUM_PAGES, PAGE_TOKENS, CPU)
    staged = staged_pool(host_path=str(tmp_path) if in_file else None)
    same(SHAPES, resident, staged, turns)
    # All that was computed is in the host tier, though it was computed in the staging.
    staged._copier.submit(int).result()
    for layer in SHAPES:
        for pages, length in ((A, 11), (B, 8), (C, 9), (D, 8), (E, 16)):
            for at in range(length):
                place = (pages[at // PAGE_TOKENS], slice(None), at % PAGE_TOKENS)
                assert torch.equal(resident.k[layer][place], staged.k[layer][place])
                assert torch.equal(resident.v[layer][place], staged.v[layer][place])


def test_half_precision_pages():
    shapes = {layer: dataclasses.replace(SHAPES[0], dtype=torch.bfloat16) for layer in range(3)}
    same(shapes, KVPool(shapes, NUM_PAGES, PAGE_TOKENS, CPU), staged_pool(shapes), BY_LAYER)


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
def test_copies_run_ahead_once_the_order_is_known(turns):
    pool = staged_pool()
    for parts in PASSES:
        run_pass(pool, SHAPES, parts, turns)
    before = dataclasses.replace(pool.counts)
    for parts in PASSES[1:4]:
        run_pass(pool, SHAPES, parts, turns)
    num_reads = 3 * sum(len(parts) for parts in PASSES[1:4])
    assert pool.counts.reads - before.reads == num_reads
    assert pool.counts.foreseen - before.foreseen == num_reads


def test_only_computed_pages_are_copied():
    pool = staged_pool()
    run_pass(pool, SHAPES, [[(E, 0, 6)], [(B, 0, 4)]], BY_LAYER)
    pool._copier.submit(int).result()
    assert pool.counts.read_bytes == 0
    # E's two pages; B's page once for three sequences, whose new pages hold nothing yet.
    run_pass(pool, SHAPES, [[(E, 6, 7)], [(B, 4, 5), (C, 4, 5), (D, 4, 5)]], BY_LAYER)
    pool._copier.submit(int).result()
    token_bytes = sum(shape.token_bytes for shape in SHAPES.values())
    assert pool.counts.read_bytes == (2 + 1) * PAGE_TOKENS * token_bytes
    assert pool.counts.written_bytes == (6 + 4 + 4) * token_bytes


def test_a_sub_batch_that_is_not_resumed_costs_its_mates_nothing_but_time():
    resident = KVPool(SHAPES, NUM_PAGES, PAGE_TOKENS, CPU)
    staged = staged_pool()
    for parts in PASSES[:3]:
        for pool in (resident, staged):
            run_pass(pool, SHAPES, parts, BY_LAYER)
    want = run_pass(resident, SHAPES, PASSES[3], BY_LAYER)
    got = run_pass(staged, SHAPES, PASSES[3], BY_LAYER, lost=1)
    assert len(got) == len(want) - 2
    for key, out in got.items():
        assert torch.equal(out, want[key])
    want, got = (run_pass(pool, SHAPES, [[(A, 9, 10)]], BY_LAYER) for pool in (resident, staged))
    assert all(torch.equal(want[key], got[key]) for key in want)


def test_a_pass_that_was_given_up_leaves_nothing_behind():
    resident = KVPool(SHAPES, NUM_PAGES, PAGE_TOKENS, CPU)
    staged = staged_pool()
    for parts in PASSES[:3]:
        for pool in (resident, staged):
            run_pass(pool, SHAPES, parts, BY_LAYER)
    staged.begin_pass()
    placed = [staged.place(batch(staged, spans)) for spans in PASSES[3]]
    attend(SHAPES, 0, PASSES[3][0], placed[0])
    want, got = (run_pass(pool, SHAPES, PASSES[3], BY_LAYER) for pool in (resident, staged))
    assert all(torch.equal(want[key], got[key]) for key in want)


def test_what_does_not_fit_the_staging_is_our_bug():
    pool = staged_pool(num_staged=3)
    assert pool.sub_batch_pages == 3
    pool.begin_pass()
    with pytest.raises(InternalError, match="4 pages; the staging holds 3"):
        pool.place(batch(pool, [(A, 0, 11), (B, 0, 4)]))
    with pytest.raises(InternalError, match="needs a batch from place"):
        attend(SHAPES, 0, [(B, 0, 4)], batch(pool, [(B, 0, 4)]))


def test_a_staging_too_small_says_how_much_is_needed():
    assert sub_batch_pages(SHAPES, PAGE_TOKENS, 4 * WIDEST_BYTES) == 2
    with pytest.raises(
        PlanError, match=rf"{4 * WIDEST_BYTES - 1:,} bytes holds 1 pages .* {WIDEST_BYTES:,} bytes"
    ) as error:
        sub_batch_pages(SHAPES, PAGE_TOKENS, 4 * WIDEST_BYTES - 1)
    assert f"set kv_memory to at least {4 * WIDEST_BYTES:,} bytes" in str(error.value)


def test_pages_that_cannot_be_read_stop_the_device():
    pool = staged_pool()
    run_pass(pool, SHAPES, PASSES[0], BY_LAYER)
    pool.k[1] = None
    with pytest.raises(DeviceError, match="could not be read from the host tier"):
        run_pass(pool, SHAPES, [[(E, 6, 7)]], BY_LAYER)


def test_pages_that_could_not_be_written_stop_the_device_before_they_are_read(monkeypatch):
    pool = staged_pool()
    write = pool._write

    def fail_in_the_last_layer(part, layer, *rest):
        if layer == 2:
            raise OSError("the disk is gone")
        write(part, layer, *rest)

    monkeypatch.setattr(pool, "_write", fail_in_the_last_layer)
    run_pass(pool, SHAPES, [[(E, 0, 6)]], BY_LAYER)
    pool._copier.submit(int).result()
    with pytest.raises(DeviceError, match="could not be written to the host tier: the disk is gone"):
        run_pass(pool, SHAPES, [[(E, 6, 7)]], BY_LAYER)


def test_the_file_of_the_host_tier_has_no_name(tmp_path):
    pool = staged_pool(host_path=str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    run_pass(pool, SHAPES, PASSES[0], BY_LAYER)
    pool._copier.submit(int).result()
    assert pool.k[2].isfinite().any()


def test_the_host_tier_has_no_room(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="is not a folder"):
        allocate_host(100, str(tmp_path / "missing"))
    too_much = 2**62
    with pytest.raises(PlanError, match=rf"bytes free, and the host tier needs {too_much:,}"):
        allocate_host(too_much, str(tmp_path))
    with pytest.raises(PlanError, match=rf"{too_much:,} bytes of host memory are not to be had"):
        allocate_host(too_much)

    def refuse(*_):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(host_memory.os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match="cannot be used: Permission denied"):
        allocate_host(100, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# Through the whole runtime.

OPTIONS = {"num_threads": 1, "page_tokens": 4, "max_context_tokens": 256, "max_sequences": 16}
PROMPTS = ["the cat", "a dog and the other one", "x", "in the end of it all", "the cat sat on", "on and on"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", chat_template=False))


def test_rows_come_out_the_same(folder, tmp_path):
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(folder, kv_memory="16MiB", **OPTIONS) as llm:
        want = [outcome.token_ids for outcome in llm.generate(PROMPTS, greedy)]
    # A token takes 256 bytes in each of 3 layers: half of the staging is 20 pages, the host tier 170.
    host = {"kv_residence": "host", "kv_memory": "40KiB", "host_memory": "510KiB"}
    for more in ({}, {"host_path": str(tmp_path)}, {"attention_sub_batch": 1}, {"num_threads": 2}):
        with LLM(folder, **{**OPTIONS, **host, **more}) as llm:
            assert [outcome.token_ids for outcome in llm.generate(PROMPTS, greedy)] == want
            assert llm.statistics()["pages"] == 170


def test_a_row_longer_than_the_staging_is_refused_and_says_so(folder):
    # Half of 16 KiB is 8 pages, 32 tokens.
    with LLM(folder, kv_residence="host", kv_memory="16KiB", host_memory="1MiB", **OPTIONS) as llm:
        ids = list(range(5, 25))
        fits, long, open_end = llm.generate(
            [ids, ids, ids],
            [
                {"max_tokens": 13, "ignore_eos": True},
                {"max_tokens": 14, "ignore_eos": True},
                {"ignore_eos": True, "max_tokens": None},
            ],
        )
    assert len(fits.token_ids) == 13
    assert long.error_code == "exceeds_kv_memory"
    assert "the staging that attention reads them from holds 8" in long.error_message
    assert (open_end.finish_reason, open_end.stop_reason) == ("length", "kv_memory")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kv_memory": "3KiB", "host_memory": "1MiB"}, "set kv_memory to at least 4,096 bytes"),
        ({"kv_memory": "16KiB", "host_memory": "4KiB"}, "set host_memory to at least 6,144 bytes"),
    ],
)
def test_tiers_that_hold_nothing_are_refused(folder, options, message):
    with pytest.raises(PlanError, match=message):
        LLM(folder, kv_residence="host", **options, **OPTIONS)


def test_tiers_have_sizes_of_their_own(folder):
    with LLM(folder, kv_residence="host", **OPTIONS) as llm:
        # All sequences at their longest, and no staging beyond that.
        assert llm.statistics()["pages"] == 16 * 256 // 4
