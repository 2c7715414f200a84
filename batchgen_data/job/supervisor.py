"""What the driver knows of its workers: how far they are, and which rows were with one that died.

A row that kills its worker (a crash in native code, memory that runs out) is found in a few restarts. Ranges
that were with a worker at two deaths run alone; one that kills the worker alone is cut into parts, and they
run alone; a single row that does so gets an error outcome. A death says nothing where no range was running.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import ray

from batchgen_data.job.progress import ProgressCounter
from batchgen_data.job.reader import Rows

# Deaths at which a range may be present before it runs alone.
_MOST_SHARED_DEATHS = 2
# A worker that dies as it starts will do so again; others are started again while rows get done meanwhile,
# and so often in all: each start loads the model.
_MOST_IDLE_DEATHS, _MOST_DEATHS_IN_A_ROW, _MOST_DEATHS = 3, 8, 100


class Supervisor(ProgressCounter):
    """Adds up what workers report and keeps account of deaths; lives in an actor of its own.

    Args:
        arguments: Of `ProgressCounter`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._workers: set[str] = set()
        # Of each worker: its ranges, and whether each runs alone.
        self._running: dict[str, dict[Rows, bool]] = {}
        self._deaths: Counter[Rows] = Counter()
        self._died_alone: set[Rows] = set()
        self._num_idle_deaths = 0
        self._deaths_in_a_row = 0
        self._num_deaths = 0

    def worker_started(self, worker: str) -> str | None:
        """Take note of a process that starts, the first of a worker or the next after a death.

        Args:
            worker: The same for all processes of one worker.

        Returns:
            Why the job should be given up; None where it should go on.
        """
        if worker not in self._workers:
            self._workers.add(worker)
            return None
        self._num_deaths += 1
        died = self._running.pop(worker, {})
        for rows, alone in died.items():
            self._deaths[rows] += 1
            if alone:
                self._died_alone.add(rows)
        self._num_idle_deaths += not died
        self._deaths_in_a_row += 1
        if (
            self._num_idle_deaths > _MOST_IDLE_DEATHS
            or self._deaths_in_a_row > _MOST_DEATHS_IN_A_ROW
            or self._num_deaths > _MOST_DEATHS
        ):
            return (
                f"worker processes died {self._num_deaths} times; look for a lack of memory (kernel log), "
                "then run again"
            )
        return None

    def begin(self, worker: str, rows: Rows, *, alone: bool) -> bool:
        """A worker is about to run `rows`; False says that it must not.

        Not beside others, where they were at too many deaths; not alone, where that was a death by itself.
        """
        if (rows in self._died_alone) if alone else (self._deaths[rows] >= _MOST_SHARED_DEATHS):
            return False
        self._running.setdefault(worker, {})[rows] = alone
        return True

    def end(self, worker: str, rows: Rows) -> None:
        """A worker is through with `rows`."""
        self._running.get(worker, {}).pop(rows, None)
        self._deaths.pop(rows, None)
        self._deaths_in_a_row = 0


def start_supervisor() -> Any:
    """Start a `Supervisor` as a nameless actor that reserves no CPU; returns its handle."""
    return ray.remote(num_cpus=0)(Supervisor).remote()


class Watch:
    """One worker's line to the supervisor.

    Args:
        supervisor: Its handle.
        worker: The same for all processes of this worker.
    """

    def __init__(self, supervisor: Any, worker: str) -> None:
        self._supervisor = supervisor
        self._worker = worker

    def begin(self, rows: Rows, *, alone: bool) -> bool:
        """See `Supervisor.begin`; returns when it is known there, so that a death cannot overtake it."""
        return bool(ray.get(self._supervisor.begin.remote(self._worker, rows, alone=alone)))

    def end(self, rows: Rows) -> None:
        """See `Supervisor.end`."""
        self._supervisor.end.remote(self._worker, rows)
