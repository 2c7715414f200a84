"""What is streamed at once: each decoder layer's own weights, and each expert of a sparse block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from batchgen_data.models.checkpoint_map import (
    Part,
    Piece,
    decoder_layers,
    expert_modules,
    expert_parameters,
    expert_part,
    num_experts,
    whole_part,
)
from batchgen_data.models.residency import Residency, WeightSizes
from batchgen_data.models.weight_files import (
    Read,
    place_part,
    placed_bytes,
    plan_placed,
    plan_reads,
    read_size,
)

# Two reads under way, one being copied.
NUM_READ_BUFFERS = 3
# Of each parameter in a buffer: as PyTorch aligns its own.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What is streamed at once.

    Attributes:
        parts: What it holds.
        offsets: Where each part lies in the unit's buffer, in bytes.
        placed: Whether a part lies so that it can be read there without a copy.
        num_bytes: Of the buffer.
    """

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]
    placed: tuple[bool, ...]
    num_bytes: int

    def plan_reads(self, read_bytes: int, *, in_place: bool) -> tuple[Read, ...]:
        """What to read, in pieces of at most `read_bytes` (a multiple of 4096).

        Args:
            read_bytes: Of a read buffer.
            in_place: Whether the unit's buffer is memory that a disk can write to.
        """
        reads = [
            read
            for part, offset, placed in zip(self.parts, self.offsets, self.placed, strict=True)
            if in_place and placed
            for read in plan_placed(part, offset, read_bytes)
        ]
        copied = [not (in_place and placed) for placed in self.placed]
        return (*reads, *plan_reads(self.parts, read_bytes, only=copied))


def make_unit(parts: Sequence[Part]) -> Unit:
    """Lay parts out in a buffer, one after the other."""
    offsets: list[int] = []
    placed: list[bool] = []
    end = 0
    for part in parts:
        place = place_part(part, end)
        offsets.append(end if place is None else place)
        placed.append(place is not None)
        if place is None:
            end += -(-part.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        else:
            end = placed_bytes(part, place)
    return Unit(tuple(parts), tuple(offsets), tuple(placed), end)


class StreamableWeights:
    """A model's parameters, sorted by whether and how they can be streamed.

    Args:
        model: Parameters may be on the meta device.
        pieces: From `checkpoint_map.parameter_pieces`.

    Attributes:
        layers: The decoder layers.
        units: The unit of each layer's own weights.
        expert_modules: The module that holds each layer's experts; None where it has none to stream.
        experts: The units of each layer's experts.
    """

    def __init__(self, model: PreTrainedModel, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        self.model = model
        self.layers = decoder_layers(model)
        prefix = next(name for name, module in model.named_modules() if module is self.layers)
        owners: dict[int, int] = {}
        for _, parameter in model.named_parameters(remove_duplicate=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        self.units: list[Unit] = []
        self.expert_modules: list[nn.Module | None] = []
        self.experts: list[list[Unit]] = []
        for number, layer in enumerate(self.layers):
            found = {
                name: (parameter, pieces[f"{prefix}.{number}.{name}"])
                for name, parameter in layer.named_parameters()
                # One that several modules share is needed at more than one time.
                if f"{prefix}.{number}.{name}" in pieces and owners[id(parameter)] == 1
            }
            name, module = next(iter(expert_modules(layer)), ("", None))
            own = {} if module is None else _stacked(name, module, found)
            self.units.append(
                make_unit([whole_part(name, *entry) for name, entry in found.items() if name not in own])
            )
            self.expert_modules.append(module if own else None)
            count = num_experts(module) if own and module is not None else 0
            self.experts.append(
                [
                    make_unit([expert_part(own[name], *found[name], expert) for name in own])
                    for expert in range(count)
                ]
            )
        self.read_bytes = read_size(unit.parts for unit in self.all_units())

    def all_units(self) -> Iterator[Unit]:
        """Every unit, layer by layer."""
        for unit, experts in zip(self.units, self.experts, strict=True):
            yield unit
            yield from experts

    @property
    def sizes(self) -> WeightSizes:
        """Bytes of what is here, in the running types."""
        tensors = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}.values()
        streamable = sum(part.num_bytes for unit in self.all_units() for part in unit.parts)
        return WeightSizes(
            fixed_bytes=sum(tensor.nbytes for tensor in tensors) - streamable,
            layer_bytes=tuple(unit.num_bytes for unit in self.units),
            expert_bytes=tuple(units[0].num_bytes if units else 0 for units in self.experts),
            num_experts=tuple(map(len, self.experts)),
            staging_bytes=NUM_READ_BUFFERS * self.read_bytes,
        )

    def streamed_pieces(self, residency: Residency) -> Iterator[Piece]:
        """The pieces that are not loaded with the model: streamed layers, and every expert."""
        for number, unit in enumerate(self.units):
            if number in residency.streamed_layers:
                yield from (piece for part in unit.parts for piece in part.pieces)
        for units in self.experts:
            yield from (piece for unit in units for part in unit.parts for piece in part.pieces)


def _stacked(prefix: str, module: nn.Module, found: dict[str, Any]) -> dict[str, str]:
    """Expert parameters with one share per expert: name in the module, by name in the layer."""
    own = {f"{prefix}.{name}": name for name in expert_parameters(module)}
    # The expert function needs all of an expert, so either all its parameters come one by one or none.
    return own if all(name in found for name in own) else {}
