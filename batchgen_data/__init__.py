"""BatchGen Data: a Ray Data stage that completes rows with a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchgen_data.callbacks import Callbacks
from batchgen_data.config import EngineConfig
from batchgen_data.errors import (
    BatchgenError,
    CallbackError,
    CommitError,
    ConfigError,
    DeviceError,
    InputError,
    InternalError,
    JobError,
    PlanError,
    PromptError,
    PromptTooLongError,
    RowError,
    UnsafeModelError,
)
from batchgen_data.prompts import PromptSpec
from batchgen_data.sampling import SamplingParams
from batchgen_data.schema import Outcome
from batchgen_data.shipped_callbacks import Int8KV, PromptLookup

if TYPE_CHECKING:
    from batchgen_data.llm import LLM
    from batchgen_data.operator import BatchGenLLM, generate

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BatchGenLLM",
    "BatchgenError",
    "CallbackError",
    "Callbacks",
    "CommitError",
    "ConfigError",
    "DeviceError",
    "EngineConfig",
    "InputError",
    "Int8KV",
    "InternalError",
    "JobError",
    "Outcome",
    "PlanError",
    "PromptError",
    "PromptLookup",
    "PromptSpec",
    "PromptTooLongError",
    "RowError",
    "SamplingParams",
    "UnsafeModelError",
    "generate",
]

# These import torch and transformers (several seconds); `batchgen --help` and job code do without.
_HEAVY = {"LLM": "llm", "BatchGenLLM": "operator", "generate": "operator"}


def __getattr__(name: str) -> Any:
    if name in _HEAVY:
        from importlib import import_module

        return getattr(import_module(f"batchgen_data.{_HEAVY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
