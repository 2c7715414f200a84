"""Paged attention for unmodified models, through transformers' attention registry.

The runtime packs the tokens of many sequences into one row and passes a `PagedBatch` as an extra keyword of
`model(...)`; transformers hands it on to the function registered here, once per layer. That function writes
the new keys and values into the KV pool and attends through block tables. Nothing is padded.

`install` proves on a small probe that the model really runs this way, and runs right; models that keep
other state than keys and values, or whose attention does not go through the registry, are refused.
"""

from __future__ import annotations

import dataclasses
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from batchgen_data.errors import ConfigError
from batchgen_kernels import kv_append, paged_attention_decode, paged_attention_extend

NAME = "batchgen_paged"


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


class KVPool:
    """The memory of all pages: per layer, keys [N, K, P, D] and values [N, K, P, V].

    On a CPU the memory is only reserved; the system backs a page when it is first written.
    """

    def __init__(
        self, shapes: dict[int, LayerShape], num_pages: int, page_tokens: int, device: torch.device
    ) -> None:
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        for layer, shape in shapes.items():
            head = (num_pages, shape.num_kv_heads, page_tokens)
            self.k[layer] = torch.empty(*head, shape.size_k, dtype=shape.dtype, device=device)
            self.v[layer] = torch.empty(*head, shape.size_v, dtype=shape.dtype, device=device)


@dataclasses.dataclass(frozen=True, slots=True)
class Prefill:
    """One prefill chunk of a pass: its tokens in the pack, its pages, its length with the chunk."""

    first: int
    last: int
    page_ids: torch.Tensor
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class PagedBatch:
    """Where the tokens of one packed pass live.

    The first `num_decode` tokens are single new tokens of as many sequences (block_tables [B, M] int32,
    lengths [B] int32 with the new token); the rest are prefill chunks. page_idx and offset [T] int64 say
    where each token's key and value go.
    """

    pool: KVPool
    page_idx: torch.Tensor
    offset: torch.Tensor
    num_decode: int
    block_tables: torch.Tensor
    lengths: torch.Tensor
    prefills: tuple[Prefill, ...]


class ShapeProbe:
    """Stands in for a PagedBatch to learn each layer's shape."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self.num_calls = 0


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: PagedBatch | ShapeProbe | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in each layer.

    Args:
        query: [1, H, T, D]; key, value: [1, K, T, D] and [1, K, T, V], after rotary embedding.
        paged: from `model(..., paged=...)`.

    Returns:
        ([1, T, H, V], None)
    """
    layer = getattr(module, "layer_idx", None)
    if paged is None or layer is None:
        raise ConfigError(
            f"{type(module).__name__} does not pass block tables to its attention; the model is not supported"
        )
    if isinstance(paged, ShapeProbe):
        paged.num_calls += 1
        paged.windows[layer] = sliding_window
        paged.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        shape = (1, query.shape[2], query.shape[1], value.shape[3])
        return torch.zeros(shape, dtype=query.dtype, device=query.device), None

    k_pages, v_pages = paged.pool.k[layer], paged.pool.v[layer]
    q_THD = query[0].transpose(0, 1)
    kv_append(
        key[0].transpose(0, 1), value[0].transpose(0, 1), k_pages, v_pages, paged.page_idx, paged.offset
    )
    options: dict[str, Any] = {
        "scale": scaling if scaling is not None else query.shape[-1] ** -0.5,
        "window": sliding_window or 0,
        "softcap": softcap or 0.0,
        "sinks_H": s_aux,
    }
    outs = []
    if paged.num_decode:
        outs.append(
            paged_attention_decode(
                q_THD[: paged.num_decode], k_pages, v_pages, paged.block_tables, paged.lengths, **options
            )
        )
    outs += [
        paged_attention_extend(
            q_THD[chunk.first : chunk.last], k_pages, v_pages, chunk.page_ids, chunk.length, **options
        )
        for chunk in paged.prefills
    ]
    out_THV = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out_THV.unsqueeze(0), None


_windows_asked: ContextVar[set[int] | None] = ContextVar("_windows_asked", default=None)


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """Causality comes from block tables and lengths, windows from the attention call.

    `local_size` is set where the model asks for a mask with a window.
    """
    asked = _windows_asked.get()
    if asked is not None and local_size:
        asked.add(local_size)


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, _no_mask)

# Other layers (convolution, linear attention, chunked attention) keep state that pages do not hold.
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}

