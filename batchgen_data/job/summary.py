"""What became of the rows: counts that add up, and one example of each kind of failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

# The result columns that are counted.
COUNTED_COLUMNS = ("finish_reason", "num_input_tokens", "num_generated_tokens", "error_code", "error_message")


@dataclass(slots=True)
class Cause:
    """Rows that ended with one error code: how many, and the first of them."""

    count: int
    location: str
    message: str


@dataclass(slots=True)
class RunSummary:
    """Counts over rows with an outcome; ``num_rows = num_ok + num_failed + num_skipped``.

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
        run_tokens: Tokens generated while this run lasted; a resumed one generates only what was missing.
        run_rows: Rows that got their outcome in this run.
        run_retries: Calls of this run that raised and were made again.
        run_yields: Times a row of this run was suspended because KV memory was short.
        run_recomputed_tokens: Tokens of this run computed again after a row was suspended.
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
    run_tokens: int = 0
    run_rows: int = 0
    run_retries: int = 0
    run_yields: int = 0
    run_recomputed_tokens: int = 0

    @property
    def num_ok(self) -> int:
        """Rows with a completion."""
        return self.num_stop + self.num_length

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of this run, model loading excluded."""
        return self.run_tokens / self.generating_s if self.generating_s > 0 else 0.0

    def add(
        self, results: pa.Table | pa.RecordBatch, *, file_name: str, rows: Iterable[int], prefix: str = ""
    ) -> None:
        """Count rows.

        Args:
            results: Rows with at least the `COUNTED_COLUMNS`.
            file_name: The input file they come from.
            rows: Position of each row in that file, from 0.
            prefix: Prefix of the result columns.
        """
        columns = (results.column(prefix + name).to_pylist() for name in COUNTED_COLUMNS)
        # Not strict: an endless counter may give the positions.
        for row, reason, num_input, num_generated, code, message in zip(rows, *columns, strict=False):
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
                _add_cause(causes, code, Cause(1, f"{file_name}:{row}", message))

    def add_summary(self, other: RunSummary) -> None:
        """Add the counts of other rows; its times stay out."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.failures, other.failures), (self.skips, other.skips)):
            for code, cause in theirs.items():
                _add_cause(mine, code, Cause(cause.count, cause.location, cause.message))

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
            "run_rows": self.run_rows,
            "run_tokens": self.run_tokens,
            "run_retries": self.run_retries,
            "run_yields": self.run_yields,
            "run_recomputed_tokens": self.run_recomputed_tokens,
        }

    def to_counts(self) -> dict[str, Any]:
        """Return the counts, examples included, for a shard's record; `from_counts` reads them."""
        causes = {
            name: {code: [cause.count, cause.location, cause.message] for code, cause in found.items()}
            for name, found in (("failures", self.failures), ("skips", self.skips))
        }
        return {name: getattr(self, name) for name in _SUMS} | causes

    @classmethod
    def from_counts(cls, counts: dict[str, Any]) -> RunSummary:
        """Return the summary that `to_counts` described."""
        summary = cls()
        for name in _SUMS:
            setattr(summary, name, int(counts[name]))
        for mine, name in ((summary.failures, "failures"), (summary.skips, "skips")):
            for code, (count, location, message) in counts[name].items():
                mine[code] = Cause(count, location, message)
        return summary


_SUMS = (
    "num_rows",
    "num_stop",
    "num_length",
    "num_failed",
    "num_skipped",
    "input_tokens",
    "generated_tokens",
)


def _add_cause(causes: dict[str, Cause], code: str, cause: Cause) -> None:
    if code in causes:
        causes[code].count += cause.count
    else:
        causes[code] = cause
