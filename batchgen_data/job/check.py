"""A job's options, and every check that needs neither a model nor a worker."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from batchgen_data.config import EngineConfig
from batchgen_data.errors import ConfigError
from batchgen_data.job import openai_batch
from batchgen_data.job.budget import check_budget
from batchgen_data.job.filesystem import is_local, open_filesystem
from batchgen_data.job.inputs import ROW_ID_COLUMN, InputFile, InputFormat, resolve_inputs
from batchgen_data.job.parts import check_writable
from batchgen_data.models.source import pinned, resolve_source
from batchgen_data.prompts import PromptSpec
from batchgen_data.sampling import SamplingParams
from batchgen_data.schema import check_columns, result_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """One job, complete.

    Attributes:
        inputs: Files, folders, globs; local paths or fsspec URLs.
        model: Model folder, hub id or GGUF file.
        output: Folder for the results: absent, empty, or of an earlier run of this job, which then goes on.
            None where nothing is written (preview).
        prompt_column, messages_column, prompt, system, sampling_column, apply_chat_template,
            chat_template_kwargs, control_tokens, on_null: Where prompts come from; see `PromptSpec`
            (`prompt` is the template).
        sampling: Settings of all rows.
        format: Read every input as "parquet", "jsonl" or "csv" instead of by its name, or as "openai": batch
            requests, which say themselves what to ask (`job.openai_batch`).
        limit: Take only the first rows of all inputs together.
        revision: Hub revision of the model.
        tokenizer: Another place to take the tokenizer from: a folder or a hub id, `id@revision` for one
            revision of it.
        num_actors: Worker processes; None: one per GPU, or one.
        num_gpus: GPUs per worker; None: one where there are any.
        batch_size: Rows of one call; None: 16 to 64 by the number of rows.
        generated_tokens: Also write the generated token ids.
        output_prefix: Put before the names of the result columns.
        fail_fast: Stop at the first row with an error.
        max_failed_rows: Stop when more rows failed: a number, or a share of all rows such as "5%".
        retry_failed: Try rows again whose outcome is an error.
        stall_timeout_s: Seconds without any progress after which a worker is started again; longer than one
            pass of the model takes.
        overwrite: Replace what is in the output, once the new results are complete.
        engine: Options of `EngineConfig`.
    """

    inputs: tuple[str, ...]
    model: str
    output: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    prompt: str | None = None
    system: str | None = None
    sampling_column: str | None = None
    apply_chat_template: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None
    control_tokens: str = "text"
    on_null: str = "skip"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    format: InputFormat | None = None
    limit: int | None = None
    revision: str | None = None
    tokenizer: str | None = None
    num_actors: int | None = None
    num_gpus: float | None = None
    batch_size: int | None = None
    generated_tokens: bool = False
    output_prefix: str = ""
    fail_fast: bool = False
    max_failed_rows: str | None = None
    retry_failed: bool = False
    stall_timeout_s: float = 1800.0
    overwrite: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("limit", "num_actors", "batch_size"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not is_whole or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
        gpus = self.num_gpus
        is_number = isinstance(gpus, int | float) and not isinstance(gpus, bool)
        if gpus is not None and not (is_number and 0 <= gpus < math.inf):
            raise ConfigError(f"num_gpus must be a number of at least 0, not {gpus!r}")
        stall = self.stall_timeout_s
        if isinstance(stall, bool) or not isinstance(stall, int | float) or not 0 < stall < math.inf:
            raise ConfigError(f"stall_timeout_s must be a number of seconds above 0, not {stall!r}")
        check_budget(self.max_failed_rows)
        if self.format not in (None, "parquet", "jsonl", "csv", "openai"):
            raise ConfigError(f"format {self.format!r} is unknown; choose parquet, jsonl, csv or openai")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedJob:
    """A job of which everything that can be checked without a model has been checked.

    Attributes:
        config: The job.
        files: Its input files, those beyond the limit left out.
        rows_by_file: How many of the first rows of each file will run.
        ignored: Names of files passed over in input folders.
        options: Keyword options of `BatchGenLLM`; model and tokenizer found, their revisions pinned.
    """

    config: JobConfig
    files: list[InputFile]
    rows_by_file: list[int]
    ignored: list[str]
    options: dict[str, Any]

    @property
    def num_rows(self) -> int:
        """Rows that will run."""
        return sum(self.rows_by_file)


def check_job(config: JobConfig) -> CheckedJob:
    """Find the inputs and the model and check every option against them.

    Raises:
        ConfigError: Says what cannot work; nothing has run and nothing is written.
    """
    EngineConfig.from_options(config.engine)
    if config.format == "openai":
        config = _for_requests(config)
    elif config.prompt_column is config.messages_column is config.prompt is None:
        raise ConfigError(
            "nothing says what to ask; give exactly one of prompt_column, messages_column and prompt (a "
            "template), or format openai for a file of batch requests"
        )
    spec = prompt_spec(config)
    _check_apart(config)
    inputs = resolve_inputs(config.inputs, format=config.format)
    for file in inputs.files:
        try:
            spec.check_schema(file.schema.append(pa.field(ROW_ID_COLUMN, pa.binary())))
            check_columns(file.schema, generated_tokens=config.generated_tokens, prefix=config.output_prefix)
        except ConfigError as error:
            raise ConfigError(f"input {file.name}: {error}") from error
        check_writable(output_schema(file, config), file.name)
    source = resolve_source(config.model, config.revision)
    tokenizer = config.tokenizer and pinned(resolve_source(config.tokenizer, needs="tokenizer"))
    rows_by_file = _rows_within(config.limit, inputs.files)
    return CheckedJob(
        config=config,
        files=inputs.files[: len(rows_by_file)],
        rows_by_file=rows_by_file,
        ignored=inputs.ignored,
        options=_stage_options(config, str(source.path or source.name), source.revision, tokenizer),
    )


def _for_requests(config: JobConfig) -> JobConfig:
    """Batch requests hold messages and settings in columns of known names."""
    names = ("prompt_column", "messages_column", "prompt", "sampling_column")
    if given := [name for name in names if getattr(config, name) is not None]:
        raise ConfigError(f"{given[0]} has no effect on batch requests (format openai), which hold their own")
    return replace(config, messages_column=openai_batch.MESSAGES, sampling_column=openai_batch.SAMPLING)


def _check_apart(config: JobConfig) -> None:
    """Refuse an output inside an input folder: the next run would take its results for inputs."""
    if config.output is None:
        return
    filesystem, path = open_filesystem(config.output)
    output = os.path.realpath(path) if is_local(filesystem) else None
    for source in config.inputs:
        filesystem, path = open_filesystem(source)
        is_folder = is_local(filesystem) and os.path.isdir(path)
        if output is not None and is_folder and f"{output}/".startswith(f"{os.path.realpath(path)}/"):
            raise ConfigError(
                f"output {config.output} lies inside the input folder {source}; name a folder elsewhere"
            )


def prompt_spec(config: JobConfig) -> PromptSpec:
    """Return where a job's prompts come from, its rows named for their random draws.

    Raises:
        ConfigError: see `PromptSpec`.
    """
    return PromptSpec(
        prompt_column=config.prompt_column,
        messages_column=config.messages_column,
        template=config.prompt,
        system=config.system,
        apply_chat_template=config.apply_chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
        control_tokens=config.control_tokens,
        on_null=config.on_null,  # type: ignore[arg-type]  # checked by PromptSpec
        sampling_column=config.sampling_column,
        row_id_column=ROW_ID_COLUMN,
    )


def output_schema(file: InputFile, config: JobConfig) -> pa.Schema:
    """Return the schema of a file's output: its own columns and metadata, then the result columns."""
    schema = file.schema
    for column in result_fields(generated_tokens=config.generated_tokens, prefix=config.output_prefix):
        schema = schema.append(column)
    return schema


def _rows_within(limit: int | None, files: Sequence[InputFile]) -> list[int]:
    """Rows to take of each file; files that lie wholly beyond the limit are left out."""
    rows_by_file: list[int] = []
    for file in files:
        rest = file.num_rows if limit is None else limit - sum(rows_by_file)
        if rest <= 0 and limit is not None:
            break
        rows_by_file.append(min(file.num_rows, rest))
    return rows_by_file


def _stage_options(
    config: JobConfig, model: str, revision: str | None, tokenizer: str | None
) -> dict[str, Any]:
    return {
        "model": model,
        "prompt_column": config.prompt_column,
        "messages_column": config.messages_column,
        "prompt": config.prompt,
        "system": config.system,
        "sampling": config.sampling,
        "sampling_column": config.sampling_column,
        "apply_chat_template": config.apply_chat_template,
        "chat_template_kwargs": config.chat_template_kwargs,
        "control_tokens": config.control_tokens,
        "on_null": config.on_null,
        "row_id_column": ROW_ID_COLUMN,
        "output_prefix": config.output_prefix,
        "generated_tokens": config.generated_tokens,
        "revision": revision,
        "tokenizer": tokenizer,
        **config.engine,
    }
