"""The runtime in this process, without Ray: for a notebook, a script, or inside a Ray actor."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import pyarrow as pa

from batchgen_data.config import EngineConfig, check_names
from batchgen_data.errors import ConfigError
from batchgen_data.models.load import load_tokenizer, resolve_source
from batchgen_data.prompts import EncodedRow, PromptSpec, encode_prompts, encode_rows
from batchgen_data.runtime.engine import vocabulary_problem
from batchgen_data.runtime.startup import Share, plan_engine, start_engine
from batchgen_data.sampling import SamplingParams, resolve, sources
from batchgen_data.schema import Outcome, append_results, check_columns

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def as_sampling(sampling: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Turn None, a mapping or SamplingParams into SamplingParams.

    Raises:
        ConfigError: an unknown name (with the nearest one) or a value out of range.
    """
    if sampling is None:
        return SamplingParams()
    return sampling if isinstance(sampling, SamplingParams) else SamplingParams.from_dict(sampling)


class LLM:
    """A loaded model that completes prompts.

    ```python
    with LLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
        for completion in llm.generate(["Name three rivers."], SamplingParams(max_tokens=64)):
            print(completion.text)
    ```

    Args:
        model: a local folder, a Hugging Face model id, or a .gguf file.
        revision: branch, tag or commit of a Hugging Face model.
        tokenizer: another folder or id to take the tokenizer from.
        share: what part of the machine to take; all of it by default.
        options: fields of EngineConfig (device, dtype, num_threads, kv_memory, max_sequences ...).

    Raises:
        ConfigError: unknown model or option, unsupported architecture, weights that are missing or unsafe.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        tokenizer: str | None = None,
        share: Share | None = None,
        _spec: PromptSpec | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options(options)
        source = resolve_source(model, revision)
        self.tokenizer = load_tokenizer(source, tokenizer)
        if _spec is not None:
            # Before the weights are read: a column of conversations needs a chat template.
            _spec.check_tokenizer(self.tokenizer)
        self._plan = plan_engine(source, config, share=share)
        config = self._plan.apply(config)
        self._engine, loaded = start_engine(source, config, tokenizer=self.tokenizer, share=share)
        # The model itself is the engine's alone, so that `close` frees it.
        self._defaults = loaded.sampling_defaults
        self._vocab_size = loaded.model.get_input_embeddings().num_embeddings
        self._facts = {
            "architecture": type(loaded.model).__name__,
            "revision": loaded.source.revision,
            "device": str(loaded.model.device),
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "ignored_generation_settings": loaded.ignored_generation_settings,
        }
        # Fast tokenizers raise "Already borrowed" when threads encode at once.
        self._encoding = threading.Lock()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | None] | None = None,
        *,
        system: str | None = None,
        apply_chat_template: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        control_tokens: str = "text",
    ) -> list[Outcome]:
        """Complete each prompt and return one outcome per prompt, in order.

        A prompt that cannot run gets an outcome with `error_code` and `error_message`; the others are
        completed all the same.

        Args:
            prompts: strings, lists of token ids, or lists of {role, content} messages; or one string.
            sampling: settings for all prompts, or one per prompt; what is not set comes from the model's
                generation config.
            system: a system message put before each prompt.
            apply_chat_template: send strings as a user message through the model's chat template, if it
                has one; False completes the raw text.
            chat_template_kwargs: variables of the chat template.
            control_tokens: "text" or "tokens", see PromptSpec.

        Raises:
            ConfigError: settings that cannot work for any prompt.
        """
        items: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        settings: Any
        if sampling is None or isinstance(sampling, SamplingParams | Mapping):
            settings = as_sampling(sampling)
            self.check_sampling(settings)
        else:
            settings = list(sampling)
        with self._encoding:
            rows = encode_prompts(
                items,
                self.tokenizer,
                system=system,
                apply_chat_template=apply_chat_template,
                chat_template_kwargs=chat_template_kwargs,
                control_tokens=control_tokens,
                sampling=settings,
                defaults=self._defaults,
                vocab_size=self._vocab_size,
            )
        return self._engine.submit(rows).wait()

    def map_table(
        self,
        table: pa.Table,
        *,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        generated_tokens: bool = False,
        output_prefix: str = "",
        spec: PromptSpec | None = None,
        **prompt_options: Any,
    ) -> pa.Table:
        """Complete each row of an Arrow table; its own columns come back untouched, results appended.

        Args:
            table: the rows.
            sampling: settings for all rows.
            generated_tokens: also return the generated token ids.
            output_prefix: put before the name of every result column.
            spec: where prompts come from; or give its fields as keywords (`prompt_column`,
                `messages_column`, `prompt` for a template, `system` ...).

        Returns:
            `table` with the columns of `schema.result_fields` appended; rows in the same order.

        Raises:
            ConfigError: a missing column, a column name that is taken, settings that cannot work.
        """
        spec = spec or prompt_spec(prompt_options)
        outcomes = self.complete_rows(table, spec, as_sampling(sampling), generated_tokens, output_prefix)
        return append_results(table, outcomes, generated_tokens=generated_tokens, prefix=output_prefix)

    def complete_rows(
        self,
        table: pa.Table,
        spec: PromptSpec,
        sampling: SamplingParams,
        generated_tokens: bool = False,
        output_prefix: str = "",
    ) -> list[Outcome]:
        """Return the outcome of each row of `table`; see `map_table`."""
        # Before the first token: a clash found afterwards would throw the work away.
        check_columns(table.schema, generated_tokens=generated_tokens, prefix=output_prefix)
        spec.check_tokenizer(self.tokenizer)
        self.check_sampling(sampling)
        with self._encoding:
            rows = encode_rows(table, spec, self.tokenizer, sampling=sampling, defaults=self._defaults)
        return self._engine.submit(rows).wait()

    def encode(self, table: pa.Table, **prompt_options: Any) -> list[list[int] | None]:
        """Return each row's prompt as token ids, None where the row has no usable prompt."""
        with self._encoding:
            rows = encode_rows(
                table,
                prompt_spec(prompt_options),
                self.tokenizer,
                sampling=SamplingParams(),
                defaults=self._defaults,
            )
        return [row.prompt_token_ids if isinstance(row, EncodedRow) else None for row in rows]

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Check settings of a whole job against the model.

        Raises:
            ConfigError: they name a token the model does not have, or cannot work with its defaults.
        """
        problem = vocabulary_problem(resolve(sampling, self._defaults), self._vocab_size)
        if problem:
            raise ConfigError(problem)

    def record(self, sampling: SamplingParams) -> dict[str, Any]:
        """What was resolved, for a run record: device, context, sampling settings and where each came from.

        Args:
            sampling: the job's settings.
        """
        limits = self._engine.scheduler.limits
        return {
            **self._facts,
            "context_tokens": self._engine.context_tokens,
            "kv_pages": limits.num_pages,
            "page_tokens": limits.page_tokens,
            "plan": dataclasses.asdict(self._plan),
            "sampling": dataclasses.asdict(resolve(sampling, self._defaults)),
            "sampling_sources": sources(sampling, self._defaults),
        }

    def statistics(self) -> dict[str, Any]:
        """Totals since the start: rows, tokens, yields, reuse, and where the seconds went."""
        return self._engine.statistics()

    def close(self) -> None:
        """Stop the engine thread and free model and KV memory; later calls raise. Safe to call twice."""
        engine = getattr(self, "_engine", None)  # missing where the constructor raised
        if engine is not None:
            engine.close()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prompt_spec(options: Mapping[str, Any]) -> PromptSpec:
    """Make a PromptSpec from keyword options; `prompt` is the template.

    Raises:
        ConfigError: an unknown option (with the nearest name), or not exactly one source of prompts.
    """
    fields = [field.name for field in dataclasses.fields(PromptSpec)]
    check_names(options, fields, also=("prompt",))
    given = dict(options)
    if "prompt" in given:
        if given.get("template") is not None:
            raise ConfigError("give prompt or template, not both: they are two names of one option")
        given["template"] = given.pop("prompt")
    return PromptSpec(**given)
