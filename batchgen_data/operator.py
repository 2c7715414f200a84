"""The Ray Data stage: a callable class for `map_batches`, and `generate`, which sets it up well."""

from __future__ import annotations

import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from batchgen_data.config import EngineConfig, calls_in_flight, check_names
from batchgen_data.errors import ConfigError, JobError
from batchgen_data.llm import LLM, as_sampling, prompt_spec
from batchgen_data.models.load import resolve_source
from batchgen_data.pool import plan_pool
from batchgen_data.prompts import PromptSpec
from batchgen_data.runtime.startup import Share
from batchgen_data.sampling import SamplingParams
from batchgen_data.schema import Outcome, append_results, check_columns

if TYPE_CHECKING:
    from ray.data import Dataset

logger = logging.getLogger(__name__)

ProgressReport = Callable[[str, dict[str, int]], Any]

_PROMPT_OPTIONS = ("prompt", *(field.name for field in dataclasses.fields(PromptSpec)))
_ENGINE_OPTIONS = tuple(field.name for field in dataclasses.fields(EngineConfig))
_STAGE_OPTIONS = (
    "sampling",
    "generated_tokens",
    "output_prefix",
    "on_row_error",
    "revision",
    "tokenizer",
    "progress",
    "actors_per_node",
)

PROGRESS_COUNTS = (
    *("rows_done", "rows_failed", "rows_skipped", "input_tokens", "generated_tokens"),
    *("yields_for_pages", "recomputed_tokens"),
)


class BatchGenLLM:
    """Completes the rows of a Ray Dataset: the class to give to `map_batches`.

    ```python
    ds.map_batches(
        BatchGenLLM,
        fn_constructor_kwargs=dict(model="HuggingFaceTB/SmolLM2-135M-Instruct", prompt_column="prompt"),
        batch_format="pyarrow",
        batch_size=32,
        num_cpus=0,
        compute=ray.data.ActorPoolStrategy(
            size=1, max_concurrent_calls_per_actor=128, enable_true_multi_threading=True
        ),
    )
    ```

    Every call returns one table: the input columns untouched, the columns of `schema.result_fields`
    appended, rows in input order. A row that fails gets an outcome; it fails neither its neighbours nor the
    job. Several calls at once (the `compute` above) share every pass of the model.

    Args:
        model: a local folder, a Hugging Face model id, or a .gguf file.
        prompt_column, messages_column, prompt: where prompts come from: a text column, a column of
            conversations, or a Jinja template over the columns. Exactly one.
        system, sampling_column, apply_chat_template, chat_template_kwargs, control_tokens, on_null,
        row_id_column: see PromptSpec.
        sampling: SamplingParams or a mapping; what is not set comes from the model's generation config.
        generated_tokens: also return the generated token ids.
        output_prefix: put before the name of every result column.
        on_row_error: "record" (the row's outcome says what happened) or "raise" (the job stops).
        revision, tokenizer: see LLM.
        progress: called with (worker id, running totals) about once a second and after each call.
        actors_per_node: actors that share this machine; CPUs and free memory are split evenly.
        options: fields of EngineConfig (device, dtype, num_threads, kv_memory, max_sequences ...).

    Raises:
        ConfigError: unknown options (with the nearest name), an unknown or unsupported model, and whatever
            would fail on every row.
    """

    def __init__(
        self,
        model: str,
        *,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        generated_tokens: bool = False,
        output_prefix: str = "",
        on_row_error: str = "record",
        revision: str | None = None,
        tokenizer: str | None = None,
        progress: ProgressReport | None = None,
        actors_per_node: int = 1,
        **options: Any,
    ) -> None:
        self._spec, engine_options = _split_options(options)
        self._sampling = as_sampling(sampling)
        self._generated_tokens = generated_tokens
        self._output_prefix = output_prefix
        self._on_row_error = _checked_on_row_error(on_row_error)
        reserved = _reserved_by_ray()
        if engine_options.get("num_threads") is None:
            engine_options["num_threads"] = int(reserved.get("CPU", 0)) or None
        self._llm = LLM(
            model,
            revision=revision,
            tokenizer=tokenizer,
            share=Share(actors_per_node=actors_per_node, gpu=min(1.0, reserved.get("GPU", 1.0))),
            _spec=self._spec,
            **engine_options,
        )
        self._llm.check_sampling(self._sampling)
        self._progress = _Progress(progress, self._llm.statistics) if progress is not None else None

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Complete one batch; safe to call from several threads at once.

        Args:
            batch: an Arrow table (`batch_format="pyarrow"`). A NumPy batch is taken only where Ray's
                conversion cannot have changed a column.

        Raises:
            ConfigError: a missing column, a result column that exists already, a batch that lost types.
            JobError: a row failed and `on_row_error` is "raise".
        """
        table = _arrow_table(batch)
        outcomes = self._llm.complete_rows(
            table, self._spec, self._sampling, self._generated_tokens, self._output_prefix
        )
        if self._progress is not None:
            self._progress.send()
        if self._on_row_error == "raise":
            _raise_first_error(outcomes)
        return append_results(
            table, outcomes, generated_tokens=self._generated_tokens, prefix=self._output_prefix
        )

    def record(self) -> dict[str, Any]:
        """What this actor resolved, for a run record: device, context, sampling and where each came from."""
        return self._llm.record(self._sampling)

    def statistics(self) -> dict[str, Any]:
        """Totals of this actor's engine since the start."""
        return self._llm.statistics()

    def close(self) -> None:
        """Stop the engine; Ray calls this when the pool shuts down."""
        # Attributes are missing where the constructor raised.
        for part in (getattr(self, "_progress", None), getattr(self, "_llm", None)):
            if part is not None:
                part.close()

    def __del__(self) -> None:
        self.close()


