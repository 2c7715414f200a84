"""Which bytes of which safetensors file make up each parameter, and each expert's share of one.

transformers renames the tensors of a checkpoint and fuses some of them (one w1, w2, w3 per expert become
gate_up_proj [E, 2I, H] and down_proj [E, H, I]). Its own rules are followed here, as far as the result is
made of whole stretches of the stored tensors. Other conversions (transposed, split, interleaved) are left to
transformers: such parameters are loaded once and stay resident.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from batchgen_data.errors import ConfigError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a checkpoint keeps a tensor: its bytes lie in a row from `offset` of the file on."""

    name: str
    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` elements of `source` from `source_first` on, which go to `first` of a parameter."""

    source: StoredTensor
    source_first: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter, or one expert's share of it, and the pieces it is filled with.

    Attributes:
        name: The parameter's name in its module's own namespace.
        shape: Of this part.
        dtype: What it runs in; pieces of another type are converted.
        pieces: In order; together they cover the part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the running type."""
        return math.prod(self.shape) * self.dtype.itemsize


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Read the headers of safetensors files; a later file's tensor replaces an earlier one of its name.

    Raises:
        ConfigError: A file is shorter than its header says, or holds a type or an alignment that cannot
            be read.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        with file.open("rb") as raw:
            header_bytes = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(header_bytes))
        data = 8 + header_bytes
        end = data
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype = _DTYPES.get(entry["dtype"])
            first, last = entry["data_offsets"]
            end = max(end, data + last)
            if dtype is None:
                raise ConfigError(
                    f"{file}: tensor {name} is of type {entry['dtype']}, which is not supported"
                )
            if (data + first) % dtype.itemsize:
                raise ConfigError(
                    f"{file}: tensor {name} starts at byte {data + first}, no multiple of its element size; "
                    "save the model again (model.save_pretrained(folder))"
                )
            found[name] = StoredTensor(name, file, data + first, dtype, tuple(entry["shape"]))
        if file.stat().st_size < end:
            raise ConfigError(
                f"the weights file {file} is truncated: it has {file.stat().st_size} bytes and its header "
                f"speaks of {end}; download it again"
            )
    return found


def parameter_pieces(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor]
) -> dict[str, tuple[Piece, ...]]:
    """Find the pieces of every parameter that is made of whole stretches of stored tensors.

    Args:
        model: On any device, the meta device included.
        stored: From `stored_tensors`.

    Returns:
        Pieces by parameter name. Parameters that need another conversion, and those that are missing from
        the checkpoint, are left out.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    expected = model.state_dict()
    prefix = model.base_model_prefix
    # As in transformers' convert_and_load_state_dict_in_model: the order of names is the order of experts.
    sources: dict[str, dict[str | None, list[StoredTensor]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], prefix, expected)
        if target in expected:
            sources.setdefault(target, {}).setdefault(pattern, []).append(stored[name])
    found = {}
    for target, groups in sources.items():
        pattern = next(iter(groups))
        converter = by_pattern[pattern] if pattern is not None else None
        placed = _place(groups, converter, tuple(expected[target].shape))
        if placed is not None:
            found[target] = placed
    return found


def _place(
    groups: Mapping[str | None, list[StoredTensor]],
    converter: WeightConverter | None,
    shape: tuple[int, ...],
) -> tuple[Piece, ...] | None:
    if converter is None:
        (tensors,) = groups.values()
        ordered = tensors if len(tensors) == 1 and tensors[0].shape == shape else []
    elif len(converter.target_patterns) > 1:
        return None
    else:
        by_source = [groups[pattern] for pattern in converter.source_patterns if pattern in groups]
        kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
        if kinds == [(Concatenate, 0)]:
            ordered = [tensor for tensors in by_source for tensor in tensors]
        elif kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            # One tensor of each pattern per expert, one after the other.
            even = len({len(tensors) for tensors in by_source}) == 1 and len(by_source[0]) == shape[0]
            ordered = [tensor for one in zip(*by_source, strict=True) for tensor in one] if even else []
        else:
            return None
    pieces = []
    first = 0
    for tensor in ordered:
        pieces.append(Piece(tensor, 0, first, tensor.count))
        first += tensor.count
    return tuple(pieces) if first == math.prod(shape) else None


def whole_part(name: str, parameter: torch.Tensor, pieces: tuple[Piece, ...]) -> Part:
    """The part that is the whole parameter."""
    return Part(name, tuple(parameter.shape), parameter.dtype, pieces)


def expert_part(name: str, parameter: torch.Tensor, pieces: tuple[Piece, ...], expert: int) -> Part:
    """One expert's share of a parameter [E, ...]."""
    count = parameter[0].numel()
    start, end = expert * count, (expert + 1) * count
    own = []
    for piece in pieces[bisect_right(pieces, start, key=lambda piece: piece.first) - 1 :]:
        if piece.first >= end:
            break
        first, last = max(piece.first, start), min(piece.first + piece.count, end)
        own.append(Piece(piece.source, piece.source_first + first - piece.first, first - start, last - first))
    return Part(name, tuple(parameter.shape[1:]), parameter.dtype, tuple(own))


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's decoder layers, in order.

    Raises:
        ConfigError: They are not kept in one list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():  # outer modules first, so never a list inside a layer
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(f"{type(model).__name__} does not keep its {count} decoder layers in one list")


def num_experts(module: nn.Module) -> int:
    """How many experts a module of `expert_modules` holds."""
    return int(cast(int, module.num_experts))


def expert_modules(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a layer that hold experts and run through transformers' registry, with their names."""
    return [
        (name, module)
        for name, module in layer.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "num_experts")
    ]


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters, by name, of a module of `expert_modules` whose first dimension is the expert."""
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim >= 2 and parameter.shape[0] == num_experts(module)
    }
