"""From a model's name to a running engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from batchgen_data.config import EngineConfig, parse_bytes
from batchgen_data.errors import ConfigError, PlanError
from batchgen_data.models.attention import KVPool, LayerShape, install, position_limit
from batchgen_data.models.load import LoadedModel, ModelSource, load_model
from batchgen_data.models.wrap import install_yield_points, sparse_blocks
from batchgen_data.runtime.engine import Engine
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.resources import available_cpus, free_memory_bytes
from batchgen_data.runtime.step import Limits

logger = logging.getLogger(__name__)

# The rest of a CPU's memory belongs to the caller, to Ray's object store and to the file cache.
_KV_FRACTION = {"cpu": 0.3, "cuda": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What part of the machine belongs to this process.

    Attributes:
        actors_per_node: processes like this one on the machine, which split CPUs and their memory evenly.
        gpu: part of one GPU, where several processes share it.
    """

    actors_per_node: int = 1
    gpu: float = 1.0


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
        PlanError: the KV memory holds less than two pages.
    """
    share = share or Share()
    device = _device(config.device)
    num_threads = config.num_threads or max(1, available_cpus() // share.actors_per_node)
    callers_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        loaded = load_model(
            source,
            device=device,
            dtype=_dtype(config.dtype, device),
            max_context_tokens=config.max_context_tokens,
        )
        shapes = install(loaded.model)
    finally:
        torch.set_num_threads(callers_threads)
    context_tokens = _context_tokens(config, loaded)
    num_pages = _num_pages(config, shapes, device, context_tokens, share)
    if config.attention_sub_batch:
        blocks = sparse_blocks(loaded.model)
        if not blocks:
            raise ConfigError(
                f"attention_sub_batch needs a model with experts; {type(loaded.model).__name__} has none "
                "and runs each pass as one unit"
            )
        install_yield_points(blocks)
    pool = KVPool(shapes, num_pages, config.page_tokens, device)
    executor = TorchExecutor(
        loaded.model,
        pool,
        sub_batch=config.attention_sub_batch,
        num_threads=num_threads if device.type == "cpu" else 1,
    )
    limits = Limits(
        num_pages=num_pages,
        page_tokens=config.page_tokens,
        max_sequences=config.max_sequences,
        max_step_tokens=config.max_step_tokens,
        max_chunk_tokens=-(-config.max_step_tokens // executor.num_threads),
        prefix_reuse=config.prefix_reuse,
    )
    engine = Engine(
        executor,
        limits,
        tokenizer or loaded.tokenizer,
        context_tokens=context_tokens,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.model.get_input_embeddings().num_embeddings,
        num_threads=num_threads,
    )
    logger.info(
        "%s: %s, %d threads, %d KV pages of %d tokens",
        type(loaded.model).__name__,
        device,
        num_threads,
        num_pages,
        config.page_tokens,
    )
    return engine, loaded


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


def _num_pages(
    config: EngineConfig,
    shapes: dict[int, LayerShape],
    device: torch.device,
    context_tokens: int,
    share: Share,
) -> int:
    page_bytes = config.page_tokens * sum(shape.token_bytes for shape in shapes.values())
    if config.kv_memory is not None:
        budget_bytes = parse_bytes(config.kv_memory, "kv_memory")
    else:
        part = share.gpu if device.type == "cuda" else 1 / share.actors_per_node
        fraction = config.kv_memory_fraction or _KV_FRACTION[device.type]
        budget_bytes = int(free_memory_bytes(device) * fraction * part)
    num_pages = budget_bytes // page_bytes
    if num_pages < 2:
        raise PlanError(
            f"KV memory of {budget_bytes:,} bytes holds {num_pages} pages of {page_bytes:,} bytes "
            f"({config.page_tokens} tokens); set kv_memory to at least {2 * page_bytes:,} bytes, or lower "
            "page_tokens"
        )
    most = config.max_sequences * -(-context_tokens // config.page_tokens)
    return int(min(num_pages, most))