def generate(
    ds: Dataset,
    model: str,
    *,
    num_actors: int | None = None,
    batch_size: int = 32,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    **options: Any,
) -> Dataset:
    """Complete the rows of a Ray Dataset; lazy, like every Ray Data operation.

    The same as `ds.map_batches(BatchGenLLM, ...)` with block sizes, compute strategy and calls in flight
    chosen so that the engine always has the next rows at hand: `batch_size` hardly matters.

    Args:
        ds: the rows.
        model: see BatchGenLLM.
        num_actors: engines; None: one per GPU when `num_gpus` is set or the cluster has GPUs, else one per
            machine (one engine uses all its CPUs).
        batch_size: rows of one call.
        num_cpus, num_gpus: what Ray reserves per actor. None reserves a GPU where there is one, and no CPU:
            readers and writers need them, and the engine takes what the machine has.
        options: everything else BatchGenLLM takes.

    Returns:
        `ds` with the columns of `schema.result_fields` appended.

    Raises:
        ConfigError: unknown options, a missing column, a template that names an absent column, an unknown
            model: all before the model is loaded anywhere.
    """
    check_stage(options, model)
    schema = ds.schema()
    base = getattr(schema, "base_schema", schema)
    if isinstance(base, pa.Schema):
        check_input(base, options)
    config = EngineConfig.from_options({k: v for k, v in options.items() if k in _ENGINE_OPTIONS})
    batch_size = _positive(batch_size, "batch_size")
    pool = plan_pool(config, num_actors=num_actors, num_cpus=num_cpus, num_gpus=num_gpus)
    return ds.repartition(target_num_rows_per_block=batch_size).map_batches(
        BatchGenLLM,
        fn_constructor_kwargs={"model": model, "actors_per_node": pool.actors_per_node, **options},
        batch_format="pyarrow",
        batch_size=batch_size,
        zero_copy_batch=True,
        **pool.map_arguments(calls_in_flight(config.max_sequences, batch_size)),
    )


def check_stage(options: Mapping[str, Any], model: str) -> None:
    """Check everything about a stage that can be checked without rows or weights.

    Raises:
        ConfigError: unknown options (with the nearest name), values out of range, an unknown model.
    """
    check_names(options, [*_STAGE_OPTIONS, *_PROMPT_OPTIONS, *_ENGINE_OPTIONS])
    rest = {name: value for name, value in options.items() if name not in _STAGE_OPTIONS}
    _, engine_options = _split_options(rest)
    EngineConfig.from_options(engine_options)
    as_sampling(options.get("sampling"))
    _checked_on_row_error(options.get("on_row_error", "record"))
    resolve_source(model, options.get("revision"))


