"""Operators that the runtime calls: one function each, whatever the device.

Every operator has a plain-PyTorch truth in `reference.py`. On a CPU in float32 the operators run as
compiled loops (`cpu.py`); anything else runs the reference. Attention over compressed latents (`mla.py`)
is matrix products on every device. Callers never ask which.

Shape letters: T tokens of the pass, B decoding sequences, H query heads, K key/value heads, D key size,
V value size, N pages of the pool, P tokens per page, M pages of the longest sequence. Of latents (MLA):
C numbers of a token, of which R are the latent and S = C - R the rotary key that all heads share;
U = D - S + V rows of a head's up-projection.
"""

from __future__ import annotations

import torch

from batchgen_kernels import cpu, reference
from batchgen_kernels.mla import mla_attention_decode, mla_attention_extend

__all__ = [
    "kv_append",
    "mla_attention_decode",
    "mla_attention_extend",
    "paged_attention_decode",
    "paged_attention_extend",
]


def _compiled(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def kv_append(
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    k_pages_NKPD: torch.Tensor,
    v_pages_NKPV: torch.Tensor,
    page_idx_T: torch.Tensor,
    offset_T: torch.Tensor,
) -> None:
    """Write the keys and values of T tokens into their pages, in place.

    Args:
        k_TKD, v_TKV: new keys and values, one row per token.
        k_pages_NKPD, v_pages_NKPV: one layer's page pool; written in place.
        page_idx_T, offset_T: int64, where each token goes: page, and position inside the page.
    """
    append = cpu.kv_append if _compiled(k_pages_NKPD) else reference.kv_append
    append(k_TKD, v_TKV, k_pages_NKPD, v_pages_NKPV, page_idx_T, offset_T)


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
    decode = cpu.paged_attention_decode if _compiled(k_pages_NKPD) else reference.paged_attention_decode
    return decode(
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
    k_pages_NKPD: torch.Tensor,
    v_pages_NKPV: torch.Tensor,
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
    return reference.paged_attention_extend(
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
