"""The truth of every operator in plain PyTorch; see the package page for shape letters.

`paged_attention_extend` is also the production path on every device for now: the fast branch of
`attention_of_chunk` is PyTorch's own scaled_dot_product_attention, its slow branch (sinks, softcap) is the
textbook formula.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F


def kv_append(
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    k_pages_NKPD: torch.Tensor,
    v_pages_NKPV: torch.Tensor,
    page_idx_T: torch.Tensor,
    offset_T: torch.Tensor,
) -> None:
    """Write keys and values of T tokens into their pages, in place."""
    k_pages_NKPD[page_idx_T, :, offset_T] = k_TKD
    v_pages_NKPV[page_idx_T, :, offset_T] = v_TKV


def gather_pages(pages_NKPD: torch.Tensor, page_ids_M: torch.Tensor, length: int) -> torch.Tensor:
    """Copy the first `length` tokens of a block table into one [K, length, D] tensor."""
    picked_MKPD = pages_NKPD.index_select(0, page_ids_M)
    num_pages, num_heads, page_tokens, size = picked_MKPD.shape
    # Cut to `length` before any arithmetic: the rest of the last page is stale and may hold NaN.
    return picked_MKPD.transpose(0, 1).reshape(num_heads, num_pages * page_tokens, size)[:, :length]


def attention(
    q_THD: torch.Tensor,
    k_KLD: torch.Tensor,
    v_KLV: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last T of L tokens, by the textbook formula in float32: [T, H, V]."""
    num_queries, num_heads, _ = q_THD.shape
    num_kv_heads, length, _ = k_KLD.shape
    group = num_heads // num_kv_heads
    q_KGTD = q_THD.float().permute(1, 0, 2).unflatten(0, (num_kv_heads, group))
    weights_KGTL = attention_weights(
        q_KGTD @ k_KLD.float().unsqueeze(1).transpose(-1, -2),
        scale=scale,
        softcap=softcap,
        sinks=None if sinks_H is None else sinks_H.view(num_kv_heads, group, 1, 1),
        hidden=~_visible(num_queries, length, window, q_THD.device),
    )
    out_KGTV = weights_KGTL @ v_KLV.float().unsqueeze(1)
    return out_KGTV.flatten(0, 1).transpose(0, 1).to(q_THD.dtype)


def attention_weights(
    scores: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each key counts, from raw scores [..., L] in float32.

    Args:
        scores: products of queries and keys.
        scale, softcap: as in `paged_attention_decode`.
        sinks: logits that take part in the softmax and are left out of the result; spread over [..., 1].
        hidden: true where a key may not be seen; spread over [..., L].
    """
    scores = scores * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def _visible(num_queries: int, length: int, window: int, device: torch.device) -> torch.Tensor:
    """[T, L] true where query t (token length - T + t) may see key l."""
    query = torch.arange(length - num_queries, length, device=device).unsqueeze(1)
    key = torch.arange(length, device=device).unsqueeze(0)
    visible = key <= query
    return visible & (key > query - window) if window else visible


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
    """One new token per sequence, sequence by sequence."""
    rows = []
    for q_1HD, page_ids, length in _sequences(q_BHD, block_tables_BM, lengths_B, k_pages_NKPD.shape[2]):
        rows.append(
            attention(
                q_1HD,
                gather_pages(k_pages_NKPD, page_ids, length),
                gather_pages(v_pages_NKPV, page_ids, length),
                scale=scale,
                window=window,
                softcap=softcap,
                sinks_H=sinks_H,
            )
        )
    return torch.cat(rows)


def _sequences(
    q_BHD: torch.Tensor, block_tables_BM: torch.Tensor, lengths_B: torch.Tensor, page_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Each decoding sequence's query [1, H, D], page ids (int64) and length."""
    for row, length in enumerate(lengths_B.tolist()):
        yield q_BHD[row : row + 1], block_tables_BM[row, : -(-length // page_tokens)].long(), length


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
    """A prefill chunk of one sequence over its gathered pages."""
    return attention_of_chunk(
        q_THD,
        gather_pages(k_pages_NKPD, page_ids_M, length),
        gather_pages(v_pages_NKPV, page_ids_M, length),
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
    )


def attention_of_chunk(
    q_THD: torch.Tensor,
    k_KLD: torch.Tensor,
    v_KLV: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attention`, by PyTorch's own function where it knows how: [T, H, V]."""
    if softcap or sinks_H is not None:
        return attention(q_THD, k_KLD, v_KLV, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H)
    num_queries, length = q_THD.shape[0], k_KLD.shape[1]
    whole = num_queries == length and (not window or window >= length)
    mask_TL = None if whole else _visible(num_queries, length, window, q_THD.device)
    out_1HTV = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1).unsqueeze(0),
        k_KLD.unsqueeze(0),
        v_KLV.unsqueeze(0),
        attn_mask=mask_TL,
        is_causal=whole,
        scale=scale,
        enable_gqa=q_THD.shape[1] != k_KLD.shape[0],
    )
    return out_1HTV[0].transpose(0, 1)


def expand_latents(
    c_LC: torch.Tensor, up_HUR: torch.Tensor, size_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads' keys [H, L, D] and values [H, L, V] from L tokens' latents (`mla_attention_decode`)."""
    rank = up_HUR.shape[2]
    size_nope = size_k - (c_LC.shape[1] - rank)
    up_HLU = c_LC[:, :rank] @ up_HUR.transpose(1, 2)
    rope_HLS = c_LC[:, rank:].expand(len(up_HUR), -1, -1)
    return torch.cat([up_HLU[..., :size_nope], rope_HLS], dim=-1), up_HLU[..., size_nope:]


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
    """One new token per sequence over latents: all heads are expanded, then attended to."""
    rows = []
    for q_1HD, page_ids, length in _sequences(q_BHD, block_tables_BM, lengths_B, c_pages_N1PC.shape[2]):
        rows.append(
            mla_attention_extend(
                q_1HD,
                c_pages_N1PC,
                up_HUR,
                page_ids,
                length,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks_H=sinks_H,
            )
        )
    return torch.cat(rows)


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
    """A prefill chunk of one sequence over latents, by the textbook formula over expanded heads."""
    c_LC = gather_pages(c_pages_N1PC, page_ids_M, length)[0]
    k_HLD, v_HLV = expand_latents(c_LC, up_HUR, q_THD.shape[2])
    return attention(q_THD, k_HLD, v_HLV, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H)
