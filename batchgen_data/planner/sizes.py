"""What a model's parts weigh, in bytes of the running type. No torch here."""

from __future__ import annotations

import dataclasses
import functools

from batchgen_data.models.residency import Residency, WeightSizes, choose_residency

# Buffers of the thread that streams weights, where nothing is known about the longest tensor.
_READER_BYTES = 3 * 4 * 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Decoder layers that are alike.

    Attributes:
        count: how many there are.
        core_bytes: weights of one such layer that every pass uses: all but its experts.
        num_experts, experts_per_token, expert_bytes: of a sparse block; 0 of a dense one.
        kv_token_bytes: keys and values of one token.
        window: tokens that attention looks back; None for all.
        feed_forward: name of the block where sub-batches can be combined, layer numbers as "*"; "" where
            they cannot.
    """

    count: int
    core_bytes: int
    kv_token_bytes: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_bytes: int = 0
    window: int | None = None
    feed_forward: str = ""

    @property
    def kind(self) -> str:
        """ "sparse" where tokens are routed to experts, else "dense"."""
        return "sparse" if self.num_experts else "dense"

    @property
    def layer_bytes(self) -> int:
        """All weights of one such layer."""
        return self.core_bytes + self.num_experts * self.expert_bytes

    def experts_hit(self, num_tokens: float) -> float:
        """Experts that get at least one of so many tokens, if each token picks evenly."""
        if not self.num_experts or num_tokens <= 0:
            return 0.0
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A model's parts.

    Attributes:
        architecture: class name of the model.
        layers: groups of equal layers, in the order in which they first appear.
        other_bytes: weights outside the layers: embedding, head, last norm.
        token_bytes: activations of one token in a pass, at most.
        logits_bytes: what sampling needs for one sequence.
        context_tokens: prompt and output together at most.
        num_parameters: of the whole model.
        stored_share: bytes of the checkpoint for each byte of weights in the running type.
        reader_bytes: buffers of the thread that streams weights, at most.
    """

    architecture: str
    layers: tuple[LayerSizes, ...]
    other_bytes: int
    token_bytes: int
    logits_bytes: int
    context_tokens: int
    num_parameters: int
    stored_share: float = 1.0
    reader_bytes: int = _READER_BYTES

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def layers_bytes(self) -> int:
        """Weights of all layers."""
        return sum(layer.count * layer.layer_bytes for layer in self.layers)

    @property
    def weights_bytes(self) -> int:
        """All weights."""
        return self.layers_bytes + self.other_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return sum(layer.count * layer.kv_token_bytes for layer in self.layers)

    @property
    def widest_kv_token_bytes(self) -> int:
        """Keys and values of one token in the layer where they are largest."""
        return max(layer.kv_token_bytes for layer in self.layers)

    @property
    def is_sparse(self) -> bool:
        """Whether some layer routes tokens to experts."""
        return any(layer.num_experts for layer in self.layers)

    @property
    def weight_sizes(self) -> WeightSizes:
        """The same sizes, layer by layer, as weight streaming counts them."""
        each = [layer for layer in self.layers for _ in range(layer.count)]
        return WeightSizes(
            fixed_bytes=self.other_bytes,
            layer_bytes=tuple(layer.core_bytes for layer in each),
            expert_bytes=tuple(layer.expert_bytes for layer in each),
            num_experts=tuple(layer.num_experts for layer in each),
            staging_bytes=self.reader_bytes,
        )

    def residency(self, weights_memory: int | None) -> Residency | None:
        """What stays on the device under a budget for weights; None where everything does.

        Raises:
            PlanError: the budget is below `least_weights_bytes`.
        """
        if weights_memory is None:
            return None
        return _residency(self, weights_memory)

    @property
    def buffer_bytes(self) -> int:
        """The least memory to stream weights through."""
        core = max(layer.core_bytes for layer in self.layers)
        expert = max(layer.expert_bytes for layer in self.layers)
        all_cores = sum(layer.count * layer.core_bytes for layer in self.layers)
        cores = min(2 * core, all_cores) if expert else 2 * core
        return self.reader_bytes + 2 * expert + cores

    @property
    def least_weights_bytes(self) -> int:
        """The least `weights_memory` that the model runs in."""
        return min(self.weights_bytes, self.other_bytes + self.buffer_bytes)

    def pass_bytes(self, num_sequences: int, num_tokens: int) -> int:
        """Memory of one pass beside weights and KV pages."""
        return num_tokens * self.token_bytes + num_sequences * self.logits_bytes


@functools.lru_cache(maxsize=256)
def _residency(sizes: ModelSizes, weights_memory: int) -> Residency | None:
    # A search asks the same many times.
    return choose_residency(sizes.weight_sizes, weights_memory, sizes.architecture)
