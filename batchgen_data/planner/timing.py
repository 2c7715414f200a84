"""Times passes of the runtime's own executor, and splits them by module.

Everything is measured in turn, round after round, and the fastest of all rounds counts: other programs only
add time, and what they disturb in one round they leave alone in another.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from batchgen_data.models.checkpoint_map import decoder_layers, expert_modules
from batchgen_data.models.kv_pool import KVPool
from batchgen_data.planner.meta import feed_forward
from batchgen_data.planner.workload import PassShape
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.sequence import Sequence as RunningSequence
from batchgen_data.runtime.step import Chunk, Step
from batchgen_data.sampling import ResolvedSampling

# Passes longer than this are run twice only: little in them depends on chance.
_LONG_S = 1.0
# One round finds everything cold; two are the least that tell anything.
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 8


@dataclass(frozen=True, slots=True)
class Shape:
    """A pass: `rows` sequences, each of `tokens` tokens after `before` others."""

    rows: int
    tokens: int
    before: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return self.rows * self.tokens

    @property
    def pass_shape(self) -> PassShape:
        """The same, as the cost model counts."""
        if self.tokens == 1:
            return PassShape(self.rows, self.before)
        return PassShape(0, 0.0, self.num_tokens, self.before + (self.tokens + 1) / 2, self.rows)


@dataclass(slots=True)
class Sample:
    """The fastest of several runs of one shape.

    Attributes:
        shape: what ran.
        wall_s: of the whole pass.
        rest_s: outside the decoder layers.
        attention_s, mlp_s: of one layer of each kind: its feed-forward block, and all the rest of it.
        experts_hit: of one sparse block.
    """

    shape: Shape
    wall_s: float
    rest_s: float = 0.0
    attention_s: dict[str, float] = field(default_factory=dict)
    mlp_s: dict[str, float] = field(default_factory=dict)
    experts_hit: float = 0.0

    def keep_fastest(self, other: Sample) -> None:
        """Keep the smaller time of each part."""
        self.wall_s = min(self.wall_s, other.wall_s)
        self.rest_s = min(self.rest_s, other.rest_s)
        for mine, others in ((self.attention_s, other.attention_s), (self.mlp_s, other.mlp_s)):
            for kind, seconds in others.items():
                mine[kind] = min(mine[kind], seconds)


class Stopwatch:
    """Seconds spent in decoder layers and in their feed-forward blocks, by kind of layer, from hooks.

    Not for passes in several sub-batches: those enter a layer again before they have left it.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._marks: dict[tuple[int, int], Any] = {}
        self._spans: dict[tuple[str, str], list[tuple[int, Any, Any]]] = defaultdict(list)
        self._chosen: list[torch.Tensor] = []
        self._handles: list[Any] = []
        self.kinds: list[str] = []
        for layer in decoder_layers(model):
            experts = expert_modules(layer)
            kind = "sparse" if experts else "dense"
            self.kinds.append(kind)
            self._watch(layer, ("layer", kind))
            if (block := feed_forward(layer)) is not None:
                self._watch(block, ("mlp", kind))
            for _, module in experts:
                self._handles.append(module.register_forward_pre_hook(self._keep_chosen, with_kwargs=True))

    def _keep_chosen(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Counted later, outside the time.
        self._chosen += [x for x in (*args, *kwargs.values()) if torch.is_tensor(x) and x.dtype == torch.long]

    def _watch(self, module: nn.Module, key: tuple[str, str]) -> None:
        def before(_: nn.Module, __: Any) -> None:
            self._marks[threading.get_ident(), id(module)] = self._now()

        def after(_: nn.Module, __: Any, ___: Any) -> None:
            thread = threading.get_ident()
            self._spans[key].append((thread, self._marks[thread, id(module)], self._now()))

        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def run(self, executor: TorchExecutor, step: Step, shape: Shape) -> Sample:
        """Run a pass and split its time."""
        self._spans.clear()
        self._chosen.clear()
        wall_s = timed(executor, step)
        if self._cuda:
            torch.cuda.synchronize(self._device)
        attention_s, mlp_s = {}, {}
        by_thread: dict[int, float] = defaultdict(float)
        for kind in dict.fromkeys(self.kinds):
            calls: dict[str, list[float]] = {"layer": [], "mlp": []}
            for name, seconds in calls.items():
                for thread, first, last in self._spans.get((name, kind), ()):
                    span_s = first.elapsed_time(last) / 1e3 if self._cuda else last - first
                    seconds.append(span_s)
                    if name == "layer":
                        by_thread[thread] += span_s
            # Of equal layers the middle one: a thread that had to wait once shows in few of them.
            mlp_s[kind] = median(calls["mlp"]) if calls["mlp"] else 0.0
            attention_s[kind] = max(0.0, median(calls["layer"]) - mlp_s[kind])
        # Lanes run side by side: the longest one sets the time.
        rest_s = max(0.0, wall_s - max(by_thread.values()))
        hits = [len(chosen.unique()) for chosen in self._chosen]
        return Sample(shape, wall_s, rest_s, attention_s, mlp_s, sum(hits) / len(hits) if hits else 0.0)


@dataclass(slots=True)
class Run:
    """A pass to measure: where, what, and what splits it; without a stopwatch only as a whole."""

    executor: TorchExecutor
    shape: Shape
    watch: Stopwatch | None = None
    sample: Sample | None = None


def measure(runs: Sequence[Run], seconds: float) -> None:
    """Run all of `runs` in turn, for about so many seconds but a few rounds at least; fills `sample`.

    Call it with `torch.inference_mode` on.
    """
    started = time.perf_counter()
    steps = [pass_of(run.executor, run.shape) for run in runs]
    for round_number in range(_MOST_ROUNDS):
        for run, step in zip(runs, steps, strict=True):
            if run.sample is not None and run.sample.wall_s > _LONG_S and round_number > 1:
                continue
            if run.watch is not None:
                sample = run.watch.run(run.executor, step, run.shape)
            else:
                sample = Sample(run.shape, timed(run.executor, step))
            if run.sample is None:
                run.sample = sample
            else:
                run.sample.keep_fastest(sample)
        if round_number + 1 >= _LEAST_ROUNDS and time.perf_counter() - started > seconds:
            break


def timed(executor: TorchExecutor, step: Step) -> float:
    """Seconds of one pass."""
    started = time.perf_counter()
    executor.run(step)
    return time.perf_counter() - started


def pass_of(executor: TorchExecutor, shape: Shape) -> Step:
    """A pass whose tokens before count as computed.

    Pages are used in turn, and again where there are too few: the pass is for its time, not its tokens.
    Tokens are spread over the vocabulary, so that they are routed to as many experts as those of a text.
    """
    pool: KVPool = executor.pool
    vocabulary = executor.model.get_input_embeddings().num_embeddings
    sampling = ResolvedSampling(temperature=0.0, max_tokens=1, ignore_eos=True)
    length = shape.before + shape.tokens
    pages = _turns(pool.num_pages)
    chunks = []
    for row in range(shape.rows):
        ids = [(row * 7919 + at * 104_729 + 17) % vocabulary for at in range(length)]
        sequence = RunningSequence(row, ids, sampling, limit_tokens=length + 1)
        sequence.pages = [next(pages) for _ in range(-(-(length + 1) // pool.page_tokens))]
        sequence.num_computed = shape.before
        chunks.append(Chunk(sequence, shape.before, length, True))
    return Step(tuple(chunks))


def _turns(count: int) -> Iterator[int]:
    at = 0
    while True:
        yield at % count
        at += 1
