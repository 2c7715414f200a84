"""Forward passes that suspend between modules: the only place that switches coroutines.

A sub-batch runs the model's ordinary `forward` inside a greenlet. A module chosen as a yield point calls
`at_yield_point` instead of computing: the sub-batch is suspended with its hidden states. When every
sub-batch of the pass waits at the same module, their hidden states are combined, the module runs once over
all of them, and each sub-batch resumes with its part.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from greenlet import greenlet

from batchgen_data.errors import InternalError


@dataclasses.dataclass(frozen=True, slots=True)
class Yield:
    """A sub-batch suspended before `module`, with the hidden states it would have been called on."""

    module: Callable[[torch.Tensor], Any]
    hidden: torch.Tensor


@dataclasses.dataclass(slots=True)
class CoroutineCounts:
    """How often sub-batches were suspended and how often their work was combined."""

    yields: int = 0
    combines: int = 0


class _SubBatch(greenlet):
    """A greenlet that marks itself, so that a yield point outside any sub-batch just runs."""


def at_yield_point(module: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
    """Run `module` on `hidden`: combined with the other sub-batches of the pass, if there are any."""
    current = greenlet.getcurrent()
    if not isinstance(current, _SubBatch):
        return module(hidden)
    return current.parent.switch(Yield(module, hidden))


def run_sub_batches(
    forwards: Sequence[Callable[[], torch.Tensor]], counts: CoroutineCounts
) -> list[torch.Tensor]:
    """Run several forward passes together, combining them at their yield points.

    The caller holds `torch.inference_mode` for the whole call: grad modes belong to the thread, and a
    greenlet suspended inside one would leak it to the others.

    Args:
        forwards: one closure per sub-batch, all through the same model.
        counts: updated in place.

    Returns:
        What each closure returned, in order.

    Raises:
        Exception: whatever a sub-batch or a combined module raises; all sub-batches are unwound first.
    """
    if len(forwards) == 1:
        return [forwards[0]()]
    coroutines = []
    for forward in forwards:
        coroutine = _SubBatch(forward)
        coroutine.gr_context = contextvars.copy_context()
        coroutines.append(coroutine)
    try:
        states: list[Any] = [coroutine.switch() for coroutine in coroutines]
        while any(isinstance(state, Yield) for state in states):
            resumed = _combine(states, counts)
            states = [coroutine.switch(part) for coroutine, part in zip(coroutines, resumed, strict=True)]
        return states
    finally:
        for coroutine in coroutines:
            if not coroutine.dead:
                coroutine.throw()


def _combine(states: Sequence[Any], counts: CoroutineCounts) -> list[Any]:
    """Call the module that all sub-batches wait for, once, and split what it returns."""
    modules = {id(state.module) if isinstance(state, Yield) else None for state in states}
    if len(modules) != 1:
        raise InternalError("sub-batches of one pass wait at different modules")
    counts.yields += len(states)
    counts.combines += 1
    lengths = [state.hidden.shape[1] for state in states]
    result = states[0].module(torch.cat([state.hidden for state in states], dim=1))
    if isinstance(result, torch.Tensor):
        return list(result.split(lengths, dim=1))
    # Some sparse blocks return (hidden, router logits); the logits are per token, batch dimension folded.
    hidden, *rest = result
    num_tokens = sum(lengths)
    parts: list[list[Any]] = [[part] for part in hidden.split(lengths, dim=1)]
    for extra in rest:
        per_token = isinstance(extra, torch.Tensor) and extra.shape[0] == num_tokens
        pieces = extra.split(lengths, dim=0) if per_token else [extra] * len(lengths)
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return [tuple(part) for part in parts]
