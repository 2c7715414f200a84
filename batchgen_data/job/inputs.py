"""Input files: found and described before anything runs.

Every file keeps its own schema from input to output, so files of one job may differ in column order, in
extra columns and in types: string, large_string, string_view or dictionary for the prompt, int32 here and
int64 there. What each file must have is checked from the footers: the columns that the prompt reads.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_data.errors import ConfigError
from batchgen_data.job import text
from batchgen_data.job.filesystem import is_local, open_file, open_filesystem, without_credentials

InputFormat = Literal["parquet", "jsonl", "csv"]
# Carries each row's identity to the stage and is gone from its output.
ROW_ID_COLUMN = "_batchgen_row"

_FORMATS: dict[str, InputFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
}
_COMPRESSED = (".gz", ".bz2", ".zst", ".xz", ".zip")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputFile:
    """One input file, described without its rows.

    Attributes:
        url: Absolute path or URL, to open it.
        name: For messages and records: as the caller wrote it, without credentials.
        output_name: Path of its output below ``data/``; unique within the job.
        format: How to read it.
        schema: Its columns, metadata included.
        num_rows: Rows in it.
        data_bytes: Size of its rows in memory, estimated.
        fingerprint: Identity of its content, the same wherever the file lies.
        size_bytes: Size on disk.
        content_digest: Digest of the footer (Parquet) or the content, to notice later changes.
        index: Where its records are (JSON Lines and CSV).
    """

    url: str
    name: str
    output_name: str
    format: InputFormat
    schema: pa.Schema
    num_rows: int
    data_bytes: int
    fingerprint: bytes
    size_bytes: int
    content_digest: bytes
    index: text.TextIndex | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files of a job in their order, and the names of files passed over in folders."""

    files: list[InputFile]
    ignored: list[str]


def resolve_inputs(sources: Sequence[str], *, format: InputFormat | None = None) -> Inputs:
    """Find the input files and read what describes them: footers, or for text files the content once.

    Each source is a file, a folder (searched deeply) or a glob, local or an fsspec URL. Sources keep their
    order; files of a folder or glob are sorted by name. Names that start with ``_`` or ``.`` are passed over.

    Args:
        sources: Paths and URLs.
        format: Read every file as this format, whatever its name ends with.

    Raises:
        ConfigError: Nothing found, a file that cannot be read, a repeated file or column.
    """
    found: list[tuple[str, str, str]] = []
    ignored: list[str] = []
    for source in sources:
        found.extend(_expand(source, format, ignored))
    if not found:
        raise ConfigError("no input files; give at least one file, folder or glob")
    for url, times in Counter(url for url, _, _ in found).items():
        if times > 1:
            raise ConfigError(f"input {without_credentials(url)} is given {times} times; name it once")
    output_names = _unique_output_names([relative for _, _, relative in found])
    with ThreadPoolExecutor(max_workers=8) as pool:
        described = pool.map(
            lambda entry: _describe(*entry),
            [
                (url, name, output_name, format or _FORMATS[PurePosixPath(relative).suffix.lower()])
                for (url, name, relative), output_name in zip(found, output_names, strict=True)
            ],
        )
        files = list(described)
    return Inputs(_with_distinct_fingerprints(files), ignored)


def footer_digest(source: Any, size_bytes: int, name: str) -> bytes:
    """Return a digest of an open Parquet file's footer.

    Raises:
        ConfigError: It has none.
    """
    source.seek(max(0, size_bytes - 8))
    tail = source.read(8)
    footer_bytes = int.from_bytes(tail[:4], "little")
    if size_bytes < 12 or tail[4:] != b"PAR1" or footer_bytes + 8 > size_bytes:
        raise ConfigError(f"input {name} is not a Parquet file, or it is cut off")
    source.seek(size_bytes - 8 - footer_bytes)
    digest = hashlib.blake2b(source.read(footer_bytes), digest_size=16).digest()
    source.seek(0)
    return digest


