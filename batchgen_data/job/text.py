"""JSON Lines and CSV files: their types settled and their records located in one pass at the start.

Workers then read any range of rows by bytes, with the types given, so that two ranges of one file never
disagree about a column. Types are inferred over the whole file:

- JSON Lines: whole numbers and decimals unify to double, a field absent or null in some lines is null
  there, strings stay strings (also those that look like dates). Anything else is refused with its line.
- CSV (comma, first record is the header): pyarrow's types; a column of mixed types is a string column.
- OpenAI batch requests (`openai_batch`): always the same columns of text.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from batchgen_data.errors import ConfigError, InputError
from batchgen_data.job.openai_batch import SCHEMA, CustomIds, parse_requests

TextFormat = Literal["jsonl", "csv", "openai"]

# One offset is kept for this many records: 100 million rows cost 50 MB, and a range reads at most
# this many records more than it needs at either end.
_STRIDE_ROWS = 16
_BLOCK_BYTES = 16 * 2**20
_NEWLINE, _QUOTE = ord("\n"), ord('"')
_IS_BLANK = np.isin(np.arange(256), list(b" \t\r\n"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextIndex:
    """Where the records of one text file are, and what they hold.

    Attributes:
        schema: Types of every range of the file.
        num_rows: Records, blank lines and the CSV header not counted.
        offsets_bytes: Start of every 16th record, then the end of the last.
        digest: Digest of the whole content.
        custom_ids: Of OpenAI batch requests, until those of all files are known to differ.
    """

    schema: pa.Schema
    num_rows: int
    offsets_bytes: np.ndarray
    digest: bytes
    custom_ids: CustomIds | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    """Whole records cut from the file: `starts` are those of non-blank records within `data`."""

    data: bytes
    starts: np.ndarray
    offset_bytes: int
    lines_before: int


def build_index(source: BinaryIO, kind: TextFormat, name: str) -> TextIndex:
    """Read `source` once, settle its types and locate its records.

    Args:
        source: The file, opened for binary reading, at its start.
        kind: "jsonl", "csv" or "openai".
        name: The file's name for messages.

    Raises:
        ConfigError: The content is not of that kind, its types conflict, or a custom_id is given twice; the
            line is named.
    """
    digest = hashlib.blake2b(digest_size=16)
    schema = SCHEMA if kind == "openai" else pa.schema([])
    custom_ids = CustomIds() if kind == "openai" else None
    header: list[str] | None = None
    offsets: list[np.ndarray] = []
    num_rows = end_bytes = 0
    for block in _blocks(source, kind, name, digest):
        starts = block.starts
        if kind == "csv" and header is None and len(starts):
            body = int(starts[1]) if len(starts) > 1 else len(block.data)
            header = _header(block.data[starts[0] : body], name)
            schema = pa.schema([(column, pa.null()) for column in header])
            starts = starts[1:]
        if len(starts):
            records = block.data[starts[0] :]
            schema, table = _widen(schema, records, len(starts), block, kind, name)
            if custom_ids is not None:
                custom_ids.add(table.column("custom_id").to_pylist(), _lines(block), name)
            # Keep every 16th record of the whole file, not of each block.
            first = -num_rows % _STRIDE_ROWS
            offsets.append(starts[first::_STRIDE_ROWS] + block.offset_bytes)
            num_rows += len(starts)
        end_bytes = block.offset_bytes + len(block.data)
    if kind == "csv" and header is None:
        raise ConfigError(f"{name}: the file is empty; a CSV file starts with a header of column names")
    settled = pa.schema([f.with_type(pa.string()) if pa.types.is_null(f.type) else f for f in schema])
    return TextIndex(
        schema=settled,
        num_rows=num_rows,
        offsets_bytes=np.concatenate([*offsets, np.array([end_bytes])]).astype(np.int64),
        digest=digest.digest(),
        custom_ids=custom_ids,
    )


def read_rows(
    source: BinaryIO, kind: TextFormat, index: TextIndex, first_row: int, num_rows: int, name: str
) -> pa.Table:
    """Read rows ``first_row`` to ``first_row + num_rows`` with the index's types.

    Raises:
        InputError: The bytes no longer hold those rows.
    """
    begin = first_row // _STRIDE_ROWS
    end = min(-(-(first_row + num_rows) // _STRIDE_ROWS), len(index.offsets_bytes) - 1)
    offset_bytes = int(index.offsets_bytes[begin])
    source.seek(offset_bytes)
    data = source.read(int(index.offsets_bytes[end]) - offset_bytes)
    expected = min(end * _STRIDE_ROWS, index.num_rows) - begin * _STRIDE_ROWS
    try:
        table = _parse(data, kind, index.schema.names, index.schema)
    except (pa.ArrowException, ValueError) as error:
        raise InputError(
            f"{name}: rows {first_row} to {first_row + num_rows} no longer match the types found when the "
            f"run started ({_cause(error)}); do not change input files during a run"
        ) from None
    if table.num_rows != expected:
        raise InputError(f"{name}: the file changed since the run started; run again")
    return table.slice(first_row - begin * _STRIDE_ROWS, num_rows)


def _blocks(source: BinaryIO, kind: TextFormat, name: str, digest: hashlib.blake2b) -> Iterator[_Block]:
    rest = b""
    offset_bytes = lines_before = 0
    while True:
        # At least as much again as what is left over, so that one huge record is not rescanned for ever.
        chunk = source.read(max(_BLOCK_BYTES, len(rest)))
        digest.update(chunk)
        data = rest + chunk
        if not data:
            return
        ends = _record_ends(data, kind)
        at_end = not chunk
        if at_end and (not len(ends) or ends[-1] != len(data)):
            if kind == "csv" and data.count(b'"') % 2:
                raise ConfigError(f"{name}: a quoted field is still open at the end of the file")
            ends = np.append(ends, len(data))
        if len(ends):
            size = int(ends[-1])
            starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
            whole = data[:size]
            yield _Block(whole, starts[_filled(whole, starts, ends, kind)], offset_bytes, lines_before)
            offset_bytes += size
            lines_before += whole.count(b"\n")
            rest = data[size:]
        else:
            rest = data
        if at_end:
            return


def _record_ends(data: bytes, kind: TextFormat) -> np.ndarray:
    octets = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(octets == _NEWLINE)
    if kind == "csv":
        # A line break ends a record only outside quotes: after an even number of them.
        newlines = newlines[np.searchsorted(np.flatnonzero(octets == _QUOTE), newlines) % 2 == 0]
    return newlines + 1


def _filled(data: bytes, starts: np.ndarray, ends: np.ndarray, kind: TextFormat) -> np.ndarray:
    """Which records pyarrow will read as rows: it passes over blank lines."""
    octets = np.frombuffer(data, np.uint8)
    if kind != "csv":
        return np.add.reduceat(~_IS_BLANK[octets], starts, dtype=np.int64) > 0
    sizes = ends - starts
    last = octets[ends - 1] == _NEWLINE
    return_before = np.where(sizes > 1, octets[np.maximum(ends - 2, 0)] == ord("\r"), False)
    return sizes - last - (last & return_before) > 0


def _header(record: bytes, name: str) -> list[str]:
    try:
        return pa.csv.read_csv(pa.py_buffer(record), parse_options=_CSV_PARSE).column_names
    except pa.ArrowException as error:
        raise ConfigError(f"{name} line 1: the header cannot be read ({_cause(error)})") from None


def _widen(
    schema: pa.Schema, records: bytes, num_rows: int, block: _Block, kind: TextFormat, name: str
) -> tuple[pa.Schema, pa.Table]:
    try:
        table = _parse(records, kind, schema.names, None)
        if table.num_rows == num_rows:
            return _unify(schema, table.schema, kind), table
        cause = "quotes do not pair up within a field" if kind == "csv" else "not one record per line"
    except (pa.ArrowException, ValueError) as error:
        cause = _cause(error)
    line, why = _first_bad_line(schema, block, kind, cause)
    hint = "quote fields that hold commas or quotes" if kind == "csv" else "one JSON object per line"
    raise ConfigError(f"{name} line {line}: {why}; expected {hint}")


def _first_bad_line(schema: pa.Schema, block: _Block, kind: TextFormat, cause: str) -> tuple[int, str]:
    bounds = [*block.starts.tolist(), len(block.data)]
    for start, end in itertools.pairwise(bounds):
        record = block.data[start:end]
        if kind == "csv" and start == block.starts[0] and block.lines_before == 0:
            continue  # the header
        try:
            table = _parse(record, kind, schema.names, None)
            schema = _unify(schema, table.schema, kind)
            bad = None if table.num_rows == 1 else cause
        except (pa.ArrowException, ValueError) as error:
            bad = _cause(error)
        if bad:
            return block.lines_before + block.data.count(b"\n", 0, start) + 1, bad
    return block.lines_before + 1, cause


def _lines(block: _Block) -> list[int]:
    """The line of each record, from 1."""
    newlines = np.flatnonzero(np.frombuffer(block.data, np.uint8) == _NEWLINE)
    lines: list[int] = (np.searchsorted(newlines, block.starts) + block.lines_before + 1).tolist()
    return lines


_CSV_PARSE = pa.csv.ParseOptions(newlines_in_values=True)


def _parse(data: bytes, kind: TextFormat, names: list[str], schema: pa.Schema | None) -> pa.Table:
    if kind == "openai":
        return parse_requests(data)
    # One block, one thread: a range is small, and pyarrow's threads would compete with the model's.
    if kind == "jsonl":
        return pa.json.read_json(
            pa.BufferReader(data),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
            if schema is not None
            else None,
        )
    return pa.csv.read_csv(
        pa.BufferReader(data),
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
        parse_options=_CSV_PARSE,
        convert_options=pa.csv.ConvertOptions(column_types=schema),
    )


def _unify(known: pa.Schema, found: pa.Schema, kind: TextFormat) -> pa.Schema:
    if kind == "openai":
        return found
    if kind == "jsonl":
        found = pa.schema([field.with_type(_without_dates(field.type)) for field in found])
        return pa.unify_schemas([known, found], promote_options="permissive")
    return pa.schema(
        [field.with_type(_csv_type(field.type, found.field(i).type)) for i, field in enumerate(known)]
    )


def _csv_type(known: pa.DataType, found: pa.DataType) -> pa.DataType:
    if known.equals(found) or pa.types.is_null(found):
        return known
    if pa.types.is_null(known):
        return found
    if {known, found} == {pa.int64(), pa.float64()}:
        return pa.float64()
    return pa.binary() if pa.binary() in (known, found) else pa.string()


def _without_dates(kind: pa.DataType) -> pa.DataType:
    """pyarrow turns JSON strings that look like dates into timestamps; a string stays a string here."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_dates(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_dates(field.type)) for field in kind])
    return kind


def _cause(error: Exception) -> str:
    """The reason in pyarrow's message without the cell or row it quotes."""
    message = str(error).splitlines()[0]
    message = re.sub(r"(got \d+):.*", r"\1", message)
    message = re.sub(r"invalid value '.*", "invalid value", message)
    return re.sub(r"Row #\d+: | in row \d+$", "", message)
