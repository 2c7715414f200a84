"""Every error the project raises, and the stable codes that rows carry.

    BatchgenError
    ├─ ConfigError(ValueError)     the caller asked for something impossible; nothing has run
    │   ├─ PlanError               does not fit: bytes needed, bytes present
    │   ├─ CallbackError           a callback raised, or answered what cannot be; the run stops
    │   └─ UnsafeModelError        pickle weights, remote code, an escaping path
    ├─ JobError                    a run stopped; finished work is kept
    │   ├─ InputError              a file cannot be read: file, row group, cause
    │   ├─ ResumeMismatchError     the output belongs to another job: the fields that differ
    │   ├─ JobLockedError          another run writes to the output
    │   ├─ CommitError             output cannot be written or published
    │   └─ ErrorBudgetExceeded     more rows failed than allowed
    ├─ RowError                    recorded in the row's outcome, never stops the job
    │   ├─ PromptError             the row has no usable prompt
    │   └─ PromptTooLongError      longer than the model's context; both lengths are named
    ├─ DeviceError                 the device is unusable by this process; the run stops
    └─ InternalError               our bug; please report it

Messages say what happened, where, and what to do. They never quote prompt text or credentials.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BatchgenError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(BatchgenError, ValueError):
    """The caller's options or files cannot work; raised before any row runs."""


class PlanError(ConfigError):
    """The model or its cache does not fit; the message names bytes needed and bytes present."""


class CallbackError(ConfigError):
    """A callback raised, or answered what cannot be; the message names it, and the run stops."""


class UnsafeModelError(ConfigError):
    """The model folder would run code or escape its folder; it is never loaded."""


class JobError(BatchgenError):
    """A run stopped part way; what it published stays valid."""


class InputError(JobError):
    """An input file cannot be read; the message names the file, the place in it and the cause."""


class ResumeMismatchError(JobError):
    """The output was begun by a job with other settings; the message names the fields that differ."""


class JobLockedError(JobError):
    """Another run writes to the output, or took it over."""


class JobStalledError(JobError):
    """No worker made any progress for too long."""


class CommitError(JobError):
    """Output cannot be written or published."""


class ErrorBudgetExceeded(JobError):
    """More rows failed than the job allows; what is finished is kept."""


class DeviceError(BatchgenError):
    """The device can no longer be used by this process (for example after a CUDA fault)."""


class InternalError(BatchgenError):
    """A broken invariant of this package: a bug to report, never the caller's fault."""


# Codes are part of the output schema: people filter on them. Add, never rename.
ROW_ERROR_CODES = {
    "null_input": "the prompt, or a column the template needs, is null (the row is skipped)",
    "empty_prompt": "the prompt has no text, or no tokens",
    "wrong_type": "a cell holds a value of a type that cannot be a prompt",
    "invalid_messages": "the conversation is not a list of {role, content}",
    "template_error": "the prompt template raised on this row",
    "chat_template_error": "the model's chat template refused the conversation",
    "tokenize_error": "the tokenizer could not encode the text",
    "invalid_sampling": "the row's sampling parameters are unknown or out of range",
    "prompt_too_long": "the prompt leaves no room in the model's context",
    "exceeds_kv_memory": "prompt and output cannot fit in the KV pages, even alone",
    "non_finite_logits": "the model produced NaN or infinity for this row",
    "decode_error": "the tokenizer could not turn the generated tokens into text",
    "model_error": "the forward pass raised for this row alone",
    "stage_error": "completing the row raised, alone and several times (not the model's doing)",
    "worker_died": "the worker process died or hung each time the row ran, also alone",
    "cancelled": "the call that owned the row was interrupted",
}


class RowError(BatchgenError):
    """One row's failure: becomes the row's outcome and never touches its neighbours.

    `code` is one of `ROW_ERROR_CODES`; `skipped` marks rows left out on purpose
    (finish_reason "skipped" instead of "error").
    """

    def __init__(self, code: str, message: str, *, skipped: bool = False) -> None:
        if code not in ROW_ERROR_CODES:
            raise InternalError(f"row error code {code!r} is not declared in ROW_ERROR_CODES")
        super().__init__(message)
        self.code = code
        self.message = message
        self.skipped = skipped

    def __reduce__(self) -> tuple[object, ...]:
        # Rows cross process borders; the default would drop the keyword.
        return (_rebuild_row_error, (type(self), self.code, self.message, self.skipped))


def _rebuild_row_error(kind: type[RowError], code: str, message: str, skipped: bool) -> RowError:
    error = kind.__new__(kind)
    RowError.__init__(error, code, message, skipped=skipped)
    return error


class PromptError(RowError):
    """The row has no usable prompt."""


class PromptTooLongError(PromptError):
    """The prompt leaves no room in the model's context."""

    def __init__(self, num_tokens: int, limit_tokens: int) -> None:
        super().__init__(
            "prompt_too_long",
            f"the prompt has {num_tokens} tokens, the model's context holds {limit_tokens} "
            "including at least one generated token; shorten the prompt",
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ``; did you mean 'top_p'?``, or an empty string when nothing is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
