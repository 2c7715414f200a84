"""Input files: found and described before anything runs.

Every file keeps its own schema from input to output, so files of one job may differ in column order, in
extra columns and in types: string, large_string, string_view or dictionary for the prompt, int32 here and
int64 there. What each file must have is checked from the footers: the columns that the prompt reads.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_data.errors import ConfigError
from batchgen_data.job import text
from batchgen_data.job.filesystem import (
    cause,
    is_local,
    open_file,
    open_filesystem,
    storage_failures,
    without_credentials,
)
from batchgen_data.job.openai_batch import CustomIds

InputFormat = Literal["parquet", "jsonl", "csv", "openai"]
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
_GLOB_MARK = re.compile(r"[*?\[]")
# A shard's number and a suffix are added, and file systems take 255 bytes.
_MAX_STEM_BYTES = 220
_COMPRESSED = (".gz", ".bz2", ".zst", ".xz", ".zip")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputFile:
    """One input file, described without its rows.

    Attributes:
        source: What the caller gave (a file, folder or glob): names the file system, credentials included.
        path: Its path there; absolute if local.
        name: For messages and records, without credentials.
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

    source: str
    path: str
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
    found: list[_Found] = []
    ignored: list[str] = []
    for source in sources:
        found.extend(_expand(source, format, ignored))
    if not found:
        raise ConfigError("no input files; give at least one file, folder or glob")
    names = {(file.place, file.path): file.name for file in found}
    for place, times in Counter((file.place, file.path) for file in found).items():
        if times > 1:
            raise ConfigError(f"input {names[place]} is given {times} times; name it once")
    output_names = _unique_output_names([file.relative for file in found])
    with ThreadPoolExecutor(max_workers=8) as pool:
        files = list(
            pool.map(lambda file, output_name: _describe(file, output_name, format), found, output_names)
        )
    if format == "openai":
        files = _with_custom_ids_checked(files)
    return Inputs(_with_distinct_fingerprints(files), ignored)


def _with_custom_ids_checked(files: Sequence[InputFile]) -> list[InputFile]:
    """Refuse ids that several files give; the ids are not kept, since the files go to every worker."""
    known = CustomIds()
    checked = []
    for file in files:
        if file.index is not None and file.index.custom_ids is not None:
            known.add_all(file.index.custom_ids)
            file = replace(file, index=replace(file.index, custom_ids=None))
        checked.append(file)
    return checked


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


def local_stat(file: InputFile) -> list[int] | None:
    """Return what changes whenever a local file does; None for files elsewhere."""
    try:
        found = os.stat(file.path)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


class _Found(NamedTuple):
    source: str
    path: str
    name: str
    # Below the folder or glob's base: what the output is called after.
    relative: str
    # Identity of the file system.
    place: object


def _expand(source: str, format: InputFormat | None, ignored: list[str]) -> Iterator[_Found]:
    """Yield the files that `source` stands for."""
    filesystem, path = open_filesystem(source)
    shown = without_credentials(source)
    try:
        if filesystem.isfile(path):
            base, paths, listed = path.rpartition("/")[0], [path], False
        elif filesystem.isdir(path):
            base, paths, listed = path.rstrip("/"), filesystem.find(path), True
        elif _GLOB_MARK.search(path):
            base = _before_glob(path)
            paths, listed = [p for p in filesystem.glob(path) if filesystem.isfile(p)], True
        else:
            raise ConfigError(f"input {shown} does not exist")
    except ConfigError:
        raise
    except storage_failures(source) as error:
        raise ConfigError(f"input {shown} cannot be listed: {cause(error)}") from error
    shown_base = _before_glob(shown) if _GLOB_MARK.search(path) else shown.rstrip("/")
    num_found = 0
    for path in sorted(paths):
        relative = path[len(base) :].lstrip("/")
        if listed and any(part.startswith(("_", ".")) for part in relative.split("/")):
            continue
        name = shown
        if listed:
            name = path if is_local(filesystem) else f"{shown_base}/{relative}"
        if format is None and (suffix := PurePosixPath(relative).suffix.lower()) not in _FORMATS:
            if suffix in _COMPRESSED:
                raise ConfigError(f"input {name} is compressed; decompress it or convert it to Parquet")
            if not listed:
                raise ConfigError(
                    f"input {name}: cannot tell the format from the name; set format (parquet, jsonl, csv "
                    "or openai)"
                )
            ignored.append(name)
            continue
        num_found += 1
        yield _Found(source, path, name, relative, filesystem)
    if not num_found:
        raise ConfigError(
            f"input {shown}: no data files there (looked for {', '.join(_FORMATS)}; names that start "
            "with _ or . are passed over)"
        )


def _before_glob(path: str) -> str:
    return _GLOB_MARK.split(path, maxsplit=1)[0].rpartition("/")[0]


def _unique_output_names(relatives: Sequence[str]) -> list[str]:
    stems = []
    for relative in relatives:
        # Readers pass over names that start with _ or . so no output may have one.
        parts = [part.lstrip("_.") or "part" for part in PurePosixPath(relative).with_suffix("").parts]
        # A longer suffix and a number are added, and file systems take 255 bytes.
        parts[-1] = parts[-1].encode(errors="surrogateescape")[:_MAX_STEM_BYTES].decode(errors="ignore")
        stems.append("/".join(parts))
    folders = {str(folder).casefold() for stem in stems for folder in PurePosixPath(stem).parents}
    taken: set[str] = set()
    names = []
    for stem in stems:
        name, number = f"{stem}.parquet", 2
        # A folder may be called train.parquet, beside a file train.csv.
        while name.casefold() in taken or name.casefold() in folders:
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


def _describe(found: _Found, output_name: str, wanted: InputFormat | None) -> InputFile:
    name = found.name
    format = wanted or _FORMATS[PurePosixPath(found.relative).suffix.lower()]
    index = None
    try:
        with open_file(found.source, found.path) as source:
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
    except ConfigError:
        raise
    except storage_failures(found.source) as error:
        raise ConfigError(f"input {name} cannot be read as {format}: {cause(error)}") from error
    repeated = [column for column, times in Counter(schema.names).items() if times > 1]
    if repeated:
        raise ConfigError(f"input {name} has several columns named {repeated[0]!r}; rename them")
    if ROW_ID_COLUMN in schema.names:
        raise ConfigError(f"input {name} has a column named {ROW_ID_COLUMN!r}, a reserved name; rename it")
    return InputFile(
        source=found.source,
        path=found.path,
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
