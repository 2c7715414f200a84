"""Operators that the runtime calls: one function each, whatever the device.

Every operator has a plain-PyTorch truth in `reference.py`, and in `int8.py` for pages of int8. On a CPU in
float32 the operators run as compiled loops (`cpu.py`, `cpu_int8.py`); anything else runs the reference.
Attention over compressed latents (`mla.py`) is matrix products on every device. Callers never ask which.

Shape letters: T tokens of the pass, B decoding sequences, H query heads, K key/value heads, D key size,
V value size, N pages of the pool, P tokens per page, M pages of the longest sequence. Of latents (MLA):
C numbers of a token, of which R are the latent and S = C - R the rotary key that all heads share;
U = D - S + V rows of a head's up-projection.
"""

from __future__ import annotations

from typing import Any

import torch

from batchgen_kernels import cpu, cpu_int8, int8, reference
from batchgen_kernels.int8 import Int8Pages
from batchgen_kernels.mla import mla_attention_decode, mla_attention_extend

__all__ = [
    "Int8Pages",
    "kv_append",
    "mla_attention_decode",
    "mla_attention_extend",
    "paged_attention_decode",
    "paged_attention_extend",
]


def _compiled(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


# One layer's keys or values, as numbers or as int8.
Pages = torch.Tensor | Int8Pages


def _operators(q: torch.Tensor, pages: Pages) -> Any:
    """The module whose operators run on these pages, for queries (or keys) like `q`."""
    if isinstance(pages, Int8Pages):
        return cpu_int8 if _compiled(q) else int8
    return cpu if _compiled(pages) else reference


def kv_append(
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    k_pages_NKPD: Pages,
    v_pages_NKPV: Pages,
    page_idx_T: torch.Tensor,
    offset_T: torch.Tensor,
) -> None:
    """Write the keys and values of T tokens into their pages, in place.

    Args:
        k_TKD, v_TKV: new keys and values, one row per token.
        k_pages_NKPD, v_pages_NKPV: one layer's page pool; written in place.
        page_idx_T, offset_T: int64, where each token goes: page, and position inside the page.
    """
    operators = _operators(k_TKD, k_pages_NKPD)
    operators.kv_append(k_TKD, v_TKV, k_pages_NKPD, v_pages_NKPV, page_idx_T, offset_T)


def paged_attention_decode(
    q_BHD: torch.Tensor,
    k_pages_NKPD: Pages,
    v_pages_NKPV: Pages,
    block_tables_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence over its own pages, without copying them.

    Args:
        q_BHD: queries; H is a multiple of the pool's K (grouped-query attention).
        block_tables_BM: int32 page ids, row b valid up to ``ceil(lengths_B[b] / P)`` entries.
        lengths_B: int32 tokens to attend to, the new one included (its key is already in its page).
        scale: factor on the scores.
        window: attend to the last `window` tokens only; 0 means all.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 means off.
        sinks_H: a learned logit per head that takes part in the softmax and contributes no value.

    Returns:
        [B, H, V] in q's dtype.
    """
    return _operators(q_BHD, k_pages_NKPD).paged_attention_decode(
        q_BHD,
        k_pages_NKPD,
        v_pages_NKPV,
        block_tables_BM,
        lengths_B,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
    )


def paged_attention_extend(
    q_THD: torch.Tensor,
    k_pages_NKPD: Pages,
    v_pages_NKPV: Pages,
    page_ids_M: torch.Tensor,
    length: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence's last T tokens over all its `length` tokens (a prefill chunk).

    The pages of this one sequence are gathered once: a chunk multiplies matrices of T rows, so the copy
    is small beside them.

    Args:
        q_THD: queries of tokens ``length - T .. length - 1``, whose keys are already in the pages.
        page_ids_M: int64 page ids covering at least `length` tokens, in order.
        length: tokens of the sequence, the chunk included.
        scale, window, softcap, sinks_H: as in `paged_attention_decode`.

    Returns:
        [T, H, V] in q's dtype.
    """
    operators = int8 if isinstance(k_pages_NKPD, Int8Pages) else reference
    return operators.paged_attention_extend(
        q_THD,
        k_pages_NKPD,
        v_pages_NKPV,
        page_ids_M,
        length,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
    )
