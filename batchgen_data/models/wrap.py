"""Yield points on unmodified modules: which modules suspend, and how they are hooked.

By default each layer's sparse block (the module that routes tokens to experts): attention runs in
sub-batches, the experts once over all of them. Dense models have no yield points and run as one unit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchgen_data.runtime.coroutine import at_yield_point


def sparse_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that own a router and experts, in layer order."""
    blocks = []
    for name, module in model.named_modules():
        experts = getattr(module, "experts", None)
        if isinstance(experts, nn.Module) and not name.endswith(".experts"):
            blocks.append(module)
    return blocks


def install_yield_points(modules: list[nn.Module]) -> None:
    """Make each module suspend the sub-batch that calls it; outside a sub-batch nothing changes."""
    for module in modules:
        _install(module)


def _install(module: nn.Module) -> None:
    original = module.forward

    def run(hidden: torch.Tensor) -> Any:
        return original(hidden)

    def forward(hidden_states: torch.Tensor) -> Any:
        return at_yield_point(run, hidden_states)

    module.forward = forward
