"""Input files: what is found, what is refused at the start, and that any range reads back exactly."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
import pytest

from batchgen_data.errors import ConfigError, InputError
from batchgen_data.job import reader, text
from batchgen_data.job.inputs import ROW_ID_COLUMN, Inputs, resolve_inputs
from batchgen_data.job.reader import RangeReader, WorkItem, plan_items


def write_parquet(path: Path, table: pa.Table, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def numbered(num_rows: int, start: int = 0) -> pa.Table:
    return pa.table(
        {"n": list(range(start, start + num_rows)), "text": [f"row {n}" for n in range(num_rows)]}
    )


def read_all(inputs: Inputs, rows_per_item: int, order: random.Random | None = None) -> list[pa.Table]:
    """Read every range, perhaps in a random order, and return one table per file, identities included."""
    items = plan_items(inputs.files, [f.num_rows for f in inputs.files], rows_per_item=rows_per_item)
    ranges = RangeReader(inputs.files)
    visit = list(range(len(items)))
    if order is not None:
        order.shuffle(visit)
    tables = {idx: ranges.read(items[idx]) for idx in visit}
    return [
        pa.concat_tables([tables[idx] for idx, item in enumerate(items) if item.file_idx == file_idx])
        for file_idx in range(len(inputs.files))
    ]


def test_a_folder_is_searched_deeply_in_name_order_and_hidden_names_are_passed_over(tmp_path: Path) -> None:
    for name in (
        "b.parquet",
        "a.parquet",
        "lang=en/c.parquet",
        "_tmp.parquet",
        ".x.parquet",
        "_old/d.parquet",
    ):
        write_parquet(tmp_path / name, numbered(1))
    (tmp_path / "README.md").write_text("about")
    inputs = resolve_inputs([str(tmp_path)])
    assert [file.output_name for file in inputs.files] == ["a.parquet", "b.parquet", "lang=en/c.parquet"]
    assert [Path(name).name for name in inputs.ignored] == ["README.md"]


def test_globs_several_files_and_urls(tmp_path: Path) -> None:
    for name in ("x/one.parquet", "y/one.parquet", "y/two.parquet"):
        write_parquet(tmp_path / name, numbered(2))
    by_glob = resolve_inputs([str(tmp_path / "*/one.parquet")])
    assert [file.output_name for file in by_glob.files] == ["x/one.parquet", "y/one.parquet"]
    given = [str(tmp_path / "y/two.parquet"), (tmp_path / "x/one.parquet").as_uri()]
    assert [file.output_name for file in resolve_inputs(given).files] == ["two.parquet", "one.parquet"]


def test_equal_names_get_different_outputs(tmp_path: Path) -> None:
    paths = [
        write_parquet(tmp_path / name, numbered(1)) for name in ("x/a.parquet", "y/A.parquet", "y/_b.pq")
    ]
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    inputs = resolve_inputs([*map(str, paths), str(tmp_path / "a.jsonl")])
    assert [f.output_name for f in inputs.files] == ["a.parquet", "A-2.parquet", "b.parquet", "a-3.parquet"]


def test_no_output_lies_where_another_has_a_folder(tmp_path: Path) -> None:
    for name in ("train.parquet/part-0.parquet", "train.parquet/part-1.parquet", "Test/x.parquet.csv/y.pq"):
        write_parquet(tmp_path / name, numbered(1))
    for name in ("train.csv", "test/x.csv", "test/X.parquet.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"n": 1}\n')
    names = [file.output_name for file in resolve_inputs([str(tmp_path)]).files]
    assert sorted(names) == [
        "Test/x.parquet.csv/y.parquet",
        "test/X.parquet.parquet",
        "test/x.parquet",
        "train-2.parquet",
        "train.parquet/part-0.parquet",
        "train.parquet/part-1.parquet",
    ]
    folders = {str(folder).casefold() for name in names for folder in Path(name).parents}
    assert not folders & {name.casefold() for name in names}


def test_outputs_of_long_names_fit_the_file_system(tmp_path: Path) -> None:
    stem = "\N{SNOWMAN}" * 82
    for name in (f"{stem}a.csv", f"{stem}b.csv"):
        (tmp_path / name).write_text("n\n1\n")
    first, second = (file.output_name for file in resolve_inputs([str(tmp_path)]).files)
    assert first != second
    for name in (first, second):
        assert name.startswith("\N{SNOWMAN}" * 73)
        assert len(name.encode()) <= 255


@pytest.mark.parametrize(
    "sources, message",
    [
        ([], "no input files"),
        (["absent.parquet"], "absent.parquet does not exist"),
        (["empty"], "no data files there"),
        (["*.parquet"], "no data files there"),
        (["notes.txt"], "cannot tell the format"),
        (["packed.jsonl.gz"], "compressed"),
        (["s9://bucket/x.parquet"], "Protocol not known: s9"),
        (["simplecache::file:///x.parquet"], "chained URLs"),
    ],
)
def test_inputs_that_are_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("notes.txt").write_text("x")
    Path("packed.jsonl.gz").write_bytes(b"x")
    with pytest.raises(ConfigError, match=message):
        resolve_inputs(sources)


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", numbered(1))
    with pytest.raises(ConfigError, match="given 2 times"):
        resolve_inputs([str(tmp_path), str(path)])


def test_credentials_never_reach_a_message() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_inputs(["s9://key:secret@bucket/x.parquet"])
    assert "s9://bucket/x.parquet" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_unreadable_parquet_is_refused_at_the_start(tmp_path: Path, damage: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", numbered(100))
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-20], "text": b"not parquet at all", "empty": b""}[damage])
    with pytest.raises(ConfigError, match="is not a Parquet file"):
        resolve_inputs([str(tmp_path)])


def test_reserved_and_repeated_columns_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pa.table({ROW_ID_COLUMN: [1]}))
    with pytest.raises(ConfigError, match="reserved name"):
        resolve_inputs([str(path)])
    write_parquet(path, pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]))
    with pytest.raises(ConfigError, match="several columns named 'a'"):
        resolve_inputs([str(path)])


@pytest.mark.parametrize("rows_per_item", [1, 7, 64, 1000])
@pytest.mark.parametrize("shuffled", [False, True])
def test_ranges_of_parquet_add_up_to_the_file_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_item: int, shuffled: bool
) -> None:
    monkeypatch.setattr(reader, "_DECODE_ROWS", 13)
    monkeypatch.setattr(reader, "_WINDOW_ROWS", 50)
    tables = [numbered(257), numbered(0), numbered(90, start=1000)]
    for idx, table in enumerate(tables):
        write_parquet(tmp_path / f"{idx}.parquet", table, row_group_size=100)
    inputs = resolve_inputs([str(tmp_path)])
    order = random.Random(5) if shuffled else None
    items = plan_items(inputs.files, [f.num_rows for f in inputs.files], rows_per_item=rows_per_item)
    assert max(item.num_rows for item in items) <= rows_per_item
    for table, back in zip([tables[0], tables[2]], _without_empty(inputs, rows_per_item, order), strict=True):
        assert back.drop_columns([ROW_ID_COLUMN]).equals(table)


def _without_empty(inputs: Inputs, rows_per_item: int, order: random.Random | None) -> list[pa.Table]:
    files = [file for file in inputs.files if file.num_rows]
    return read_all(Inputs(files, []), rows_per_item, order)


def test_ascending_ranges_decode_a_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", numbered(5000))  # one row group
    inputs = resolve_inputs([str(path)])
    restarts = []
    restart = reader._ParquetRows._restart
    monkeypatch.setattr(
        reader._ParquetRows, "_restart", lambda self, group: (restarts.append(group), restart(self, group))
    )
    ranges = RangeReader(inputs.files)
    items = plan_items(inputs.files, [5000], rows_per_item=16)
    # Eight calls at once ask a little out of order.
    for start in range(0, len(items), 8):
        for item in reversed(items[start : start + 8]):
            assert ranges.read(item).column("n")[0].as_py() == item.first_row
    assert restarts == [0]


def test_types_and_metadata_come_back_as_they_are_in_the_file(tmp_path: Path) -> None:
    table = pa.table(
        {
            "ms": pa.array([1, None], pa.timestamp("ms", "Europe/Zurich")),
            "us": pa.array([1, None], pa.timestamp("us", "UTC")),
            "ns": pa.array([1, None], pa.timestamp("ns", "+02:00")),
            "int": pa.array([1, None], pa.int64()),
            "float": pa.array([float("nan"), None]),
            "bool": pa.array([True, None]),
            "large": pa.array(["a", None], pa.large_string()),
            "view": pa.array(["a", None], pa.string_view()),
            "dictionary": pa.array(["a", None]).dictionary_encode(),
            "nested": pa.array([[{"x": 1}], None]),
            "nothing": pa.nulls(2),
        }
    ).replace_schema_metadata({"owner": "someone"})
    path = write_parquet(tmp_path / "a.parquet", table)
    inputs = resolve_inputs([str(path)])
    (back,) = read_all(inputs, 1)
    back = back.drop_columns([ROW_ID_COLUMN])
    assert back.schema.equals(pq.read_table(path).schema, check_metadata=True)
    assert back.schema.metadata[b"owner"] == b"someone"
    for name in table.column_names:
        # NaN is not equal to itself: compare the printed values.
        assert str(back.column(name).to_pylist()) == str(table.column(name).to_pylist())
        assert back.column(name).type == table.column(name).type


def test_each_file_keeps_its_own_schema(tmp_path: Path) -> None:
    """Case 65: string kinds, column order, an extra column and other integer widths in one job."""
    tables = [
        pa.table({"prompt": pa.array(["a"], pa.string()), "n": pa.array([1], pa.int32())}),
        pa.table({"n": pa.array([1], pa.int64()), "prompt": pa.array(["b"], pa.large_string())}),
        pa.table({"prompt": pa.array(["c"]).dictionary_encode(), "n": pa.array([1]), "extra": [True]}),
    ]
    for idx, table in enumerate(tables):
        write_parquet(tmp_path / f"{idx}.parquet", table)
    for table, back in zip(tables, read_all(resolve_inputs([str(tmp_path)]), 10), strict=True):
        assert back.drop_columns([ROW_ID_COLUMN]).equals(table)


def test_row_identity_is_the_content_and_the_position_not_the_place(tmp_path: Path) -> None:
    first = write_parquet(tmp_path / "x/a.parquet", numbered(40))
    second = tmp_path / "elsewhere.parquet"
    second.write_bytes(first.read_bytes())
    (alone,) = read_all(resolve_inputs([str(first)]), 16)
    (moved,) = read_all(resolve_inputs([str(second)]), 7)
    ids = alone.column(ROW_ID_COLUMN).to_pylist()
    assert len(set(ids)) == 40
    assert moved.column(ROW_ID_COLUMN).to_pylist() == ids
    # Two copies in one job are different rows.
    both = read_all(resolve_inputs([str(first), str(second)]), 16)
    assert both[0].column(ROW_ID_COLUMN).to_pylist() == ids
    assert not set(ids) & set(both[1].column(ROW_ID_COLUMN).to_pylist())


def test_a_file_that_changes_during_the_run_is_an_input_error(tmp_path: Path) -> None:
    parquet = write_parquet(tmp_path / "a.parquet", numbered(10))
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"n": 1}\n{"n": 2}\n')
    inputs = resolve_inputs([str(tmp_path)])
    write_parquet(parquet, numbered(11))
    lines.write_text('{"n": 1}\n{"n": "2"}\n')
    ranges = RangeReader(inputs.files)
    with pytest.raises(InputError, match=r"a\.parquet changed since the run started"):
        ranges.read(WorkItem(0, 0, 10))
    with pytest.raises(InputError, match=r"b\.jsonl"):
        ranges.read(WorkItem(1, 0, 2))
    lines.unlink()
    with pytest.raises(InputError, match=r"b\.jsonl cannot be read"):
        ranges.read(WorkItem(1, 0, 2))


def test_a_damaged_page_is_an_input_error_that_names_the_row_group(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "a.parquet",
        numbered(200),
        row_group_size=100,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    inputs = resolve_inputs([str(path)])
    content = bytearray(path.read_bytes())
    offset = content.rfind(b"row 150")
    content[offset] ^= 1
    path.write_bytes(bytes(content))
    ranges = RangeReader(inputs.files)
    assert ranges.read(WorkItem(0, 0, 50)).num_rows == 50
    with pytest.raises(InputError, match=r"a\.parquet, row group 1, cannot be read"):
        ranges.read(WorkItem(0, 120, 50))


def test_large_rows_make_small_ranges(tmp_path: Path) -> None:
    table = pa.table(
        {"blob": pa.array([random.Random(i).randbytes(4 * 2**20) for i in range(6)], pa.binary())}
    )
    path = write_parquet(tmp_path / "a.parquet", table, compression="none", use_dictionary=False)
    inputs = resolve_inputs([str(path)])
    items = plan_items([inputs.files[0]], [6], rows_per_item=64)
    assert [item.num_rows for item in items] == [6]
    assert inputs.files[0].data_bytes > 24 * 2**20
    assert reader._ITEM_BYTES // (inputs.files[0].data_bytes // 6) < 64


def test_the_limit_takes_the_first_rows_of_each_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", numbered(50))
    inputs = resolve_inputs([str(path)])
    items = plan_items(inputs.files, [20], rows_per_item=16)
    assert items == [WorkItem(0, 0, 16), WorkItem(0, 16, 4)]


JSON_LINES = [
    '{"a": 1, "s": "2020-01-01 00:00:00", "list": [1, 2]}',
    "",
    '{"a": null, "o": {"x": null}}',
    "   ",
    '{"a": 2.5, "s": "text", "o": {"x": "y", "z": 3}}',
    '{"s": "caf\\u00e9 \\n \\"q\\""}',
]


@pytest.mark.parametrize("block_bytes", [1, 40, 10**6])
@pytest.mark.parametrize("last_newline", ["", "\n", "\r\n"])
def test_json_lines_are_typed_over_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, last_newline: str
) -> None:
    monkeypatch.setattr(text, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(text, "_STRIDE_ROWS", 2)
    path = tmp_path / "a.jsonl"
    path.write_bytes(("\n".join(JSON_LINES * 5) + last_newline).encode())
    inputs = resolve_inputs([str(path)])
    file = inputs.files[0]
    assert file.num_rows == 20
    assert file.schema.field("a").type == pa.float64()
    assert file.schema.field("s").type == pa.string()  # not a timestamp
    assert file.schema.field("o").type == pa.struct([("x", pa.string()), ("z", pa.int64())])
    for rows_per_item in (1, 3, 20):
        (back,) = read_all(inputs, rows_per_item, random.Random(1))
        assert back.column("a").to_pylist() == [1.0, None, 2.5, None] * 5
        assert back.column("s").to_pylist()[:4] == ["2020-01-01 00:00:00", None, "text", 'café \n "q"']
        assert back.column("o").to_pylist()[1:3] == [{"x": None, "z": None}, {"x": "y", "z": 3}]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"a": "secret words"}', r"a\.jsonl line 41: .*int64 vs string"),
        ('{"a": ', r"a\.jsonl line 41: .*one JSON object per line"),
        ("[1]", r"a\.jsonl line 41: .*array"),
        ('{"a": 1} {"a": 2}', r"a\.jsonl line 41: not one record per line"),
        ('{"a": 1, "a": 2}', r"a\.jsonl line 41: .*twice"),
    ],
)
@pytest.mark.parametrize("block_bytes", [64, 10**6])
def test_a_bad_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str, block_bytes: int
) -> None:
    monkeypatch.setattr(text, "_BLOCK_BYTES", block_bytes)
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' * 40 + line + "\n" + '{"a": 1}\n' * 40)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_inputs([str(path)])
    assert "secret" not in str(caught.value)


CSV_TEXT = 'id,text,x,none\r\n1,"a, ""quoted"" \n\nvalue",1,\r\n\r\n2,plain,2.5,\r\n3,,,\r\n'


@pytest.mark.parametrize("block_bytes", [1, 30, 10**6])
def test_csv_with_quoted_line_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(text, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(text, "_STRIDE_ROWS", 2)
    path = tmp_path / "a.csv"
    path.write_bytes(CSV_TEXT.encode())
    inputs = resolve_inputs([str(path)])
    assert inputs.files[0].num_rows == 3
    for rows_per_item in (1, 2, 3):
        (back,) = read_all(inputs, rows_per_item, random.Random(1))
        assert back.drop_columns([ROW_ID_COLUMN]).to_pydict() == {
            "id": [1, 2, 3],
            "text": ['a, "quoted" \n\nvalue', "plain", ""],
            "x": [1.0, 2.5, None],
            "none": ["", "", ""],
        }


def test_csv_column_of_mixed_types_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_BLOCK_BYTES", 8)
    path = tmp_path / "a.csv"
    path.write_text("n\n" + "1\n" * 20 + "many\n" + "007\n")
    inputs = resolve_inputs([str(path)])
    (back,) = read_all(inputs, 5)
    assert back.column("n").to_pylist() == ["1"] * 20 + ["many", "007"]


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "file is empty"),
        ("a,b\n1,2\n1,2,3 secret\n", r"line 3: .*Expected 2 columns, got 3"),
        ('a,b\n1,"open\n', "still open at the end"),
        ('a,b\n1,5" pipe\n2,6" pipe\n', r"line 2: .*quotes"),
        ("a,a\n1,2\n", "several columns named 'a'"),
    ],
)
def test_bad_csv_is_refused_at_the_start(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_inputs([str(path)])
    assert "secret" not in str(caught.value)


def test_a_header_alone_is_a_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n")
    (file,) = resolve_inputs([str(path)]).files
    assert (file.num_rows, file.schema.names) == (0, ["a", "b"])


def test_format_overrides_the_name(tmp_path: Path) -> None:
    path = tmp_path / "export.txt"
    path.write_text('{"a": "x"}\n')
    (file,) = resolve_inputs([str(path)], format="jsonl").files
    assert (file.format, file.num_rows, file.output_name) == ("jsonl", 1, "export.parquet")
