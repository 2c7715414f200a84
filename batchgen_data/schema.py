"""The result columns: declared once, always typed, appended after the untouched input columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from batchgen_data.errors import ConfigError, InternalError, RowError

FinishReason = Literal["stop", "length", "error", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one row.

    Attributes:
        finish_reason: "stop" (end token or stop string), "length" (a limit), "error", or "skipped".
        stop_reason: Which stop string or stop token id ended it, as text; "kv_memory" where a row without
            max_tokens filled all KV memory; None for the model's end token and other lengths.
        num_input_tokens: Prompt tokens; None when the prompt was never encoded.
        token_ids: Generated token ids.
        text: Generated text; None for rows without a result.
        error_code: One of `errors.ROW_ERROR_CODES`, or None.
        error_message: What happened and what to do, or None.
    """

    finish_reason: FinishReason
    stop_reason: str | None = None
    num_input_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    error_code: str | None = None
    error_message: str | None = None

    @classmethod
    def failed(cls, error: RowError, num_input_tokens: int | None = None) -> Outcome:
        """Return the outcome of a row that ended with `error`: no text, no tokens."""
        return cls(
            finish_reason="skipped" if error.skipped else "error",
            num_input_tokens=num_input_tokens,
            error_code=error.code,
            error_message=error.message,
        )


_COLUMNS: tuple[tuple[str, pa.DataType, Callable[[Outcome], Any]], ...] = (
    ("generated_text", pa.string(), lambda outcome: outcome.text),
    ("finish_reason", pa.string(), lambda outcome: outcome.finish_reason),
    ("stop_reason", pa.string(), lambda outcome: outcome.stop_reason),
    ("num_input_tokens", pa.int32(), lambda outcome: outcome.num_input_tokens),
    ("num_generated_tokens", pa.int32(), lambda outcome: len(outcome.token_ids)),
    ("error_code", pa.string(), lambda outcome: outcome.error_code),
    ("error_message", pa.string(), lambda outcome: outcome.error_message),
)
_TOKENS_COLUMN: tuple[str, pa.DataType, Callable[[Outcome], Any]] = (
    "generated_tokens",
    pa.list_(pa.int32()),
    lambda outcome: None if outcome.text is None else outcome.token_ids,
)


def result_fields(*, generated_tokens: bool = False, prefix: str = "") -> list[pa.Field]:
    """Return the declared result columns, in output order.

    Args:
        generated_tokens: Also declare `generated_tokens` (null where `generated_text` is null).
        prefix: Put before every name.
    """
    return [pa.field(prefix + name, kind) for name, kind, _ in _declared(generated_tokens)]


def check_columns(schema: pa.Schema, *, generated_tokens: bool = False, prefix: str = "") -> None:
    """Refuse an input that already has a column of a result's name.

    Raises:
        ConfigError: Names the columns that clash.
    """
    declared = {item.name for item in result_fields(generated_tokens=generated_tokens, prefix=prefix)}
    clashing = sorted(declared.intersection(schema.names))
    if clashing:
        raise ConfigError(
            f"the input already has {'a column' if len(clashing) == 1 else 'columns'} named "
            f"{', '.join(map(repr, clashing))}, which the results need; "
            'set output_prefix= (for example "batchgen_") or rename the input'
        )


def append_results(
    table: pa.Table, outcomes: Sequence[Outcome], *, generated_tokens: bool = False, prefix: str = ""
) -> pa.Table:
    """Append one outcome per row to `table` as the declared columns.

    Input columns are the same Arrow objects as before, schema metadata included; the types of the new
    columns never depend on the rows.

    Raises:
        ConfigError: A result column exists already (see `check_columns`).
        InternalError: The number of outcomes is not the number of rows.
    """
    if len(outcomes) != table.num_rows:
        raise InternalError(f"{len(outcomes)} outcomes for {table.num_rows} rows")
    check_columns(table.schema, generated_tokens=generated_tokens, prefix=prefix)
    for name, kind, read in _declared(generated_tokens):
        column = _column([read(outcome) for outcome in outcomes], kind)
        table = table.append_column(pa.field(prefix + name, kind), column)
    return table


def _declared(
    generated_tokens: bool,
) -> tuple[tuple[str, pa.DataType, Callable[[Outcome], Any]], ...]:
    return (*_COLUMNS, _TOKENS_COLUMN) if generated_tokens else _COLUMNS


def _column(values: list[Any], kind: pa.DataType) -> pa.ChunkedArray:
    try:
        array = pa.array(values, type=kind)
    except UnicodeEncodeError:
        # A lone surrogate cannot be UTF-8; one replacement mark is better than losing the whole table.
        clean = [v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values]
        array = pa.array(clean, type=kind)
    # pyarrow itself returns several chunks when one would pass the 2 GiB of 32-bit offsets.
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array], type=kind)
