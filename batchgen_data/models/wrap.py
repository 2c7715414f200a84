"""Points on unmodified modules at which sub-batches of a pass are suspended: which modules, and how.

Yield points are each layer's sparse block (the module that routes tokens to experts) unless the caller names
others: attention runs in sub-batches, the experts once over all of them. Barriers stand before each decoder
layer where weights are streamed, so that a layer is read once for all sub-batches.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from batchgen_data.errors import ConfigError
from batchgen_data.models.attention import ShapeProbe
from batchgen_data.models.checkpoint_map import decoder_layers
from batchgen_data.runtime.coroutine import Point, at_barrier, at_yield_point

# A number that no model has of heads, so that it tells the dimension of tokens.
_PROBE_TOKENS = 11
_MOST_NAMES = 3


def sparse_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that own a router and experts, in layer order."""
    blocks = []
    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module) and not name.endswith(".experts"):
            blocks.append(module)
    return blocks


def install_yield_points(model: PreTrainedModel, patterns: Sequence[str] | None = None) -> list[str]:
    """Make modules suspend the sub-batch that calls them; outside a sub-batch nothing changes.

    Args:
        model: switched to paged attention by `models.attention.install`, where there are patterns: a
            forward pass of a few tokens shows what each module is called with.
        patterns: over names of modules, as "model.layers.*.mlp"; None means the sparse blocks. Of modules
            within each other the outer one is taken.

    Returns:
        The names of the modules.

    Raises:
        ConfigError: a pattern matches no module, or one where sub-batches cannot be combined.
    """
    modules = dict(model.named_modules())
    if patterns is None:
        blocks = {id(block) for block in sparse_blocks(model)}
        dims = {name: 1 for name, module in modules.items() if id(module) in blocks}
    else:
        dims = _token_dims(model, modules, patterns)
    for name, dim in dims.items():
        _install_yield_point(name, modules[name], dim)
    return list(dims)


def install_layer_barriers(model: PreTrainedModel) -> None:
    """Let every sub-batch of a pass finish a decoder layer before any enters the next.

    Install it after what wraps the layers' `forward` to bring their weights.

    Raises:
        ConfigError: the model does not keep its decoder layers in one list.
    """
    for number, layer in enumerate(decoder_layers(model)):
        _install_barrier(Point(f"layer {number}", None), layer)


def _install_yield_point(name: str, module: nn.Module, token_dim: int) -> None:
    point = Point(name, module.forward, token_dim)

    @functools.wraps(module.forward)
    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        (hidden,) = args or kwargs.values()
        return at_yield_point(point, hidden)

    module.forward = forward


def _install_barrier(point: Point, module: nn.Module) -> None:
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        at_barrier(point)
        return original(*args, **kwargs)

    module.forward = forward


@dataclass(frozen=True, slots=True)
class _Call:
    """How a module was called: the names of its arguments, and the dimension of tokens.

    `token_dim` is None where sub-batches cannot be combined: there is more than one argument, or what it
    returns has not one state per token.
    """

    arguments: tuple[str, ...]
    token_dim: int | None


def _token_dims(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], patterns: Sequence[str]
) -> dict[str, int]:
    """The dimension of tokens of each module that `patterns` choose, by name."""
    calls = _calls(model, modules)
    matched: set[str] = set()
    for pattern in patterns:
        found = {name for name in modules if name and fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError(
                f"yield_at: no module of {type(model).__name__} matches {pattern!r}; "
                f"{_suggestion(pattern, calls)}"
            )
        matched |= found
    outer = [name for name in modules if name in matched and not matched & set(_parents(name))]
    dims: dict[str, int] = {}
    for name in outer:
        call = calls.get(name)
        if call is None or call.token_dim is None:
            raise ConfigError(
                f"yield_at: sub-batches cannot be combined at {name} ({type(modules[name]).__name__}), which "
                f"{_obstacle(call)}; {_suggestion(name, calls)}"
            )
        dims[name] = call.token_dim
    return dims


@torch.inference_mode()
def _calls(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> dict[str, _Call]:
    """How each module is called in a forward pass of a few tokens; those that are not are left out."""
    calls: dict[str, _Call] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = _Call(_argument_names(module, args, kwargs), _token_dim(args, kwargs, output))
            if name in calls and calls[name] != call:
                call = _Call(call.arguments, None)
            calls[name] = call

        return hook

    handles = [
        module.register_forward_hook(watch(name), with_kwargs=True)
        for name, module in modules.items()
        if name  # the model itself has none
    ]
    embedding = model.get_input_embeddings()
    position_ids = torch.arange(_PROBE_TOKENS, device=embedding.weight.device).unsqueeze(0)
    try:
        model(
            input_ids=position_ids % embedding.num_embeddings,
            position_ids=position_ids,
            use_cache=False,
            paged=ShapeProbe(),
        )
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _argument_names(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    names = list(inspect.signature(module.forward).parameters)[: len(args)]
    names += [f"argument {number + 1}" for number in range(len(names), len(args))]
    return (*names, *kwargs)


def _token_dim(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int | None:
    values = [*args, *kwargs.values()]
    result = output[0] if isinstance(output, tuple) and output else output
    if len(values) != 1 or not isinstance(values[0], torch.Tensor) or not isinstance(result, torch.Tensor):
        return None
    # [1, T, ...], or [T, ...] where a block has folded the dimension of one row.
    taken, returned = values[0].shape, result.shape
    for dim in (0, 1):
        if taken[dim : dim + 1] == returned[dim : dim + 1] == (_PROBE_TOKENS,):
            return dim
    return None


def _obstacle(call: _Call | None) -> str:
    if call is None:
        return "is not called in a forward pass"
    if len(call.arguments) != 1:
        return f"takes {', '.join(call.arguments)} and not hidden states alone"
    return "does not take and return one state for each token"


def _suggestion(wanted: str, calls: Mapping[str, _Call]) -> str:
    """Name the yield points that are nearest to a name or pattern, layers as "*"."""
    names = list(
        dict.fromkeys(_any_layer(name) for name, call in calls.items() if call.token_dim is not None)
    )
    near = difflib.get_close_matches(_any_layer(wanted), names, n=_MOST_NAMES, cutoff=0.0)
    return f"the nearest yield points are {', '.join(near)}"


def _any_layer(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
