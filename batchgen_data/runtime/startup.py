"""From a model's name to a running engine."""

from __future__ import annotations

import logging
from typing import Any

import torch

from batchgen_data.config import EngineConfig, parse_bytes
from batchgen_data.errors import ConfigError, PlanError
from batchgen_data.models.attention import KVPool, LayerShape, install
from batchgen_data.models.load import LoadedModel, ModelSource, load_model
from batchgen_data.models.wrap import install_yield_points, sparse_blocks
from batchgen_data.runtime.engine import Engine
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.resources import available_cpus, free_memory_bytes
from batchgen_data.runtime.scheduler import Limits

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# The rest of a CPU's memory belongs to the caller, to Ray's object store and to the file cache.
_KV_FRACTION = {"cpu": 0.3, "cuda": 0.9}


def start_engine(
    source: ModelSource, config: EngineConfig, *, tokenizer: Any = None, actors_per_node: int = 1
) -> tuple[Engine, LoadedModel]:
    """Load a model, switch it to paged attention, size its KV pool and start the engine thread.

    Args:
        source: from `models.load.resolve_source`.
        config: see EngineConfig.
        tokenizer: a loaded tokenizer to use in place of the model's own.
        actors_per_node: processes like this one on the machine; CPUs and free memory are split evenly.

    Raises:
        ConfigError: unknown device or type, an unsupported model, missing or unsafe weights.
        PlanError: the KV memory holds less than two pages.
    """
    device = _device(config.device)
    num_threads = config.num_threads or max(1, available_cpus() // actors_per_node)
    torch.set_num_threads(num_threads)
    loaded = load_model(source, device=device, dtype=_dtype(config.dtype, device))
    shapes = install(loaded.model)
    num_pages = _num_pages(config, shapes, device, loaded, actors_per_node)
    blocks = sparse_blocks(loaded.model) if config.attention_sub_batch else []
    install_yield_points(blocks)
    pool = KVPool(shapes, num_pages, config.page_tokens, device)
    executor = TorchExecutor(
        loaded.model,
        pool,
        sub_batch=config.attention_sub_batch if blocks else None,
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
        context_tokens=min(config.max_context_tokens or loaded.context_tokens, loaded.context_tokens),
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
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but PyTorch sees no CUDA device")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name == "auto":
        # bfloat16 matrix products run at a tenth of float32's rate on CPUs without units for them.
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _num_pages(
    config: EngineConfig,
    shapes: dict[int, LayerShape],
    device: torch.device,
    loaded: LoadedModel,
    actors_per_node: int,
) -> int:
    page_bytes = config.page_tokens * sum(shape.token_bytes for shape in shapes.values())
    if config.kv_memory is not None:
        budget_bytes = parse_bytes(config.kv_memory, "kv_memory")
    else:
        fraction = config.kv_memory_fraction or _KV_FRACTION[device.type]
        budget_bytes = int(free_memory_bytes(device) * fraction / actors_per_node)
    num_pages = budget_bytes // page_bytes
    if num_pages < 2:
        raise PlanError(
            f"KV memory of {budget_bytes:,} bytes holds {num_pages} pages of {page_bytes:,} bytes "
            f"({config.page_tokens} tokens); set kv_memory to at least {2 * page_bytes:,} bytes, or lower "
            "page_tokens"
        )
    context_tokens = min(config.max_context_tokens or loaded.context_tokens, loaded.context_tokens)
    most = config.max_sequences * -(-context_tokens // config.page_tokens)
    return int(min(num_pages, most))
