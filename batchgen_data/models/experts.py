"""The expert function: one product per expert that got tokens, for weights that are there or come one by one.

Registered beside transformers' own. Tokens are sorted by expert; experts add to the result in ascending
order and each token at most once per expert, so the sum of a token never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from batchgen_data.models.checkpoint_map import expert_modules, expert_parameters

NAME = "batchgen"

# Of the experts that got tokens, ascending: each one's weights by parameter name, valid until the next.
ExpertSource = Callable[[list[int]], Iterator[tuple[int, dict[str, torch.Tensor]]]]


def run_experts(
    experts: Any,
    hidden_TH: torch.Tensor,
    top_k_index_TK: torch.Tensor,
    top_k_weights_TK: torch.Tensor,
) -> torch.Tensor:
    """The function transformers calls in place of an expert module's forward.

    Args:
        experts: The module; `expert_source`, where it has one, brings the weights one by one.
        hidden_TH: Hidden states.
        top_k_index_TK: Experts of each token; ids beyond the last expert are ignored.
        top_k_weights_TK: What each of them counts.

    Returns:
        [T, H], the weighted sum of the experts' outputs.
    """
    num_choices = top_k_index_TK.shape[-1]
    chosen = top_k_index_TK.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    tokens = order // num_choices
    weights = top_k_weights_TK.reshape(-1)[order].unsqueeze(-1)
    counts = torch.bincount(chosen, minlength=experts.num_experts)[: experts.num_experts].tolist()
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    # Half precision would lose bits with every expert added.
    total_TH = torch.zeros(hidden_TH.shape, dtype=torch.float32, device=hidden_TH.device)
    hit = [expert for expert, count in enumerate(counts) if count]
    source = getattr(experts, "expert_source", None)
    for expert, parameters in _resident(experts, hit) if source is None else source(hit):
        own = slice(ends[expert], ends[expert + 1])
        output = _run_expert(experts, parameters, hidden_TH[tokens[own]])
        total_TH.index_add_(0, tokens[own], (output * weights[own]).float())
    return total_TH.to(hidden_TH.dtype)


def install_experts(model: PreTrainedModel) -> None:
    """Make `model` use `run_experts`, if it has experts that go through the registry."""
    if expert_modules(model):
        model.set_experts_implementation(NAME)


def install_source(experts: Any, source: ExpertSource) -> None:
    """Let an expert module take its weights from `source` instead of its own parameters."""
    experts.expert_source = source


def _resident(experts: Any, hit: list[int]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    stacked = expert_parameters(experts)
    for expert in hit:
        yield expert, {name: parameter[expert] for name, parameter in stacked.items()}


def _run_expert(experts: Any, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    up = _linear(experts, parameters, "gate_up_proj" if experts.has_gate else "up_proj", x)
    output = _linear(
        experts, parameters, "down_proj", experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    )
    return experts.post_expert_norm(output) if getattr(experts, "has_post_expert_norm", False) else output


def _linear(experts: Any, parameters: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    weight = parameters[name].T if experts.is_transposed else parameters[name]
    return torch.nn.functional.linear(x, weight, parameters.get(f"{name}_bias"))


ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
