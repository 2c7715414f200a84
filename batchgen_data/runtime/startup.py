"""From a model's name to a running engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchgen_data.config import EngineConfig, parse_bytes
from batchgen_data.errors import ConfigError, PlanError
from batchgen_data.models.attention import install, position_limit
from batchgen_data.models.kv_checkpoint import KVCopies, host_page_bytes
from batchgen_data.models.kv_pool import KVPool, LayerShape
from batchgen_data.models.kv_staging import StagedKVPool, sub_batch_pages
from batchgen_data.models.load import LoadedModel, ModelSource, load_model
from batchgen_data.models.wrap import install_layer_barriers, install_yield_points
from batchgen_data.planner.advise import Target, plan_at_start
from batchgen_data.planner.plan import Plan
from batchgen_data.runtime.engine import Engine
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.resources import available_cpus, free_memory_bytes
from batchgen_data.runtime.step import Limits
from batchgen_data.runtime.trace import OFF, Trace
from batchgen_data.shipped_callbacks import as_callbacks

logger = logging.getLogger(__name__)

# The rest of a CPU's memory belongs to the caller, to Ray's object store and to the file cache.
_KV_FRACTION = {"cpu": 0.3, "cuda": 0.9}
# Of the host tier's size, where nobody says how much of a CPU's memory is the staging.
_STAGING_FRACTION = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What part of the machine belongs to this process.

    Attributes:
        actors_per_node: processes like this one on the machine, which split CPUs and their memory evenly.
        gpu: part of one GPU, where several processes share it.
    """

    actors_per_node: int = 1
    gpu: float = 1.0


def plan_target(
    source: ModelSource,
    config: EngineConfig,
    *,
    share: Share | None = None,
    device_memory: int | None = None,
    host_memory: int | None = None,
) -> Target:
    """What a plan for an engine of this process is made for, with budgets of the tiers where given.

    Raises:
        ConfigError: no such device.
    """
    share = share or Share()
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    return Target(
        source=source,
        config=config,
        device=device,
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
        num_threads=_num_threads(config, share),
        device_memory=device_memory,
        host_memory=host_memory,
        part=share.gpu if device.type == "cuda" else 1 / share.actors_per_node,
    )


def plan_engine(source: ModelSource, config: EngineConfig, *, share: Share | None = None) -> Plan:
    """Choose what the caller left open about memory and batching; see `planner.advise.plan_at_start`.

    Raises:
        ConfigError: no such device, a model whose config cannot be used.
        PlanError: the model runs in no way; no weight has been read.
    """
    return plan_at_start(plan_target(source, config, share=share))


def start_engine(
    source: ModelSource, config: EngineConfig, *, tokenizer: Any = None, share: Share | None = None
) -> tuple[Engine, LoadedModel]:
    """Load a model, switch it to paged attention, size its KV pool and start the engine thread.

    Args:
        source: from `models.load.resolve_source`.
        config: see EngineConfig.
        tokenizer: a loaded tokenizer to use in place of the model's own.
        share: what part of the machine to take; all of it by default.

    Raises:
        ConfigError: no such device, an unsupported model, missing or unsafe weights, a context longer than
            the model's, sub-batches of a model without yield points.
        PlanError: the KV memory or the staging holds less than two pages, the host tier has no room,
            `weights_memory` is too little to stream the weights.
    """
    share = share or Share()
    device = _device(config.device)
    if config.trace is not None and not Path(config.trace).resolve().parent.is_dir():
        raise ConfigError(f"trace: there is no folder {Path(config.trace).resolve().parent} to write to")
    num_threads = _num_threads(config, share)
    callers_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        loaded = load_model(
            source,
            device=device,
            dtype=_dtype(config.dtype, device),
            max_context_tokens=config.max_context_tokens,
            weights_memory=parse_bytes(config.weights_memory, "weights_memory")
            if config.weights_memory is not None
            else None,
        )
        try:
            engine = _start(loaded, config, device, num_threads, tokenizer or loaded.tokenizer, share)
        except BaseException:
            if loaded.weights is not None:
                loaded.weights.close()
            raise
    finally:
        torch.set_num_threads(callers_threads)
    return engine, loaded


