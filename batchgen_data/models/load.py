"""Loading a model and its tokenizer: safetensors only, native code only, and every weight accounted for."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from batchgen_data.errors import ConfigError, DeviceError, PlanError, UnsafeModelError
from batchgen_data.sampling import SamplingParams, ignored_generation_settings

from .experts import install_experts
from .safety import check_no_remote_code, check_weight_files, read_json
from .source import ModelSource, local_folder, resolve_source
from .streamed_load import load_streamed
from .weights import WeightStream

__all__ = ["LoadedModel", "ModelSource", "load_model", "load_tokenizer", "local_folder", "resolve_source"]

_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")
# Causal always, though their configs inherit the flag `is_decoder` as False.
_DECODERS_WITHOUT_FLAG = frozenset({"gpt_neox", "gpt_neox_japanese"})
_KNOWN_MODEL_TYPES = frozenset(CONFIG_MAPPING_NAMES)
_MAX_NAMES_SHOWN = 8
_REPORT_LINE = re.compile(
    r"^(\S+)\s*\|\s*(?:\x1b\[[0-9;]*m)*(?:MISSING|CONVERSION|MISMATCH|UNEXPECTED)", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: In eval mode, without gradients, on its device.
        tokenizer: A fast tokenizer; it may have no pad token, and ids beyond the model's embedding.
        source: Where it came from.
        context_tokens: Most tokens of prompt and output together.
        eos_token_ids: Every id that ends a generation: the generation config's, the config's and the
            tokenizer's together.
        sampling_defaults: From the model's generation config.
        ignored_generation_settings: What that config asks for and the runtime does not do.
        weights: What brings the weights that are not resident; None where all are. Close it with the model.
    """

    model: Any
    tokenizer: Any
    source: ModelSource
    context_tokens: int
    eos_token_ids: frozenset[int]
    sampling_defaults: SamplingParams
    ignored_generation_settings: dict[str, Any] = field(default_factory=dict)
    weights: WeightStream | None = None


def load_tokenizer(source: ModelSource, tokenizer: str | None = None) -> Any:
    """Load the model's tokenizer, or the one at `tokenizer` (a folder or hub id, or `id@revision`).

    Raises:
        ConfigError: There is none, it is damaged, or it has no fast implementation.
        UnsafeModelError: It would need code of its own.
    """
    if tokenizer is not None:
        source = resolve_source(tokenizer, needs="tokenizer")
    with quiet_transformers():
        folder = local_folder(source, weights=False)
        check_no_remote_code(folder, _KNOWN_MODEL_TYPES)
        # Without a config AutoTokenizer cannot tell the family; the file itself says all that is needed.
        loader = AutoTokenizer if (folder / "config.json").exists() else PreTrainedTokenizerFast
        try:
            loaded = loader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise UnsafeModelError(
                    f"{folder / 'tokenizer_config.json'} asks to run Python code that comes with the "
                    "tokenizer (key 'auto_map'), which is never done; give another one with tokenizer="
                ) from error
            raise ConfigError(
                f"cannot load a tokenizer from {folder}: {_first_line(error)}; it needs a tokenizer.json "
                "(give one from elsewhere with tokenizer=)"
            ) from error
    if not getattr(loaded, "is_fast", False):
        raise ConfigError(
            f"the tokenizer in {folder} ({type(loaded).__name__}) has no fast implementation; "
            "give one that has a tokenizer.json with tokenizer="
        )
    return loaded


