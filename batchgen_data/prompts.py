"""From rows to token ids: a prompt column, a conversation column or a template, through the tokenizer.

Nothing about one row can raise: every row comes out as an `EncodedRow` or as the `RowError` that is its
outcome. What is wrong for all rows (a missing column, a tokenizer without chat template) is a
`ConfigError` from the two checks of `PromptSpec`, before any weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from batchgen_data.chat import ChatFormat
from batchgen_data.columns import content_keys, is_text, read_cells, row_keys
from batchgen_data.errors import ConfigError, PromptError, RowError, nearest
from batchgen_data.row_values import (
    Prompt,
    conversation,
    prompt_sampling,
    prompt_text,
    python_prompt,
    row_sampling,
)
from batchgen_data.sampling import ResolvedSampling, SamplingParams, resolve
from batchgen_data.template import compile_template, is_null

NullPolicy = Literal["skip", "error", "render"]
_NULL_POLICIES = ("skip", "error", "render")
_SOURCES = ("prompt_column", "messages_column", "template")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSpec:
    """Where a row's prompt comes from.

    Attributes:
        prompt_column: A text column; each value is one prompt.
        messages_column: A column of conversations: a list of {role, content}, or the same as JSON text.
        template: Jinja text over the columns; `row["name"]` reaches names that are no identifiers.
        system: System message put before the prompt, and before conversations that have none of their own.
        apply_chat_template: Send prompts as a user message through the tokenizer's chat template, if it has
            one. False: prompts are raw text.
        chat_template_kwargs: Variables handed to the chat template (for example ``enable_thinking``).
        control_tokens: What names of control tokens in the data mean where the chat template applies:
            "text" (they are encoded as text and cannot change the conversation's turns) or "tokens".
        on_null: A row whose prompt, or any column the template names, is null (or NaN) is left out
            ("skip"), is an error ("error"), or is rendered with None for the null ("render"; to print a
            null is an error even then).
        sampling_column: Per-row sampling parameters: a struct, a map or JSON text; null means the job's.
        row_id_column: Names the row for its random draws; without it the row's content does.

    Raises:
        ConfigError: Not exactly one source of prompts, or options that contradict each other.
    """

    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = None
    system: str | None = None
    apply_chat_template: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None
    control_tokens: str = "text"
    on_null: NullPolicy = "skip"
    sampling_column: str | None = None
    row_id_column: str | None = None

    def __post_init__(self) -> None:
        for name in (*_SOURCES, "system", "sampling_column", "row_id_column"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} must be a string, not {type(value).__name__}")
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"give exactly one of prompt_column, messages_column and a prompt template; got "
                f"{' and '.join(given) or 'none of them'}"
            )
        if self.on_null not in _NULL_POLICIES:
            raise ConfigError(
                f"on_null={self.on_null!r} is unknown; choose one of {', '.join(_NULL_POLICIES)}"
            )
        if not self.apply_chat_template:
            for name in ("messages_column", "system", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} needs the chat template: drop apply_chat_template=False")
        self.chat_format()

    def chat_format(self) -> ChatFormat:
        """Return the part of this spec that concerns the chat template."""
        return ChatFormat(
            system=self.system,
            enabled=self.apply_chat_template,
            template_kwargs=self.chat_template_kwargs,
            control_tokens=self.control_tokens,
        )

    def check_schema(self, schema: pa.Schema) -> None:
        """Check that the input has what this spec reads; cheap, needs no data.

        Raises:
            ConfigError: A column is missing, doubled or of a type that cannot work, or the template is
                wrong.
        """
        if self.prompt_column is not None:
            kind = _column_type(schema, "prompt_column", self.prompt_column)
            if not (is_text(kind) or pa.types.is_null(kind)):
                raise ConfigError(
                    f"prompt_column {self.prompt_column!r} must hold text, not {kind}; "
                    "to print another type, use a template"
                )
        if self.messages_column is not None:
            _check_messages_type(
                self.messages_column, _column_type(schema, "messages_column", self.messages_column)
            )
        if self.template is not None:
            template = compile_template(self.template)
            for name in template.columns(_visible_names(schema)):
                _column_type(schema, "the prompt template's column", name)
        if self.sampling_column is not None:
            kind = _column_type(schema, "sampling_column", self.sampling_column)
            if not (
                pa.types.is_struct(kind) or pa.types.is_map(kind) or is_text(kind) or pa.types.is_null(kind)
            ):
                raise ConfigError(
                    f"sampling_column {self.sampling_column!r} must be a struct, a map or JSON text, "
                    f"not {kind}"
                )
        if self.row_id_column is not None:
            kind = _column_type(schema, "row_id_column", self.row_id_column)
            if pa.types.is_nested(kind):
                raise ConfigError(f"row_id_column {self.row_id_column!r} must hold plain values, not {kind}")

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that the tokenizer can do what this spec asks.

        Raises:
            ConfigError: Conversations or a system message without a chat template, or a system message
                that the chat template refuses.
        """
        chat = self.chat_format()
        if not chat.is_available(tokenizer):
            for name in ("messages_column", "system", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name} needs a chat template, and this model's tokenizer has none; use an "
                        'instruction-tuned model, give one as chat_template_kwargs={"chat_template": ...}, '
                        "or use prompt_column or a prompt template alone"
                    )
        elif self.system is not None:
            try:
                chat.render(tokenizer, [{"role": "user", "content": "Hello"}])
            except RowError as error:
                raise ConfigError(
                    f"this model's chat template refuses a system message ({error.message}); "
                    "put the text into the prompt instead of system="
                ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """A row ready to run.

    Attributes:
        prompt_token_ids: At least one token id.
        sampling: The row's settings.
        row_key: Identity for random draws; empty when decoding is greedy.
    """

    prompt_token_ids: list[int]
    sampling: ResolvedSampling
    row_key: bytes


def encode_rows(
    table: pa.Table,
    spec: PromptSpec,
    tokenizer: Any,
    *,
    sampling: SamplingParams,
    defaults: SamplingParams,
) -> list[EncodedRow | RowError]:
    """Turn each row of `table` into token ids and settings, or into the error that is its outcome.

    Args:
        table: The input rows.
        spec: Where prompts come from.
        tokenizer: A Hugging Face tokenizer.
        sampling: The job's settings; a row's own win over them.
        defaults: The model's settings (`SamplingParams.from_generation_config`).

    Returns:
        One item per row, in order. Nothing about a row raises.

    Raises:
        ConfigError: The table as a whole cannot work (`PromptSpec.check_schema`), or the job's settings
            contradict the model's.
    """
    spec.check_schema(table.schema)
    prompts = _read_prompts(table, spec)
    settings: list[ResolvedSampling | RowError]
    if spec.sampling_column is None:
        settings = [resolve(sampling, defaults)] * table.num_rows
    else:
        cells = read_cells(table.column(spec.sampling_column), spec.sampling_column)
        unset = resolve(sampling, defaults)
        settings = [unset if cell is None else row_sampling(cell, sampling, defaults) for cell in cells]
    encoded = spec.chat_format().encode(prompts, tokenizer)
    samples = any(isinstance(item, ResolvedSampling) and not item.greedy for item in settings)
    keys = row_keys(table, spec.row_id_column) if samples else [b""] * table.num_rows
    return _assemble(encoded, settings, keys)


def encode_prompts(
    prompts: Sequence[str | Sequence[int] | Sequence[Mapping[str, Any]]],
    tokenizer: Any,
    *,
    system: str | None = None,
    apply_chat_template: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    control_tokens: str = "text",
    sampling: SamplingParams | Sequence[SamplingParams | Mapping[str, Any] | None],
    defaults: SamplingParams,
    vocab_size: int | None = None,
) -> list[EncodedRow | RowError]:
    """Encode plain Python prompts: each a string, a list of token ids, or a list of messages.

    Args:
        prompts: The prompts; they may be of different kinds.
        tokenizer: A Hugging Face tokenizer.
        system: As in `PromptSpec`; not used for token ids.
        apply_chat_template: As in `PromptSpec`; conversations always go through the template.
        chat_template_kwargs: As in `PromptSpec`.
        control_tokens: As in `PromptSpec`.
        sampling: Settings for all prompts, or one per prompt.
        defaults: The model's settings.
        vocab_size: Token ids must be below it; unset: the tokenizer's length.

    Returns:
        One item per prompt, in order. Nothing about a prompt raises.

    Raises:
        ConfigError: Settings that cannot work, or not one per prompt.
    """
    chat = ChatFormat(
        system=system,
        enabled=apply_chat_template,
        template_kwargs=chat_template_kwargs,
        control_tokens=control_tokens,
    )
    settings: list[ResolvedSampling | RowError]
    if isinstance(sampling, SamplingParams):
        settings = [resolve(sampling, defaults)] * len(prompts)
    elif len(sampling) != len(prompts):
        raise ConfigError(f"{len(sampling)} sampling parameters for {len(prompts)} prompts; give one each")
    else:
        settings = [prompt_sampling(item, defaults) for item in sampling]
    limit = len(tokenizer) if vocab_size is None else vocab_size
    checked = [python_prompt(prompt, limit) for prompt in prompts]
    encoded = chat.encode(checked, tokenizer)
    samples = any(isinstance(item, ResolvedSampling) and not item.greedy for item in settings)
    keys = content_keys(checked) if samples else [b""] * len(prompts)
    return _assemble(encoded, settings, keys)


def _assemble(
    encoded: list[list[int] | RowError], settings: list[ResolvedSampling | RowError], keys: list[bytes]
) -> list[EncodedRow | RowError]:
    rows: list[EncodedRow | RowError] = []
    for ids, setting, key in zip(encoded, settings, keys, strict=True):
        if isinstance(ids, RowError):
            rows.append(ids)
        elif isinstance(setting, RowError):
            rows.append(setting)
        else:
            row_key = b"" if setting.greedy else key
            rows.append(EncodedRow(prompt_token_ids=ids, sampling=setting, row_key=row_key))
    return rows


def _column_type(schema: pa.Schema, option: str, name: str) -> pa.DataType:
    num_found = schema.names.count(name)
    if num_found == 1:
        return schema.field(name).type
    if num_found > 1:
        raise ConfigError(f"{option} {name!r} names {num_found} columns of the input; rename all but one")
    visible = _visible_names(schema)
    present = ", ".join(map(repr, visible)) or "no columns"
    raise ConfigError(f"{option} {name!r} is not in the input{nearest(name, visible)}; it has {present}")


def _visible_names(schema: pa.Schema) -> list[str]:
    """The caller's own columns: those that `batchgen run` adds are nobody's to print or to name."""
    return [name for name in schema.names if not name.startswith("_batchgen_")]


def _check_messages_type(name: str, kind: pa.DataType) -> None:
    if is_text(kind) or pa.types.is_null(kind):
        return
    is_list = any(
        check(kind)
        for check in (
            pa.types.is_list,
            pa.types.is_large_list,
            pa.types.is_fixed_size_list,
            pa.types.is_list_view,
            pa.types.is_large_list_view,
        )
    )
    legal = "a list of structs with role and content, or JSON text"
    if not is_list or not (pa.types.is_struct(kind.value_type) or pa.types.is_null(kind.value_type)):
        raise ConfigError(f"messages_column {name!r} must be {legal}, not {kind}")
    if pa.types.is_struct(kind.value_type):
        fields = [kind.value_type.field(i).name for i in range(kind.value_type.num_fields)]
        if missing := [field for field in ("role", "content") if field not in fields]:
            raise ConfigError(
                f"messages_column {name!r} must be {legal}; its structs have "
                f"{', '.join(map(repr, fields))} and lack {' and '.join(map(repr, missing))}"
            )


def _read_prompts(table: pa.Table, spec: PromptSpec) -> list[Prompt | RowError]:
    if spec.template is not None:
        return _render_prompts(table, spec, spec.template)
    name = spec.prompt_column if spec.prompt_column is not None else spec.messages_column
    assert name is not None
    prompts: list[Prompt | RowError] = []
    for cell in read_cells(table.column(name), name):
        try:
            if isinstance(cell, RowError):
                raise cell
            if is_null(cell):
                raise RowError("null_input", f"column {name!r} is null", skipped=spec.on_null == "skip")
            prompts.append(prompt_text(cell) if spec.messages_column is None else conversation(cell))
        except RowError as error:
            prompts.append(error)
        except Exception as error:
            code = "wrong_type" if spec.messages_column is None else "invalid_messages"
            prompts.append(PromptError(code, f"reading column {name!r} raised {type(error).__name__}"))
    return prompts


def _render_prompts(table: pa.Table, spec: PromptSpec, source: str) -> list[Prompt | RowError]:
    template = compile_template(source)
    present = _visible_names(table.schema)
    named = template.columns(present)
    needed = list(dict.fromkeys(present)) if template.reads_whole_row(present) else list(named)
    # Names that occur twice cannot be asked for (check_schema), only met in passing: take the first.
    columns = {name: table.schema.names.index(name) for name in needed}
    cells = [read_cells(table.column(index), name) for name, index in columns.items()]
    skips = spec.on_null == "skip"
    prompts: list[Prompt | RowError] = []
    for index in range(table.num_rows):
        values = {name: column[index] for name, column in zip(needed, cells, strict=True)}
        try:
            for name in named:
                if isinstance(values[name], RowError):
                    raise values[name]
                if spec.on_null != "render" and is_null(values[name]):
                    raise RowError("null_input", f"template column {name!r} is null", skipped=skips)
            prompts.append(prompt_text(template.render(values)))
        except RowError as error:
            if error.code == "null_input" and skips:
                error = RowError(error.code, error.message, skipped=True)
            prompts.append(error)
        except Exception as error:
            prompts.append(RowError("template_error", f"rendering the prompt raised {type(error).__name__}"))
    return prompts
