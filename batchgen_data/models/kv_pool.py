"""The memory of KV pages, and what attention sees of it.

Shape letters: N pages, K key/value heads, P tokens of a page, D key size, V value size, T tokens of a
sub-batch, B its decoding sequences, M pages of the longest of these.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from batchgen_kernels import kv_append

# Tensors begin at multiples of a cache line.
ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one token in one layer: heads, sizes, type."""

    num_kv_heads: int
    size_k: int
    size_v: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.num_kv_heads * (self.size_k + self.size_v) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Prefill:
    """One prefill chunk of a pass: its tokens in the pack, its pages, its length with the chunk."""

    first: int
    last: int
    page_ids: torch.Tensor
    length: int


def _sizes(shape: LayerShape, num_pages: int, page_tokens: int) -> tuple[int, int]:
    """Bytes of a layer's keys, rounded up, and of its values."""
    per_value = num_pages * shape.num_kv_heads * page_tokens * shape.dtype.itemsize
    return -(-per_value * shape.size_k // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, per_value * shape.size_v


def layer_bytes(shape: LayerShape, num_pages: int, page_tokens: int) -> int:
    """Bytes that `page_views` needs for one layer."""
    return -(-sum(_sizes(shape, num_pages, page_tokens)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def page_views(
    memory: torch.Tensor, shape: LayerShape, num_pages: int, page_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [N, K, P, D] and values [N, K, P, V] in a stretch of bytes."""
    k_bytes, v_bytes = _sizes(shape, num_pages, page_tokens)
    head = (num_pages, shape.num_kv_heads, page_tokens)
    num_k = num_pages * shape.num_kv_heads * page_tokens * shape.size_k
    k = memory[:k_bytes].view(shape.dtype)[:num_k].view(*head, shape.size_k)
    v = memory[k_bytes : k_bytes + v_bytes].view(shape.dtype).view(*head, shape.size_v)
    return k, v


class Pages(Protocol):
    """What attention sees of a KV pool."""

    def append(
        self, layer: int, k_TKD: torch.Tensor, v_TKV: torch.Tensor, paged: PagedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values and return its pages, [N, K, P, D] and [N, K, P, V].

        What is returned may be read until the next call.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where the tokens of one packed sub-batch live.

    The first `num_decode` tokens are single new tokens of as many sequences (block_tables [B, M] int32,
    lengths [B] int32 with the new token); the rest are prefill chunks. page_idx and offset [T] int64 say
    where each token's key and value go.
    """

    pool: Pages
    page_idx: torch.Tensor
    offset: torch.Tensor
    num_decode: int
    block_tables: torch.Tensor
    lengths: torch.Tensor
    prefills: tuple[Prefill, ...]


class KVPool:
    """The memory of all pages: per layer, keys [N, K, P, D] and values [N, K, P, V].

    On a CPU the memory is only reserved; the system backs a page when it is first written.

    Args:
        shapes: of every layer's keys and values, in layer order.
        num_pages: N.
        page_tokens: P.
        device: where to take the memory.
        memory: uint8, the memory to use instead, of all layers' `layer_bytes`.
    """

    # Pages that one sub-batch of a pass may use; None where all are at hand, and lanes may run side by side.
    sub_batch_pages: int | None = None

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        num_pages: int,
        page_tokens: int,
        device: torch.device,
        *,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        sizes = [layer_bytes(shape, num_pages, page_tokens) for shape in shapes.values()]
        if memory is None:
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for (layer, shape), part in zip(shapes.items(), memory.split(sizes), strict=True):
            self.k[layer], self.v[layer] = page_views(part, shape, num_pages, page_tokens)

    def begin_pass(self) -> None:
        """A new pass: what was placed for the last one is over."""

    def place(self, paged: PagedBatch) -> PagedBatch:
        """Take the next sub-batch of the pass, in the order they run, and return what to run instead."""
        return paged

    def append(
        self, layer: int, k_TKD: torch.Tensor, v_TKV: torch.Tensor, paged: PagedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Pages.append`."""
        k_pages, v_pages = self.k[layer], self.v[layer]
        kv_append(k_TKD, v_TKV, k_pages, v_pages, paged.page_idx, paged.offset)
        return k_pages, v_pages
