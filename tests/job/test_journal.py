"""The journal: what was written is read back, what is torn or damaged ends the reading, nothing else does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from batchgen_data.errors import CommitError
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.journal import Entry, JournalName, JournalWriter, journal_files, read_journal
from batchgen_data.job.reader import WorkItem


def results(*texts: str) -> pa.Table:
    return pa.table({"generated_text": list(texts)})


def entries(folder: Path) -> Iterator[Entry]:
    for name in journal_files(str(folder), LocalFiles()):
        yield from read_journal((folder / str(name)).read_bytes())


def test_attempts_and_outcomes_come_back_in_order(tmp_path: Path) -> None:
    writer = JournalWriter(str(tmp_path), 3, LocalFiles())
    for first, texts in ((0, ("a", "b")), (2, ("c",))):
        item = WorkItem(0, first, len(texts), shard_idx=7)
        writer.attempt(item)
        writer.outcomes(item, results(*texts))
    writer.attempt(WorkItem(0, 9, 4, shard_idx=8, round_idx=1))
    writer.close()
    names = list(journal_files(str(tmp_path), LocalFiles()))
    assert [(n.shard_idx, n.round_idx, n.generation) for n in names] == [(7, 0, 3), (8, 1, 3)]
    found = list(entries(tmp_path))
    assert [(e.first_row, e.num_rows, e.results is None) for e in found] == [
        (0, 2, True),
        (0, 2, False),
        (2, 1, True),
        (2, 1, False),
        (9, 4, True),
    ]
    assert found[1].results is not None
    assert found[1].results.column(0).to_pylist() == ["a", "b"]


def test_a_file_is_read_up_to_any_cut_and_any_flipped_bit(tmp_path: Path) -> None:
    writer = JournalWriter(str(tmp_path), 1, LocalFiles())
    for row in range(6):
        writer.outcomes(WorkItem(0, row, 1), results(f"text {row}"))
    writer.close()
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    length = (len(content) - 8) // 6
    for cut in range(len(content)):
        rows = [entry.first_row for entry in read_journal(content[:cut])]
        assert rows == list(range(max(0, (cut - 8) // length)))
    random_ = random.Random(5)
    for _ in range(500):
        at, bit = random_.randrange(8, len(content)), 1 << random_.randrange(8)
        flipped = bytearray(content)
        flipped[at] ^= bit
        rows = [entry.first_row for entry in read_journal(bytes(flipped))]
        assert rows == list(range((at - 8) // length))
    assert list(read_journal(b"something else")) == []


def test_few_files_stay_open_and_all_are_read(tmp_path: Path) -> None:
    writer = JournalWriter(str(tmp_path), 1, LocalFiles(), max_open=2)
    for turn in range(2):
        for shard in range(4):
            writer.outcomes(WorkItem(0, turn, 1, shard_idx=shard), results("x"))
    writer.close()
    assert sorted(entry.first_row for entry in entries(tmp_path)) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(list(tmp_path.iterdir())) == 8


def test_a_full_disk_is_an_error_and_what_follows_is_in_a_new_file(tmp_path: Path) -> None:
    class Sink:
        def __init__(self, path: str) -> None:
            self.file = open(path, "xb", buffering=0)  # noqa: SIM115
            self.writes = 0

        def write(self, content: bytes) -> int:
            self.writes += 1
            return self.file.write(content[:5] if self.writes == 3 else content)

        def close(self) -> None:
            self.file.close()

    class Files(LocalFiles):
        def append(self, path: str) -> Sink:  # type: ignore[override]
            return Sink(path)

    writer = JournalWriter(str(tmp_path), 1, Files())
    writer.outcomes(WorkItem(0, 0, 1), results("x"))
    with pytest.raises(CommitError, match="cannot be written"):
        writer.outcomes(WorkItem(0, 1, 1), results("y"))
    writer.outcomes(WorkItem(0, 2, 1), results("z"))
    writer.close()
    assert [entry.first_row for entry in entries(tmp_path)] == [0, 2]


def test_other_names_are_no_journals() -> None:
    name = JournalName(1, 2, 3, "abc")
    assert JournalName.parse(str(name)) == name
    for other in ("notes.txt", "1-2-3.log", "a-0-1-w.log", "1-0-1-w.log.tmp"):
        assert JournalName.parse(other) is None