def _expand(source: str, format: InputFormat | None, ignored: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (url, name, path relative to the source) of the files that `source` stands for."""
    filesystem, path = open_filesystem(source)
    shown = without_credentials(source)
    try:
        if filesystem.isfile(path):
            base, paths, listed = path.rpartition("/")[0], [path], False
        elif filesystem.isdir(path):
            base, paths, listed = path.rstrip("/"), filesystem.find(path), True
        elif any(mark in path for mark in "*?["):
            base = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0]
            paths, listed = [p for p in filesystem.glob(path) if filesystem.isfile(p)], True
        else:
            raise ConfigError(f"input {shown} does not exist")
    except OSError as error:
        raise ConfigError(f"input {shown} cannot be listed: {error.strerror or error}") from error
    num_found = 0
    for path in sorted(paths):
        relative = path[len(base) :].lstrip("/")
        if listed and any(part.startswith(("_", ".")) for part in relative.split("/")):
            continue
        url = path if is_local(filesystem) else filesystem.unstrip_protocol(path)
        name = without_credentials(url) if listed else shown
        if format is None and (suffix := PurePosixPath(relative).suffix.lower()) not in _FORMATS:
            if suffix in _COMPRESSED:
                raise ConfigError(f"input {name} is compressed; decompress it or convert it to Parquet")
            if not listed:
                raise ConfigError(
                    f"input {name}: cannot tell the format from the name; set format (parquet, jsonl or csv)"
                )
            ignored.append(name)
            continue
        num_found += 1
        yield url, name, relative
    if not num_found:
        raise ConfigError(
            f"input {shown}: no data files there (looked for {', '.join(_FORMATS)}; names that start "
            "with _ or . are passed over)"
        )


def _unique_output_names(relatives: Sequence[str]) -> list[str]:
    taken: set[str] = set()
    names = []
    for relative in relatives:
        # Readers pass over names that start with _ or . so no output may have one.
        parts = [part.lstrip("_.") or "part" for part in PurePosixPath(relative).with_suffix("").parts]
        stem = "/".join(parts)
        name, number = f"{stem}.parquet", 2
        while name.casefold() in taken:
            name, number = f"{stem}-{number}.parquet", number + 1
        taken.add(name.casefold())
        names.append(name)
    return names


def _with_distinct_fingerprints(files: list[InputFile]) -> list[InputFile]:
    """Give copies of one file different identities, so that their rows draw different numbers."""
    seen: Counter[bytes] = Counter()
    distinct = []
    for file in files:
        copy_number = seen[file.fingerprint]
        seen[file.fingerprint] += 1
        if copy_number:
            digest = hashlib.blake2b(file.fingerprint + copy_number.to_bytes(8, "big"), digest_size=16)
            file = replace(file, fingerprint=digest.digest())
        distinct.append(file)
    return distinct


def _describe(url: str, name: str, output_name: str, format: InputFormat) -> InputFile:
    index = None
    try:
        with open_file(url) as source:
            size_bytes = source.seek(0, 2)
            source.seek(0)
            if format == "parquet":
                digest = footer_digest(source, size_bytes, name)
                footer = pq.ParquetFile(source)
                schema, num_rows = footer.schema_arrow, footer.metadata.num_rows
                groups = [footer.metadata.row_group(i) for i in range(footer.metadata.num_row_groups)]
                data_bytes = sum(group.total_byte_size for group in groups)
            else:
                index = text.build_index(source, format, name)
                schema, num_rows, digest = index.schema, index.num_rows, index.digest
                data_bytes = size_bytes
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"input {name} cannot be read as {format}: {error}") from error
    repeated = [column for column, times in Counter(schema.names).items() if times > 1]
    if repeated:
        raise ConfigError(f"input {name} has several columns named {repeated[0]!r}; rename them")
    if ROW_ID_COLUMN in schema.names:
        raise ConfigError(f"input {name} has a column named {ROW_ID_COLUMN!r}, a reserved name; rename it")
    return InputFile(
        url=url,
        name=name,
        output_name=output_name,
        format=format,
        schema=schema,
        num_rows=num_rows,
        data_bytes=data_bytes,
        fingerprint=hashlib.blake2b(size_bytes.to_bytes(8, "big") + digest, digest_size=16).digest(),
        size_bytes=size_bytes,
        content_digest=digest,
        index=index,
    )
