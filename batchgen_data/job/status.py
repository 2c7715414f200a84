"""How far a job is, read from its output while it runs or after."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from batchgen_data.errors import ConfigError
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.journal import journal_files, read_journal
from batchgen_data.job.lease import Owner, running_owner
from batchgen_data.job.manifest import Manifest, read_manifest
from batchgen_data.job.store import Places, read_states
from batchgen_data.job.summary import RunSummary


@dataclass(slots=True, kw_only=True)
class JobStatus:
    """What an output says of its job.

    Attributes:
        num_rows: Rows of the job.
        num_shards, num_shards_done: Its shards, and those that are published.
        num_journaled: Rows of open shards with an outcome.
        num_in_flight: Rows that were begun and have none: at work, or lost when a run was killed.
        summary: Counts of published rows; the times are those of the last run.
        owner: Who writes to the output now, as far as this machine can tell.
        last_status: How the last run ended: "finished", "failed", "interrupted"; None if it never said.
        replacement: Status of the job that will replace this one, if there is one.
    """

    num_rows: int
    num_shards: int
    num_shards_done: int
    num_journaled: int = 0
    num_in_flight: int = 0
    summary: RunSummary = field(default_factory=RunSummary)
    owner: Owner | None = None
    last_status: str | None = None
    replacement: JobStatus | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every row has a published outcome."""
        return self.num_shards_done == self.num_shards

    def lines(self) -> list[str]:
        """Return what to tell people before the counts."""
        if self.is_finished:
            state = "finished"
        elif self.owner is not None:
            state = f"running (process {self.owner.pid} on {self.owner.host})"
        else:
            state = f"{self.last_status or 'stopped'}, not finished: run the same command to go on"
        done = self.summary.num_rows + self.num_journaled
        share = f" ({100 * done / self.num_rows:.1f}%)" if self.num_rows else ""
        lines = [
            f"state: {state}",
            f"progress: {done} of {self.num_rows} rows{share}; "
            f"{self.num_shards_done} of {self.num_shards} shards published, "
            f"{self.num_journaled} rows of open shards in the journal",
        ]
        if self.num_in_flight:
            what = "are at work" if self.owner is not None else "were in flight when the last run ended"
            lines.append(f"in flight: {self.num_in_flight} rows {what}")
        if self.replacement is not None:
            lines += [f"replacement, {line}" for line in self.replacement.lines()]
        return lines


def read_status(path: str, files: LocalFiles | None = None) -> JobStatus:
    """Return the status of the job in an output folder; nothing is locked or changed.

    Args:
        path: The output folder.
        files: The file system.

    Raises:
        ConfigError: There is no output of a run.
        CommitError: Its records are damaged.
    """
    files = files or LocalFiles()
    places, next_places = Places.of_output(path), Places.of_replacement(path)
    manifest, next_manifest = read_manifest(places, files), read_manifest(next_places, files)
    if manifest is None:
        raise ConfigError(f"{path} is not the output of a run: {places.manifest} is missing")
    owner = running_owner(f"{path}/_batchgen", files)
    status = _status_of(places, manifest, owner, files)
    if next_manifest is not None:
        status.replacement = _status_of(next_places, next_manifest, owner, files)
    return status


def _status_of(places: Places, manifest: Manifest, owner: Owner | None, files: LocalFiles) -> JobStatus:
    states = read_states(places, files)
    report = _report(places, files)
    status = JobStatus(
        num_rows=manifest.num_rows,
        num_shards=len(manifest.shards()),
        num_shards_done=len(states),
        owner=owner,
        last_status=report.get("status"),
    )
    for state in states.values():
        status.summary.add_summary(state.summary)
    counts = report.get("counts", {})
    status.summary.generating_s = counts.get("generating_s", 0.0)
    status.summary.elapsed_s = counts.get("elapsed_s", 0.0)
    status.summary.run_tokens = counts.get("run_tokens", 0)
    for shard in manifest.shards():
        if shard.idx not in states:
            done, begun = _journaled(places, shard.idx, manifest.first_generation, files)
            status.num_journaled += len(done)
            status.num_in_flight += len(begun - done)
    return status


def _journaled(
    places: Places, shard_idx: int, first_generation: int, files: LocalFiles
) -> tuple[set[int], set[int]]:
    """Return the rows of an open shard with an outcome in the journal, and those that were begun last."""
    done: set[int] = set()
    begun: set[int] = set()
    latest = -1
    for name in journal_files(places.journal, files):
        if name.shard_idx != shard_idx or name.generation < first_generation:
            continue
        if name.generation > latest:
            latest, begun = name.generation, set()
        try:
            content = files.read(f"{places.journal}/{name}")
        except FileNotFoundError:
            continue  # its shard was published meanwhile
        for entry in read_journal(content):
            rows = range(entry.first_row, entry.first_row + entry.num_rows)
            (begun if entry.results is None else done).update(rows)
    return done, begun


def _report(places: Places, files: LocalFiles) -> dict[str, Any]:
    try:
        report = json.loads(files.read(places.report))
    except (FileNotFoundError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}
