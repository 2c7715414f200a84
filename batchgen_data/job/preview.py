"""The first rows of a job in this process, without Ray: prompts as the model sees them, and completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from batchgen_data.job.check import CheckedJob, prompt_spec
from batchgen_data.job.reader import RangeReader, plan_items

# What `LLM` takes of the stage's options: the model, and nothing about single calls.
_MODEL_OPTIONS = ("model", "revision", "tokenizer")
_COLUMNS = ("generated_text", "finish_reason", "num_generated_tokens", "error_code", "error_message")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewRow:
    """One row of a preview.

    Attributes:
        location: File and position of the row in it, from 0.
        prompt: The prompt as the model sees it, special tokens included; None where the row has none.
        text: The completion; None where there is none.
        finish_reason: As in the results.
        num_generated_tokens: As in the results.
        error_code: As in the results.
        error_message: As in the results.
    """

    location: str
    prompt: str | None
    text: str | None
    finish_reason: str
    num_generated_tokens: int
    error_code: str | None
    error_message: str | None


def preview_rows(job: CheckedJob, *, llm_class: Callable[..., Any] | None = None) -> list[PreviewRow]:
    """Complete the rows of a job and return them; meant for a few.

    The rows come out as in a run of the same job: the same prompts, settings and random draws.

    Args:
        job: The checked job, with a limit.
        llm_class: Takes the place of `LLM` in tests.

    Raises:
        ConfigError: The model cannot be loaded or refuses the prompts.
        InputError: An input file cannot be read.
    """
    config = job.config
    spec = prompt_spec(config)
    prompt_options = {field.name: getattr(spec, field.name) for field in fields(spec)}
    llm_options = {name: job.options[name] for name in _MODEL_OPTIONS} | dict(config.engine)
    reader = RangeReader(job.files)
    rows = []
    # The spec goes along so that prompts the tokenizer cannot take are refused before the weights load.
    with (llm_class or _llm_class())(**llm_options, _spec=spec) as llm:
        for item in plan_items(job.files, job.rows_by_file, rows_per_item=64):
            table = reader.read(item)
            completed = llm.map_table(
                table,
                sampling=config.sampling,
                output_prefix=config.output_prefix,
                generated_tokens=config.generated_tokens,
                spec=spec,
            )
            prompts = llm.encode(table, **prompt_options)
            columns = [completed.column(config.output_prefix + name).to_pylist() for name in _COLUMNS]
            for idx, (ids, text, reason, num_tokens, code, message) in enumerate(
                zip(prompts, *columns, strict=True)
            ):
                rows.append(
                    PreviewRow(
                        location=f"{job.files[item.file_idx].name}:{item.first_row + idx}",
                        prompt=None if ids is None else llm.tokenizer.decode(ids),
                        text=text,
                        finish_reason=reason,
                        num_generated_tokens=num_tokens,
                        error_code=code,
                        error_message=message,
                    )
                )
    return rows


def _llm_class() -> Callable[..., Any]:
    # Imported late: it brings torch and transformers, which the checks before do without.
    from batchgen_data.llm import LLM

    return LLM