# Logits of the probe must agree to this share of their largest magnitude. float32 differs by 1e-6 or so;
# bfloat16 keeps 8 bits, and a wrong mask or a missed layer is off by far more.
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@torch.inference_mode()
def install(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Switch `model` to paged attention and prove on a probe that its logits stay the same.

    Two sequences of 5 and 3 tokens are prefilled together, the first in two chunks, and each decodes one
    token: all logits must equal the model's own.

    Returns:
        The shape of every layer's keys and values, by layer index.

    Raises:
        ConfigError: the architecture is not supported; the message says why.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or [])
    if unknown := layer_types - _SUPPORTED_LAYERS:
        raise ConfigError(
            f"{name} is not supported: it has layers of type {', '.join(sorted(unknown))}, and only "
            "attention layers keep all their state in KV pages"
        )
    prompts = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3]]
    vocab = model.get_input_embeddings().num_embeddings
    prompts = [[token % vocab for token in prompt] for prompt in prompts]
    expected = torch.stack([_plain_logits(model, prompt)[-1] for prompt in prompts])
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise ConfigError(
            f"{name} is not supported: its attention does not go through transformers' registry"
        ) from error
    shapes = _learn_shapes(model, prompts[0], config.num_hidden_layers)
    actual = _paged_logits(model, shapes, prompts)
    scale = float(expected.abs().max()) or 1.0
    off = float((actual.float() - expected.float()).abs().max()) / scale
    if not off <= _PROBE_TOLERANCE.get(expected.dtype, 1e-1):
        raise ConfigError(
            f"{name} is not supported: with paged attention its logits differ by {off:.1%} of their range "
            "from its own forward pass"
        )
    return shapes


def _plain_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    device = model.get_input_embeddings().weight.device
    return model(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits[0]


def _learn_shapes(model: PreTrainedModel, prompt: list[int], num_layers: int) -> dict[int, LayerShape]:
    device = model.get_input_embeddings().weight.device
    probe = ShapeProbe()
    windows_asked: set[int] = set()
    reset = _windows_asked.set(windows_asked)
    try:
        model(
            input_ids=torch.tensor([prompt], device=device),
            position_ids=torch.arange(len(prompt), device=device).unsqueeze(0),
            use_cache=False,
            paged=probe,
        )
    finally:
        _windows_asked.reset(reset)
    if probe.num_calls != num_layers or len(probe.shapes) != num_layers:
        raise ConfigError(
            f"{type(model).__name__} is not supported: {probe.num_calls} of its {num_layers} layers send "
            "attention through transformers' registry"
        )
    _check_windows(model, windows_asked, probe.windows)
    return probe.shapes


def _check_windows(model: PreTrainedModel, asked: set[int], windows: dict[int, int | None]) -> None:
    """A model that applies its window in the mask only would attend to everything: masks are not used."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or []
    missed = [
        layer
        for layer, kind in enumerate(layer_types)
        if kind == "sliding_attention" and not windows.get(layer)
    ]
    if asked and (missed or not any(windows.values())):
        raise ConfigError(
            f"{type(model).__name__} is not supported: it has a sliding window of {max(asked)} tokens and "
            "does not pass it to its attention"
        )


def position_limit(config: Any) -> int | None:
    """Tokens up to which a model's rotary factors do not depend on the longest sequence of a pass.

    longrope picks between two sets of factors by the largest position it meets, so that one long row would
    change all others (and a row its own past). Below the original length there is one set.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for parameters in kinds:
        if parameters.get("rope_type", parameters.get("type")) == "longrope":
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            return int(original or config.max_position_embeddings)
    return None


def _paged_logits(
    model: PreTrainedModel, shapes: dict[int, LayerShape], prompts: list[list[int]]
) -> torch.Tensor:
    """Logits of each prompt's last token: prefill the rest (the first prompt in two chunks), decode it."""
    device = model.get_input_embeddings().weight.device
    page_tokens = 4
    pool = KVPool(shapes, num_pages=4, page_tokens=page_tokens, device=device)
    tables = [[2, 0], [3, 1]]

    def run(spans: list[tuple[int, int, int]], num_decode: int) -> torch.Tensor:
        tokens = [prompts[row][at] for row, start, end in spans for at in range(start, end)]
        places = [(row, at) for row, start, end in spans for at in range(start, end)]
        prefills = []
        first = num_decode
        for row, start, end in spans[num_decode:]:
            page_ids = torch.tensor(tables[row][: -(-end // page_tokens)], device=device)
            prefills.append(Prefill(first, first + end - start, page_ids, end))
            first += end - start
        paged = PagedBatch(
            pool=pool,
            page_idx=torch.tensor([tables[row][at // page_tokens] for row, at in places], device=device),
            offset=torch.tensor([at % page_tokens for _, at in places], device=device),
            num_decode=num_decode,
            block_tables=torch.tensor(tables[:num_decode] or [[0]], dtype=torch.int32, device=device),
            lengths=torch.tensor(
                [end for _, _, end in spans[:num_decode]] or [1], dtype=torch.int32, device=device
            ),
            prefills=tuple(prefills),
        )
        return model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([[at for _, at in places]], device=device),
            use_cache=False,
            paged=paged,
        ).logits[0]

    run([(0, 0, 3)], num_decode=0)
    run([(0, 3, 5), (1, 0, 3)], num_decode=0)
    return run([(0, 5, 6), (1, 3, 4)], num_decode=2)
