"""Forward passes that suspend between modules: the only place that switches coroutines.

A sub-batch runs the model's ordinary `forward` inside a greenlet. At a point that `models/wrap.py` has put
before a module it is suspended until every sub-batch of the pass is there. At a yield point their hidden
states are combined, the module runs once over all of them, and each resumes with its part; at a barrier
they only wait for one another.

What a sub-batch raises is its own failure, and the others go on without it. Where a combined module
raises, it runs again for each sub-batch, so that only those fail for which it raises alone.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from batchgen_data.errors import InternalError
from batchgen_data.runtime.faults import aborts_pass
from batchgen_data.runtime.trace import OFF, Trace

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A module boundary at which sub-batches are suspended.

    Attributes:
        name: of the module.
        run: computes the module on hidden states; None for a barrier.
        token_dim: which dimension of its hidden states, and of what it returns, is the tokens.
    """

    name: str
    run: Callable[[torch.Tensor], Any] | None
    token_dim: int = 1


@dataclasses.dataclass(slots=True, eq=False)
class Yield:
    """A sub-batch was suspended.

    Attributes:
        sub_batch: which.
        point: before what.
        hidden: what the module would have been called on; None at a barrier.
        at_s: when, in seconds of `time.perf_counter`.
    """

    sub_batch: _SubBatch
    point: Point
    hidden: torch.Tensor | None
    at_s: float


@dataclasses.dataclass(slots=True, eq=False)
class Combine:
    """Suspended sub-batches were resumed with what a module made of their hidden states together.

    Attributes:
        point: where they were.
        num_tokens: of all of them.
        num_calls: how often the module ran: more than once above the most tokens of a call.
        copy_s: seconds for joining and splitting hidden states, on the host.
        run_s: seconds in the module, on the host.
        retried: the module raised, and ran again for each sub-batch.
    """

    point: Point
    num_tokens: int
    num_calls: int = 0
    copy_s: float = 0.0
    run_s: float = 0.0
    retried: bool = False


@dataclasses.dataclass(slots=True)
class CoroutineCounts:
    """What the events of all passes add up to.

    Attributes:
        yields: sub-batches suspended at yield points.
        barriers: sub-batches suspended at barriers.
        wait_s: seconds that sub-batches were suspended, added up over them.
        combines: times that sub-batches were combined.
        calls: calls of modules that took.
        combined_tokens: tokens in them.
        copy_s: seconds for joining and splitting hidden states.
        run_s: seconds in the modules.
        retries: combined modules that raised and ran again for each sub-batch.
        failures: sub-batches that raised.
    """

    yields: int = 0
    barriers: int = 0
    wait_s: float = 0.0
    combines: int = 0
    calls: int = 0
    combined_tokens: int = 0
    copy_s: float = 0.0
    run_s: float = 0.0
    retries: int = 0
    failures: int = 0

    def add(self, event: Combine) -> None:
        """Count an event."""
        self.combines += 1
        self.calls += event.num_calls
        self.combined_tokens += event.num_tokens
        self.copy_s += event.copy_s
        self.run_s += event.run_s
        self.retries += event.retried


class _SubBatch(greenlet):
    """A greenlet that marks itself, so that a point outside any sub-batch changes nothing."""

    def __init__(self, number: int, forward: Callable[[], torch.Tensor]) -> None:
        super().__init__(lambda _: forward())
        self.gr_context = contextvars.copy_context()
        self.number = number
        self.outcome: torch.Tensor | Exception | None = None


def at_yield_point(point: Point, hidden: torch.Tensor) -> Any:
    """Run the point's module on `hidden`: in a sub-batch, combined with the others of the pass."""
    current = getcurrent()
    if isinstance(current, _SubBatch):
        return current.parent.switch(Yield(current, point, hidden, time.perf_counter()))
    assert point.run is not None
    return point.run(hidden)


def at_barrier(point: Point) -> None:
    """In a sub-batch, wait until all others of the pass are here."""
    current = getcurrent()
    if isinstance(current, _SubBatch):
        current.parent.switch(Yield(current, point, None, time.perf_counter()))


def run_sub_batches(
    forwards: Sequence[Callable[[], torch.Tensor]],
    counts: CoroutineCounts,
    *,
    most_tokens: int | None = None,
    trace: Trace = OFF,
) -> list[torch.Tensor | Exception]:
    """Run several forward passes in turns, combining them at yield points.

    The caller holds `torch.inference_mode` for the whole call: grad modes belong to the thread, and a
    greenlet suspended inside one would leak it to the others.

    Args:
        forwards: one closure per sub-batch, all through the same model.
        counts: updated in place.
        most_tokens: tokens of one combined call at most; None: all that wait.
        trace: where to record sub-batches and combined calls.

    Returns:
        For each closure, in order, what it returned, or the exception that was its own failure.

    Raises:
        Exception: the first sub-batch's failure where all of them failed; at once what says that the pass
            as a whole cannot run (`aborts_pass`). All sub-batches are unwound first.
        InternalError: sub-batches wait at different points.
    """
    if len(forwards) == 1 and most_tokens is None:
        return [forwards[0]()]
    sub_batches = [_SubBatch(number, forward) for number, forward in enumerate(forwards)]
    try:
        states = [_resume(sub_batch, None, counts, trace) for sub_batch in sub_batches]
        while waiting := [state for state in states if state is not None]:
            states = []
            for event, answer in zip(waiting, _answers(waiting, counts, most_tokens, trace), strict=True):
                counts.wait_s += time.perf_counter() - event.at_s
                states.append(_resume(event.sub_batch, answer, counts, trace))
    finally:
        for sub_batch in sub_batches:
            if not sub_batch.dead:
                sub_batch.throw()
    outcomes: list[Any] = [sub_batch.outcome for sub_batch in sub_batches]
    if all(isinstance(outcome, Exception) for outcome in outcomes):
        raise outcomes[0]
    return outcomes


