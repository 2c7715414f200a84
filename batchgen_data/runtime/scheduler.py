"""Which sequences run next, and who holds which KV pages.

Pure Python: no torch, no clock, no threads. The same calls give the same decisions, so one class drives
the real executor, the fake one of the tests, and a simulated one. `plan_step` decides one forward pass;
`complete` takes its sampled tokens (or `step_failed` its failure).

A page boundary comes at least every `page_tokens` decoded tokens, and when something finishes or arrives:
extend the block tables of active sequences (two pages ahead), yield the youngest if pages are short, and
refill from suspended sequences, then waiting ones, first in first out.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from batchgen_data.errors import InternalError, RowError
from batchgen_data.runtime.residents import Residents
from batchgen_data.runtime.sequence import Sequence, State
from batchgen_data.runtime.step import Chunk, Copy, Counts, Limits, Sampled, Step
from batchgen_data.runtime.suspects import Suspects

if TYPE_CHECKING:
    from batchgen_data.runtime.hooks import Hooks

# How far past sequences that wait for a page of the current pass to look for others.
_LOOK_AHEAD = 64


class Scheduler:
    """Owns the queues and the page pool of one runtime.

    Progress: the oldest active sequence is never made to yield, and `add` refuses a sequence that could
    not run alone, so every accepted sequence finishes.

    Args:
        limits: what it may use.
        hooks: asks callbacks; None where there are none.
    """

    def __init__(self, limits: Limits, hooks: Hooks | None = None) -> None:
        self._hooks = hooks
        self._counts = Counts()
        self._residents = Residents(limits, self._counts)
        self.pool = self._residents.pool
        self.store = self._residents.store
        self._waiting: deque[Sequence] = deque()
        self._suspended: deque[Sequence] = deque()
        self._suspects = Suspects()
        self._steps_to_boundary = 0
        # Lowered when the device runs out of memory.
        self._max_step_tokens = limits.max_step_tokens
        self._max_sequences = limits.max_sequences
        self._planned_names: set[bytes] = set()

    @property
    def limits(self) -> Limits:
        """What it may use."""
        return self._residents.limits

    @property
    def num_active(self) -> int:
        """Sequences with pages."""
        return len(self._residents)

    @property
    def num_unfinished(self) -> int:
        """Sequences waiting, suspended or active."""
        return len(self._waiting) + len(self._suspended) + len(self._residents) + len(self._suspects.idle())

    @property
    def num_yields_for_pages(self) -> int:
        """How often a sequence was suspended because pages were short."""
        return self._counts.yields_for_pages

    @property
    def active(self) -> Collection[Sequence]:
        """Sequences with pages, for reading."""
        return self._residents.sequences

    @property
    def suspended(self) -> Collection[Sequence]:
        """Sequences that yielded, for reading."""
        return self._suspended

    @property
    def waiting(self) -> Collection[Sequence]:
        """Sequences that have not run yet, for reading."""
        return self._waiting

    def admit_first(self, sequences: Collection[Sequence]) -> None:
        """Let these waiting sequences be admitted before the others, in their order."""
        first = {sequence.seq_id: sequence for sequence in sequences}
        others = [sequence for sequence in self._waiting if sequence.seq_id not in first]
        self._waiting = deque([*first.values(), *others])

    def add_pages(self, count: int) -> None:
        """The pool holds more pages now; those in use keep their ids."""
        self._residents.add_pages(count)

    def add(self, sequence: Sequence) -> bool:
        """Queue a new sequence; one that can never fit fails at once and False is returned."""
        if (error := self._residents.refusal(sequence)) is not None:
            sequence.fail(error)
            sequence.state = State.FINISHED
            return False
        self._waiting.append(sequence)
        self._steps_to_boundary = 0
        return True

    def cancel(self, sequence: Sequence, error: RowError) -> None:
        """Take an unfinished sequence out, with `error` as its outcome."""
        if sequence.state is State.FINISHED:
            return
        self.store.drop(sequence)
        if sequence.state is State.ACTIVE:
            self._residents.leave(sequence)
        elif sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        elif not sequence.suspect:
            self._suspended.remove(sequence)
        self._suspects.clear(sequence)
        sequence.fail(error)
        sequence.state = State.FINISHED

    def plan_step(self) -> Step | None:
        """Decide the next forward pass; None when every sequence is finished."""
        self._planned_names.clear()
        if self._suspects:
            return self._plan_alone(self._suspects.oldest)
        if self._steps_to_boundary <= 0:
            if self._hooks is not None and self._waiting:
                self._hooks.refill()
            self._extend()
        chunks = [
            Chunk(sequence, sequence.num_computed, sequence.num_tokens, True)
            for sequence in self._residents.sequences
            if sequence.decoding and self._residents.can_decode(sequence)
        ]
        self._counts.decode_tokens += len(chunks)
        budget = max(self._max_step_tokens - len(chunks), 0)
        for sequence in self._residents.sequences:
            if budget > 0 and not sequence.decoding and not self.store.waits(sequence):
                budget -= self._append_prefill(chunks, sequence, budget)
        while budget > 0 and (admitted := self._admit()) is not None:
            if not self.store.waits(admitted):
                budget -= self._append_prefill(chunks, admitted, budget)
        self._spend_rest(chunks, budget)
        if self._hooks is not None:
            room_tokens = self._max_step_tokens - sum(chunk.end - chunk.start for chunk in chunks)
            self._counts.drafted_tokens += self._hooks.draft(
                chunks, room_tokens, self._counts.page_boundaries
            )
        if not chunks:
            if self.store.num_under_way:
                return self._wait_for_copies()
            if self.num_unfinished:
                raise InternalError("sequences are left but none can run")
            return None
        # Decode tokens first: single-token chunks of any kind, and drafts, are attended to as one batch.
        chunks.sort(key=lambda chunk: not chunk.singly)
        self._counts.steps += 1
        self._steps_to_boundary -= 1
        return Step(tuple(chunks), self.store.take_orders())

    def complete(
        self,
        step: Step,
        results: Mapping[int, Sampled | tuple[Sampled, ...]],
        failed: Mapping[int, str] | None = None,
        copied: Mapping[Copy, bool] | None = None,
    ) -> list[Sequence]:
        """Take the result of each chunk that `samples`, by sequence id; return who finished.

        A result is the sampled token, or the row's own failure (its logits were not finite); of a chunk
        with a draft, those that hold. Sequences in `failed`, with the cause, have none: the part of the
        pass that held them raised (see `step_failed`). `copied`: see `StepResult`.
        """
        if copied:
            self._counts.recomputed_tokens += self.store.settle(copied)
            self._steps_to_boundary = 0
        finished = []
        num_ahead = 0
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence.state is not State.ACTIVE:
                continue
            if failed and sequence.seq_id in failed:
                if self._chunk_failed(step, sequence, failed[sequence.seq_id]):
                    finished.append(sequence)
                continue
            sequence.num_computed = chunk.end - len(chunk.draft)
            if not chunk.samples:
                self._residents.name_pages(sequence)
                continue
            self._suspects.clear(sequence)
            result = results[sequence.seq_id]
            if isinstance(result, tuple):
                num_ahead = max(num_ahead, len(result) - 1)
                done = self._take_all(sequence, result)
            else:
                done = self._take(sequence, result)
            if done:
                self._finish(sequence)
                finished.append(sequence)
        # The boundary comes by tokens, and this pass gave more than one.
        self._steps_to_boundary -= num_ahead
        return finished

    def step_failed(self, step: Step, cause: str) -> list[Sequence]:
        """The pass raised: run its sequences alone to find the culprit; return who failed for good.

        Nothing the pass computed is trusted. A sequence that fails alone gets a row error; its former
        batch mates go on from their tokens.
        """
        return [
            chunk.sequence
            for chunk in step.chunks
            if chunk.sequence.state is State.ACTIVE and self._chunk_failed(step, chunk.sequence, cause)
        ]

    def step_too_large(self, step: Step) -> list[Sequence]:
        """The device had no memory for the pass: make passes half as large; return who failed for good.

        A pass of one sequence that is as small as it can be fails that sequence.
        """
        if len(step.chunks) == 1 and step.num_tokens <= max(1, self._max_step_tokens // 2):
            return self.step_failed(step, "the device has no memory for it")
        self._max_step_tokens = max(1, step.num_tokens // 2)
        self._max_sequences = max(1, min(self._max_sequences, len(self._residents)) // 2)
        while len(self._residents) > self._max_sequences:
            self._yield(self._residents.youngest)
        return []

    def statistics(self) -> dict[str, int]:
        """Totals since the start, and what is held now."""
        return {
            **dataclasses.asdict(self._counts),
            "active": len(self._residents),
            "waiting": len(self._waiting),
            "suspended": len(self._suspended) + len(self._suspects.idle()),
            "max_step_tokens": self._max_step_tokens,
            "max_sequences": self._max_sequences,
            "pages": self.limits.num_pages,
            "pages_in_use": self.pool.num_in_use,
            **self.store.statistics(),
        }

    def check(self) -> None:
        """Assert every invariant (tests call it after each step).

        Raises:
            InternalError: pages leak or are counted twice, a queue holds a sequence in the wrong state,
                or an active sequence has fewer pages than tokens computed.
        """
        self._residents.check((*self._suspended, *self._suspects.idle()))
        for queue, state in (
            (self._waiting, State.WAITING),
            (self._suspended, State.SUSPENDED),
            (self._suspects.idle(), State.SUSPENDED),
        ):
            for sequence in queue:
                if sequence.state is not state or sequence.pages or sequence.num_computed:
                    raise InternalError(f"a {state.value} sequence holds pages or is in another state")

    # Results.

    def _take(self, sequence: Sequence, result: Sampled) -> bool:
        """Take a sampled token or a failure and say whether the sequence ends with it."""
        if isinstance(result, RowError):
            sequence.fail(result)
            self._residents.forget_pages(sequence)
            return True
        self._residents.name_pages(sequence)
        return sequence.accept(result)

    def _take_all(self, sequence: Sequence, results: tuple[Sampled, ...]) -> bool:
        """The same for what a draft gave: each token after the first was computed as its guess."""
        done = self._take(sequence, results[0])
        for result in results[1:]:
            if done:
                break
            sequence.num_computed += 1
            self._counts.accepted_draft_tokens += 1
            done = self._take(sequence, result)
        return done

    # Admission and memory.

    def _extend(self) -> None:
        """Page boundary: give every active sequence room for a page of tokens, oldest first."""
        self._counts.page_boundaries += 1
        promised = 0
        for sequence in sorted(self._residents.sequences, key=lambda s: s.seq_id):
            if sequence.state is not State.ACTIVE:
                continue  # yielded to an older one in this very loop
            missing = self._residents.num_missing(sequence)
            if missing <= 0:
                continue
            # Pages that are still being copied come back before the reserve is used up, or it waits for them.
            while self.pool.num_available + self.store.num_coming - promised < missing:
                youngest = self._residents.youngest
                if self._hooks is not None and self._hooks.makes_room(youngest):
                    continue
                self._yield(youngest, checkpoint=True)
                self._counts.yields_for_pages += 1
                if youngest is sequence:
                    break
            if sequence.state is State.ACTIVE:
                at_once = min(missing, self.pool.num_available)
                sequence.pages += self.pool.allocate(at_once)
                promised += missing - at_once
        # A full page of the reserve is left to everyone, or the sequence's own end comes before.
        self._steps_to_boundary = self.limits.page_tokens

    def _admit(self) -> Sequence | None:
        """Activate the first suspended, else the first waiting sequence, if its pages are to be had.

        One that only waits for a page this very pass computes lets those behind it go first.
        """
        queue = self._suspended or self._waiting
        if not queue or len(self._residents) >= self._max_sequences:
            return None
        # One that yielded before comes back only when the others can also go on for a page without it,
        # or it would be driven out again at the next boundary.
        headroom = self._residents.next_boundary_pages() if queue is self._suspended else 0
        for position, sequence in enumerate(itertools.islice(queue, _LOOK_AHEAD)):
            if self._waits_for_this_pass(sequence):
                continue
            while not self._activate(sequence, headroom):
                if self._hooks is None or not self._hooks.makes_room(sequence):
                    return None
            del queue[position]
            return sequence
        return None

    def _waits_for_this_pass(self, sequence: Sequence) -> bool:
        """Whether this pass computes the next page that the sequence could share.

        From the next pass on it does not have to compute that again: the first wave shares too.
        """
        if not self._planned_names:
            return False
        num_shared, names = self._residents.num_shared(sequence)
        return num_shared < len(names) and names[num_shared] in self._planned_names

    def _activate(self, sequence: Sequence, headroom: int = 0) -> bool:
        if not self._residents.activate(sequence, headroom):
            return False
        if self._hooks is not None:
            self._hooks.combined(sequence)
        return True

    def _wait_for_copies(self) -> Step:
        """Nothing can run before a copy has ended."""
        return Step((), self.store.take_orders())

    def _append_prefill(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        """Add the next prefill chunk of a sequence and return its tokens."""
        start = sequence.num_computed
        end = min(sequence.num_tokens, start + min(budget, self.limits.max_chunk_tokens or budget))
        chunks.append(self._planned_chunk(sequence, start, end))
        return end - start

    def _spend_rest(self, chunks: list[Chunk], budget: int) -> None:
        """Nobody else can come in: let the chunks that `max_chunk_tokens` cut short grow."""
        for index, chunk in enumerate(chunks):
            room = min(budget, chunk.sequence.num_tokens - chunk.end)
            if room > 0:
                self._counts.prefill_tokens -= chunk.end - chunk.start
                chunks[index] = self._planned_chunk(chunk.sequence, chunk.start, chunk.end + room)
                budget -= room

    def _planned_chunk(self, sequence: Sequence, start: int, end: int) -> Chunk:
        self._counts.prefill_tokens += end - start
        if self.limits.prefix_reuse:
            names = sequence.page_names(self.limits.page_tokens, end // self.limits.page_tokens)
            self._planned_names.update(names[sequence.num_named :])
        return Chunk(sequence, start, end, end == sequence.num_tokens)

    # Leaving.

    def _yield(self, sequence: Sequence, *, checkpoint: bool = False) -> None:
        """Suspend: pages go back; its full pages stay reusable until their memory is needed.

        A checkpoint keeps pages until they are copied, so none is made where they are needed at once.
        """
        if self._hooks is not None:
            self._hooks.yielded(sequence)
        self.store.suspend(sequence, checkpoint=checkpoint)
        self._residents.leave(sequence)
        sequence.state = State.SUSPENDED
        sequence.num_yields += 1
        self._counts.yields += 1
        if not sequence.suspect:
            # In order of arrival, before everything that waits.
            insort(self._suspended, sequence, key=lambda other: other.seq_id)

    def _finish(self, sequence: Sequence) -> None:
        self._residents.leave(sequence)
        sequence.state = State.FINISHED
        self._steps_to_boundary = 0

    # Isolation after a failed pass.

    def _plan_alone(self, suspect: Sequence) -> Step:
        """A pass with one suspect only; others keep their pages while there is room."""
        if suspect.state is not State.ACTIVE:
            while not self._activate(suspect):
                if self.store.num_coming:
                    return self._wait_for_copies()
                self._yield(self._residents.youngest)
        chunks: list[Chunk] = []
        self._append_prefill(chunks, suspect, self._max_step_tokens)
        self._counts.steps += 1
        return Step(tuple(chunks), self.store.take_orders())

    def _chunk_failed(self, step: Step, sequence: Sequence, cause: str) -> bool:
        """An active sequence's part of a pass raised: fail it if it ran alone (True), else suspect it."""
        if len(step.chunks) > 1:
            self._suspects.add(sequence)
            self._yield(sequence)
            return False
        self._suspects.clear(sequence)
        sequence.fail(RowError("model_error", f"the forward pass raised for this row alone: {cause}"))
        self._finish(sequence)
        return True
