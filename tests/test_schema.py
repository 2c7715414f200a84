from __future__ import annotations

import pyarrow as pa
import pytest

from batchgen_data.errors import ConfigError, InternalError, RowError
from batchgen_data.schema import Outcome, append_results, check_columns, result_fields

GOOD = Outcome(finish_reason="stop", stop_reason="\n", num_input_tokens=4, token_ids=[1, 2], text="ab")
FAILED = Outcome.failed(RowError("empty_prompt", "the prompt has no tokens"))
SKIPPED = Outcome.failed(RowError("null_input", "column 'a' is null", skipped=True))


def test_case_2_the_schema_does_not_depend_on_what_the_rows_did() -> None:
    schemas = [
        append_results(pa.table({"a": [1] * len(rows)}, schema=pa.schema([("a", pa.int64())])), rows).schema
        for rows in ([], [GOOD], [FAILED], [SKIPPED], [GOOD, FAILED, SKIPPED])
    ]
    assert all(schema.equals(schemas[0], check_metadata=True) for schema in schemas)
    assert schemas[0].names[1:] == [field.name for field in result_fields()]
    assert schemas[0].field("error_message").type == pa.string()
    assert schemas[0].field("num_generated_tokens").type == pa.int32()


def test_result_values() -> None:
    table = append_results(pa.table({"a": [1, 2, 3]}), [GOOD, FAILED, SKIPPED], generated_tokens=True)
    rows = table.to_pylist()
    assert rows[0] == {
        "a": 1,
        "generated_text": "ab",
        "finish_reason": "stop",
        "stop_reason": "\n",
        "num_input_tokens": 4,
        "num_generated_tokens": 2,
        "error_code": None,
        "error_message": None,
        "generated_tokens": [1, 2],
    }
    assert [row["finish_reason"] for row in rows] == ["stop", "error", "skipped"]
    assert [row["num_generated_tokens"] for row in rows] == [2, 0, 0]
    assert [row["generated_tokens"] for row in rows[1:]] == [None, None]
    assert rows[1]["error_code"] == "empty_prompt"
    assert rows[2]["error_message"] == "column 'a' is null"
    assert table.field("generated_tokens").type == pa.list_(pa.int32())


def test_case_8_time_zones_and_units_survive() -> None:
    columns = {
        f"t_{unit}": pa.array([0, None, 2], pa.timestamp(unit, tz="Europe/Paris"))
        for unit in ("s", "ms", "us", "ns")
    }
    table = pa.table(columns)
    out = append_results(table, [GOOD] * 3)
    assert out.select(table.column_names).equals(table)
    assert [out.field(name).type.tz for name in columns] == ["Europe/Paris"] * 4


def test_case_19_nulls_stay_null_and_nan_stays_nan() -> None:
    table = pa.table(
        {
            "i": pa.array([1, None, 3], pa.int64()),
            "f": pa.array([1.0, None, float("nan")], pa.float64()),
            "b": pa.array([True, None, False]),
        }
    )
    out = append_results(table, [GOOD] * 3)
    assert out.schema.types[:3] == [pa.int64(), pa.float64(), pa.bool_()]
    assert [column.null_count for column in out.columns[:3]] == [1, 1, 1]
    assert out.column("f").to_pylist()[2] != out.column("f").to_pylist()[2]


def test_inputs_are_the_same_arrow_objects_with_their_metadata() -> None:
    field = pa.field("a", pa.dictionary(pa.int32(), pa.string()), nullable=False, metadata={"k": "v"})
    column = pa.chunked_array([pa.array(["x"]).dictionary_encode(), pa.array(["y"]).dictionary_encode()])
    table = pa.Table.from_arrays([column], schema=pa.schema([field], metadata={"pandas": "{}"}))
    out = append_results(table.slice(1), [GOOD])
    assert out.schema.metadata == {b"pandas": b"{}"}
    assert out.schema.field(0).equals(field, check_metadata=True)
    whole = append_results(table, [GOOD, GOOD])
    for chunk, original in zip(whole.column(0).chunks, column.chunks, strict=True):
        assert chunk.indices.buffers()[1].address == original.indices.buffers()[1].address


def test_columns_that_clash_are_refused_with_the_way_out() -> None:
    schema = pa.schema([("error_code", pa.string()), ("x", pa.int8()), ("generated_tokens", pa.int8())])
    with pytest.raises(ConfigError, match=r"'error_code'.*output_prefix"):
        check_columns(schema)
    with pytest.raises(ConfigError, match="'error_code', 'generated_tokens'"):
        check_columns(schema, generated_tokens=True)
    check_columns(schema, generated_tokens=True, prefix="llm_")
    out = append_results(pa.table({"error_code": ["old"]}), [GOOD], prefix="llm_")
    assert out.column("error_code").to_pylist() == ["old"]
    assert out.column("llm_error_code").to_pylist() == [None]


def test_a_wrong_number_of_outcomes_is_our_bug() -> None:
    with pytest.raises(InternalError, match="1 outcomes for 2 rows"):
        append_results(pa.table({"a": [1, 2]}), [GOOD])


def test_text_that_is_not_unicode_does_not_lose_the_table() -> None:
    broken = Outcome(finish_reason="stop", num_input_tokens=1, token_ids=[1], text="a\ud800")
    out = append_results(pa.table({"a": [1, 2]}), [broken, GOOD])
    assert out.column("generated_text").to_pylist() == ["a?", "ab"]