def load_model(
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype | str = "auto",
    tokenizer: Any = None,
    max_context_tokens: int | None = None,
    weights_memory: int | None = None,
) -> LoadedModel:
    """Load a causal language model; every weight comes from the checkpoint and every tensor there is used.

    Args:
        source: A resolved source.
        device: Where the model goes.
        dtype: "auto" is fp32 on a CPU (the fast precision there) and the checkpoint's own elsewhere.
        tokenizer: One that was loaded already; default: the model's own.
        max_context_tokens: Lowers the context, or states it where the config does not.
        weights_memory: Bytes of the device for weights. Where they need more, the rest is streamed from the
            checkpoint in every pass (`models.weights`); None keeps all on the device.

    Raises:
        ConfigError: Damaged files, missing, unexpected or mismatched weights, an architecture that is no
            causal language model, or quantised weights.
        UnsafeModelError: Pickle weights, code of its own, or files outside the folder.
        PlanError: The weights do not fit on the device, or `weights_memory` is too little to stream them.
    """
    with quiet_transformers() as messages:
        folder = local_folder(source)
        check_no_remote_code(folder, _KNOWN_MODEL_TYPES)
        config = _load_config(folder)
        if (folder / "generation_config.json").exists():
            # transformers would go on without a broken one, and so without the end tokens it lists.
            read_json(folder / "generation_config.json")
        files = check_weight_files(folder)
        context_tokens = _context_tokens(config, max_context_tokens, folder)
        if dtype == "auto":
            dtype = torch.float32 if device.type == "cpu" else (config.dtype or torch.float32)

        def load(loader: Any, path: Path | None, **options: Any) -> Any:
            return _from_pretrained(loader, path, folder, messages, config=config, dtype=dtype, **options)

        streamed = None
        if weights_memory is not None:
            causal = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            streamed = load_streamed(
                lambda tensors: load(causal, None, state_dict=tensors), files, device, weights_memory
            )
        model, weights = streamed or (load(AutoModelForCausalLM, folder), None)
        try:
            if weights is not None and (folder / "generation_config.json").exists():
                model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
            if tokenizer is None:
                tokenizer = load_tokenizer(source)
            model.eval().requires_grad_(False)
            if device.type == "cpu":
                install_experts(model)
            return _loaded(model, weights, source, tokenizer, context_tokens, device)
        except BaseException:
            if weights is not None:
                weights.close()
            raise


def _loaded(
    model: Any,
    weights: WeightStream | None,
    source: ModelSource,
    tokenizer: Any,
    context_tokens: int,
    device: torch.device,
) -> LoadedModel:
    return LoadedModel(
        model=_to_device(model, device) if weights is None else model,
        tokenizer=tokenizer,
        source=source,
        context_tokens=context_tokens,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        sampling_defaults=SamplingParams.from_generation_config(model.generation_config or {}),
        ignored_generation_settings=ignored_generation_settings(model.generation_config or {}),
        weights=weights,
    )


def _from_pretrained(
    loader: Any, path: Path | None, folder: Path, messages: list[str], **options: Any
) -> Any:
    """Load a model with transformers and check what it reports; errors name `folder`."""
    try:
        model, loading = loader.from_pretrained(
            path,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            # So that they are reported with the others instead of raised one by one.
            ignore_mismatched_sizes=True,
            # Named here because a config may name a kernel to download and run.
            attn_implementation="eager",
            **options,
        )
    except DeviceError:
        raise  # names the file that could not be read
    except Exception as error:
        names = _reported_weights(messages)
        why = f"weights are missing or of another shape: {names}" if names else _first_line(error)
        raise ConfigError(f"cannot load the model in {folder}: {why}") from error
    check_loading(loading, str(folder))
    return model


def check_loading(loading: Mapping[str, Any], place: str) -> None:
    """Turn transformers' loading info into one error that names the weights.

    What a model class declares benign (old buffers, extra prediction layers) is already left out of it, and
    so is a head that is tied to the embedding.

    Raises:
        ConfigError: A weight is missing, unexpected, or has another shape than the model's.
    """
    problems = []
    if missing := sorted(loading["missing_keys"]):
        problems.append(f"missing from the checkpoint: {_listed(missing)}")
    if unexpected := sorted(loading["unexpected_keys"]):
        problems.append(f"in the checkpoint but not in the model: {_listed(unexpected)}")
    if mismatched := sorted(loading["mismatched_keys"]):
        shown = [f"{name} {tuple(there)}, expected {tuple(here)}" for name, there, here in mismatched]
        problems.append(f"of another shape than config.json says: {_listed(shown)}")
    if errors := list(loading.get("error_msgs", ())):
        problems.append(_listed([str(message) for message in errors]))
    if problems:
        raise ConfigError(
            f"the weights in {place} do not fit the model: {'; '.join(problems)}. "
            "Use the config.json that belongs to these weights, or download the model again"
        )


