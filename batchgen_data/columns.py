"""Arrow columns seen row by row: cells as Python values, and the key that names a row's random draws."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen_data.errors import RowError

_KEY_BYTES = 16


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds text: any string kind, or a dictionary of one."""
    if isinstance(kind, pa.BaseExtensionType):
        return is_text(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def read_cells(column: pa.ChunkedArray, name: str) -> list[Any]:
    """Return a column's values as Python objects; a cell that cannot be read becomes a `RowError`.

    Single and half precision numbers come back as the shortest decimal that names them, so that 0.1
    prints as 0.1.

    Args:
        column: The column.
        name: Its name, for messages.
    """
    try:
        cells = column.to_pylist()
    except Exception:  # one bad cell (for example invalid UTF-8) fails the whole conversion
        cells = [_read_cell(scalar, name) for scalar in column]
    if pa.types.is_float32(column.type) or pa.types.is_float16(column.type):
        narrow = np.float32 if pa.types.is_float32(column.type) else np.float16
        cells = [cell if cell is None else float(str(narrow(cell))) for cell in cells]
    return cells


def row_keys(table: pa.Table, row_id_column: str | None = None) -> list[bytes]:
    """Return each row's identity for random draws, 16 bytes.

    The key is a hash of `row_id_column`'s value where there is one, else of the row's whole content plus
    how many equal rows came before it in `table`. Column order, string kind (string, large_string,
    dictionary) and integer width do not change it; neither do a null against an absent column or field.
    """
    ids: list[Any] = [None] * table.num_rows
    if row_id_column is not None:
        ids = _key_cells(table.column(row_id_column))
    contents = _row_contents(table) if None in ids else [b""] * table.num_rows
    seen: Counter[bytes] = Counter()
    keys = []
    for row_id, content in zip(ids, contents, strict=True):
        if row_id is not None:
            keys.append(_digest(b"id" + canonical(row_id)))
            continue
        keys.append(_digest(b"row%d:" % seen[content] + content))
        seen[content] += 1
    return keys


def content_keys(values: Iterable[Any]) -> list[bytes]:
    """Return keys for plain Python values: a hash of the content and of how many equal ones came before."""
    seen: Counter[bytes] = Counter()
    keys = []
    for value in values:
        content = canonical(value)
        keys.append(_digest(b"value%d:" % seen[content] + content))
        seen[content] += 1
    return keys


def canonical(value: Any) -> bytes:
    """Encode a Python value so that equal values, and only those, give equal bytes on any machine."""
    if isinstance(value, (str, bytes)):
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return b"s%d:" % len(data) + data
    if value is None or isinstance(value, bool):
        return b"n" if value is None else b"t" if value else b"f"
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, float):
        return b"d" + (struct.pack(">d", value) if value == value else b"nan")
    if isinstance(value, (list, tuple)):
        return b"l%d:" % len(value) + b"".join(map(canonical, value))
    if isinstance(value, dict):
        # A null field is the same as an absent one: Arrow adds nulls when it unifies structs.
        items = sorted((str(key), item) for key, item in value.items() if item is not None)
        return b"m%d:" % len(items) + b"".join(canonical(key) + canonical(item) for key, item in items)
    return b"o" + canonical(f"{type(value).__name__}:{value!r}")


def _row_contents(table: pa.Table) -> list[bytes]:
    hashes = [hashlib.blake2b(digest_size=_KEY_BYTES) for _ in range(table.num_rows)]
    for index in sorted(range(table.num_columns), key=lambda i: table.schema.names[i]):
        name = canonical(table.schema.names[index])
        for row, cell in zip(hashes, _key_cells(table.column(index)), strict=True):
            if cell is not None:
                row.update(name + canonical(cell))
    return [row.digest() for row in hashes]


def _key_cells(column: pa.ChunkedArray) -> list[Any]:
    kind = column.type
    if is_text(kind) and not isinstance(kind, pa.BaseExtensionType):
        # Bytes need no UTF-8 check, so text that cannot be decoded still has an identity. Arrow cannot cast
        # every dictionary (string_view values); those go the way of other types.
        with suppress(pa.ArrowNotImplementedError):
            return column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        # Plain integers: no time zone database and no pandas needed, nanoseconds kept.
        column = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    cells = read_cells(column, "")
    return [b"unreadable" if isinstance(cell, RowError) else cell for cell in cells]


def _read_cell(scalar: pa.Scalar, name: str) -> Any:
    try:
        return scalar.as_py()
    except Exception as error:
        what = "is not valid UTF-8" if isinstance(error, UnicodeDecodeError) else "cannot be read"
        return RowError("wrong_type", f"reading column {name!r}: the value {what} ({type(error).__name__})")


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_KEY_BYTES).digest()
