"""Options of the command line: one dataclass per command, whose fields become the options of their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer


def _option(panel: str, help: str, *names: str, **extra: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **extra)


_PROMPT, _SAMPLING, _MODEL, _RUN = "Prompts", "Sampling", "Model and engine", "Job"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """Options of both commands; the fields become command-line options of their names."""

    model: Annotated[str, _option(_MODEL, "Model folder, Hugging Face id, or .gguf file.", "--model", "-m")]
    prompt: Annotated[str | None, _option(_PROMPT, "Jinja template over the columns.")] = None
    prompt_column: Annotated[str | None, _option(_PROMPT, "Text column with the prompt.")] = None
    messages_column: Annotated[
        str | None, _option(_PROMPT, "Column of conversations: role/content structs, or JSON text.")
    ] = None
    system: Annotated[str | None, _option(_PROMPT, "System message put before each prompt.")] = None
    raw: Annotated[bool, _option(_PROMPT, "Send the text as it is, without the chat template.", "--raw")] = (
        False
    )
    chat_template_kwargs: Annotated[
        str | None, _option(_PROMPT, "Variables of the chat template, as one JSON object.")
    ] = None
    control_tokens: Annotated[
        str,
        _option(_PROMPT, "What names of control tokens in the data mean: text (default) or tokens."),
    ] = "text"
    on_null: Annotated[
        str, _option(_PROMPT, "Rows with a null the prompt needs: skip (default), error or render.")
    ] = "skip"
    sampling_column: Annotated[
        str | None, _option(_SAMPLING, "Column of per-row settings: a struct, or JSON text.")
    ] = None
    sampling: Annotated[str | None, _option(_SAMPLING, "Settings as one JSON object.")] = None
    temperature: Annotated[float | None, _option(_SAMPLING, "0 is greedy.")] = None
    top_p: Annotated[float | None, _option(_SAMPLING, "Nucleus mass, above 0 to 1.")] = None
    top_k: Annotated[int | None, _option(_SAMPLING, "Likeliest tokens kept; 0 keeps all.")] = None
    min_p: Annotated[float | None, _option(_SAMPLING, "Least probability relative to the likeliest.")] = None
    repetition_penalty: Annotated[float | None, _option(_SAMPLING, "Above 0; 1 is off.")] = None
    presence_penalty: Annotated[float | None, _option(_SAMPLING, "From -2 to 2.")] = None
    frequency_penalty: Annotated[float | None, _option(_SAMPLING, "From -2 to 2.")] = None
    max_tokens: Annotated[int | None, _option(_SAMPLING, "Most tokens to generate per row.")] = None
    min_tokens: Annotated[int | None, _option(_SAMPLING, "No end before this many tokens.")] = None
    stop: Annotated[list[str] | None, _option(_SAMPLING, "Text that ends a row; may be repeated.")] = None
    stop_token_ids: Annotated[
        list[int] | None, _option(_SAMPLING, "Token id that ends a row; may be repeated.", "--stop-token-id")
    ] = None
    seed: Annotated[int | None, _option(_SAMPLING, "Seed of the random draws.")] = None
    logit_bias: Annotated[
        str | None, _option(_SAMPLING, "JSON object of token ids to biases, -100 to 100.")
    ] = None
    ignore_eos: Annotated[bool | None, _option(_SAMPLING, "Go on after the model's end token.")] = None
    include_stop_str_in_output: Annotated[
        bool | None, _option(_SAMPLING, "Keep the stop string in the text.")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, _option(_SAMPLING, "Leave special tokens out of the text (default).")
    ] = None
    do_sample: Annotated[
        bool | None, _option(_SAMPLING, "Sample, at the model's temperature; --no-do-sample is greedy.")
    ] = None
    revision: Annotated[str | None, _option(_MODEL, "Hub revision of the model.")] = None
    tokenizer: Annotated[str | None, _option(_MODEL, "Other folder, id or id@revision of the tokenizer.")] = (
        None
    )
    device: Annotated[str | None, _option(_MODEL, "auto (default), cpu, cuda, cuda:1.")] = None
    dtype: Annotated[str | None, _option(_MODEL, "auto (default), float32, bfloat16, float16.")] = None
    num_threads: Annotated[int | None, _option(_MODEL, "CPU threads per worker.")] = None
    kv_memory: Annotated[str | None, _option(_MODEL, "Memory for KV pages per worker, as 4GiB.")] = None
    weights_memory: Annotated[
        str | None, _option(_MODEL, "Memory for weights per worker, as 4GiB; the rest is streamed from disk.")
    ] = None
    kv_residence: Annotated[
        str | None,
        _option(_MODEL, "Where KV pages live: device (default), or host with --kv-memory staging."),
    ] = None
    host_memory: Annotated[
        str | None, _option(_MODEL, "Host memory per worker for KV of suspended rows, or all KV; as 64GiB.")
    ] = None
    host_path: Annotated[
        str | None, _option(_MODEL, "Folder for the host tier as a file, instead of memory.")
    ] = None
    attention_sub_batch: Annotated[
        int | None, _option(_MODEL, "Rows that attend together before the experts run over all.")
    ] = None
    moe_batch_tokens: Annotated[
        int | None, _option(_MODEL, "Tokens that the experts take at once at most.")
    ] = None
    yield_at: Annotated[
        list[str] | None,
        _option(_MODEL, "Modules at which rows are combined, as model.layers.*.mlp; may be repeated."),
    ] = None
    max_sequences: Annotated[int | None, _option(_MODEL, "Rows decoded together at most.")] = None
    max_step_tokens: Annotated[int | None, _option(_MODEL, "Tokens of one forward pass at most.")] = None
    max_context_tokens: Annotated[
        int | None, _option(_MODEL, "Prompt and output together; default: the model's limit.")
    ] = None
    trace: Annotated[
        str | None, _option(_MODEL, "Write where the time of the first passes went, for chrome://tracing.")
    ] = None
    callbacks: Annotated[
        list[str] | None,
        _option(_MODEL, "Shipped callback: prompt-lookup or int8-kv; may be repeated.", "--callback"),
    ] = None
    format: Annotated[
        str | None,
        _option(_RUN, "parquet, jsonl, csv, or openai (batch requests); default: by each file's name."),
    ] = None
    generated_tokens: Annotated[
        bool, _option(_RUN, "Also write the generated token ids.", "--generated-tokens")
    ] = False
    output_prefix: Annotated[str, _option(_RUN, "Put before the names of the result columns.")] = ""
    debug: Annotated[bool, _option(_RUN, "Show tracebacks of errors.", "--debug")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(SharedOptions):
    """Options of ``batchgen run``."""

    output: Annotated[
        str,
        _option(_RUN, "Folder for the results: new, or of this job to go on.", "--output", "-o"),
    ]
    limit: Annotated[int | None, _option(_RUN, "Take only the first rows of all inputs together.")] = None
    num_actors: Annotated[
        int | None, _option(_RUN, "Workers, each with the model; default: one per GPU or machine.")
    ] = None
    num_gpus: Annotated[float | None, _option(_RUN, "GPUs per worker; default: 1 if there are any.")] = None
    batch_size: Annotated[int | None, _option(_RUN, "Rows of one call; default: 16 to 64.")] = None
    fail_fast: Annotated[bool, _option(_RUN, "Stop at the first row with an error.", "--fail-fast")] = False
    max_failed_rows: Annotated[
        str | None, _option(_RUN, "Stop when more rows failed: a number, or a share such as 5%.")
    ] = None
    retry_failed: Annotated[
        bool, _option(_RUN, "Try rows again whose outcome is an error.", "--retry-failed")
    ] = False
    stall_timeout_s: Annotated[
        float, _option(_RUN, "Seconds without progress after which a worker is started again (1800).")
    ] = 1800.0
    overwrite: Annotated[
        bool,
        _option(_RUN, "Replace other results in OUT once the new ones are complete.", "--overwrite"),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(SharedOptions):
    """Options of ``batchgen plan``: the line of a run, with the input as an option."""

    input: Annotated[
        list[str] | None, _option(_RUN, "Rows to plan for, as IN of a run; may be repeated.", "--input", "-i")
    ] = None
    limit: Annotated[int | None, _option(_RUN, "Take only the first rows of all inputs together.")] = None
    device_memory: Annotated[
        str | None, _option(_MODEL, "Memory of the device to plan with, as 16GiB; default: what is free.")
    ] = None
    explain: Annotated[
        bool, _option(_RUN, "Draw the work of one layer and its critical path.", "--explain")
    ] = False
    json: Annotated[bool, _option(_RUN, "Print everything as one JSON object.", "--json")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewOptions(SharedOptions):
    """Options of ``batchgen preview``."""

    num_rows: Annotated[int, _option(_RUN, "Rows to show (default 5).", "--num-rows", "-n", min=1)] = 5


Inputs = Annotated[
    list[str],
    typer.Argument(metavar="IN", help="Parquet, JSON Lines or CSV: files, folders, globs, fsspec URLs."),
]
