"""Output files: nothing half visible, nothing overwritten, row groups bounded in bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_data.errors import CommitError, ConfigError, InternalError
from batchgen_data.job import store as store_module
from batchgen_data.job.store import OutputStore, check_writable

SCHEMA = pa.schema([("text", pa.string())], metadata={"owner": "someone"})


def rows(*texts: str) -> pa.Table:
    return pa.table({"text": list(texts)}, schema=SCHEMA)


def visible(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def write_part_until(store: OutputStore, name: str, error: type[BaseException]) -> None:
    with store.open_part(name, SCHEMA) as part:
        part.write(rows("x"))
        raise error


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_a_part_is_visible_only_when_whole(output: Path) -> None:
    store = OutputStore(str(output))
    assert not output.exists()  # checking changes nothing
    store.prepare()
    with store.open_part("lang=en/a.parquet", SCHEMA) as part:
        part.write(rows("x"))
        part.write(rows("y", "z"))
        assert list((output / "data").rglob("*.parquet")) == []
    assert part.num_rows == 3
    table = pq.read_table(output / "data/lang=en/a.parquet", partitioning=None)
    assert table.equals(rows("x", "y", "z"))
    assert table.schema.metadata[b"owner"] == b"someone"
    store.write_record({"status": "finished"})
    store.close()
    assert visible(output) == ["_batchgen/run.json", "data/lang=en/a.parquet"]
    assert json.loads((output / "_batchgen/run.json").read_text()) == {"status": "finished"}


def test_a_path_may_be_longer_than_a_file_name(output: Path) -> None:
    store = OutputStore(str(output))
    store.prepare()
    name = "/".join(["folder" * 20] * 4) + "/a.parquet"
    with store.open_part(name, SCHEMA) as part, store.open_part("other.parquet", SCHEMA):
        part.write(rows("x"))
    store.close()
    assert visible(output) == [f"data/{name}", "data/other.parquet"]
    assert pq.read_table(output / "data" / name).equals(rows("x"))


def test_a_part_without_rows_has_the_schema(output: Path) -> None:
    store = OutputStore(str(output))
    store.prepare()
    with store.open_part("a.parquet", SCHEMA):
        pass
    assert pq.read_schema(output / "data/a.parquet").equals(SCHEMA, check_metadata=True)


def test_an_interrupted_run_leaves_no_trace(output: Path) -> None:
    store = OutputStore(str(output))
    store.prepare()
    with pytest.raises(KeyboardInterrupt):
        write_part_until(store, "a.parquet", KeyboardInterrupt)
    store.close()
    assert not output.exists()


def test_an_interrupted_run_keeps_what_it_published_and_an_existing_folder(output: Path) -> None:
    output.mkdir()
    store = OutputStore(str(output))
    store.prepare()
    with store.open_part("a.parquet", SCHEMA) as part:
        part.write(rows("x"))
    with pytest.raises(ZeroDivisionError):
        write_part_until(store, "b.parquet", ZeroDivisionError)
    store.close()
    assert visible(output) == ["data/a.parquet"]


def test_an_existing_empty_folder_survives_a_run_that_published_nothing(output: Path) -> None:
    output.mkdir()
    store = OutputStore(str(output))
    store.prepare()
    store.close()
    assert list(output.iterdir()) == []


def test_an_occupied_output_is_refused(output: Path) -> None:
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; name a new folder"):
        OutputStore(str(output))
    with pytest.raises(ConfigError, match="is a file"):
        OutputStore(str(output / "notes.txt"))
    assert (output / "notes.txt").read_text() == "mine"


def test_of_two_runs_on_one_folder_one_is_refused(output: Path) -> None:
    first, second = OutputStore(str(output)), OutputStore(str(output))
    first.prepare()
    with pytest.raises(ConfigError, match="another run"):
        second.prepare()
    with first.open_part("a.parquet", SCHEMA) as part:
        part.write(rows("x"))
    assert visible(output) == ["data/a.parquet"]


def test_a_published_file_is_never_overwritten(output: Path) -> None:
    store = OutputStore(str(output))
    store.prepare()
    (output / "data/a.parquet").write_text("foreign")
    with pytest.raises(CommitError, match="exists already"), store.open_part("a.parquet", SCHEMA) as part:
        part.write(rows("x"))
    assert (output / "data/a.parquet").read_text() == "foreign"


def test_rows_of_another_schema_are_our_bug(output: Path) -> None:
    store = OutputStore(str(output))
    store.prepare()
    with (
        pytest.raises(InternalError, match="declared"),
        store.open_part("a.parquet", SCHEMA) as part,
    ):
        part.write(pa.table({"text": pa.array(["x"], pa.large_string())}))
    store.close()
    assert not output.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_created_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot be"):
        OutputStore(str(tmp_path / "locked/out")).prepare()


def test_a_failing_disk_is_a_commit_error(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = OutputStore(str(output))
    store.prepare()

    def fail(path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "_sync", fail)
    with (
        pytest.raises(CommitError, match=r"a\.parquet cannot be written: .*No space left"),
        store.open_part("a.parquet", SCHEMA) as part,
    ):
        part.write(rows("x"))
    store.close()
    assert not output.exists()


def test_row_groups_are_cut_by_bytes(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 13, with a lowered threshold: many small tables, and one large one."""
    monkeypatch.setattr(store_module, "ROW_GROUP_BYTES", 100_000)
    store = OutputStore(str(output))
    store.prepare()
    texts = [f"{n:06d}" + "x" * 10_000 for n in range(60)]
    with store.open_part("a.parquet", SCHEMA) as part:
        for start in range(0, 30, 3):
            part.write(rows(*texts[start : start + 3]))
        part.write(rows(*texts[30:]))
    metadata = pq.ParquetFile(output / "data/a.parquet").metadata
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sum(sizes) == 60
    assert max(sizes) * 10_000 <= 130_000
    assert pq.read_table(output / "data/a.parquet").column("text").to_pylist() == texts


