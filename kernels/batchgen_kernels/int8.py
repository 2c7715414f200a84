"""Pages of int8, and the truth of their operators in plain PyTorch.

Each token's key and value of each head has a scale of its own, the largest magnitude of its numbers over
127: a number is off by 0.4 % of that magnitude at most. Gathered pages become numbers again before anything
is computed. Shape letters as in the package page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from batchgen_kernels.reference import attention, attention_of_chunk, gather_pages


class Int8Pages(NamedTuple):
    """One layer's keys or values: int8 [N, K, P, D] and float32 scales [N, K, P]."""

    values: torch.Tensor
    scales: torch.Tensor


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Int8 numbers [..., D] and float32 scales [...] of `x` [..., D]."""
    x = x.float()
    largest = x.abs().amax(dim=-1)
    # In this order, as in the compiled loop: equal to the bit.
    inverse = torch.where(largest > 0, 127.0 / largest, 0.0)
    return (x * inverse.unsqueeze(-1)).round().to(torch.int8), largest / 127.0


def kv_append(
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    k_pages: Int8Pages,
    v_pages: Int8Pages,
    page_idx_T: torch.Tensor,
    offset_T: torch.Tensor,
) -> None:
    """Write keys and values of T tokens into their pages, in place."""
    for x, pages in ((k_TKD, k_pages), (v_TKV, v_pages)):
        values, scales = quantise(x)
        pages.values[page_idx_T, :, offset_T] = values
        pages.scales[page_idx_T, :, offset_T] = scales


def gather(pages: Int8Pages, page_ids_M: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy the first `length` tokens of a block table into one [K, length, D] tensor of numbers."""
    values_KLD = gather_pages(pages.values, page_ids_M, length)
    scales_KL1 = gather_pages(pages.scales.unsqueeze(-1), page_ids_M, length)
    return (values_KLD.float() * scales_KL1).to(dtype)


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
    """One new token per sequence, sequence by sequence."""
    page_tokens = k_pages.values.shape[2]
    rows = []
    for q_HD, table_M, length in zip(q_BHD, block_tables_BM, lengths_B.tolist(), strict=True):
        page_ids = table_M[: -(-length // page_tokens)].long()
        rows.append(
            attention(
                q_HD.unsqueeze(0),
                gather(k_pages, page_ids, length, torch.float32),
                gather(v_pages, page_ids, length, torch.float32),
                scale=scale,
                window=window,
                softcap=softcap,
                sinks_H=sinks_H,
            )
        )
    return torch.cat(rows)


def paged_attention_extend(
    q_THD: torch.Tensor,
    k_pages: Int8Pages,
    v_pages: Int8Pages,
    page_ids_M: torch.Tensor,
    length: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """A prefill chunk of one sequence over its gathered pages."""
    return attention_of_chunk(
        q_THD,
        gather(k_pages, page_ids_M, length, q_THD.dtype),
        gather(v_pages, page_ids_M, length, q_THD.dtype),
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
    )
