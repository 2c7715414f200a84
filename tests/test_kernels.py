"""Every operator against its plain-PyTorch truth, at odd sizes and with poisoned memory."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch

from batchgen_kernels import (
    Int8Pages,
    cpu,
    cpu_int8,
    int8,
    kv_append,
    mla,
    mla_attention_decode,
    mla_attention_extend,
    paged_attention_decode,
    paged_attention_extend,
    reference,
)

TOLERANCE = {torch.float32: 2e-5}


def paged_case(lengths, *, heads=6, kv_heads=2, size_k=16, size_v=16, page_tokens=16, seed=0, poison=True):
    """Random sequences written into shuffled pages; every slot that no sequence owns is NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(-(-length // page_tokens) for length in lengths) + 3
    fill = float("nan") if poison else 0.0
    k_pages = torch.full((num_pages, kv_heads, page_tokens, size_k), fill)
    v_pages = torch.full((num_pages, kv_heads, page_tokens, size_v), fill)
    order = torch.randperm(num_pages, generator=generator).tolist()
    widest = max(-(-length // page_tokens) for length in lengths)
    tables = torch.zeros(len(lengths), widest, dtype=torch.int32)
    dense = []
    for row, length in enumerate(lengths):
        pages = [order.pop() for _ in range(-(-length // page_tokens))]
        tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        k = torch.randn(length, kv_heads, size_k, generator=generator)
        v = torch.randn(length, kv_heads, size_v, generator=generator)
        position = torch.arange(length)
        page_idx = torch.tensor(pages)[position // page_tokens]
        kv_append(k, v, k_pages, v_pages, page_idx, position % page_tokens)
        dense.append((k.transpose(0, 1), v.transpose(0, 1)))
    q = torch.randn(len(lengths), heads, size_k, generator=generator)
    return q, k_pages, v_pages, tables, torch.tensor(lengths, dtype=torch.int32), dense


OPTIONS = [
    {},
    {"window": 5},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 20, "softcap": 2.0, "sinks": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [[1], [63], [16, 17, 1, 64, 100], [1000, 3]], ids=str)
def test_decode_equals_the_reference_and_the_dense_formula(lengths, options):
    options = dict(options)
    q, k_pages, v_pages, tables, lens, dense = paged_case(lengths)
    if options.pop("sinks", False):
        options["sinks_H"] = torch.linspace(-1, 2, q.shape[1])
    got = paged_attention_decode(q, k_pages, v_pages, tables, lens, scale=0.3, **options)
    ref = reference.paged_attention_decode(q, k_pages, v_pages, tables, lens, scale=0.3, **options)
    plain = torch.cat(
        [reference.attention(q[i : i + 1], k, v, scale=0.3, **options) for i, (k, v) in enumerate(dense)]
    )
    assert torch.isfinite(got).all()
    torch.testing.assert_close(ref, plain, atol=1e-6, rtol=0)
    torch.testing.assert_close(got, ref, atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.parametrize("size_k,size_v,heads,kv_heads", [(24, 16, 4, 4), (64, 64, 9, 3), (128, 128, 8, 1)])
def test_decode_takes_any_head_shape(size_k, size_v, heads, kv_heads):
    q, k_pages, v_pages, tables, lens, _ = paged_case(
        [7, 40, 33], size_k=size_k, size_v=size_v, heads=heads, kv_heads=kv_heads
    )
    got = paged_attention_decode(q, k_pages, v_pages, tables, lens, scale=0.1)
    ref = reference.paged_attention_decode(q, k_pages, v_pages, tables, lens, scale=0.1)
    torch.testing.assert_close(got, ref, atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("chunk,length", [(1, 1), (5, 5), (63, 63), (7, 40), (33, 100), (100, 100)])
def test_extend_equals_the_dense_formula(chunk, length, options):
    options = dict(options)
    _, k_pages, v_pages, tables, _, dense = paged_case([length])
    q = torch.randn(chunk, 6, 16, generator=torch.Generator().manual_seed(1))
    if options.pop("sinks", False):
        options["sinks_H"] = torch.linspace(-1, 2, 6)
    got = paged_attention_extend(q, k_pages, v_pages, tables[0].long(), length, scale=0.3, **options)
    want = reference.attention(q, *dense[0], scale=0.3, **options)
    torch.testing.assert_close(got, want, atol=TOLERANCE[torch.float32], rtol=0)


def test_append_writes_its_slots_and_no_other():
    k_pages, v_pages = torch.full((4, 2, 8, 4), -1.0), torch.full((4, 2, 8, 3), -1.0)
    k, v = torch.randn(5, 2, 4), torch.randn(5, 2, 3)
    page, offset = torch.tensor([3, 3, 0, 2, 1]), torch.tensor([0, 7, 4, 4, 2])
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    reference.kv_append(k, v, expected_k, expected_v, page, offset)
    kv_append(k, v, k_pages, v_pages, page, offset)
    assert torch.equal(k_pages, expected_k)
    assert torch.equal(v_pages, expected_v)
    assert int((k_pages != -1).sum()) == k.numel()


def test_the_compiled_path_is_the_one_in_use_for_float32(monkeypatch):
    q, k_pages, v_pages, tables, lens, _ = paged_case([9, 3])
    calls = []
    monkeypatch.setattr(cpu, "paged_attention_decode", lambda *a, **k: calls.append(1) or q)
    paged_attention_decode(q, k_pages, v_pages, tables, lens, scale=1.0)
    assert calls == [1]


@pytest.mark.parametrize("num_shares", [1, 2, 3, 16])
def test_work_is_cut_into_shares_that_cover_every_item_once(num_shares):
    lengths = torch.tensor([1, 5000, 20, 3000, 1, 1, 900], dtype=torch.int32).numpy()
    shares = cpu._shares(lengths, 3, num_shares)
    items = [item for low, high in shares for item in range(low, high)]
    assert items == list(range(len(lengths) * 3))
    assert len(shares) <= num_shares


def test_without_a_folder_for_compiled_code_it_compiles_for_itself(monkeypatch):
    """A read-only container has neither a package folder nor a home to write to."""
    from numba.core import caching

    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])

    def add_one(values):
        values[0] += 1

    values = np.zeros(1)
    cpu.compiled()(add_one)(values)
    assert values[0] == 1
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(cache=True)(add_one)


def mla_case(lengths, *, heads=5, size_nope=12, size_rope=6, size_v=10, rank=16, dtype=torch.float64):
    """Latents in shuffled pages, NaN wherever nothing was written, and the up-projection of each head."""
    _, c_pages, _, tables, lens, _ = paged_case(
        lengths, heads=heads, kv_heads=1, size_k=rank + size_rope, size_v=0
    )
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(len(lengths), heads, size_nope + size_rope, generator=generator)
    up = torch.randn(heads, size_nope + size_v, rank, generator=generator) * rank**-0.5
    return q.to(dtype), c_pages.to(dtype), up.to(dtype), tables, lens


@pytest.mark.parametrize("on_cpu", [True, False], ids=["one by one", "padded"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [[1], [63], [16, 17, 1, 64, 100], [1000, 3]], ids=str)
def test_decode_over_latents_equals_expanded_heads(lengths, options, on_cpu, monkeypatch):
    options = dict(options)
    q, c_pages, up, tables, lens = mla_case(lengths)
    if not on_cpu:
        monkeypatch.setattr(mla, "_decode_one_by_one", mla._decode_padded)
        monkeypatch.setattr(mla, "_MOST_NUMBERS", 5000)  # several groups
    if options.pop("sinks", False):
        options["sinks_H"] = torch.linspace(-1, 2, q.shape[1])
    got = mla_attention_decode(q, c_pages, up, tables, lens, scale=0.3, **options)
    want = reference.mla_attention_decode(q, c_pages, up, tables, lens, scale=0.3, **options)
    assert got.shape == (len(lengths), 5, 10)
    torch.testing.assert_close(got, want, atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
# Among latents, except for those of 63 and 100 tokens.
@pytest.mark.parametrize("chunk,length", [(1, 1), (5, 63), (63, 63), (7, 100), (100, 100)])
def test_extend_over_latents_equals_expanded_heads(chunk, length, options, monkeypatch):
    options = dict(options)
    _, c_pages, up, tables, _ = mla_case([length], dtype=torch.float32)
    q = torch.randn(chunk, 5, 18, generator=torch.Generator().manual_seed(1))
    if options.pop("sinks", False):
        options["sinks_H"] = torch.linspace(-1, 2, 5)
    monkeypatch.setattr(mla, "_MOST_NUMBERS", 20_000)  # two heads at a time, or one
    case = (q, c_pages, up, tables[0].long(), length)
    got = mla_attention_extend(*case, scale=0.3, **options)
    want = reference.mla_attention_extend(*case, scale=0.3, **options)
    assert got.shape == (chunk, 5, 10)
    torch.testing.assert_close(got, want, atol=TOLERANCE[torch.float32], rtol=0)


def test_long_chunks_expand_heads_and_short_ones_do_not(monkeypatch):
    """Sizes of DeepSeek-V3's heads: expansion is worth it from a few hundred tokens on."""
    _, c_pages, up, tables, _ = mla_case(
        [600], heads=1, size_nope=128, size_rope=64, size_v=128, rank=512, dtype=torch.float32
    )
    expanded = []
    real = mla.expand_latents
    monkeypatch.setattr(mla, "expand_latents", lambda *case: expanded.append(1) or real(*case))
    for chunk, times in ((1, 0), (64, 0), (600, 1)):
        expanded.clear()
        mla_attention_extend(torch.randn(chunk, 1, 192), c_pages, up, tables[0].long(), 600, scale=0.1)
        assert len(expanded) == times, chunk


def int8_case(lengths, **options):
    """`paged_case`, and the same sequences as int8; slots that no sequence owns have NaN scales."""
    q, k_pages, v_pages, tables, lens, dense = paged_case(lengths, **options)
    pages = []
    for x in (k_pages, v_pages):
        values = torch.randint(-127, 128, x.shape, dtype=torch.int8)
        pages.append(Int8Pages(values, torch.full(x.shape[:3], float("nan"))))
    for row, length in enumerate(lengths):
        position = torch.arange(length)
        page_tokens = k_pages.shape[2]
        page_idx = tables[row].long()[position // page_tokens]
        k, v = (x.transpose(0, 1) for x in dense[row])
        kv_append(k, v, *pages, page_idx, position % page_tokens)
    return q, *pages, tables, lens, dense


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", [[1], [16, 17, 1, 64, 100], [1000, 3]], ids=str)
def test_int8_decode_equals_its_reference_and_nearly_the_dense_formula(lengths, options):
    options = dict(options)
    q, k_pages, v_pages, tables, lens, dense = int8_case(lengths)
    if options.pop("sinks", False):
        options["sinks_H"] = torch.linspace(-1, 2, q.shape[1])
    got = paged_attention_decode(q, k_pages, v_pages, tables, lens, scale=0.3, **options)
    ref = int8.paged_attention_decode(q, k_pages, v_pages, tables, lens, scale=0.3, **options)
    plain = torch.cat(
        [reference.attention(q[i : i + 1], k, v, scale=0.3, **options) for i, (k, v) in enumerate(dense)]
    )
    torch.testing.assert_close(got, ref, atol=TOLERANCE[torch.float32], rtol=0)
    # 0.4 % of the largest of 16 numbers, in keys and in values.
    torch.testing.assert_close(ref, plain, atol=0.05, rtol=0)


def test_int8_decode_takes_any_head_shape():
    for size_k, size_v, heads, kv_heads in [(24, 16, 4, 4), (64, 64, 9, 3), (128, 128, 8, 1)]:
        q, k_pages, v_pages, tables, lens, _ = int8_case(
            [7, 40, 33], size_k=size_k, size_v=size_v, heads=heads, kv_heads=kv_heads
        )
        got = paged_attention_decode(q, k_pages, v_pages, tables, lens, scale=0.1)
        ref = int8.paged_attention_decode(q, k_pages, v_pages, tables, lens, scale=0.1)
        torch.testing.assert_close(got, ref, atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_int8_chunk_equals_its_tokens_one_by_one(options):
    options = dict(options)
    _, k_pages, v_pages, tables, _, _ = int8_case([37])
    if options.pop("sinks", False):
        options["sinks_H"] = torch.linspace(-1, 2, 6)
    q = torch.randn(7, 6, 16, generator=torch.Generator().manual_seed(1))
    got = paged_attention_extend(q, k_pages, v_pages, tables[0].long(), 37, scale=0.3, **options)
    one_by_one = paged_attention_decode(
        q, k_pages, v_pages, tables.expand(7, -1), torch.arange(31, 38).int(), scale=0.3, **options
    )
    torch.testing.assert_close(got, one_by_one, atol=TOLERANCE[torch.float32], rtol=0)


def test_int8_numbers_are_equal_to_the_bit_on_both_paths_and_off_by_half_a_step_at_most():
    x = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(3))
    x[1] = 0.0
    x[2, 0, 3] = 1e6
    x[3] *= 1e-30
    page_idx, offset = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 3, 1, 2, 0])
    written = []
    for module in (cpu_int8, int8):
        pages = [
            Int8Pages(torch.zeros(3, 2, 4, 16, dtype=torch.int8), torch.zeros(3, 2, 4)) for _ in range(2)
        ]
        module.kv_append(x, 2 * x, *pages, page_idx, offset)
        written.append(pages)
    for compiled, truth in zip(*written, strict=True):
        assert torch.equal(compiled.values, truth.values)
        assert torch.equal(compiled.scales, truth.scales)
    values, scales = int8.quantise(x)
    assert ((values * scales.unsqueeze(-1) - x).abs() <= scales.unsqueeze(-1) * 0.5001).all()
    assert (values[1] == 0).all()


def test_nan_in_int8_pages_is_not_lost():
    x = torch.randn(1, 2, 16)
    x[0, 1, 5] = float("nan")
    for module in (cpu_int8, int8):
        pages = [
            Int8Pages(torch.zeros(1, 2, 4, 16, dtype=torch.int8), torch.zeros(1, 2, 4)) for _ in range(2)
        ]
        module.kv_append(x, x, *pages, torch.tensor([0]), torch.tensor([0]))
        assert torch.isfinite(pages[0].scales[0, 0, 0])
        assert torch.isnan(pages[0].scales[0, 1, 0])
