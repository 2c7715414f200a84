"""CPU operators over int8 pages: as in `cpu.py`, with numbers made of each row of int8 as it is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from batchgen_kernels.cpu import compiled, decode_in_shares
from batchgen_kernels.int8 import Int8Pages


@compiled()
def _append_kernel(x: Any, values: Any, scales: Any, page_idx: Any, offset: Any) -> None:
    num_tokens, num_heads, size = x.shape
    for t in range(num_tokens):
        page = page_idx[t]
        at = offset[t]
        for h in range(num_heads):
            largest = np.float32(0)
            for i in range(size):
                magnitude = abs(x[t, h, i])
                # A NaN stays, as in the reference.
                if magnitude > largest or magnitude != magnitude:
                    largest = magnitude
            inverse = np.float32(0)
            if largest > 0:
                inverse = np.float32(127) / largest
            for i in range(size):
                values[page, h, at, i] = np.int8(np.rint(x[t, h, i] * inverse))
            scales[page, h, at] = largest / np.float32(127)


# Why fastmath: see cpu.py.
@compiled(fastmath={"reassoc", "contract", "arcp", "nsz"})
def _decode_kernel(
    q: Any,
    k_values: Any,
    k_scales: Any,
    v_values: Any,
    v_scales: Any,
    block_tables: Any,
    lengths: Any,
    sinks: Any,
    scale: np.float32,
    window: int,
    softcap: np.float32,
    first_item: int,
    last_item: int,
    out: Any,
) -> None:
    # One item is one (sequence, key/value head) pair; the G query heads of a group share each key read.
    _, num_kv_heads, group, size_k = q.shape
    page_tokens = k_values.shape[2]
    size_v = v_values.shape[3]
    # A row of numbers, made once for the group.
    k_row = np.empty(size_k, np.float32)
    v_row = np.empty(size_v, np.float32)
    scores = np.empty((group, page_tokens), np.float32)
    acc = np.empty((group, size_v), np.float32)
    top = np.empty(group, np.float32)
    total = np.empty(group, np.float32)
    for item in range(first_item, last_item):
        b = item // num_kv_heads
        h = item % num_kv_heads
        length = lengths[b]
        start = 0
        if window > 0 and length > window:
            start = length - window
        acc[:] = np.float32(0)
        for g in range(group):
            if sinks.shape[0] > 0:
                top[g] = sinks[h * group + g]
                total[g] = np.float32(1)
            else:
                top[g] = -np.inf
                total[g] = np.float32(0)
        for p in range(start // page_tokens, (length + page_tokens - 1) // page_tokens):
            page = block_tables[b, p]
            k = k_values[page, h]
            v = v_values[page, h]
            low = max(start - p * page_tokens, 0)
            high = min(length - p * page_tokens, page_tokens)
            for t in range(low, high):
                for i in range(size_k):
                    k_row[i] = np.float32(k[t, i])
                k_scale = k_scales[page, h, t] * scale
                for g in range(group):
                    dot = np.float32(0)
                    for i in range(size_k):
                        dot += q[b, h, g, i] * k_row[i]
                    scores[g, t] = dot * k_scale
            for g in range(group):
                if softcap > 0:
                    for t in range(low, high):
                        scores[g, t] = softcap * np.float32(math.tanh(scores[g, t] / softcap))
                new_top = top[g]
                for t in range(low, high):
                    new_top = max(new_top, scores[g, t])
                shrink = np.float32(math.exp(top[g] - new_top))
                top[g] = new_top
                page_total = np.float32(0)
                for t in range(low, high):
                    weight = np.float32(math.exp(scores[g, t] - new_top))
                    scores[g, t] = weight
                    page_total += weight
                total[g] = total[g] * shrink + page_total
                for i in range(size_v):
                    acc[g, i] *= shrink
            for t in range(low, high):
                v_scale = v_scales[page, h, t]
                for i in range(size_v):
                    v_row[i] = np.float32(v[t, i]) * v_scale
                for g in range(group):
                    weight = scores[g, t]
                    for i in range(size_v):
                        acc[g, i] += weight * v_row[i]
        for g in range(group):
            inverse = np.float32(1) / total[g]
            for i in range(size_v):
                out[b, h, g, i] = acc[g, i] * inverse


def kv_append(
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    k_pages: Int8Pages,
    v_pages: Int8Pages,
    page_idx_T: torch.Tensor,
    offset_T: torch.Tensor,
) -> None:
    """Write keys and values of T tokens into their pages, in place."""
    page_idx, offset = page_idx_T.numpy(), offset_T.numpy()
    for x, pages in ((k_TKD, k_pages), (v_TKV, v_pages)):
        _append_kernel(x.contiguous().numpy(), pages.values.numpy(), pages.scales.numpy(), page_idx, offset)


def paged_attention_decode(
    q_BHD: torch.Tensor,
    k_pages: Int8Pages,
    v_pages: Int8Pages,
    block_tables_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """One new token per sequence, over its pages in place."""
    pages = [part.numpy() for part in (*k_pages, *v_pages)]
    return decode_in_shares(
        _decode_kernel,
        q_BHD,
        pages,
        k_pages.values.shape[1],
        v_pages.values.shape[3],
        block_tables_BM,
        lengths_B,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
    )
