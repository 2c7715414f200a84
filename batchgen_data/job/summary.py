"""What became of the rows: counts that add up, and one example of each kind of failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa


@dataclass(slots=True)
class Cause:
    """Rows that ended with one error code: how many, and the first of them."""

    count: int
    location: str
    message: str


@dataclass(slots=True)
class RunSummary:
    """Counts over the rows written so far; ``num_rows = num_ok + num_failed + num_skipped``.

    Attributes:
        num_rows: Rows in, all with an outcome.
        num_stop: Rows that ended by themselves.
        num_length: Rows that reached a length limit.
        num_failed: Rows with an error.
        num_skipped: Rows left out on purpose.
        failures: Causes of failed rows by error code.
        skips: Causes of skipped rows by error code.
        input_tokens: Prompt tokens.
        generated_tokens: Generated tokens.
        elapsed_s: From the start of the run.
        generating_s: From the moment the first worker had its model.
    """

    num_rows: int = 0
    num_stop: int = 0
    num_length: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    failures: dict[str, Cause] = field(default_factory=dict)
    skips: dict[str, Cause] = field(default_factory=dict)
    input_tokens: int = 0
    generated_tokens: int = 0
    elapsed_s: float = 0.0
    generating_s: float = 0.0

    @property
    def num_ok(self) -> int:
        """Rows with a completion."""
        return self.num_stop + self.num_length

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, model loading excluded."""
        return self.generated_tokens / self.generating_s if self.generating_s > 0 else 0.0

    def add(self, table: pa.Table, *, file_name: str, first_row: int, prefix: str = "") -> None:
        """Count the rows of a completed table.

        Args:
            table: Rows with the declared result columns.
            file_name: The input file they come from.
            first_row: Position of the table's first row in that file, from 0.
            prefix: Prefix of the result columns.
        """
        names = ("finish_reason", "num_input_tokens", "num_generated_tokens", "error_code", "error_message")
        columns = (table.column(prefix + name).to_pylist() for name in names)
        for row, (reason, num_input, num_generated, code, message) in enumerate(
            zip(*columns, strict=True), start=first_row
        ):
            self.num_rows += 1
            self.input_tokens += num_input or 0
            self.generated_tokens += num_generated or 0
            if reason == "stop":
                self.num_stop += 1
            elif reason == "length":
                self.num_length += 1
            else:
                causes = self.skips if reason == "skipped" else self.failures
                self.num_skipped += reason == "skipped"
                self.num_failed += reason != "skipped"
                if code in causes:
                    causes[code].count += 1
                else:
                    causes[code] = Cause(1, f"{file_name}:{row}", message)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for the run record."""
        return {
            "rows": self.num_rows,
            "ok": self.num_ok,
            "stop": self.num_stop,
            "length": self.num_length,
            "failed": self.num_failed,
            "skipped": self.num_skipped,
            "failures": {code: cause.count for code, cause in self.failures.items()},
            "skips": {code: cause.count for code, cause in self.skips.items()},
            "input_tokens": self.input_tokens,
            "generated_tokens": self.generated_tokens,
            "elapsed_s": round(self.elapsed_s, 3),
            "generating_s": round(self.generating_s, 3),
        }
