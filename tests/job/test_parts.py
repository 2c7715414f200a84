"""Parquet files of results: row groups bounded in bytes, pages with checksums, types as declared."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_data.errors import ConfigError, InternalError
from batchgen_data.job import parts as parts_module
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.parts import PartWriter, check_writable, read_part

SCHEMA = pa.schema([("text", pa.string())], metadata={"owner": "someone"})


def rows(*texts: str) -> pa.Table:
    return pa.table({"text": list(texts)}, schema=SCHEMA)


def part(path: Path, schema: pa.Schema = SCHEMA) -> PartWriter:
    return PartWriter(LocalFiles(), str(path), schema)


def test_schema_and_metadata_are_kept_with_rows_or_without(tmp_path: Path) -> None:
    with part(tmp_path / "a.parquet") as writer:
        writer.write(rows("x"))
        writer.write(rows("y", "z"))
    assert writer.num_rows == 3
    assert pq.read_table(tmp_path / "a.parquet").equals(rows("x", "y", "z"), check_metadata=True)
    with part(tmp_path / "b.parquet"):
        pass
    assert pq.read_schema(tmp_path / "b.parquet").equals(SCHEMA, check_metadata=True)


def test_rows_of_another_schema_are_our_bug(tmp_path: Path) -> None:
    other = pa.table({"text": pa.array(["x"], pa.large_string())})
    with pytest.raises(InternalError, match="declared"), part(tmp_path / "a.parquet") as writer:
        writer.write(other)


def test_row_groups_are_cut_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 13, with a lowered threshold: many small tables, and one large one."""
    monkeypatch.setattr(parts_module, "ROW_GROUP_BYTES", 100_000)
    texts = [f"{n:06d}" + "x" * 10_000 for n in range(60)]
    with part(tmp_path / "a.parquet") as writer:
        for start in range(0, 30, 3):
            writer.write(rows(*texts[start : start + 3]))
        writer.write(rows(*texts[30:]))
    metadata = pq.ParquetFile(tmp_path / "a.parquet").metadata
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sum(sizes) == 60
    assert max(sizes) * 10_000 <= 130_000
    assert pq.read_table(tmp_path / "a.parquet").column("text").to_pylist() == texts


def test_a_flipped_bit_in_a_page_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with part(path) as writer:
        writer.write(rows(*(f"{n} text" for n in range(1000))))
    assert sum(batch.num_rows for batch in read_part(str(path))) == 1000
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(OSError, match=r"CRC|checksum|corrupt"):
        list(read_part(str(path)))


def test_dictionaries_that_differ_between_tables_are_written(tmp_path: Path) -> None:
    schema = pa.schema([("d", pa.dictionary(pa.int32(), pa.string()))])
    with part(tmp_path / "a.parquet", schema) as writer:
        for values in (["a", "b", None], ["c", "a"]):
            writer.write(pa.table({"d": pa.array(values).dictionary_encode()}, schema=schema))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.equals(schema)
    assert table.column("d").to_pylist() == ["a", "b", None, "c", "a"]


def test_a_schema_that_parquet_cannot_hold_is_refused_early() -> None:
    check_writable(SCHEMA, "a.jsonl")
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be written as Parquet.*struct"):
        check_writable(pa.schema([("empty", pa.struct([]))]), "a.jsonl")
