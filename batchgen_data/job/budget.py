"""How many rows of a job may fail before it stops."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from batchgen_data.errors import ConfigError, ErrorBudgetExceeded, JobError
from batchgen_data.job.summary import RunSummary

_BUDGET = re.compile(r"(\d+(?:\.\d+)?)(%?)")


def check_budget(value: str | None) -> None:
    """Refuse what is neither a number of rows nor a share of them.

    Raises:
        ConfigError: Says what is expected.
    """
    if value is None:
        return
    match = _BUDGET.fullmatch(value)
    if match is None or (not match[2] and "." in match[1]) or (match[2] and float(match[1]) > 100):
        raise ConfigError(f"max_failed_rows must be a number of rows or a share such as 5%, not {value!r}")


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """What a job allows to fail.

    Attributes:
        max_failed: Rows that may fail; None for any number.
        fail_fast: Stop at the first one.
    """

    max_failed: int | None
    fail_fast: bool

    @classmethod
    def of(cls, value: str | None, num_rows: int, *, fail_fast: bool) -> ErrorBudget:
        """Return the budget of a job of `num_rows` rows; `value` as in `check_budget`."""
        if value is None:
            return cls(None, fail_fast)
        if value.endswith("%"):
            return cls(math.floor(float(value[:-1]) / 100 * num_rows), fail_fast)
        return cls(int(value), fail_fast)

    def check(self, counted: RunSummary) -> None:
        """Stop the job when too many of the rows counted so far failed.

        Raises:
            JobError: One row failed, and none may.
            ErrorBudgetExceeded: More failed than may.
        """
        if not counted.num_failed or (self.max_failed is None and not self.fail_fast):
            return
        code, cause = max(counted.failures.items(), key=lambda item: item[1].count)
        if self.fail_fast:
            raise JobError(
                f"row {cause.location} failed ({code}): {cause.message}; run without fail_fast to go on, or "
                "with retry_failed to try it again"
            )
        if self.max_failed is not None and counted.num_failed > self.max_failed:
            raise ErrorBudgetExceeded(
                f"{counted.num_failed} rows failed, {self.max_failed} may (max_failed_rows); mostly {code}, "
                f"first at {cause.location}: {cause.message}; what is finished is kept: run again with a "
                "larger number, or with retry_failed"
            )