def _start(
    loaded: LoadedModel,
    config: EngineConfig,
    device: torch.device,
    num_threads: int,
    tokenizer: Any,
    share: Share,
) -> Engine:
    shapes = install(loaded.model)
    context_tokens = _context_tokens(config, loaded)
    trace = OFF if config.trace is None else Trace()
    pool = _kv_pool(config, shapes, device, context_tokens, share, trace)
    _install_points(loaded, config, staged=pool.sub_batch_pages is not None)
    if loaded.weights is not None:
        loaded.weights.trace = trace
    host_pages = _checkpoint_pages(config, pool, context_tokens)
    executor = TorchExecutor(
        loaded.model,
        pool,
        sub_batch=config.attention_sub_batch,
        moe_batch_tokens=config.moe_batch_tokens,
        # Lanes would each want another layer's weights: streamed ones are used by all threads at once.
        num_threads=num_threads if device.type == "cpu" and loaded.weights is None else 1,
        weights=loaded.weights,
        copies=KVCopies(pool, host_pages, host_path=config.host_path, trace=trace) if host_pages else None,
        trace=trace,
        trace_path=config.trace,
    )
    limits = Limits(
        num_pages=pool.num_pages,
        page_tokens=config.page_tokens,
        max_sequences=config.max_sequences,
        max_step_tokens=config.max_step_tokens,
        max_chunk_tokens=-(-config.max_step_tokens // executor.num_threads),
        max_sequence_pages=pool.sub_batch_pages,
        prefix_reuse=config.prefix_reuse,
        host_pages=host_pages,
    )
    engine = Engine(
        executor,
        limits,
        tokenizer,
        context_tokens=context_tokens,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.model.get_input_embeddings().num_embeddings,
        num_threads=num_threads,
        callbacks=as_callbacks(config.callbacks),
    )
    logger.info(
        "%s: %s, %d threads, %d KV pages of %d tokens",
        type(loaded.model).__name__,
        device,
        num_threads,
        pool.num_pages,
        config.page_tokens,
    )
    return engine


def _install_points(loaded: LoadedModel, config: EngineConfig, *, staged: bool) -> None:
    """Where the sub-batches of a pass yield and wait for one another, if it runs in sub-batches.

    Args:
        loaded: switched to paged attention.
        config: what the caller asked for.
        staged: whether the KV pool cuts a pass into sub-batches, however many there are.
    """
    asked = [name for name in ("attention_sub_batch", "moe_batch_tokens") if getattr(config, name)]
    if not asked and not staged:
        if config.yield_at is not None:
            raise ConfigError(
                "yield_at has no effect while each pass runs as one unit; set attention_sub_batch, the "
                "sequences of a sub-batch"
            )
        return
    names = install_yield_points(loaded.model, config.yield_at)
    # Where weights are streamed sub-batches also meet before each layer.
    needs_experts = [name for name in asked if name == "moe_batch_tokens" or loaded.weights is None]
    if not names and needs_experts:
        raise ConfigError(
            f"{needs_experts[0]} needs a model with experts; {type(loaded.model).__name__} has none and runs "
            "each pass as one unit, unless yield_at names modules at which sub-batches are combined"
        )
    if loaded.weights is not None:
        install_layer_barriers(loaded.model)


def _num_threads(config: EngineConfig, share: Share) -> int:
    return config.num_threads or max(1, available_cpus() // share.actors_per_node)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was asked for, but PyTorch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        # bfloat16 matrix products run at a tenth of float32's rate on CPUs without units for them.
        return torch.float32 if device.type == "cpu" else "auto"
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def _context_tokens(config: EngineConfig, loaded: LoadedModel) -> int:
    limit = position_limit(loaded.model.config)
    if limit is None or loaded.context_tokens <= limit:
        return loaded.context_tokens
    if config.max_context_tokens is not None:
        raise ConfigError(
            f"max_context_tokens={config.max_context_tokens} is beyond the {limit} tokens up to which "
            f"{type(loaded.model).__name__} can be run: past them its rotary factors would depend on the "
            "other rows of a pass"
        )
    logger.warning("context cut from %d to %d tokens: longrope factors", loaded.context_tokens, limit)
    return limit


def _kv_pool(
    config: EngineConfig,
    shapes: dict[int, LayerShape],
    device: torch.device,
    context_tokens: int,
    share: Share,
    trace: Trace,
) -> KVPool:
    page_tokens = config.page_tokens
    page_bytes = page_tokens * sum(shape.token_bytes for shape in shapes.values())
    most_pages = config.max_sequences * -(-context_tokens // page_tokens)
    if config.kv_residence == "device":
        budget_bytes = _kv_bytes(config, device, share)
        num_pages = _num_pages("KV memory", "kv_memory", budget_bytes, page_bytes, page_tokens)
        return KVPool(shapes, min(num_pages, most_pages), page_tokens, device)
    host_bytes = _host_kv_bytes(config, device, share)
    num_pages = _num_pages("a host tier", "host_memory", host_bytes, page_bytes, page_tokens)
    num_pages = min(num_pages, most_pages)
    if config.kv_memory is None and device.type == "cpu":
        staging_bytes = int(host_bytes * _STAGING_FRACTION)
    else:
        staging_bytes = _kv_bytes(config, device, share)
    # More than the whole host tier cannot be staged.
    widest_bytes = page_tokens * max(shape.token_bytes for shape in shapes.values())
    staging_bytes = min(staging_bytes, 2 * num_pages * widest_bytes)
    staged_tokens = sub_batch_pages(shapes, page_tokens, staging_bytes) * page_tokens
    if staged_tokens < context_tokens:
        logger.warning("rows of more than %d tokens are refused: the KV staging holds no more", staged_tokens)
    return StagedKVPool(
        shapes,
        num_pages,
        page_tokens,
        device,
        staging_bytes=staging_bytes,
        host_path=config.host_path,
        trace=trace,
    )


def _checkpoint_pages(config: EngineConfig, pool: KVPool, context_tokens: int) -> int:
    """Pages of the host tier for suspended sequences; 0 where these are recomputed."""
    if config.host_memory is None or config.kv_residence == "host":
        return 0
    host_bytes = parse_bytes(config.host_memory, "host_memory")
    num_pages = _num_pages(
        "a host tier", "host_memory", host_bytes, host_page_bytes(pool), config.page_tokens
    )
    # All sequences at their longest.
    return min(num_pages, config.max_sequences * -(-context_tokens // config.page_tokens))


def _kv_bytes(config: EngineConfig, device: torch.device, share: Share) -> int:
    if config.kv_memory is not None:
        return parse_bytes(config.kv_memory, "kv_memory")
    part = share.gpu if device.type == "cuda" else 1 / share.actors_per_node
    fraction = config.kv_memory_fraction or _KV_FRACTION[device.type]
    return int(free_memory_bytes(device) * fraction * part)


def _host_kv_bytes(config: EngineConfig, device: torch.device, share: Share) -> int:
    """The host tier where all KV lives there."""
    if config.host_memory is not None:
        return parse_bytes(config.host_memory, "host_memory")
    fraction = 0.5 if device.type == "cuda" else config.kv_memory_fraction or _KV_FRACTION["cpu"]
    return int(free_memory_bytes(torch.device("cpu")) * fraction / share.actors_per_node)


def _num_pages(place: str, option: str, budget_bytes: int, page_bytes: int, page_tokens: int) -> int:
    num_pages = budget_bytes // page_bytes
    if num_pages < 2:
        raise PlanError(
            f"{place} of {budget_bytes:,} bytes holds {num_pages} pages of {page_bytes:,} bytes "
            f"({page_tokens} tokens); set {option} to at least {2 * page_bytes:,} bytes, or lower page_tokens"
        )
    return num_pages
