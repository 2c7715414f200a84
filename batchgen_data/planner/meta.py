"""A model's sizes from its config alone: built on the meta device, no weight is read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from batchgen_data.models import mla
from batchgen_data.models.attention import NAME, ShapeProbe, position_limit
from batchgen_data.models.checkpoint_map import (
    decoder_layers,
    expert_modules,
    expert_parameters,
    num_experts,
)
from batchgen_data.models.kv_pool import LayerShape
from batchgen_data.models.load import quiet_transformers
from batchgen_data.models.weight_files import read_bytes
from batchgen_data.models.weight_units import NUM_READ_BUFFERS
from batchgen_data.planner.sizes import LayerSizes, ModelSizes

# Activations alive at once, in hidden sizes: residual, norm, queries, keys, values, output and two copies.
_HIDDEN_COPIES = 8
# Logits of a sequence in float32, and one copy for sampling.
_LOGITS_COPIES = 2
# Names by which models call the feed-forward block of a layer.
_FEED_FORWARD = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
_PROBE_TOKENS = 2


def model_sizes(config: Any, dtype: torch.dtype, context_tokens: int) -> ModelSizes:
    """Return what a model's parts weigh in `dtype`.

    Args:
        config: as `models.load.read_config` returns it.
        dtype: the running type.
        context_tokens: prompt and output together at most.
    """
    with quiet_transformers(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.eval().requires_grad_(False)
    points = _combine_points(model)
    shapes = layer_shapes(model)
    for handle in points.handles:
        handle.remove()
    groups: dict[LayerSizes, int] = {}
    layers = decoder_layers(model)
    windows = _windows(model)
    for number, layer in enumerate(layers):
        alike = dataclasses.replace(
            _layer_sizes(layer, config, shapes[number].token_bytes, windows.get(number)),
            feed_forward=points.names.get(number, ""),
        )
        groups[alike] = groups.get(alike, 0) + 1
    text = config.get_text_config()
    parameters = {id(parameter): parameter for parameter in model.parameters()}.values()
    weights_bytes = sum(parameter.nbytes for parameter in parameters)
    layers_bytes = sum(parameter.nbytes for parameter in layers.parameters())
    width = max((weight.shape[-2] for weight in layers.parameters() if weight.ndim == 2), default=0)
    limit = position_limit(config)
    stored = config.dtype.itemsize if isinstance(config.dtype, torch.dtype) else dtype.itemsize
    return ModelSizes(
        architecture=type(model).__name__,
        layers=tuple(dataclasses.replace(alike, count=count) for alike, count in groups.items()),
        other_bytes=weights_bytes - layers_bytes,
        token_bytes=(_HIDDEN_COPIES * text.hidden_size + 2 * width) * dtype.itemsize,
        logits_bytes=_LOGITS_COPIES * 4 * text.vocab_size,
        context_tokens=min(context_tokens, limit or context_tokens),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        stored_share=stored / dtype.itemsize,
        reader_bytes=NUM_READ_BUFFERS * read_bytes(max(map(_longest_part, layers), default=0)),
    )


@torch.inference_mode()
def layer_shapes(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Switch `model` to paged attention and return each layer's keys and values, by layer number.

    Unlike `models.attention.install` it proves nothing, and works on the meta device.
    """
    model.set_attn_implementation(NAME)
    mla.keep_latents(model)
    device = model.get_input_embeddings().weight.device
    probe = ShapeProbe()
    with _without_experts(model):
        model(
            input_ids=torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device=device),
            # Without one, transformers looks at values of the positions, and the meta device has none.
            attention_mask=torch.ones(1, _PROBE_TOKENS, dtype=torch.long, device=device),
            use_cache=False,
            paged=probe,
        )
    return probe.shapes


def feed_forward(layer: nn.Module) -> nn.Module | None:
    """The feed-forward block of a decoder layer, dense or sparse; None where it has no name of its own."""
    return next((child for name, child in layer.named_children() if name in _FEED_FORWARD), None)


@dataclasses.dataclass(slots=True)
class _Points:
    names: dict[int, str]
    handles: list[Any]


def _combine_points(model: PreTrainedModel) -> _Points:
    """Watch, during the next forward pass, which feed-forward blocks take and return one state per token.

    Sub-batches can be combined there (`models.wrap`). Their names, layer numbers as "*", are patterns for
    `yield_at`.
    """
    points = _Points({}, [])
    names = {id(module): name for name, module in model.named_modules()}
    for number, layer in enumerate(decoder_layers(model)):
        block = feed_forward(layer)
        if block is None:
            continue
        pattern = re.sub(r"\.\d+(?=\.)", ".*", names[id(block)])

        def note(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            output: Any,
            number: int = number,
            pattern: str = pattern,
        ) -> None:
            taken = [*args, *kwargs.values()]
            result = output[0] if isinstance(output, tuple) else output
            if len(taken) == 1 and torch.is_tensor(result) and result.shape == taken[0].shape:
                points.names[number] = pattern

        points.handles.append(block.register_forward_hook(note, with_kwargs=True))
    return points


@contextmanager
def _without_experts(model: PreTrainedModel) -> Iterator[None]:
    """Leave experts out: which of them run depends on values, and the meta device has none."""
    modules = [module for layer in decoder_layers(model) for _, module in expert_modules(layer)]
    for module in modules:
        module.forward = lambda hidden, *_, **__: torch.zeros_like(hidden)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _layer_sizes(layer: nn.Module, config: Any, kv_token_bytes: int, window: int | None) -> LayerSizes:
    total = sum(parameter.nbytes for parameter in layer.parameters())
    modules = [module for _, module in expert_modules(layer)]
    if not modules:
        return LayerSizes(count=1, core_bytes=total, kv_token_bytes=kv_token_bytes, window=window)
    number = num_experts(modules[0])
    stacked = sum(parameter.nbytes for parameter in expert_parameters(modules[0]).values())
    return LayerSizes(
        count=1,
        core_bytes=total - stacked,
        kv_token_bytes=kv_token_bytes,
        num_experts=number,
        experts_per_token=_experts_per_token(config),
        expert_bytes=stacked // number,
        window=window,
    )


def _longest_part(layer: nn.Module) -> int:
    """Bytes of the largest parameter of a layer, or of one expert's share of it."""
    shares = {
        id(parameter): num_experts(module)
        for _, module in expert_modules(layer)
        for parameter in expert_parameters(module).values()
    }
    return max(parameter.nbytes // shares.get(id(parameter), 1) for parameter in layer.parameters())


def _experts_per_token(config: Any) -> int:
    text = config.get_text_config()
    for name in ("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk"):
        value = getattr(text, name, None)
        if isinstance(value, int):
            return value
    return 1


def _windows(model: PreTrainedModel) -> dict[int, int]:
    """Layers that look back a limited number of tokens."""
    text = model.config.get_text_config()
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or []
    return {number: int(window) for number, kind in enumerate(kinds) if window and kind.startswith("sliding")}
