"""Files nobody wishes for: odd schemas, huge cells, damage before, between and during runs."""

from __future__ import annotations

import decimal
import os
import random
import re
from dataclasses import replace
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_data.errors import ConfigError, InputError, ResumeMismatchError
from batchgen_data.job.verify import verify_output
from plain_job import PlainJob, write_inputs

ROWS = 20
WHEN = datetime(2024, 2, 29, 12, 34, 56, tzinfo=UTC)


def prompts(first: int = 0) -> list[str]:
    """Every fourth prompt fails."""
    return [f"{'bad' if row % 4 == 1 else 'say'} {row}" for row in range(first, first + ROWS)]


def write(job: PlainJob, name: str, table: pa.Table, **options: Any) -> pa.Table:
    job.inputs.mkdir(exist_ok=True)
    table = table.append_column("id", pa.array(range(table.num_rows), pa.int64()))
    pq.write_table(table, job.inputs / f"{name}.parquet", **options)
    return pq.read_table(job.inputs / f"{name}.parquet")


def published(job: PlainJob, name: str, folder: str) -> pa.Table:
    paths = sorted((job.output / folder).glob(f"{name}-*.parquet"))
    return pa.concat_tables([pq.read_table(path) for path in paths])


def same(left: pa.Table, right: pa.Table) -> bool:
    """Compare values and types; NaN equals NaN."""
    return left.schema.equals(right.schema, check_metadata=True) and repr(left.to_pylist()) == repr(
        right.to_pylist()
    )


@pytest.fixture
def job(tmp_path: Path) -> PlainJob:
    return PlainJob(inputs=tmp_path / "in", output=tmp_path / "out", shard_rows=6, rows_per_item=4)


def odd_columns() -> dict[str, pa.Array]:
    def cycle(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array([values[row % len(values)] for row in range(ROWS)], kind)

    timestamps = {
        f"at_{unit}_{zone}": cycle([WHEN if zone else WHEN.replace(tzinfo=None), None], kind)
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC", "Europe/Zurich")
        for kind in (pa.timestamp(unit, zone),)
    }
    struct = pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))])
    return {
        **timestamps,
        "int": cycle([1, None, -(2**62)], pa.int64()),
        "float": cycle([1.5, None, float("nan"), float("-inf")], pa.float64()),
        "flag": cycle([True, None, False], pa.bool_()),
        "decimal": cycle([decimal.Decimal("1.10"), None], pa.decimal128(12, 2)),
        "day": cycle([date(1969, 12, 31), None], pa.date32()),
        "clock": cycle([time(23, 59, 59), None], pa.time64("us")),
        "bytes": cycle([b"\x00\xff", None, b""], pa.large_binary()),
        "words": cycle(["p", None, "q", "p"], pa.dictionary(pa.int16(), pa.string())),
        "nested": cycle([[[1], None, []], None, []], pa.list_(pa.list_(pa.int32()))),
        "record": cycle([{"a": 1, "b": ["x", None]}, None, {"a": None, "b": None}], struct),
        "map": cycle([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
        "nothing": pa.nulls(ROWS),
        "text": cycle(["\u0000", "🤖 世界 é", "", None, "\r\n"], pa.string()),
    }


def test_every_kind_of_column_comes_out_as_it_went_in(job: PlainJob) -> None:
    """Cases 8, 19 and 20: types, time zones, nulls, NaN and metadata, in rows that succeed and that fail."""
    columns = {"prompt": pa.array(prompts()), **odd_columns()}
    table = write(job, "odd", pa.table(columns).replace_schema_metadata({"owner": "someone"}))
    job.run()
    is_bad = [prompt.startswith("bad") for prompt in prompts()]
    for folder in ("data", "errors"):
        found = published(job, "odd", folder).select(table.column_names)
        rows = [row for row, bad in enumerate(is_bad) if bad == (folder == "errors")]
        wanted = pa.concat_tables([table.slice(row, 1) for row in rows])
        assert found.schema.equals(table.schema, check_metadata=True)
        assert same(found, wanted)
    report = verify_output(str(job.output))
    assert (report.problems, report.num_compared) == ([], ROWS)


def test_files_of_one_job_may_differ_in_everything_but_the_prompt(job: PlainJob) -> None:
    """Case 65, with files without rows among them."""
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
    tables = []
    for number, kind in enumerate(kinds):
        column = pa.array(prompts(number))
        column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)
        table = pa.table({f"only_{number}": pa.array(range(ROWS), pa.int16()), "prompt": column})
        tables.append(write(job, f"{number}", table, row_group_size=7))
        write(job, f"{number}-empty", table.slice(0, 0))
    job.run()
    for number, table in enumerate(tables):
        data, errors = published(job, f"{number}", "data"), published(job, f"{number}", "errors")
        assert data.num_rows + errors.num_rows == ROWS
        assert data.schema.types[: len(table.schema)] == table.schema.types
        assert data.schema.equals(errors.schema)
        assert published(job, f"{number}-empty", "data").num_rows == 0
    assert verify_output(str(job.output)).problems == []


def test_huge_cells_are_cut_into_small_shards_and_row_groups(job: PlainJob) -> None:
    """Case 13: rows of 8 MB."""
    random_ = random.Random(1)
    cells = [random_.randbytes(2**16) * 128 for _ in range(9)]
    table = write(job, "huge", pa.table({"prompt": ["say"] * 9, "blob": pa.array(cells, pa.binary())}))
    replace(job, shard_rows=1000).run()
    paths = sorted((job.output / "data").iterdir())
    assert len(paths) == 2
    assert [pq.ParquetFile(path).metadata.num_rows for path in paths] == [7, 2]
    assert published(job, "huge", "data").select(table.column_names).equals(table)


@pytest.mark.parametrize("damage", ["cut", "empty", "no footer"])
def test_damaged_input_files_are_named_before_anything_runs(job: PlainJob, damage: str) -> None:
    write(job, "a", pa.table({"prompt": prompts()}))
    path = job.inputs / "a.parquet"
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "no footer": content[:-8]}[damage])
    with pytest.raises(ConfigError, match=r"a\.parquet is not a Parquet file, or it is cut off"):
        job.run()
    assert not job.output.exists()


