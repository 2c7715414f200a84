"""Reads a whole output again: are all rows there, once, undamaged, and are they the input's?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from batchgen_data.errors import BatchgenError, ConfigError
from batchgen_data.job.files import LocalFiles, file_digest
from batchgen_data.job.filesystem import cause
from batchgen_data.job.inputs import ROW_ID_COLUMN, local_stat, resolve_inputs
from batchgen_data.job.manifest import Manifest, read_manifest
from batchgen_data.job.parts import STORAGE_FAILURES, PartFile, read_part
from batchgen_data.job.reader import RangeReader, WorkItem
from batchgen_data.job.records import ShardState, check_rows
from batchgen_data.job.shards import Ranges, Shard, as_ranges, each_row, num_rows, without
from batchgen_data.job.store import Places, read_states
from batchgen_data.job.summary import RunSummary


@dataclass(slots=True)
class Verification:
    """What reading an output again showed.

    Attributes:
        problems: What is wrong, one line each.
        num_rows: Rows of the job.
        num_files: Files read.
        summary: Counts taken from the files.
        num_compared: Rows whose input columns were compared with the input files.
        missing_inputs: Input files that are not there to be compared with, or changed since.
    """

    problems: list[str] = field(default_factory=list)
    num_rows: int = 0
    num_files: int = 0
    summary: RunSummary = field(default_factory=RunSummary)
    num_compared: int = 0
    missing_inputs: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return what to tell people."""
        lines = [f"problem: {problem}" for problem in self.problems]
        lines += [f"note: input {name} is gone or changed: not compared" for name in self.missing_inputs]
        read = f"{self.num_files} files with {self.summary.num_rows} of {self.num_rows} rows read"
        if self.problems:
            return [*lines, f"{read}; {len(self.problems)} problems"]
        return [
            *lines,
            f"{read}: each row once, bytes and pages as published; "
            f"{self.num_compared} rows compared with the input",
        ]


def verify_output(path: str, files: LocalFiles | None = None) -> Verification:
    """Read every file of a finished output again.

    Checked are the bytes of each file against its record, each page against its checksum, the counts, that
    the records name every row exactly once, that no file is there without a record, and, where the input
    files are still there, that the input's columns of every row are what the input says.

    Args:
        path: The output folder.
        files: The file system.

    Raises:
        ConfigError: There is no output of a run.
    """
    files = files or LocalFiles()
    places = Places.of_output(path)
    report = Verification()
    try:
        manifest = read_manifest(places, files)
        if manifest is None:
            raise ConfigError(f"{path} is not the output of a run: {places.manifest} is missing")
        states = read_states(places, files)
    except ConfigError:
        raise
    except BatchgenError as error:
        report.problems.append(str(error))
        return report
    report.num_rows = manifest.num_rows
    inputs = _Inputs(manifest, report)
    shards = manifest.shards()
    for shard in shards:
        if shard.idx in states:
            _verify_shard(places, files, manifest, shard, states[shard.idx], inputs, report)
        else:
            report.problems.append(f"{_place(manifest, shard)} have no outcome yet; run again to go on")
    strange = states.keys() - {shard.idx for shard in shards}
    report.problems += [f"shard {idx} is recorded, but the job has no such shard" for idx in strange]
    _find_strangers(places, files, states, report)
    return report


def _verify_shard(
    places: Places,
    files: LocalFiles,
    manifest: Manifest,
    shard: Shard,
    state: ShardState,
    inputs: _Inputs,
    report: Verification,
) -> None:
    problem = check_rows(shard, state)
    if problem is not None:
        report.problems.append(f"{_place(manifest, shard)}: {problem}")
        return
    for part, rows in standing_rows(state):
        final = f"{places.root}/{part.path}"
        if files.size_bytes(final) is None:
            report.problems.append(f"{part.path} is gone")
            continue
        report.num_files += 1
        try:
            counts, problem = _read_rows(final, shard, rows, manifest, inputs, report)
            if not part.matches(final, files):
                problem = "its bytes are not those that were published"
        except STORAGE_FAILURES as error:
            report.problems.append(f"{part.path} is damaged: {cause(error)}")
            continue
        report.summary.add_summary(counts)
        if counts.num_rows != num_rows(rows) or counts.to_counts() != part.counts.to_counts():
            problem = problem or "its rows are not those that its record counts"
        if problem is not None:
            report.problems.append(f"{part.path}: {problem}")


