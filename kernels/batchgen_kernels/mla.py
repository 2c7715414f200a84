"""Attention over compressed latents (MLA): matrix products on every device.

Keys and values of a head are linear in a token's latent, so their up-projections can move to the other side:
the query is brought into the space of latents, attention runs there over one key head that is its own value,
and the result is brought back. All heads then share what is read of a token, and each sequence is one matrix
product of [H, C] with [C, L]: on a CPU that copies the pages first and is still twice as fast as loops over
pages in place (16 heads of 512 + 64, 16 sequences of 512 tokens, one core: 12 ms against 23 ms).
"""

from __future__ import annotations

from typing import Any

import torch

from batchgen_kernels.reference import attention_of_chunk, attention_weights, expand_latents, gather_pages

# Numbers that padded pages of a decoding batch, or the expanded heads of a chunk, may take at once.
_MOST_NUMBERS = 2**26


def mla_attention_decode(
    q_BHD: torch.Tensor,
    c_pages_N1PC: torch.Tensor,
    up_HUR: torch.Tensor,
    block_tables_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence over compressed latents, without expanding any head.

    The up-projections are multiplied once for all sequences.

    Args:
        q_BHD: queries, of each head D - S numbers without and S with rotary embedding.
        c_pages_N1PC: one layer's pages: a token's latent, then its rotary key, as one head.
        up_HUR: up-projection of each head: D - S rows that make its keys, then V that make its values.
        block_tables_BM, lengths_B, scale, window, softcap, sinks_H: as in `paged_attention_decode`.

    Returns:
        [B, H, V] in q's dtype.
    """
    q_BHC = _to_latents(q_BHD, up_HUR, c_pages_N1PC.shape[3])
    attend = _decode_one_by_one if q_BHD.device.type == "cpu" else _decode_padded
    out_BHR = attend(
        q_BHC,
        c_pages_N1PC,
        up_HUR.shape[2],
        block_tables_BM,
        lengths_B,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
    )
    return _from_latents(out_BHR, up_HUR, q_BHD.shape[2] - c_pages_N1PC.shape[3] + up_HUR.shape[2])


def _decode_one_by_one(
    q_BHC: torch.Tensor,
    c_pages_N1PC: torch.Tensor,
    rank: int,
    block_tables_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Sequence by sequence, so that nothing is padded: [B, H, R]."""
    page_tokens = c_pages_N1PC.shape[2]
    sinks_H1 = None if sinks_H is None else sinks_H.unsqueeze(1)
    out_BHR = q_BHC.new_empty(*q_BHC.shape[:2], rank)
    for row, length in enumerate(lengths_B.tolist()):
        page_ids = block_tables_BM[row, : -(-length // page_tokens)]
        c_LC = gather_pages(c_pages_N1PC, page_ids, length)[0]
        if window:
            c_LC = c_LC[-window:]
        scores_HL = q_BHC[row].float() @ c_LC.float().T
        weights_HL = attention_weights(scores_HL, scale=scale, softcap=softcap, sinks=sinks_H1)
        out_BHR[row] = weights_HL @ c_LC[:, :rank].float()
    return out_BHR


def _decode_padded(
    q_BHC: torch.Tensor,
    c_pages_N1PC: torch.Tensor,
    rank: int,
    block_tables_BM: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Many sequences at once, padded to the longest, and without asking the device for lengths: [B, H, R]."""
    _, num_pages = block_tables_BM.shape
    page_tokens, size = c_pages_N1PC.shape[2:]
    length = num_pages * page_tokens
    sinks_H1 = None if sinks_H is None else sinks_H.unsqueeze(1)
    position_L = torch.arange(length, device=q_BHC.device)
    at_once = max(1, _MOST_NUMBERS // (length * size))
    outs = []
    for first in range(0, len(q_BHC), at_once):
        rows = slice(first, first + at_once)
        lengths_B1 = lengths_B[rows].unsqueeze(1)
        hidden_BL = position_L >= lengths_B1
        if window:
            hidden_BL |= position_L < lengths_B1 - window
        c_BLC = c_pages_N1PC[:, 0].index_select(0, block_tables_BM[rows].flatten())
        # What lies behind a sequence's end is stale and may hold NaN, which a weight of 0 does not hide.
        c_BLC = c_BLC.view(-1, length, size).float().masked_fill(hidden_BL.unsqueeze(2), 0.0)
        scores_BHL = q_BHC[rows].float() @ c_BLC.transpose(1, 2)
        weights_BHL = attention_weights(
            scores_BHL, scale=scale, softcap=softcap, sinks=sinks_H1, hidden=hidden_BL.unsqueeze(1)
        )
        outs.append((weights_BHL @ c_BLC[..., :rank]).to(q_BHC.dtype))
    return torch.cat(outs)


def mla_attention_extend(
    q_THD: torch.Tensor,
    c_pages_N1PC: torch.Tensor,
    up_HUR: torch.Tensor,
    page_ids_M: torch.Tensor,
    length: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence's last T tokens over the latents of all its `length` tokens.

    It runs among latents or over expanded heads, whichever multiplies less: a head is narrower than a
    latent (192 + 128 numbers against 576 + 512 in DeepSeek-V3), so that long chunks are worth the expansion
    and short ones are not. Heads are expanded some at a time.

    Args:
        q_THD, c_pages_N1PC, up_HUR: as in `mla_attention_decode`.
        page_ids_M, length, scale, window, softcap, sinks_H: as in `paged_attention_extend`.

    Returns:
        [T, H, V] in q's dtype.
    """
    num_queries, num_heads, size_k = q_THD.shape
    rows, rank = up_HUR.shape[1:]
    c_LC = gather_pages(c_pages_N1PC, page_ids_M, length)[0]
    size = c_LC.shape[1]
    size_nope = size_k - size + rank
    size_v = rows - size_nope
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    among_latents = num_queries * (rows * rank + length * (size + rank))
    over_heads = length * rows * rank + num_queries * length * (size_k + size_v)
    if among_latents <= over_heads:
        c_1LC = c_LC.unsqueeze(0)
        q_THC = _to_latents(q_THD, up_HUR, size)
        out_THR = attention_of_chunk(q_THC, c_1LC, c_1LC[..., :rank], sinks_H=sinks_H, **options)
        return _from_latents(out_THR, up_HUR, size_nope)
    at_once = max(1, _MOST_NUMBERS // (length * (size_k + size_v + num_queries)))
    outs = []
    for first in range(0, num_heads, at_once):
        heads = slice(first, first + at_once)
        k_HLD, v_HLV = expand_latents(c_LC, up_HUR[heads], size_k)
        sinks = None if sinks_H is None else sinks_H[heads]
        outs.append(attention_of_chunk(q_THD[:, heads], k_HLD, v_HLV, sinks_H=sinks, **options))
    return torch.cat(outs, dim=1)


def _to_latents(q_THD: torch.Tensor, up_HUR: torch.Tensor, size: int) -> torch.Tensor:
    """Queries that score latents as they scored keys: [T, H, C]."""
    size_nope = q_THD.shape[2] - size + up_HUR.shape[2]
    latent_HTR = q_THD[..., :size_nope].transpose(0, 1) @ up_HUR[:, :size_nope]
    return torch.cat([latent_HTR.transpose(0, 1), q_THD[..., size_nope:]], dim=-1)


def _from_latents(out_THR: torch.Tensor, up_HUR: torch.Tensor, size_nope: int) -> torch.Tensor:
    """Weighted latents to weighted values: [T, H, V]."""
    return (out_THR.transpose(0, 1) @ up_HUR[:, size_nope:].transpose(1, 2)).transpose(0, 1)
