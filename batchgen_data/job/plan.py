"""The plan of a job: lengths of its rows, as the tokenizer counts them, and what to choose for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from batchgen_data.config import EngineConfig, parse_bytes
from batchgen_data.errors import ConfigError
from batchgen_data.job.check import JobConfig, check_job, prompt_spec
from batchgen_data.job.progress import duration
from batchgen_data.job.reader import RangeReader, plan_items
from batchgen_data.models.source import resolve_source
from batchgen_data.planner.plan import Plan, as_options, as_size
from batchgen_data.planner.search import TIE
from batchgen_data.planner.sizes import ModelSizes
from batchgen_data.planner.workload import MOST_ROWS, Workload
from batchgen_data.prompts import EncodedRow, encode_rows
from batchgen_data.sampling import SamplingParams

if TYPE_CHECKING:
    from batchgen_data.planner.advise import Advice

_ITEM_ROWS = 64
# Output tokens of a row where no limit is set: what a model will write is not known before.
ASSUMED_OUTPUT_TOKENS = 256


def plan_job(
    config: JobConfig,
    *,
    device_memory: str | None = None,
    host_memory: str | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Plan a job; without inputs, for rows of an assumed length.

    Args:
        config: the job; its engine options stay as they are.
        device_memory, host_memory: sizes of the tiers; None takes what is free.
        notify: called with what is being measured.

    Raises:
        ConfigError: as `check_job`, or no row has a prompt.
        PlanError: nothing fits.
    """
    engine = EngineConfig.from_options(config.engine)
    device_bytes = parse_bytes(device_memory, "device_memory") if device_memory is not None else None
    host_bytes = parse_bytes(host_memory, "host_memory") if host_memory is not None else None
    source = resolve_source(config.model, config.revision)
    workload = input_lengths(config) if config.inputs else assumed_lengths(config.sampling)
    # Late: these bring torch.
    from batchgen_data.planner.advise import advise
    from batchgen_data.runtime.startup import plan_target

    return advise(
        plan_target(source, engine, device_memory=device_bytes, host_memory=host_bytes),
        workload,
        notify=notify,
    )


def assumed_lengths(sampling: SamplingParams) -> Workload:
    """Rows for a plan without an input."""
    return Workload.uniform(512, 256, sampling.max_tokens or ASSUMED_OUTPUT_TOKENS)