def _read_rows(
    path: str, shard: Shard, rows: Ranges, manifest: Manifest, inputs: _Inputs, report: Verification
) -> tuple[RunSummary, str | None]:
    """Read a part whole; returns its counts, and what tells its rows from those of the input."""
    counts, problem = RunSummary(), None
    name = manifest.inputs[shard.file_idx]["name"]
    left = each_row(rows)
    for batch in read_part(path):
        positions = list(itertools.islice(left, batch.num_rows))
        prefix = manifest.fields["output_prefix"]
        counts.add(batch, file_name=name, rows=positions, prefix=prefix)
        offset = 0
        for first, end in as_ranges(positions):
            wanted = inputs.read(shard.file_idx, first, end - first)
            if wanted is None:
                break
            found = pa.Table.from_batches([batch.slice(offset, end - first)])
            offset += end - first
            report.num_compared += end - first
            if problem is None and (column := _differing_column(wanted, found)) is not None:
                problem = f"column {column!r} differs from the input in rows {first} to {end - 1} of {name}"
    return counts, problem


class _Inputs:
    """The job's input files, as far as they are still there with the same content."""

    def __init__(self, manifest: Manifest, report: Verification) -> None:
        self._readers: dict[int, RangeReader] = {}
        for file_idx, described in enumerate(manifest.inputs):
            try:
                (file,) = resolve_inputs([described["path"]], format=described["format"]).files
                if local_stat(file) != described["stat"] and file_digest(file.path) != described["digest"]:
                    raise ConfigError("it changed")
                self._readers[file_idx] = RangeReader([file])
            except (BatchgenError, *STORAGE_FAILURES):
                report.missing_inputs.append(described["name"])

    def read(self, file_idx: int, first_row: int, num_rows: int) -> pa.Table | None:
        """Return rows of a file, None where it is missing."""
        reader = self._readers.get(file_idx)
        if reader is None:
            return None
        return reader.read(WorkItem(0, first_row, num_rows)).drop_columns([ROW_ID_COLUMN])


def _differing_column(wanted: pa.Table, found: pa.Table) -> str | None:
    for name in wanted.column_names:
        left, right = wanted.column(name), found.column(name)
        if left.type != right.type:
            return str(name)
        # NaN and dictionaries of another order are unequal to Arrow, but not to us.
        if not left.equals(right) and repr(left.to_pylist()) != repr(right.to_pylist()):
            return str(name)
    return None


def _find_strangers(
    places: Places, files: LocalFiles, states: dict[int, ShardState], report: Verification
) -> None:
    standing = {part.path for state in states.values() for part in state.parts}
    for folder in ("data", "errors"):
        for found in files.tree(f"{places.root}/{folder}"):
            if f"{folder}/{found}" not in standing:
                report.problems.append(f"{folder}/{found} is no file of this job; move it elsewhere")


def _place(manifest: Manifest, shard: Shard) -> str:
    name = manifest.inputs[shard.file_idx]["name"]
    return f"rows {shard.first_row} to {shard.first_row + shard.num_rows - 1} of {name}"


def standing_rows(state: ShardState) -> Iterator[tuple[PartFile, Ranges]]:
    """Yield the standing files of a shard, each with the rows it holds, in order."""
    last = state.records[-1]
    for record in state.records:
        if record.data is not None:
            yield record.data, without(record.rows, record.failed_rows)
    if last.errors is not None:
        yield last.errors, last.failed_rows
