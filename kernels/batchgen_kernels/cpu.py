"""CPU operators in float32: compiled loops over pages in place (numba), split over threads.

Decoding reads every key and value once, so the floor is memory bandwidth: 64 sequences of 512 tokens of
SmolLM2-135M are 50 MB a layer. Gathering the pages first would read and write all of it once more.
The loops release the GIL; work is cut into one share per torch thread, of equal numbers of tokens.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit

_NO_SINKS = np.zeros(0, dtype=np.float32)
_pool: ThreadPoolExecutor | None = None
_pool_pid = 0


def compiled(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """Compile without the GIL and keep the machine code on disk, where there is a folder for it."""

    def decorate(function: Callable[..., None]) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:
            # Neither the package's folder nor the user's cache can be written (a read-only container):
            # each process compiles for itself, in seconds.
            return njit(nogil=True, **options)(function)

    return decorate


@compiled()
def _append_kernel(k: Any, v: Any, k_pages: Any, v_pages: Any, page_idx: Any, offset: Any) -> None:
    num_tokens, num_kv_heads, size_k = k.shape
    size_v = v.shape[2]
    for t in range(num_tokens):
        page = page_idx[t]
        at = offset[t]
        for h in range(num_kv_heads):
            for i in range(size_k):
                k_pages[page, h, at, i] = k[t, h, i]
            for i in range(size_v):
                v_pages[page, h, at, i] = v[t, h, i]


# fastmath lets the dot product be summed in vector lanes; without it the inner loop stays scalar (8x).
# It also assumes finite numbers, so NaN and infinity are looked for in the logits, not here.
@compiled(fastmath={"reassoc", "contract", "arcp", "nsz"})
def _decode_kernel(
    q: Any,
    k_pages: Any,
    v_pages: Any,
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
    page_tokens = k_pages.shape[2]
    size_v = v_pages.shape[3]
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
            k = k_pages[page, h]
            v = v_pages[page, h]
            low = max(start - p * page_tokens, 0)
            high = min(length - p * page_tokens, page_tokens)
            for t in range(low, high):
                for g in range(group):
                    dot = np.float32(0)
                    for i in range(size_k):
                        dot += q[b, h, g, i] * k[t, i]
                    scores[g, t] = dot * scale
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
                for g in range(group):
                    weight = scores[g, t]
                    for i in range(size_v):
                        acc[g, i] += weight * v[t, i]
        for g in range(group):
            inverse = np.float32(1) / total[g]
            for i in range(size_v):
                out[b, h, g, i] = acc[g, i] * inverse


def kv_append(
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    k_pages_NKPD: torch.Tensor,
    v_pages_NKPV: torch.Tensor,
    page_idx_T: torch.Tensor,
    offset_T: torch.Tensor,
) -> None:
    """Write keys and values of T tokens into their pages, in place."""
    _append_kernel(
        # One memory layout each, so that one compiled version serves every model.
        k_TKD.contiguous().numpy(),
        v_TKV.contiguous().numpy(),
        k_pages_NKPD.numpy(),
        v_pages_NKPV.numpy(),
        page_idx_T.numpy(),
        offset_T.numpy(),
    )


def paged_attention_decode(
    q_BHD: torch.Tensor,
    k_pages_NKPD: torch.Tensor,
    v_pages_NKPV: torch.Tensor,
    block_tables_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """One new token per sequence, over its pages in place."""
    return decode_in_shares(
        _decode_kernel,
        q_BHD,
        [k_pages_NKPD.numpy(), v_pages_NKPV.numpy()],
        k_pages_NKPD.shape[1],
        v_pages_NKPV.shape[3],
        block_tables_BM,
        lengths_B,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
    )


def decode_in_shares(
    kernel: Callable[..., None],
    q_BHD: torch.Tensor,
    pages: list[np.ndarray],
    num_kv_heads: int,
    size_v: int,
    block_tables_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Run a decoding loop over (sequence, key/value head) pairs, one share of them per thread: [B, H, V].

    Args:
        kernel: takes queries, `pages`, block tables, lengths, sinks, settings, its share, the output.
        num_kv_heads: K.
        size_v: V.
    """
    batch, num_heads, size_k = q_BHD.shape
    q = np.ascontiguousarray(q_BHD.numpy()).reshape(batch, num_kv_heads, num_heads // num_kv_heads, size_k)
    tables, lengths = block_tables_BM.numpy(), lengths_B.numpy()
    sinks = _NO_SINKS if sinks_H is None else np.ascontiguousarray(sinks_H.detach().float().numpy())
    out = np.empty((*q.shape[:3], size_v), np.float32)

    def run(first_item: int, last_item: int) -> None:
        kernel(
            q,
            *pages,
            tables,
            lengths,
            sinks,
            np.float32(scale),
            window,
            np.float32(softcap),
            first_item,
            last_item,
            out,
        )

    bounds = _shares(lengths, num_kv_heads, torch.get_num_threads())
    others = [_threads().submit(run, low, high) for low, high in bounds[1:]]
    run(*bounds[0])
    for other in others:
        other.result()
    return torch.from_numpy(out).view(batch, num_heads, -1)


def _shares(lengths: np.ndarray, num_kv_heads: int, num_shares: int) -> list[tuple[int, int]]:
    """Cut the (sequence, head) items into runs with about the same number of tokens to read."""
    num_items = len(lengths) * num_kv_heads
    # Under about 4,000 tokens x heads one core is done before a second has woken up (20-50 us).
    work = int(lengths.sum()) * num_kv_heads
    num_shares = max(1, min(num_shares, num_items, work // 4096))
    if num_shares == 1:
        return [(0, num_items)]
    ends = np.cumsum(np.repeat(lengths, num_kv_heads))
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, num_shares) / num_shares) + 1
    edges = [0, *cuts.tolist(), num_items]
    return [(low, high) for low, high in itertools.pairwise(edges) if high > low]


def _threads() -> ThreadPoolExecutor:
    """The process's worker threads; made again after a fork, whose child has none."""
    global _pool, _pool_pid
    if _pool is None or _pool_pid != os.getpid():
        _pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1), thread_name_prefix="batchgen-attention")
        _pool_pid = os.getpid()
    return _pool
