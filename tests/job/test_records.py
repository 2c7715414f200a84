"""Records: small however many rows are done, checked before they are believed, added up round by round."""

from __future__ import annotations

import random
import time
import tracemalloc
from dataclasses import replace

import pytest

from batchgen_data.errors import CommitError
from batchgen_data.job.parts import PartFile
from batchgen_data.job.records import ShardRecord, add_up, check_rows
from batchgen_data.job.shards import Ranges, Shard, as_ranges, num_rows
from batchgen_data.job.summary import RunSummary


def part(path: str, rows: int) -> PartFile:
    counts = RunSummary(num_rows=rows, num_failed=rows if path.startswith("errors") else 0)
    return PartFile(path=path, size_bytes=10, digest="00", counts=counts)


def record(rows: Ranges, failed: Ranges, *, round_idx: int = 0, retired: str | None = None) -> ShardRecord:
    suffix = f"-r{round_idx}" if round_idx else ""
    num_failed = num_rows(failed)
    return ShardRecord(
        generation=1,
        shard_idx=7,
        round_idx=round_idx,
        rows=rows,
        failed_rows=failed,
        data=part(f"data/a{suffix}.parquet", num_rows(rows) - num_failed),
        errors=part(f"errors/a{suffix}.parquet", num_failed) if num_failed else None,
        retired=retired,
    )


FIRST = record(((0, 10),), ((2, 4), (7, 8)))
SECOND = record(FIRST.failed_rows, ((3, 4),), round_idx=1, retired="errors/a.parquet")
SHARD = Shard(7, 0, 0, 10, "a")


def test_a_record_comes_back_as_it_was_and_no_byte_may_change() -> None:
    content = FIRST.encode()
    assert ShardRecord.decode(content, "x") == FIRST
    for at in range(len(content) - 1):
        damaged = bytearray(content)
        damaged[at] ^= 1
        with pytest.raises(CommitError, match="the record x is damaged"):
            ShardRecord.decode(bytes(damaged), "x")
    with pytest.raises(CommitError):
        ShardRecord.decode(content[:-5], "x")


def test_rounds_add_up() -> None:
    state = add_up([FIRST, SECOND])[7]
    assert state.failed_rows == ((3, 4),)
    assert [p.path for p in state.parts] == ["data/a.parquet", "data/a-r1.parquet", "errors/a-r1.parquet"]
    assert (state.summary.num_rows, state.summary.num_failed, state.next_round) == (10, 1, 2)
    assert check_rows(SHARD, state) is None


@pytest.mark.parametrize(
    "records",
    [[SECOND], [FIRST, replace(SECOND, round_idx=2)], [FIRST, replace(SECOND, retired=None)], [FIRST, FIRST]],
)
def test_records_that_do_not_follow_one_another_are_refused(records: list[ShardRecord]) -> None:
    with pytest.raises(CommitError, match=r"missing|do not follow"):
        add_up(records)


@pytest.mark.parametrize(
    "records",
    [
        [replace(FIRST, rows=((0, 9),))],
        [replace(FIRST, failed_rows=((9, 11),))],
        [FIRST, replace(SECOND, rows=((2, 4),))],
    ],
)
def test_rows_that_are_not_there_once_are_noticed(records: list[ShardRecord]) -> None:
    assert check_rows(SHARD, add_up(records)[7]) is not None


def test_twenty_million_finished_rows_are_read_in_seconds_and_little_memory() -> None:
    """Case 16, with one row in a hundred failed, at random."""
    random_ = random.Random(3)
    contents = []
    for shard_idx in range(400):
        first = shard_idx * 50_000
        failed = as_ranges(sorted(random_.sample(range(first, first + 50_000), 500)))
        contents.append(replace(record(((first, first + 50_000),), failed), shard_idx=shard_idx).encode())
    assert sum(map(len, contents)) < 8 * 2**20
    tracemalloc.start()
    begin_s = time.monotonic()
    states = add_up(ShardRecord.decode(content, "x") for content in contents)
    assert time.monotonic() - begin_s < 20
    assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    tracemalloc.stop()
    assert sum(state.summary.num_rows for state in states.values()) == 20_000_000