def check_input(schema: pa.Schema, options: Mapping[str, Any]) -> None:
    """Check a stage's options against the schema of its input.

    Raises:
        ConfigError: a missing column, a column of the wrong type, a template that names an absent column,
            a result column whose name is taken.
    """
    prompt_spec({k: v for k, v in options.items() if k in _PROMPT_OPTIONS}).check_schema(schema)
    check_columns(
        schema,
        generated_tokens=options.get("generated_tokens", False),
        prefix=options.get("output_prefix", ""),
    )


def _split_options(options: Mapping[str, Any]) -> tuple[PromptSpec, dict[str, Any]]:
    check_names(options, [*_PROMPT_OPTIONS, *_ENGINE_OPTIONS], also=_STAGE_OPTIONS)
    spec = prompt_spec({k: v for k, v in options.items() if k in _PROMPT_OPTIONS})
    return spec, {k: v for k, v in options.items() if k in _ENGINE_OPTIONS}


def _checked_on_row_error(value: Any) -> str:
    if value not in ("record", "raise"):
        raise ConfigError(f'on_row_error must be "record" or "raise", not {value!r}')
    return str(value)


def _positive(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive whole number, not {value!r}")
    return value


def _raise_first_error(outcomes: Sequence[Outcome]) -> None:
    for index, outcome in enumerate(outcomes):
        if outcome.finish_reason == "error":
            raise JobError(
                f"row {index} of a batch of {len(outcomes)} failed ({outcome.error_code}): "
                f'{outcome.error_message}; on_row_error="record" keeps going'
            )


def _reserved_by_ray() -> dict[str, float]:
    """What Ray reserved for this actor; empty outside Ray and in its driver."""
    try:
        import ray
    except ImportError:
        return {}
    if not ray.is_initialized():
        return {}
    try:
        return dict(ray.get_runtime_context().get_assigned_resources())
    except (AssertionError, RuntimeError):
        return {}  # a driver has no resources assigned


def _arrow_table(batch: Any) -> pa.Table:
    if isinstance(batch, pa.Table):
        return batch
    advice = 'add batch_format="pyarrow" to map_batches, or use batchgen_data.generate(ds, ...)'
    if not isinstance(batch, Mapping):
        raise ConfigError(f"BatchGenLLM takes Arrow batches, not {type(batch).__name__}; {advice}")
    for name, values in batch.items():
        if not _survived_numpy(np.asarray(values)):
            raise ConfigError(
                f"column {name!r} came as a NumPy array, in which nulls, time zones or nested types may "
                f"already be lost; {advice}"
            )
    return pa.table({name: pa.array(values) for name, values in batch.items()})


def _survived_numpy(values: np.ndarray) -> bool:
    """Whether Ray's conversion from Arrow to NumPy cannot have changed this column."""
    if values.ndim != 1:
        return False
    if values.dtype.kind == "f":
        return not np.isnan(values).any()  # NaN may have been a null, or the column whole numbers
    if values.dtype.kind == "O":
        return {type(value) for value in values if value is not None} <= {str, bytes, bool}
    return values.dtype.kind in "biuU"


class _Progress:
    """Reports an engine's running totals once a second, from a thread of its own."""

    def __init__(self, report: ProgressReport, statistics: Callable[[], dict[str, Any]]) -> None:
        self._report = report
        self._statistics = statistics
        self._worker = uuid.uuid4().hex[:12]
        self._stop = threading.Event()
        self._last: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="batchgen-progress", daemon=True)
        self._thread.start()

    def send(self) -> None:
        """Report now, if anything changed."""
        statistics = self._statistics()
        totals = {name: statistics[name] for name in PROGRESS_COUNTS}
        if totals == self._last:
            return
        self._last = totals
        try:
            self._report(self._worker, totals)
        except Exception as error:
            # Progress is a courtesy: rows must not fail because nobody listens.
            logger.debug("progress report failed: %s", type(error).__name__)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(timeout=1.0):
            self.send()