def _resume(sub_batch: _SubBatch, answer: Any, counts: CoroutineCounts, trace: Trace) -> Yield | None:
    """Let a sub-batch go on to its next point; None when it ended, with its outcome set."""
    started_s = time.perf_counter()
    try:
        state = sub_batch.throw(answer) if isinstance(answer, Exception) else sub_batch.switch(answer)
    except Exception as error:
        if aborts_pass(error):
            raise
        counts.failures += 1
        # Its frames hold the hidden states of a sub-batch that nobody needs any more.
        sub_batch.outcome = error.with_traceback(None)
        state = None
    if sub_batch.dead:
        if sub_batch.outcome is None:
            sub_batch.outcome = state
        state = None
    if trace.on:
        until = state.point.name if state is not None else "the end"
        name = f"sub-batch {sub_batch.number}"
        trace.add(name, "sub-batches", started_s, time.perf_counter(), until=until)
    return state


def _answers(
    waiting: Sequence[Yield], counts: CoroutineCounts, most_tokens: int | None, trace: Trace
) -> Sequence[Any]:
    """What each waiting sub-batch is resumed with: its part, the exception it is to raise, or None."""
    point = waiting[0].point
    for event in waiting:
        if event.point is not point:
            raise InternalError(f"sub-batches of one pass wait at {point.name} and {event.point.name}")
    if point.run is None:
        counts.barriers += len(waiting)
        return (None,) * len(waiting)
    counts.yields += len(waiting)
    hidden = [event.hidden for event in waiting if event.hidden is not None]
    combine = Combine(point, sum(part.shape[point.token_dim] for part in hidden))
    answers = _try(combine, hidden, most_tokens, trace)
    if isinstance(answers, Exception):
        if len(hidden) > 1:
            combine.retried = True
            logger.warning("%s raised %s for %d sub-batches", point.name, type(answers).__name__, len(hidden))
            alone = [_try(combine, [part], most_tokens, trace) for part in hidden]
            answers = [answer if isinstance(answer, Exception) else answer[0] for answer in alone]
        else:
            answers = [answers]
    counts.add(combine)
    return answers


def _try(
    combine: Combine, hidden: Sequence[torch.Tensor], most_tokens: int | None, trace: Trace
) -> list[Any] | Exception:
    """Run the module over all of `hidden`: the part of each, or what the module raised."""
    try:
        return _run(combine, hidden, most_tokens, trace)
    except Exception as error:
        if aborts_pass(error):
            raise
        # What the traceback holds (hidden states, streamed weights) must be free for the next try.
        return error.with_traceback(None)


def _run(
    combine: Combine, hidden: Sequence[torch.Tensor], most_tokens: int | None, trace: Trace
) -> list[Any]:
    run, dim = combine.point.run, combine.point.token_dim
    assert run is not None
    began_s = time.perf_counter()
    joined = torch.cat(list(hidden), dim=dim) if len(hidden) > 1 else hidden[0]
    num_tokens = joined.shape[dim]
    num_calls = 1 if most_tokens is None else max(1, -(-num_tokens // most_tokens))
    # Of about equal size, so that the last is not a small one.
    groups = joined.split(-(-num_tokens // num_calls), dim=dim) if num_calls > 1 else (joined,)
    copied_s = time.perf_counter() - began_s
    results, ran_s = [], 0.0
    for group in groups:
        combine.num_calls += 1
        started_s = time.perf_counter()
        results.append(run(group))
        ended_s = time.perf_counter()
        ran_s += ended_s - started_s
        if trace.on:
            tokens, name = group.shape[dim], combine.point.name
            trace.add(name, "combined", started_s, ended_s, tokens=tokens, sub_batches=len(hidden))
    started_s = time.perf_counter()
    result = results[0] if len(results) == 1 else _join(results, [group.shape[dim] for group in groups], dim)
    parts = [result] if len(hidden) == 1 else _split(result, [part.shape[dim] for part in hidden], dim)
    combine.copy_s += copied_s + time.perf_counter() - started_s
    combine.run_s += ran_s
    return parts


def _join(results: Sequence[Any], sizes: Sequence[int], dim: int) -> Any:
    """Put together what a module returned for groups of so many tokens."""
    if isinstance(results[0], torch.Tensor):
        return torch.cat(list(results), dim=dim)
    columns = list(zip(*results, strict=True))
    joined = [torch.cat(columns[0], dim=dim)]
    for column in columns[1:]:
        per_token = all(_is_per_token(extra, size) for extra, size in zip(column, sizes, strict=True))
        joined.append(torch.cat(column, dim=0) if per_token else column[0])
    return tuple(joined)


def _split(result: Any, sizes: list[int], dim: int) -> list[Any]:
    """Cut what a module returned into the parts of sub-batches of so many tokens."""
    if isinstance(result, torch.Tensor):
        return list(result.split(sizes, dim=dim))
    # Some sparse blocks return (hidden, router logits); the logits are per token, batch dimension folded.
    hidden, *rest = result
    columns: list[Sequence[Any]] = [hidden.split(sizes, dim=dim)]
    for extra in rest:
        per_token = _is_per_token(extra, sum(sizes))
        columns.append(extra.split(sizes, dim=0) if per_token else [extra] * len(sizes))
    return list(zip(*columns, strict=True))


def _is_per_token(extra: Any, num_tokens: int) -> bool:
    return isinstance(extra, torch.Tensor) and extra.ndim > 0 and extra.shape[0] == num_tokens
