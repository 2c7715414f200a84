"""What a pass costs under a plan: measured costs, one layer's graph, and the sum. No torch here."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from typing import Any

from batchgen_data.errors import ConfigError
from batchgen_data.planner.dag import LayerGraph, Node
from batchgen_data.planner.plan import Budget, Plan
from batchgen_data.planner.roofline import Roofline
from batchgen_data.planner.sizes import LayerSizes, ModelSizes
from batchgen_data.planner.workload import PassShape

COMPUTE, COPY, DISK = "compute", "copy", "disk"
# Sub-batches and pieces of streamed experts that a graph shows one by one; more are drawn several as one.
_MOST_PARTS = 8

FORMAT = 2
# Fields of a profile that are numbers.
_PLAIN = (
    "lane_tokens",
    "num_lanes",
    "sub_batch_s",
    "copy_bytes_s",
    "copy_share",
    "copy_turn_s",
    "disk_bytes_s",
)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCosts:
    """One layer of a kind: attention with all that is not the feed-forward block, and that block.

    Terms of `attention`: `kv_tokens` (tokens that decoding sequences attend to, all together),
    `prefill_pairs` (pairs of a prompt token and one it attends to), `chunks` (sequences that prompt tokens
    belong to). Of `mlp`: `experts_hit`.
    """

    attention: Roofline
    mlp: Roofline


@dataclasses.dataclass(frozen=True, slots=True)
class PassCosts:
    """One way of running passes: a layer of each kind, and the rest of a pass.

    `rest` goes by the rows that pass through the output head and are sampled from, with `tokens` as a term.
    """

    layers: Mapping[str, LayerCosts]
    rest: Roofline

    def scaled(self, factor: float) -> PassCosts:
        """The same, `factor` times as long."""
        layers = {
            kind: LayerCosts(layer.attention.scaled(factor), layer.mlp.scaled(factor))
            for kind, layer in self.layers.items()
        }
        return PassCosts(layers, self.rest.scaled(factor))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured of a model on a device.

    Attributes:
        together: passes as one unit or in sub-batches, all threads in each product.
        lanes: passes cut into one lane per thread; None where that is not done.
        lane_tokens: tokens from which a pass is cut into lanes.
        num_lanes: into how many.
        streamed_mlp: a sparse block whose experts come one by one; None where there are no experts.
        sub_batch_s: what a further sub-batch costs each layer, beyond its work.
        copy_bytes_s: bandwidth between the tiers.
        copy_share: seconds of computing that a second of copying costs: on a CPU, a thread's share.
        copy_turn_s: what staging the pages of a layer and sub-batch costs beyond its bytes.
        disk_bytes_s: bandwidth of reading the checkpoint.
        facts: what was measured, where and when, for people.
    """

    together: PassCosts
    lanes: PassCosts | None = None
    lane_tokens: int = 0
    num_lanes: int = 1
    streamed_mlp: Roofline | None = None
    sub_batch_s: float = 0.0
    copy_bytes_s: float = math.inf
    copy_share: float = 0.0
    copy_turn_s: float = 0.0
    disk_bytes_s: float = math.inf
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "format": FORMAT,
            "together": _costs_to_dict(self.together),
            "lanes": _costs_to_dict(self.lanes) if self.lanes else None,
            "streamed_mlp": self.streamed_mlp.to_dict() if self.streamed_mlp else None,
            **{name: getattr(self, name) for name in _PLAIN},
            "facts": dict(self.facts),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """The opposite of `to_dict`.

        Raises:
            ConfigError: not a profile, or one of another format.
        """
        try:
            values = dict(values)
            if values.pop("format") != FORMAT:
                raise ConfigError("the profile was written by another version")
            lanes, streamed_mlp = values.pop("lanes"), values.pop("streamed_mlp")
            return cls(
                together=_costs_from_dict(values.pop("together")),
                lanes=_costs_from_dict(lanes) if lanes is not None else None,
                streamed_mlp=Roofline.from_dict(streamed_mlp) if streamed_mlp is not None else None,
                **values,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a profile: {error!r}") from error


def _costs_to_dict(costs: PassCosts) -> dict[str, Any]:
    layers = {
        kind: {"attention": layer.attention.to_dict(), "mlp": layer.mlp.to_dict()}
        for kind, layer in costs.layers.items()
    }
    return {"layers": layers, "rest": costs.rest.to_dict()}


def _costs_from_dict(values: Mapping[str, Any]) -> PassCosts:
    layers = {
        kind: LayerCosts(Roofline.from_dict(layer["attention"]), Roofline.from_dict(layer["mlp"]))
        for kind, layer in values["layers"].items()
    }
    return PassCosts(layers, Roofline.from_dict(values["rest"]))


@dataclasses.dataclass(frozen=True, slots=True)
class _Streamed:
    """Bytes of the checkpoint that one layer reads in a pass, and buffers for experts."""

    core_bytes: float = 0.0
    expert_bytes: float = 0.0
    expert_slots: int = 0


class CostModel:
    """Predicts passes of one model under one plan.

    Args:
        sizes: the model's.
        profile: measured costs; it knows each kind of layer of the model.
        budget: its bandwidths, where set, take the place of the profile's.
        plan: the choice; predictions in it are not read.
        page_tokens: tokens of a KV page.

    Raises:
        PlanError: the plan's memory for weights is too small to stream them.
    """

    def __init__(
        self, sizes: ModelSizes, profile: Profile, budget: Budget, plan: Plan, page_tokens: int = 64
    ) -> None:
        self.sizes = sizes
        self.profile = profile
        self.plan = plan
        self.page_tokens = page_tokens
        self._kept = sizes.residency(plan.weights_memory)
        # Sub-batches take turns on all threads; else passes may be cut into lanes.
        self._in_turns = bool(
            plan.attention_sub_batch
            or plan.moe_batch_tokens
            or plan.kv_residence == "host"
            or self._kept is not None
        )
        self._disk_bytes_s = budget.disk_bytes_s or profile.disk_bytes_s
        self._copy_bytes_s = budget.copy_bytes_s or profile.copy_bytes_s

    def pass_s(self, shape: PassShape) -> float:
        """Seconds of one pass."""
        if shape.num_tokens <= 0:
            return 0.0
        costs = self._costs(shape)
        # Each sub-batch goes through embedding and head by itself.
        number = self.num_sub_batches(shape)
        seconds = number * costs.rest.seconds(shape.num_sequences / number, tokens=shape.num_tokens / number)
        return seconds + sum(
            layer.count * self.layer_graph(layer, shape).seconds for layer in self.sizes.layers
        )

    def num_sub_batches(self, shape: PassShape) -> int:
        """Sub-batches of a pass: as many as sequences and the staging of KV pages ask for."""
        number = 1
        if self.plan.attention_sub_batch:
            number = math.ceil(shape.num_sequences / self.plan.attention_sub_batch)
        if self.plan.kv_residence == "host" and self.plan.kv_memory:
            page_bytes = self.page_tokens * self.sizes.widest_kv_token_bytes
            staged_pages = max(1, self.plan.kv_memory // 2 // page_bytes)
            number = max(number, math.ceil(self._num_pages(shape) / staged_pages))
        return min(number, max(1, math.ceil(shape.num_sequences)))

    def layer_graph(self, layer: LayerSizes, shape: PassShape) -> LayerGraph:
        """One layer in the midst of a pass, with what is fetched for the next one meanwhile.

        Where only some layers or experts are streamed, each layer reads an even share of them.
        """
        costs = self._costs(shape).layers[layer.kind]
        num_sub_batches = self.num_sub_batches(shape)
        num_parts = min(num_sub_batches, _MOST_PARTS)
        streamed = self._streamed(layer, shape)
        copy_s, new_copy_s = self._copy_seconds(layer, shape)
        arrived_bytes = (streamed.core_bytes + streamed.expert_bytes) / self.sizes.stored_share
        # Weights of the running type are read to their places.
        if self.sizes.stored_share == 1:
            arrived_bytes = 0.0
        # On a CPU the threads that copy take their time from those that compute.
        lost_s = self.profile.copy_share * (copy_s + new_copy_s + arrived_bytes / self._copy_bytes_s)
        if copy_s:
            lost_s += num_sub_batches * self.profile.copy_turn_s
        combined = self._combines(layer)
        attention_s = self._attention_s(costs, layer, shape, num_sub_batches)
        mlp_s = self._mlp_s(costs, layer, shape, num_sub_batches)
        own_mlp_s = 0.0 if combined or streamed.expert_bytes else mlp_s / num_parts
        nodes: list[Node] = []
        for part in range(1, num_parts + 1):
            label = f" {part}/{num_parts}" if num_parts > 1 else ""
            waits: tuple[str, ...] = ()
            if copy_s and part > 1:
                # Two halves: one is read while the other is filled.
                freed = (f"attention {part - 2}/{num_parts}",) if part > 2 else ()
                nodes.append(Node(f"KV in{label}", COPY, copy_s / num_parts, freed))
                waits = (f"KV in{label}",)
            nodes.append(Node(f"attention{label}", COMPUTE, (attention_s + lost_s) / num_parts, waits))
            if new_copy_s:
                nodes.append(Node(f"KV out{label}", COPY, new_copy_s / num_parts, (f"attention{label}",)))
            if own_mlp_s:
                nodes.append(Node(f"MLP{label}", COMPUTE, own_mlp_s))
        previous = f"attention{label}"
        if copy_s:
            freed = (f"attention {num_parts - 1}/{num_parts}",) if num_parts > 1 else ()
            nodes.append(Node("KV in, next layer", COPY, copy_s / num_parts, freed))
        if streamed.core_bytes:
            nodes.append(Node("weights, next layer", DISK, streamed.core_bytes / self._disk_bytes_s))
        if streamed.expert_bytes:
            nodes += self._expert_nodes(layer, shape, mlp_s, previous, streamed)
        elif combined:
            nodes.append(Node("experts" if layer.num_experts else "MLP", COMPUTE, mlp_s, (previous,)))
        return LayerGraph(nodes)

    def _combines(self, layer: LayerSizes) -> bool:
        """Whether sub-batches are combined at the layer's feed-forward block; one alone is no other case."""
        if self.plan.yield_at is None:
            return layer.num_experts > 0
        return any(fnmatch.fnmatchcase(layer.feed_forward, pattern) for pattern in self.plan.yield_at)

    def _expert_nodes(
        self, layer: LayerSizes, shape: PassShape, mlp_s: float, after: str, streamed: _Streamed
    ) -> list[Node]:
        hit = self._experts_hit(layer, shape)
        num_parts = max(1, min(_MOST_PARTS, round(hit)))
        read_s = streamed.expert_bytes / self._disk_bytes_s / num_parts
        # Where all are needed they are asked for before the router has run, as far as buffers reach.
        ahead = max(1, round(streamed.expert_slots * num_parts / hit))
        all_hit = hit > layer.num_experts - 0.5
        nodes = []
        for part in range(1, num_parts + 1):
            label = f"experts {part}/{num_parts}"
            waits = [] if all_hit else [after]
            if part > ahead:
                waits.append(f"experts {part - ahead}/{num_parts}")
            nodes.append(Node(f"{label} read", DISK, read_s, tuple(waits)))
            nodes.append(Node(label, COMPUTE, mlp_s / num_parts, (after, f"{label} read")))
        return nodes

    def _streamed(self, layer: LayerSizes, shape: PassShape) -> _Streamed:
        """What a layer of a kind reads from the checkpoint, on average."""
        kept = self._kept
        if kept is None:
            return _Streamed()
        first = 0
        for group in self.sizes.layers:
            if group is layer:
                break
            first += group.count
        own = range(first, first + layer.count)
        layers_share = len(kept.streamed_layers.intersection(own)) / layer.count
        core_bytes = layer.core_bytes * layers_share * self.sizes.stored_share
        if not layer.num_experts:
            return _Streamed(core_bytes)
        resident = sum(kept.resident_experts[number] for number in own) / layer.count
        read = self._experts_hit(layer, shape) * (1 - resident / layer.num_experts)
        return _Streamed(core_bytes, read * layer.expert_bytes * self.sizes.stored_share, kept.expert_slots)

    def _costs(self, shape: PassShape) -> PassCosts:
        lanes = self.profile.lanes
        if lanes is None or self._in_turns or shape.num_tokens < self.profile.lane_tokens:
            return self.profile.together
        return lanes

    def _attention_s(self, costs: LayerCosts, layer: LayerSizes, shape: PassShape, number: int) -> float:
        """Of all sub-batches together, each of an even part of the pass."""
        context = min(shape.context, layer.window or math.inf)
        prefill_context = min(shape.prefill_context, layer.window or math.inf)
        kv_tokens = shape.decoding * (context + 1)
        pairs = shape.prefill_tokens * prefill_context
        each = costs.attention.seconds(
            shape.num_tokens / number,
            kv_tokens=kv_tokens / number,
            prefill_pairs=pairs / number,
            chunks=shape.chunks / number,
        )
        return number * each + (number * self.profile.sub_batch_s if number > 1 else 0.0)

    def _mlp_s(self, costs: LayerCosts, layer: LayerSizes, shape: PassShape, num_sub_batches: int) -> float:
        calls = self._calls(layer, shape, num_sub_batches)
        mlp = costs.mlp
        if layer.num_experts and self._kept is not None and self.profile.streamed_mlp is not None:
            mlp = self.profile.streamed_mlp
        # Of lanes each computes its own tokens, at the same time.
        lanes = 1 if costs is self.profile.together.layers.get(layer.kind) else self.profile.num_lanes
        tokens = shape.num_tokens / calls
        return calls * mlp.seconds(tokens, experts_hit=layer.experts_hit(tokens / lanes))

    def _calls(self, layer: LayerSizes, shape: PassShape, num_sub_batches: int) -> int:
        """How often the feed-forward block of a layer runs in a pass."""
        if not self._combines(layer):
            return num_sub_batches
        return math.ceil(shape.num_tokens / (self.plan.moe_batch_tokens or shape.num_tokens))

    def _experts_hit(self, layer: LayerSizes, shape: PassShape) -> float:
        """Experts read in a layer; those of another call are read again."""
        calls = self._calls(layer, shape, self.num_sub_batches(shape))
        return calls * layer.experts_hit(shape.num_tokens / calls)

    def _copy_seconds(self, layer: LayerSizes, shape: PassShape) -> tuple[float, float]:
        """Staging one layer's pages of all sequences, and writing the new tokens back."""
        if self.plan.kv_residence != "host":
            return 0.0, 0.0
        bandwidth = self._copy_bytes_s
        page_bytes = self.page_tokens * layer.kv_token_bytes
        return (
            self._num_pages(shape) * page_bytes / bandwidth,
            shape.num_tokens * layer.kv_token_bytes / bandwidth,
        )

    def _num_pages(self, shape: PassShape) -> float:
        """Pages of the sequences of a pass; half a page more each than their tokens fill."""
        tokens = shape.decoding * shape.context + shape.chunks * shape.prefill_context
        return tokens / self.page_tokens + shape.num_sequences / 2