def test_a_damaged_page_of_an_input_is_named_with_its_row_group_and_other_files_go_on(job: PlainJob) -> None:
    write(job, "a", pa.table({"prompt": prompts()}))
    write(job, "b", pa.table({"prompt": prompts()}), row_group_size=10, write_page_checksum=True)
    path = job.inputs / "b.parquet"
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"b\.parquet, row group 1, cannot be read"):
        job.run()
    assert published(job, "a", "data").num_rows == 15
    assert published(job, "b", "data").num_rows > 0


def test_a_file_that_changes_while_the_job_runs_stops_it(job: PlainJob) -> None:
    """Its rows' results would be those of other rows."""
    write(job, "a", pa.table({"prompt": prompts()}))

    class Changing(PlainJob):
        def generate(self, table: pa.Table) -> pa.Table:
            path = self.inputs / "a.parquet"
            content = bytearray(path.read_bytes())
            content[8] = 0xFF  # in a page: size and footer stay as they are
            path.write_bytes(bytes(content))
            return super().generate(table)

    changing = Changing(**{name: getattr(job, name) for name in job.__dataclass_fields__})
    with pytest.raises(InputError, match=r"a\.parquet was touched since the run started"):
        changing.run()
    assert list(job.output.rglob("*.parquet")) == []
    with pytest.raises(ResumeMismatchError, match=r"a\.parquet: its content changed"):
        job.run()


def test_each_flip_and_cut_of_an_output_is_found(job: PlainJob) -> None:
    """Promise 8; every flip prints what it was."""
    write_inputs(job.inputs, [30])
    job.run()
    paths = sorted((job.output / "data").iterdir()) + sorted((job.output / "errors").iterdir())
    random_ = random.Random(2)
    for number in range(80):
        path = random_.choice(paths)
        content = path.read_bytes()
        at = random_.randrange(len(content))
        damaged = bytearray(content)
        damaged[at] ^= 1 << random_.randrange(8)
        path.write_bytes(bytes(damaged) if number % 2 else content[:at])
        name = str(path.relative_to(job.output))
        problems = verify_output(str(job.output)).problems
        assert [problem for problem in problems if problem.startswith(name)], (name, at, number % 2)
        path.write_bytes(content)
    assert verify_output(str(job.output)).problems == []


@pytest.mark.parametrize(
    "damage", ["record gone", "record damaged", "file gone", "file added", "rows doubled"]
)
def test_damage_to_the_whole_is_found(job: PlainJob, damage: str) -> None:
    write_inputs(job.inputs, [12])
    job.run()
    record = job.output / "_batchgen/job/records/00000000-0.json"
    path = job.output / "data/0-00000.parquet"
    wanted = {
        "record gone": "rows 0 to 5 of .* have no outcome yet",
        "record damaged": "the record 00000000-0.json is damaged",
        "file gone": "data/0-00000.parquet is gone",
        "file added": "data/new.parquet is no file of this job",
        "rows doubled": "data/copy.parquet is no file of this job",
    }[damage]
    if damage == "record gone":
        record.unlink()
    elif damage == "record damaged":
        record.write_bytes(record.read_bytes().replace(b'"generation": 1', b'"generation": 2'))
    elif damage == "file gone":
        path.unlink()
    elif damage == "file added":
        (job.output / "data/new.parquet").write_text("x")
    else:
        os.link(path, job.output / "data/copy.parquet")
    problems = verify_output(str(job.output)).problems
    assert any(re.search(wanted, problem) for problem in problems), problems
