"""Which weights stay on the device and which are streamed: arithmetic on sizes, without the weights.

What every pass reads costs the same wherever it belongs, so the choice is simple: first everything that is
no layer's own (embedding, head, norms), then the layers without their experts, then experts. What is left
out is spread evenly, so that the reader always has computation to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen_data.errors import PlanError

# One buffer is computed with while the next is filled.
_LEAST_SLOTS = 2
# More expert buffers cover the time between two sparse blocks; they are small beside the experts kept.
_MOST_EXPERT_SLOTS = 8
_EXPERT_SLOTS_SHARE = 1 / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Bytes of a model's weights in the running type.

    Attributes:
        fixed_bytes: What always stays: embedding, head, norms, buffers, and what cannot be streamed.
        layer_bytes: Each layer's own weights, without experts that can be streamed one by one.
        expert_bytes: One expert of each layer; 0 for a layer without.
        num_experts: Of each layer.
        staging_bytes: Buffers of the reader.
    """

    fixed_bytes: int
    layer_bytes: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    num_experts: tuple[int, ...]
    staging_bytes: int

    @property
    def total_bytes(self) -> int:
        """All weights."""
        experts = zip(self.expert_bytes, self.num_experts, strict=True)
        return self.fixed_bytes + sum(self.layer_bytes) + sum(size * count for size, count in experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """What stays, and the buffers for the rest.

    Attributes:
        streamed_layers: Layers whose own weights are streamed.
        resident_experts: How many experts of each layer stay: the first ones.
        layer_slots: Buffers for layers.
        expert_slots: Buffers for experts.
        resident_bytes: Bytes of what stays.
        ring_bytes: Bytes of all buffers, the reader's included.
    """

    streamed_layers: frozenset[int]
    resident_experts: tuple[int, ...]
    layer_slots: int
    expert_slots: int
    resident_bytes: int
    ring_bytes: int


def choose_residency(sizes: WeightSizes, budget_bytes: int, name: str = "the model") -> Residency | None:
    """Fill a budget with weights; None means that all of them fit.

    Raises:
        PlanError: The budget is below what always stays plus the smallest ring.
    """
    if sizes.total_bytes <= budget_bytes:
        return None
    layer_slot, expert_slot = max(sizes.layer_bytes), max(sizes.expert_bytes)
    free = budget_bytes - sizes.fixed_bytes - sizes.staging_bytes - _LEAST_SLOTS * expert_slot
    layer_slots = 0
    if not expert_slot or sum(sizes.layer_bytes) > free:
        layer_slots = _LEAST_SLOTS
        free -= layer_slots * layer_slot
    if free < 0:
        need = budget_bytes - free
        raise PlanError(
            f"weights_memory of {budget_bytes:,} bytes is too small to stream {name} ({sizes.total_bytes:,} "
            f"bytes of weights): {sizes.fixed_bytes:,} bytes always stay, and streaming needs "
            f"{need - sizes.fixed_bytes:,} bytes of buffers ({_LEAST_SLOTS} of the largest layer or expert); "
            f"set weights_memory to at least {min(need, sizes.total_bytes):,} bytes"
        )
    resident_layers = set(range(len(sizes.layer_bytes)))
    if layer_slots:
        resident_layers = _spread(sizes.layer_bytes, free)
    free -= sum(sizes.layer_bytes[layer] for layer in resident_layers)
    expert_slots = 0
    resident_experts = sizes.num_experts
    if expert_slot:
        more = min(_MOST_EXPERT_SLOTS - _LEAST_SLOTS, int(free * _EXPERT_SLOTS_SHARE) // expert_slot)
        expert_slots = _LEAST_SLOTS + more
        free -= more * expert_slot
        resident_experts = _share_experts(sizes, free)
        free -= sum(a * b for a, b in zip(resident_experts, sizes.expert_bytes, strict=True))
    ring_bytes = layer_slots * layer_slot + expert_slots * expert_slot + sizes.staging_bytes
    return Residency(
        streamed_layers=frozenset(range(len(sizes.layer_bytes))) - resident_layers,
        resident_experts=resident_experts,
        layer_slots=layer_slots,
        expert_slots=expert_slots,
        resident_bytes=budget_bytes - free - ring_bytes,
        ring_bytes=ring_bytes,
    )


def _spread(layer_bytes: Sequence[int], free: int) -> set[int]:
    """As many layers as fit, spread evenly over the model; those of no bytes always fit."""
    count = len(layer_bytes)
    most = 0
    for size in sorted(layer_bytes):
        if size > free:
            break
        free -= size
        most += 1
    # Layers differ little: an even choice of as many may not fit, then one less is tried.
    budget = free + sum(sorted(layer_bytes)[:most])
    while most:
        chosen = {(number + 1) * count // most - 1 for number in range(most)}
        if sum(layer_bytes[layer] for layer in chosen) <= budget:
            return chosen
        most -= 1
    return set()


def _share_experts(sizes: WeightSizes, free: int) -> tuple[int, ...]:
    """The same number of experts for every layer, and one more for as many layers as possible."""
    layers = [layer for layer, count in enumerate(sizes.num_experts) if count and sizes.expert_bytes[layer]]
    shares = [0] * len(sizes.num_experts)
    while True:
        open_layers = [layer for layer in layers if shares[layer] < sizes.num_experts[layer]]
        fits = sum(sizes.expert_bytes[layer] for layer in open_layers) <= free
        chosen = open_layers
        if not fits:
            chosen = []
            for layer in open_layers:
                if sizes.expert_bytes[layer] <= free - sum(sizes.expert_bytes[one] for one in chosen):
                    chosen.append(layer)
        for layer in chosen:
            shares[layer] += 1
            free -= sizes.expert_bytes[layer]
        if not fits or not chosen:
            return tuple(shares)