def read_config(source: ModelSource, max_context_tokens: int | None = None) -> tuple[Path, Any, int]:
    """Return a model's folder, its checked config and its context; no weight is read or downloaded.

    Raises:
        ConfigError, UnsafeModelError: As `load_model`, where the config alone tells.
    """
    with quiet_transformers():
        folder = local_folder(source, weights=False)
        check_no_remote_code(folder, _KNOWN_MODEL_TYPES)
        config = _load_config(folder)
        return folder, config, _context_tokens(config, max_context_tokens, folder)


@contextmanager
def quiet_transformers() -> Iterator[list[str]]:
    """Keep transformers' and the hub's bars and reports off the terminal.

    Yields:
        The messages of level WARNING and above that were held back, as they come.
    """
    kept: list[str] = []
    root = logging.getLogger("transformers")
    before = root.handlers, root.propagate, root.level
    had_bars = transformers_logging.is_progress_bar_enabled()
    had_hub_bars = not are_progress_bars_disabled()
    root.handlers, root.propagate = [_Keeper(kept)], False
    root.setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    try:
        yield kept
    finally:
        root.handlers, root.propagate = before[:2]
        root.setLevel(before[2])
        if had_bars:
            transformers_logging.enable_progress_bar()
        if had_hub_bars:
            enable_progress_bars()


class _Keeper(logging.Handler):
    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record.getMessage())


def _reported_weights(messages: list[str]) -> str:
    """Read the weights' names from transformers' load report: its exception does not carry them."""
    return _listed(sorted({name for message in messages for name in _REPORT_LINE.findall(message)}))


def _load_config(folder: Path) -> Any:
    path = folder / "config.json"
    content = read_json(path)
    model_type = content.get("model_type")
    if model_type not in _KNOWN_MODEL_TYPES:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} does not know the architecture "
            f"model_type={model_type!r}; a newer transformers may"
        )
    if content.get("quantization_config"):
        raise ConfigError(
            f"{path}: quantised weights (quantization_config) are not supported; use the model's original "
            "checkpoint, or a .gguf file"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"{path} is not a valid config: {_first_line(error)}") from error
    _check_architecture(config, path)
    config._experts_implementation = None  # a kernel from elsewhere could be named here too
    return config


def _check_architecture(config: Any, path: Path) -> None:
    stated = list(config.architectures or ())
    native = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    name = stated[0] if stated else (native or config.model_type)
    if config.is_encoder_decoder:
        why = "is an encoder-decoder"
    elif native is None or not any(str(one).endswith(_CAUSAL_SUFFIXES) for one in (stated or [native])):
        why = "is no causal language model"
    elif not native.endswith(_CAUSAL_SUFFIXES) or hasattr(config, "text_config"):
        why = "takes more than text"
    elif getattr(config, "is_decoder", True) is False and config.model_type not in _DECODERS_WITHOUT_FLAG:
        why = "reads in both directions (is_decoder is false)"
    else:
        return
    raise ConfigError(
        f"the architecture {name} of {path} {why}; only decoder-only text models can generate here"
    )


def _context_tokens(config: Any, wanted: int | None, folder: Path) -> int:
    values = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    known = next((value for value in values if isinstance(value, int) and value > 0), None)
    if known is None and wanted is None:
        raise ConfigError(
            f"{folder / 'config.json'} states no context length ({', '.join(_CONTEXT_NAMES)}); "
            "set max_context_tokens"
        )
    if wanted is not None and wanted < 1:
        raise ConfigError(f"max_context_tokens={wanted} must be at least 1")
    if known is not None and wanted is not None and wanted > known:
        raise ConfigError(f"max_context_tokens={wanted} is more than the model's context of {known} tokens")
    return wanted or known or 0


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    # The tokenizer alone is not enough: chat models often end turns with a second token that only the
    # generation config names.
    found: set[Any] = set()
    for holder in (model.generation_config, model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else () if value is None else (value,))
    for token_id in found:
        if not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(
                f"eos_token_id {token_id!r} of the model is not a token id; "
                "correct it in config.json and generation_config.json"
            )
    return frozenset(found)


def _to_device(model: Any, device: torch.device) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        needed_bytes = sum(tensor.nbytes for tensor in model.parameters())
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        raise PlanError(
            f"the weights need {needed_bytes} bytes on {device}, which has {free_bytes} bytes free; "
            "use a smaller dtype or a larger device"
        ) from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + more


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