def test_pages_have_checksums(output: Path) -> None:
    store = OutputStore(str(output))
    store.prepare()
    with store.open_part("a.parquet", SCHEMA) as part:
        part.write(rows(*(f"{n} text" for n in range(1000))))
    path = output / "data/a.parquet"
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(OSError, match=r"CRC|checksum|corrupt"):
        pq.ParquetFile(path, page_checksum_verification=True).read()


def test_dictionaries_that_differ_between_tables_are_written(output: Path) -> None:
    kind = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([("d", kind)])
    store = OutputStore(str(output))
    store.prepare()
    with store.open_part("a.parquet", schema) as part:
        for values in (["a", "b", None], ["c", "a"]):
            part.write(pa.table({"d": pa.array(values).dictionary_encode()}, schema=schema))
    table = pq.read_table(output / "data/a.parquet")
    assert table.schema.equals(schema)
    assert table.column("d").to_pylist() == ["a", "b", None, "c", "a"]


def test_a_schema_that_parquet_cannot_hold_is_refused_early() -> None:
    check_writable(SCHEMA, "a.jsonl")
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be written as Parquet.*struct"):
        check_writable(pa.schema([("empty", pa.struct([]))]), "a.jsonl")


def test_other_file_systems_go_through_the_same_steps() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    store = OutputStore("memory://bucket/out")
    store.prepare()
    with store.open_part("x/a.parquet", SCHEMA) as part:
        part.write(rows("x"))
    store.write_record({"status": "finished"})
    store.close()
    assert sorted(memory.find("/bucket/out")) == [
        "/bucket/out/_batchgen/run.json",
        "/bucket/out/data/x/a.parquet",
    ]
    with memory.open("/bucket/out/data/x/a.parquet") as source:
        assert pq.read_table(source).equals(rows("x"))
    with pytest.raises(ConfigError, match="not empty"):
        OutputStore("memory://bucket/out")
    memory.rm("/bucket", recursive=True)
