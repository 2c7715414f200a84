"""Which job an output belongs to: all that decides its rows, so that only the same job goes on with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchgen_data.errors import CommitError, InputError, ResumeMismatchError
from batchgen_data.job.check import CheckedJob
from batchgen_data.job.files import LocalFiles, file_digest
from batchgen_data.job.inputs import InputFile, local_stat
from batchgen_data.job.shards import Shard, choose_shard_rows, plan_shards
from batchgen_data.job.store import Places
from batchgen_data.shipped_callbacks import is_int8

MANIFEST_FORMAT = 1
# Options that decide what a row's outcome is. All others (workers, memory, batch sizes) do not.
_JOB_FIELDS = (
    "prompt_column",
    "messages_column",
    "prompt",
    "system",
    "sampling_column",
    "apply_chat_template",
    "chat_template_kwargs",
    "control_tokens",
    "on_null",
    "generated_tokens",
    "output_prefix",
    "limit",
)
# Never quoted in messages.
_TEXT_FIELDS = ("prompt", "system")
_ENGINE_FIELDS = ("dtype", "max_context_tokens")
# A model's files up to this size are read whole; of larger ones the size and both ends, which change
# whenever weights are trained or converted.
_WHOLE_BYTES, _END_BYTES = 16 * 2**20, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A job as its output remembers it.

    Attributes:
        fields: What decides its rows, by option.
        inputs: Its files in order: name, path, format, stem, rows, rows_per_shard, bytes, digest, stat.
        first_generation: The lease under which it was begun; journals of earlier ones are not its own.
        created_at: When, in UTC.
    """

    fields: dict[str, Any]
    inputs: list[dict[str, Any]]
    first_generation: int
    created_at: str

    @property
    def num_rows(self) -> int:
        """Rows of the job."""
        return sum(file["rows"] for file in self.inputs)

    def shards(self) -> list[Shard]:
        """Return the job's shards."""
        columns = ([file[name] for file in self.inputs] for name in ("stem", "rows", "rows_per_shard"))
        return plan_shards(*columns)

    def encode(self) -> bytes:
        """Return the manifest as JSON."""
        content = {
            "format": MANIFEST_FORMAT,
            "created_at": self.created_at,
            "first_generation": self.first_generation,
            "fields": self.fields,
            "inputs": self.inputs,
        }
        return json.dumps(content, indent=1).encode() + b"\n"

    def is_same(self, other: Manifest) -> bool:
        """Tell whether `other`, made of the options of this run, describes the same job."""
        return not self._differences(other)

    def check_same(self, other: Manifest, shown: str) -> None:
        """Make sure that `other`, made of the options of this run, describes the same job.

        Raises:
            ResumeMismatchError: It does not; every field that differs is named.
        """
        differing = self._differences(other)
        if differing:
            raise ResumeMismatchError(
                f"output {shown} belongs to another job; what differs: {'; '.join(differing)}. "
                "Use the same settings to go on, another folder, or --overwrite to replace it"
            )

    def _differences(self, other: Manifest) -> list[str]:
        differing = []
        for name, value in other.fields.items():
            before = self.fields.get(name)
            if before != value:
                is_text = name in _TEXT_FIELDS
                differing.append(name if is_text else f"{name} ({_shown(before)} then, {_shown(value)} now)")
        same_limit = self.fields.get("limit") == other.fields["limit"]
        return differing + _differing_inputs(self.inputs, other.inputs, same_limit)


