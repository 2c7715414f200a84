"""Paged attention for unmodified models, through transformers' attention registry.

The runtime packs the tokens of many sequences into one row and passes a `PagedBatch` as an extra keyword of
`model(...)`; transformers hands it on to the function registered here, once per layer. That function writes
the new keys and values into the KV pool and attends through block tables. Nothing is padded.

`install` proves on a small probe that the model really runs this way, and runs right; models that keep
other state than keys and values, or whose attention does not go through the registry, are refused.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from batchgen_data.errors import ConfigError
from batchgen_data.models import mla
from batchgen_data.models.kv_pool import KVPool, LayerShape, PagedBatch, Prefill
from batchgen_kernels import (
    mla_attention_decode,
    mla_attention_extend,
    paged_attention_decode,
    paged_attention_extend,
)

logger = logging.getLogger(__name__)

NAME = "batchgen_paged"


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
        query: [1, H, T, D]; key, value: [1, K, T, D] and [1, K, T, V], after rotary embedding; or
            [1, 1, T, C] and [1, 1, T, 0], where the module keeps latents (`models.mla`).
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
        size_v: Any = module.v_head_dim if mla.keeps_latents(module) else value.shape[3]
        shape = (1, query.shape[2], query.shape[1], size_v)
        return torch.zeros(shape, dtype=query.dtype, device=query.device), None

    k_pages, v_pages = paged.pool.append(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), paged)
    decode: Any = paged_attention_decode
    extend: Any = paged_attention_extend
    source = v_pages
    if mla.keeps_latents(module):
        decode, extend, source = mla_attention_decode, mla_attention_extend, mla.up_projection(module)
    q_THD = query[0].transpose(0, 1)
    options: dict[str, Any] = {
        "scale": scaling if scaling is not None else query.shape[-1] ** -0.5,
        "window": sliding_window or 0,
        "softcap": softcap or 0.0,
        "sinks_H": s_aux,
    }
    outs = []
    if paged.num_decode:
        outs.append(
            decode(q_THD[: paged.num_decode], k_pages, source, paged.block_tables, paged.lengths, **options)
        )
    outs += [
        extend(q_THD[chunk.first : chunk.last], k_pages, source, chunk.page_ids, chunk.length, **options)
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
    tolerance = _PROBE_TOLERANCE.get(expected.dtype, 1e-1)
    if mla.keep_latents(model):
        try:
            shapes, off = _probe(model, prompts, expected)
            if off <= tolerance:
                return shapes
            cause = f"with them its logits differ by {off:.1%} of their range"
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            cause = str(error)
        logger.warning("%s: KV pages hold expanded heads, not latents: %s", name, cause)
        mla.expand_heads(model)
    shapes, off = _probe(model, prompts, expected)
    if not off <= tolerance:
        raise ConfigError(
            f"{name} is not supported: with paged attention its logits differ by {off:.1%} of their range "
            "from its own forward pass"
        )
    return shapes


def _probe(
    model: PreTrainedModel, prompts: list[list[int]], expected: torch.Tensor
) -> tuple[dict[int, LayerShape], float]:
    """Shapes, and how far paged logits are from the model's own, as a share of their largest magnitude."""
    num_layers = model.config.get_text_config().num_hidden_layers
    shapes = _learn_shapes(model, prompts[0], num_layers)
    actual = _paged_logits(model, shapes, prompts)
    scale = float(expected.abs().max()) or 1.0
    return shapes, float((actual.float() - expected.float()).abs().max()) / scale


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
