"""How long rows are, and which passes they make. No torch here."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from batchgen_data.errors import ConfigError

# More rows than this are represented by an even sample of so many.
MOST_ROWS = 1024
# Numbers of tokens within this ratio count as equal: passes are alike then.
_LIKENESS = 1.4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The rows of a job, by length.

    Attributes:
        prompt_tokens: of each row, at least 1.
        output_tokens: of each row, at least 1.
        num_rows: rows of the job; more than the lengths given where those are a sample.
        source: where the lengths come from, for people.
    """

    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    num_rows: int
    source: str = "given"

    def __post_init__(self) -> None:
        if not self.prompt_tokens or len(self.prompt_tokens) != len(self.output_tokens):
            raise ConfigError("a workload has at least one row, and an output length for each")
        if min(*self.prompt_tokens, *self.output_tokens) < 1 or self.num_rows < len(self.prompt_tokens):
            raise ConfigError("lengths of a workload are at least 1, and its rows at least as many as those")

    @classmethod
    def uniform(cls, num_rows: int, prompt_tokens: int, output_tokens: int) -> Workload:
        """Rows that are all alike."""
        sample = min(num_rows, MOST_ROWS)
        return cls(
            prompt_tokens=(prompt_tokens,) * sample,
            output_tokens=(output_tokens,) * sample,
            num_rows=num_rows,
            source=f"{num_rows} rows of {prompt_tokens} prompt and {output_tokens} output tokens",
        )

    def within(self, context_tokens: int) -> Workload:
        """The same rows where prompt and output together have at most so many tokens."""
        prompts = tuple(max(1, min(prompt, context_tokens - 1)) for prompt in self.prompt_tokens)
        outputs = tuple(
            max(1, min(output, context_tokens - prompt))
            for prompt, output in zip(prompts, self.output_tokens, strict=True)
        )
        return dataclasses.replace(self, prompt_tokens=prompts, output_tokens=outputs)

    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest row."""
        return max(p + o for p, o in zip(self.prompt_tokens, self.output_tokens, strict=True))

    @property
    def mean_tokens(self) -> float:
        """Prompt and half of the output of a row: what it holds on average while it decodes."""
        return (sum(self.prompt_tokens) + sum(self.output_tokens) / 2) / len(self.prompt_tokens)

    @property
    def generated_tokens(self) -> float:
        """Output tokens of the whole job."""
        return sum(self.output_tokens) * self.num_rows / len(self.output_tokens)


class PassShape(NamedTuple):
    """What a pass computes; counts may be means of several passes.

    Attributes:
        decoding: sequences that decode one token.
        context: tokens before that one, on average.
        prefill_tokens: prompt tokens.
        prefill_context: tokens that one of these attends to, on average.
        chunks: sequences that the prompt tokens belong to.
    """

    decoding: float
    context: float
    prefill_tokens: float = 0
    prefill_context: float = 0.0
    chunks: float = 0

    @property
    def num_tokens(self) -> float:
        """Tokens of the pass."""
        return self.decoding + self.prefill_tokens

    @property
    def num_sequences(self) -> float:
        """Sequences of the pass."""
        return self.decoding + self.chunks


def passes(
    workload: Workload, *, max_sequences: int, max_step_tokens: int, capacity_tokens: float
) -> dict[PassShape, float]:
    """The passes that complete a workload, alike ones counted together.

    Rows come first in, first out; every pass decodes a token of each active row and fills up with prompt
    tokens, as the scheduler does. A row counts its prompt and half of its output against the capacity.

    Args:
        workload: the rows.
        max_sequences: rows at once.
        max_step_tokens: tokens of a pass.
        capacity_tokens: tokens whose keys and values have room.

    Returns:
        How often each shape of a pass occurs; the counts are those of all rows, not of the sample.
    """
    tally = _Tally()
    rows = list(zip(workload.prompt_tokens, workload.output_tokens, strict=True))
    waiting = 0
    room = capacity_tokens
    prefilling: list[list[int]] = []  # [prompt, prompt tokens left, output]
    active: list[tuple[int, int, int]] = []  # (number of the pass it ends with, prompt, output)
    start_sum = 0  # over active rows: prompt minus the number of the pass they began with
    now = 0
    while waiting < len(rows) or prefilling or active:
        while waiting < len(rows) and len(active) + len(prefilling) < max_sequences:
            prompt, output = rows[waiting]
            need = prompt + output / 2
            if need > room and (active or prefilling):
                break
            room -= need
            prefilling.append([prompt, prompt, output])
            waiting += 1
        decoding = len(active)
        context = (start_sum + now * decoding) / decoding if decoding else 0.0
        if prefilling:
            prefill, chunks, pairs, done = _take(prefilling, max(1, max_step_tokens - decoding))
            tally.add(1, decoding, context * decoding, prefill, pairs, chunks)
            now += 1
            for prompt, _, output in done:
                if output > 1:
                    # The pass that ends the prompt samples the first token.
                    heapq.heappush(active, (now + output - 1, prompt, output))
                    start_sum += prompt - now
                else:
                    room += prompt + output / 2
        else:
            ends = active[0][0]
            span = ends - now
            tally.add(span, decoding, (context + (span - 1) / 2) * decoding)
            now = ends
        while active and active[0][0] <= now:
            ends, prompt, output = heapq.heappop(active)
            start_sum -= prompt - (ends - output + 1)
            room += prompt + output / 2
    return tally.shapes(workload.num_rows / len(rows))


def _take(prefilling: list[list[int]], budget: int) -> tuple[int, int, float, Sequence[list[int]]]:
    """Prompt tokens of a pass, first in, first out: how many, of how many rows, pairs, rows that ended."""
    taken, chunks, pairs = 0, 0, 0.0
    done = []
    while prefilling and taken < budget:
        row = prefilling[0]
        part = min(row[1], budget - taken)
        first = row[0] - row[1]
        pairs += part * (first + (part + 1) / 2)
        row[1] -= part
        taken += part
        chunks += 1
        if row[1]:
            break
        done.append(prefilling.pop(0))
    return taken, chunks, pairs, done


class _Tally:
    """Passes, alike ones added up, so that their means are exact."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], list[float]] = {}

    def add(
        self,
        times: int,
        decoding: int,
        kv_tokens: float,
        prefill: int = 0,
        pairs: float = 0.0,
        chunks: int = 0,
    ) -> None:
        """Count passes of one shape; `kv_tokens` and `pairs` are sums over the tokens of a pass."""
        sums = self._sums.setdefault((_alike(decoding), _alike(prefill)), [0.0] * 6)
        for at, value in enumerate((1, decoding, kv_tokens, prefill, pairs, chunks)):
            sums[at] += times * value

    def shapes(self, scale: float) -> dict[PassShape, float]:
        """The mean shape of each group and how often it occurs, times `scale`."""
        shapes: dict[PassShape, float] = {}
        for times, decoding, kv_tokens, prefill, pairs, chunks in self._sums.values():
            shape = PassShape(
                decoding / times,
                kv_tokens / decoding if decoding else 0.0,
                prefill / times,
                pairs / prefill if prefill else 0.0,
                chunks / times,
            )
            shapes[shape] = shapes.get(shape, 0.0) + times * scale
        return shapes


def _alike(number: int) -> int:
    """The number that stands for this one and those near it, on average; small ones stand for themselves."""
    if number <= 4:
        return number
    low = 4.0
    while low * _LIKENESS <= number:
        low *= _LIKENESS
    return round(low * _LIKENESS**0.5)