def describe_job(job: CheckedJob, *, generation: int, before: Manifest | None = None) -> Manifest:
    """Return the manifest of a checked job.

    Args:
        job: The job.
        generation: The lease it would begin under.
        before: An earlier manifest: files that have not been touched since are not read again.

    Raises:
        InputError: A file cannot be read.
    """
    known = {file["name"]: file for file in before.inputs} if before is not None else {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        digests = list(pool.map(lambda file: _content(file, known.get(file.name)), job.files))
    inputs = [
        {
            "name": file.name,
            "path": file.path,
            "format": file.format,
            "stem": file.output_name.removesuffix(".parquet"),
            "rows": rows,
            "rows_per_shard": choose_shard_rows(file, job.num_rows),
            "bytes": file.size_bytes,
            **content,
        }
        for file, rows, content in zip(job.files, job.rows_by_file, digests, strict=True)
    ]
    config = job.config
    fields = {name: getattr(config, name) for name in _JOB_FIELDS}
    fields["sampling"] = config.sampling.to_dict()
    fields |= {name: config.engine.get(name) for name in _ENGINE_FIELDS}
    # The only one of the shipped callbacks that changes tokens.
    fields["kv"] = "int8" if any(map(is_int8, config.engine.get("callbacks") or ())) else None
    fields["model"] = model_identity(str(job.options["model"]), job.options["revision"])
    tokenizer = job.options["tokenizer"]
    fields["tokenizer"] = tokenizer and model_identity(str(tokenizer), None)
    return Manifest(
        # Through JSON, as it will be compared: tuples become lists.
        fields=json.loads(json.dumps(fields, default=str)),
        inputs=inputs,
        first_generation=generation,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def read_manifest(places: Places, files: LocalFiles) -> Manifest | None:
    """Return the manifest of an output, None where there is none.

    Raises:
        CommitError: It is damaged or of a format that this version does not know.
    """
    if not files.exists(places.manifest):
        return None
    try:
        content = json.loads(files.read(places.manifest))
        if content["format"] != MANIFEST_FORMAT:
            raise ValueError(f"its format {content['format']} is unknown to this version")
        return Manifest(
            fields=content["fields"],
            inputs=content["inputs"],
            first_generation=content["first_generation"],
            created_at=content["created_at"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CommitError(f"{places.manifest} is damaged: {error}") from error


def model_identity(model: str, revision: str | None) -> str:
    """Return what tells one model from another: the hub's name and commit, or a digest of local files.

    Args:
        model: A folder, a GGUF file, or a hub id.
        revision: The hub commit.

    Raises:
        OSError: A local file cannot be read.
    """
    path = Path(model)
    if path.is_file():
        return f"file {_sampled_digest([path], path.parent)}"
    if path.is_dir():
        found = [p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")]
        return f"folder {_sampled_digest(found, path)}"
    return f"{model}@{revision}" if revision else model


def _sampled_digest(paths: Sequence[Path], base: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        size_bytes = path.stat().st_size
        digest.update(f"{path.relative_to(base)}\0{size_bytes}\0".encode(errors="surrogateescape"))
        with path.open("rb") as source:
            if size_bytes <= _WHOLE_BYTES:
                digest.update(source.read())
            else:
                digest.update(source.read(_END_BYTES))
                source.seek(-_END_BYTES, os.SEEK_END)
                digest.update(source.read())
    return digest.hexdigest()


def _content(file: InputFile, known: dict[str, Any] | None) -> dict[str, Any]:
    """Return what identifies a file's bytes; a local file is read whole unless it was not touched since."""
    stat = local_stat(file)
    if stat is None:
        return {"stat": None, "digest": file.fingerprint.hex()}
    if known is not None and known["stat"] == stat:
        return {"stat": stat, "digest": known["digest"]}
    try:
        return {"stat": stat, "digest": file_digest(file.path)}
    except OSError as error:
        raise InputError(f"{file.name} cannot be read: {error.strerror}") from error


def _differing_inputs(
    then: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]], same_limit: bool
) -> list[str]:
    before = {file["stem"]: file for file in then}
    after = {file["stem"]: file for file in now}
    if not same_limit:  # it decides how many files there are
        before, after = (
            {stem: m[stem] for stem in m if stem in before and stem in after} for m in (before, after)
        )
    if [_identity(file) for file in before.values()] == [_identity(file) for file in after.values()]:
        return []
    differing = []
    for stem, file in after.items():
        if stem not in before:
            differing.append(f"input {file['name']}: was not there")
        elif _identity(file) != _identity(before[stem]):
            differing.append(f"input {file['name']}: its content changed")
    differing += [f"input {file['name']}: is missing" for stem, file in before.items() if stem not in after]
    return differing or ["inputs: their order"]


def _identity(file: dict[str, Any]) -> tuple[Any, ...]:
    return (file["stem"], file["bytes"], file["digest"])


def _shown(value: Any, limit: int = 80) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 1] + "…"
