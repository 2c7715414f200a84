"""One thread owns the device: select, combine, forward, sample, manage. Callers hand it rows and wait.

Several callers may wait at once; their rows share every pass. When one caller's last rows are decoding, the
next caller's rows already fill the device, so throughput hardly depends on how rows were batched.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from batchgen_data.callbacks import Callbacks
from batchgen_data.errors import BatchgenError, DeviceError, InternalError, PromptTooLongError, RowError
from batchgen_data.prompts import EncodedRow
from batchgen_data.runtime.faults import first_line, is_device_fault, is_out_of_memory
from batchgen_data.runtime.finished_rows import FinishedRows
from batchgen_data.runtime.hooks import Hooks
from batchgen_data.runtime.scheduler import Scheduler
from batchgen_data.runtime.sequence import Sequence as RunningSequence
from batchgen_data.runtime.step import Limits, Step, StepResult
from batchgen_data.runtime.ticket import Ending, Ticket
from batchgen_data.sampling import ResolvedSampling

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs one step on some device: real, fake or simulated."""

    def run(self, step: Step) -> StepResult:
        """Return what became of each chunk; raise if the pass failed as a whole."""


class TokenDecoder(Protocol):
    """The part of a tokenizer the engine needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Turn token ids into text."""


class Engine:
    """The runtime of one process: scheduler, executor and the thread that drives them.

    Args:
        executor: what runs the passes.
        limits: what the scheduler may use.
        tokenizer: turns ids into text.
        context_tokens: prompt and output together at most.
        eos_token_ids: tokens that end a generation.
        vocab_size: token ids are below it; a row that names another fails.
        num_threads: CPU threads of the engine thread; None leaves PyTorch's setting.
        callbacks: what to ask about rows and memory.
        check: assert the scheduler's invariants after every step (slow; for tests).
    """

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        tokenizer: TokenDecoder,
        *,
        context_tokens: int,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        num_threads: int | None = None,
        callbacks: Sequence[Callbacks] = (),
        check: bool = False,
    ) -> None:
        kv = getattr(executor, "pool", None)
        hooks = Hooks(callbacks, vocab_size=vocab_size, kv=kv) if callbacks else None
        self.scheduler = Scheduler(limits, hooks)
        self.context_tokens = context_tokens
        self._executor: Executor | None = executor
        self._tokenizer = tokenizer
        # Some tokenizers name an end token beyond the model's vocabulary; it can never be sampled.
        self._eos_token_ids = frozenset(token for token in eos_token_ids if token < vocab_size)
        self._vocab_size = vocab_size
        self._reuse = limits.prefix_reuse
        self._check = check
        self._num_threads = num_threads
        self._next_id = 0
        self._owners: dict[int, list[tuple[Ticket, int]]] = {}
        self._leaders: dict[tuple[Any, ...], RunningSequence] = {}
        self._keys: dict[int, tuple[Any, ...]] = {}
        self._sequences: dict[int, RunningSequence] = {}
        self._finished = FinishedRows()
        self._inbox: deque[Ticket | _Cancel] = deque()
        self._open: dict[int, Ticket] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._fatal: BatchgenError | None = None
        self._told_of_pressure = False
        self._counts = {
            "rows": 0,
            "rows_done": 0,
            "rows_failed": 0,
            "rows_skipped": 0,
            "rows_shared": 0,
            "input_tokens": 0,
            "generated_tokens": 0,
        }
        self._seconds = {"schedule_s": 0.0, "run_s": 0.0, "idle_s": 0.0}
        if hooks is not None:
            hooks.start(self.scheduler)
        self._thread = threading.Thread(target=self._main, name="batchgen-engine", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[EncodedRow | RowError]) -> Ticket:
        """Hand over rows; those that already failed keep their error as outcome. Returns at once.

        Raises:
            BatchgenError: the engine has stopped, or a callback called it: it would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise BatchgenError("a callback must not generate with the engine it runs in")
        ticket = Ticket(self, rows)
        with self._wake:
            if self._fatal is not None:
                raise type(self._fatal)(str(self._fatal)) from self._fatal
            if self._closing:
                raise BatchgenError("the engine is closed")
            self._open[id(ticket)] = ticket
            self._inbox.append(ticket)
            self._wake.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Take a ticket's unfinished rows out of the engine; returns at once."""
        with self._wake:
            self._inbox.append(_Cancel(ticket))
            self._wake.notify()

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Turn token ids into text."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def statistics(self) -> dict[str, Any]:
        """Totals since the start: rows, tokens, yields, reuse, and where the seconds went."""
        details: dict[str, Any] = {
            name: asdict(value)
            for name in ("timings", "coroutine", "weights", "kv_copies")
            if (value := getattr(self._executor, name, None)) is not None
        }
        scheduled = self.scheduler.statistics()
        # A pass counts one token of each row that samples; what drafts added is counted where it is taken.
        generated_tokens = self._counts["generated_tokens"] + scheduled["accepted_draft_tokens"]
        counts = {**self._counts, "generated_tokens": generated_tokens}
        if (pool := getattr(self._executor, "pool", None)) is not None:
            details["kv_int8"] = pool.quantised
        return {**counts, **self._seconds, **scheduled, **details}

    def close(self) -> None:
        """Stop the thread; waiting callers get an error. Safe to call twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            close = getattr(self._executor, "close", None)
            if close is not None:
                close()
            # The last reference to the KV pool, and with the caller's to the model.
            self._executor = None

    # Everything below runs in the engine thread.

    def _main(self) -> None:
        try:
            if self._num_threads:
                # OpenMP keeps this per calling thread, so it is set in the thread that computes.
                torch.set_num_threads(self._num_threads)
            # Once for the thread: a grad mode entered inside a coroutine would leak to the others.
            with torch.inference_mode():
                self._loop()
            self._abandon(BatchgenError("the engine was closed before these rows were done"))
        except BaseException as error:
            fatal = (
                error if isinstance(error, BatchgenError) else InternalError(f"the engine stopped: {error!r}")
            )
            fatal.__cause__ = error if fatal is not error else error.__cause__
            logger.error("engine stopped: %s", type(error).__name__)
            self._abandon(fatal)

    def _loop(self) -> None:
        while self._take_inbox():
            started = time.perf_counter()
            step = self.scheduler.plan_step()
            planned = time.perf_counter()
            self._seconds["schedule_s"] += planned - started
            if step is None:
                continue
            try:
                assert self._executor is not None  # until the thread has ended
                result = self._executor.run(step)
            except DeviceError:
                raise
            except Exception as error:
                if is_device_fault(error):
                    raise DeviceError(f"the device failed: {first_line(error)}") from error
                logger.warning("a pass of %d rows raised %s", len(step.chunks), type(error).__name__)
                if is_out_of_memory(error):
                    finished = self.scheduler.step_too_large(step)
                else:
                    finished = self.scheduler.step_failed(step, first_line(error))
            else:
                ran = time.perf_counter()
                self._seconds["run_s"] += ran - planned
                finished = self.scheduler.complete(step, result.tokens, result.failed, result.copied)
                self._counts["generated_tokens"] += len(result.tokens)
                self._seconds["schedule_s"] += time.perf_counter() - ran
            if not self._told_of_pressure and self.scheduler.num_yields_for_pages:
                self._told_of_pressure = True
                logger.warning(
                    "KV memory is short: rows are suspended until others have ended; more kv_memory or "
                    "host_memory, or fewer max_sequences, may be faster (see statistics())"
                )
            for sequence in finished:
                self._deliver(sequence)
            if self._check:
                self.scheduler.check()

    def _take_inbox(self) -> bool:
        """Move new rows into the scheduler; wait when there is nothing to do. False means stop."""
        while True:
            with self._wake:
                started = time.perf_counter()
                while not self._inbox and not self._closing and not self.scheduler.num_unfinished:
                    self._wake.wait()
                self._seconds["idle_s"] += time.perf_counter() - started
                if self._closing:
                    return False
                arrived, self._inbox = list(self._inbox), deque()
            for item in arrived:
                if isinstance(item, Ticket):
                    self._start(item)
                else:
                    self._cancel(item.ticket)
            if self.scheduler.num_unfinished:
                return True

    def _start(self, ticket: Ticket) -> None:
        self._counts["rows"] += len(ticket.rows)
        for index, row in enumerate(ticket.rows):
            if isinstance(row, RowError):
                self._count(row)
                continue
            self._counts["input_tokens"] += len(row.prompt_token_ids)
            if (refusal := self._refusal(row)) is not None:
                self._settle(ticket, index, refusal)
                continue
            key = self._sharing_key(row)
            if key is not None and (ending := self._finished.get(key)) is not None:
                self._counts["rows_shared"] += 1
                self._settle(ticket, index, ending)
                continue
            if key is not None and (leader := self._leaders.get(key)) is not None:
                self._counts["rows_shared"] += 1
                self._owners[leader.seq_id].append((ticket, index))
                continue
            self._start_sequence(ticket, index, row, key)
        self._close_if_done(ticket)

    def _refusal(self, row: EncodedRow) -> RowError | None:
        if not row.prompt_token_ids:
            return RowError("empty_prompt", "the prompt has no tokens")
        if len(row.prompt_token_ids) >= self.context_tokens:
            return PromptTooLongError(len(row.prompt_token_ids), self.context_tokens)
        if max(row.prompt_token_ids) >= self._vocab_size:
            # Some tokenizers add special tokens past the end of the model's embedding.
            return RowError(
                "tokenize_error",
                f"the prompt holds token {max(row.prompt_token_ids)}, but the model's vocabulary has "
                f"{self._vocab_size} tokens",
            )
        problem = vocabulary_problem(row.sampling, self._vocab_size)
        return RowError("invalid_sampling", problem) if problem else None

    def _start_sequence(
        self, ticket: Ticket, index: int, row: EncodedRow, key: tuple[Any, ...] | None
    ) -> None:
        sampling = row.sampling
        limit_tokens = self.context_tokens
        if sampling.max_tokens is not None:
            limit_tokens = min(limit_tokens, len(row.prompt_token_ids) + sampling.max_tokens)

        def decode_text(token_ids: list[int]) -> str:
            return self.decode(token_ids, sampling.skip_special_tokens)

        sequence = RunningSequence(
            self._next_id,
            row.prompt_token_ids,
            sampling,
            limit_tokens=limit_tokens,
            eos_token_ids=self._eos_token_ids,
            row_key=row.row_key,
            decode_text=decode_text,
        )
        self._next_id += 1
        self._owners[sequence.seq_id] = [(ticket, index)]
        self._sequences[sequence.seq_id] = sequence
        if key is not None:
            self._leaders[key] = sequence
            self._keys[sequence.seq_id] = key
        if not self.scheduler.add(sequence):
            self._deliver(sequence)

    def _sharing_key(self, row: EncodedRow) -> tuple[Any, ...] | None:
        """Equal greedy prompts with equal settings run once; a drawn row is never shared."""
        if not self._reuse or not row.sampling.greedy:
            return None
        sampling = replace(row.sampling, seed=0) if row.sampling.seed else row.sampling
        return array("i", row.prompt_token_ids).tobytes(), sampling

    def _deliver(self, sequence: RunningSequence) -> None:
        ending: Ending | RowError
        if sequence.error is not None:
            ending = sequence.error
        else:
            ending = Ending(
                array("i", sequence.generated_ids),
                sequence.finish_reason or "length",
                sequence.stop_reason,
                sequence.stop_at,
            )
        del self._sequences[sequence.seq_id]
        key = self._keys.pop(sequence.seq_id, None)
        if key is not None:
            del self._leaders[key]
            if isinstance(ending, Ending):
                self._finished.add(key, ending)
        for ticket, index in self._owners.pop(sequence.seq_id):
            self._settle(ticket, index, ending)

    def _settle(self, ticket: Ticket, index: int, ending: Ending | RowError) -> None:
        self._count(ending)
        ticket.settle(index, ending)
        self._close_if_done(ticket)

    def _close_if_done(self, ticket: Ticket) -> None:
        if not ticket.num_left and not ticket.done.is_set():
            del self._open[id(ticket)]
            ticket.done.set()

    def _count(self, ending: Ending | RowError) -> None:
        self._counts["rows_done"] += 1
        if isinstance(ending, RowError):
            self._counts["rows_skipped" if ending.skipped else "rows_failed"] += 1

    def _cancel(self, ticket: Ticket) -> None:
        error = RowError("cancelled", "the call that owned this row was interrupted")
        for seq_id in [s for s, owners in self._owners.items() if any(t is ticket for t, _ in owners)]:
            owners = self._owners[seq_id]
            for owner in [owner for owner in owners if owner[0] is ticket]:
                owners.remove(owner)
                self._settle(ticket, owner[1], error)
            if not owners:
                # Nobody else waits for this generation.
                sequence = self._sequences[seq_id]
                self.scheduler.cancel(sequence, error)
                self._deliver(sequence)

    def _abandon(self, fatal: BatchgenError) -> None:
        """Wake every waiting caller with the reason the engine stopped."""
        with self._wake:
            if not self._closing:
                self._fatal = fatal
            waiting, self._open = list(self._open.values()), {}
            self._inbox.clear()
        for ticket in waiting:
            ticket.fatal = fatal
            ticket.done.set()


def vocabulary_problem(sampling: ResolvedSampling, vocab_size: int) -> str | None:
    """Say which setting names a token that the model does not have, or None."""
    for name, ids in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        bad = next((token for token in ids if token >= vocab_size), None)
        if bad is not None:
            return f"{name} names token {bad}, but the model's vocabulary has {vocab_size} tokens"
    return None


@dataclass(frozen=True, slots=True)
class _Cancel:
    ticket: Ticket