def input_lengths(config: JobConfig) -> Workload:
    """Count the tokens of a job's prompts, of an even sample of its rows where there are many.

    Raises:
        ConfigError: as `check_job`, or no row has a prompt.
        InputError: an input cannot be read.
    """
    job = check_job(config)
    from batchgen_data.models.load import load_tokenizer

    spec = prompt_spec(config)
    tokenizer = load_tokenizer(resolve_source(config.model, config.revision), config.tokenizer)
    spec.check_tokenizer(tokenizer)
    items = plan_items(job.files, job.rows_by_file, rows_per_item=_ITEM_ROWS)
    every = max(1, -(-len(items) * _ITEM_ROWS // MOST_ROWS))
    reader = RangeReader(job.files)
    prompts: list[int] = []
    outputs: list[int] = []
    num_read = 0
    for item in items[::every]:
        table = reader.read(item)
        num_read += table.num_rows
        rows: list[Any] = encode_rows(
            table, spec, tokenizer, sampling=config.sampling, defaults=SamplingParams()
        )
        for row in rows:
            if isinstance(row, EncodedRow):
                prompts.append(len(row.prompt_token_ids))
                outputs.append(row.sampling.max_tokens or ASSUMED_OUTPUT_TOKENS)
    if not prompts:
        raise ConfigError("no row of the input has a prompt that could run, so there is nothing to plan for")
    num_rows = max(len(prompts), round(job.num_rows * len(prompts) / num_read))
    limit = f"{median(outputs):.0f}" + ("" if config.sampling.max_tokens else " (assumed)")
    return Workload(
        prompt_tokens=tuple(prompts),
        output_tokens=tuple(outputs),
        num_rows=num_rows,
        source=f"{num_rows} rows of {min(prompts)} to {max(prompts)} prompt tokens (median "
        f"{median(prompts):.0f}) and {limit} output tokens each",
    )


def plan_lines(advice: Advice) -> list[str]:
    """A plan for people."""
    problem, choice = advice.problem, advice.choice
    sizes, facts, budget = problem.sizes, problem.profile.facts, problem.budget
    lines = [
        f"{sizes.architecture}, {sizes.num_parameters / 1e9:.3g} B parameters, "
        f"{as_size(sizes.weights_bytes)} in {facts.get('dtype')}; {facts.get('device')}, "
        f"{facts.get('threads')} threads",
        f"device memory {as_size(budget.device_bytes)}, host memory {as_size(budget.host_bytes)}; "
        f"{problem.workload.source}",
        "",
        f"plan:      {_described(choice.best, sizes)}",
        f"           {_expected(choice.best)}",
        f"           options: {as_options(choice.best) or '(the defaults)'}",
    ]
    if choice.runner_up is not None:
        lines += [
            f"runner-up: {_described(choice.runner_up, sizes)}",
            f"           {_expected(choice.runner_up)}",
        ]
    if advice.predicted_defaults is not None:
        usual = advice.predicted_defaults
        lines.append(f"defaults:  {usual.tokens_per_s:.1f} tokens/s, {duration(usual.bct_s)} in all")
    helps = [help for help in choice.helps if help.times_sooner > 1 + TIE]
    if helps:
        told = ", ".join(f"{help.what} ({help.times_sooner:.2f} times sooner)" for help in helps)
        lines.append(f"what would help most: {told}")
    else:
        lines.append("what would help most: a faster processor; more memory or bandwidth changes nothing")
    return lines


def plan_record(advice: Advice) -> dict[str, Any]:
    """A plan for programs."""
    choice, problem = advice.choice, advice.problem
    return {
        "plan": asdict(choice.best),
        "options": choice.best.to_options(),
        "runner_up": asdict(choice.runner_up) if choice.runner_up is not None else None,
        "defaults": asdict(advice.predicted_defaults) if advice.predicted_defaults is not None else None,
        "helps": [asdict(help) for help in choice.helps],
        "budget": asdict(problem.budget),
        "rows": problem.workload.num_rows,
        "workload": problem.workload.source,
        "sizes": asdict(problem.sizes) | {"weights_bytes": problem.sizes.weights_bytes},
        "profile": dict(problem.profile.facts),
    }


def _described(plan: Plan, sizes: ModelSizes) -> str:
    if plan.weights_memory is None:
        weights = "all weights on the device"
    else:
        weights = f"{as_size(plan.weights_memory)} for weights, the rest streamed"
    if plan.kv_residence == "host":
        kv = (
            f"{as_size(plan.host_memory or 0)} of KV in the host tier, {as_size(plan.kv_memory or 0)} staging"
        )
    else:
        kv = f"{as_size(plan.kv_memory or 0)} of KV on the device"
    sub_batches = f" in sub-batches of {plan.attention_sub_batch}" if plan.attention_sub_batch else ""
    experts = f", experts over {plan.moe_batch_tokens or 'all'} tokens" if sizes.is_sparse else ""
    return (
        f"{weights}; {kv}; {plan.max_sequences} sequences{sub_batches}, {plan.max_step_tokens} tokens a "
        f"pass{experts}"
    )


def _expected(plan: Plan) -> str:
    expected = plan.prediction
    assert expected is not None  # made by the search
    return (
        f"{expected.tokens_per_s:.1f} tokens/s, {duration(expected.bct_s)} in all; a pass of "
        f"{expected.step_sequences} sequences takes {expected.step_s:.3g} s"
    )
