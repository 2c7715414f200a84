"""The memory of KV pages, and what attention sees of it.

Shape letters: N pages, K key/value heads, P tokens of a page, D key size, V value size, T tokens of a
sub-batch, B its decoding sequences, M pages of the longest of these.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from batchgen_kernels import Int8Pages, kv_append
from batchgen_kernels.int8 import quantise

# Tensors begin at multiples of a cache line.
ALIGNMENT_BYTES = 64
# At once while a pool becomes int8: what is copied meanwhile needs memory of its own.
_PAGES_AT_ONCE = 256


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


def int8_layer_bytes(shape: LayerShape, num_pages: int, page_tokens: int) -> int:
    """Bytes that `int8_page_views` needs for one layer."""
    return sum(_int8_sizes(shape, num_pages, page_tokens))


def _int8_sizes(shape: LayerShape, num_pages: int, page_tokens: int) -> tuple[int, ...]:
    """Bytes of a layer's keys, their scales, values, their scales, each rounded up."""
    num_scales = num_pages * shape.num_kv_heads * page_tokens
    sizes = (num_scales * shape.size_k, 4 * num_scales, num_scales * shape.size_v, 4 * num_scales)
    return tuple(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)


def int8_page_views(
    memory: torch.Tensor, shape: LayerShape, num_pages: int, page_tokens: int
) -> tuple[Int8Pages, Int8Pages]:
    """Keys and values as int8 in a stretch of bytes."""
    sizes = _int8_sizes(shape, num_pages, page_tokens)
    parts = memory[: sum(sizes)].split(sizes)
    head = (num_pages, shape.num_kv_heads, page_tokens)
    num_scales = num_pages * shape.num_kv_heads * page_tokens

    def pages(values: torch.Tensor, scales: torch.Tensor, size: int) -> Int8Pages:
        return Int8Pages(
            values.view(torch.int8)[: num_scales * size].view(*head, size),
            scales.view(torch.float32)[:num_scales].view(head),
        )

    k, k_scales, v, v_scales = parts
    return pages(k, k_scales, shape.size_k), pages(v, v_scales, shape.size_v)


class Pages(Protocol):
    """What attention sees of a KV pool."""

    def append(
        self, layer: int, k_TKD: torch.Tensor, v_TKV: torch.Tensor, paged: PagedBatch
    ) -> tuple[torch.Tensor | Int8Pages, torch.Tensor | Int8Pages]:
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
        self._layers = dict(zip(shapes, zip(shapes.values(), memory.split(sizes), strict=True), strict=True))
        # Whether checkpoints of suspended rows copy these pages as they are.
        self.is_copied = False
        # What takes the place of `k` and `v`.
        self._int8: dict[int, tuple[Int8Pages, Int8Pages]] = {}

    @property
    def quantised(self) -> bool:
        """Whether pages hold int8."""
        return bool(self._int8)

    @property
    def quantise_obstacle(self) -> str | None:
        """Why the pool cannot become int8; None where it can."""
        if self.is_copied:
            return "the host tier keeps pages of suspended rows as they are (host_memory)"
        if any(shape.size_v == 0 for shape, _ in self._layers.values()):
            return "its pages hold compressed latents (MLA)"
        if not self.quantised and self._num_int8_pages() <= self.num_pages:
            return "the model's heads are so small that int8 and its scales need no less memory"
        return None

    @torch.no_grad()
    def quantise(self) -> int:
        """Turn all pages into int8 in the same memory and return how many there are now.

        Pages keep their ids and what they hold, rounded. Call it between passes. A second call changes
        nothing.
        """
        if self.quantised:
            return self.num_pages
        num_before, self.num_pages = self.num_pages, self._num_int8_pages()
        for layer, (shape, memory) in self._layers.items():
            # The new pages lie over the old ones: all of a layer are made before any is put there.
            made = [_quantised(pages) for pages in (self.k.pop(layer), self.v.pop(layer))]
            views = int8_page_views(memory, shape, self.num_pages, self.page_tokens)
            for view, (values, scales) in zip(views, made, strict=True):
                view.values[:num_before] = values
                view.scales[:num_before] = scales
            self._int8[layer] = views
        return self.num_pages

    def _num_int8_pages(self) -> int:
        return min(
            _most_int8_pages(shape, len(memory), self.page_tokens) for shape, memory in self._layers.values()
        )

    def begin_pass(self) -> None:
        """A new pass: what was placed for the last one is over."""

    def place(self, paged: PagedBatch) -> PagedBatch:
        """Take the next sub-batch of the pass, in the order they run, and return what to run instead."""
        return paged

    def append(
        self, layer: int, k_TKD: torch.Tensor, v_TKV: torch.Tensor, paged: PagedBatch
    ) -> tuple[torch.Tensor | Int8Pages, torch.Tensor | Int8Pages]:
        """See `Pages.append`."""
        k_pages, v_pages = self._int8[layer] if self._int8 else (self.k[layer], self.v[layer])
        kv_append(k_TKD, v_TKV, k_pages, v_pages, paged.page_idx, paged.offset)
        return k_pages, v_pages


def _most_int8_pages(shape: LayerShape, num_bytes: int, page_tokens: int) -> int:
    """How many int8 pages of a layer fit in so many bytes."""
    num_pages = num_bytes // (page_tokens * shape.num_kv_heads * (shape.size_k + shape.size_v + 8))
    while int8_layer_bytes(shape, num_pages, page_tokens) > num_bytes:  # for what rounding up takes
        num_pages -= 1
    return num_pages


def _quantised(pages: torch.Tensor) -> Int8Pages:
    parts = [quantise(part) for part in pages.split(_PAGES_AT_ONCE)]
    return Int8Pages(torch.cat([values for values, _ in parts]), torch.cat([scales for _, scales in parts]))
