"""Options of the runtime: frozen, keyword-only, checked when made."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from batchgen_data.callbacks import Callbacks
from batchgen_data.errors import ConfigError, nearest
from batchgen_data.shipped_callbacks import as_callbacks

DTYPES = ("auto", "float32", "float16", "bfloat16")

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}

# Rows at hand per row that an engine decodes at once. A call ends with its slowest row: where one row in 64
# is 64 times longer than the others, calls of 64 rows need this many at once to keep the engine full.
_ROWS_IN_FLIGHT_FACTOR = 16
_MOST_CALLS = 512
_OPTIONAL_COUNTS = ("num_threads", "max_context_tokens", "attention_sub_batch", "moe_batch_tokens")


def parse_bytes(value: int | str, field: str) -> int:
    """Turn ``"4GiB"``, ``"500 MB"`` or a plain count into bytes.

    Raises:
        ConfigError: not a size; the message names `field`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].upper() in _UNITS and float(match[1]) > 0:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    raise ConfigError(f"{field} must be a size such as 4GiB, 500MB or a number of bytes, not {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How one runtime uses its device.

    Attributes:
        device: "auto" (CUDA when present, else CPU), "cpu", "cuda", "cuda:1".
        dtype: "auto" (float32 on a CPU, the checkpoint's type on a GPU), or a torch type's name.
        num_threads: CPU threads of the forward pass; None takes the CPUs this process may use.
        kv_memory: bytes for KV pages, or a size such as "4GiB"; None takes `kv_memory_fraction` of the
            free memory left after the weights are loaded.
        kv_memory_fraction: see `kv_memory`; None means 0.3 on a CPU and 0.9 on a GPU.
        page_tokens: tokens of one KV page.
        max_sequences: sequences decoded together at most.
        max_step_tokens: tokens of one forward pass at most, prefill chunks and decoded tokens together.
        max_context_tokens: prompt and output together; None takes the model's own limit.
        prefix_reuse: let sequences share the KV pages of equal prefixes.
        attention_sub_batch: sequences of one attention sub-batch. None runs each pass as one unit, the
            faster way where everything fits (measured: docs/performance.md); a number makes the
            sub-batches yield before each sparse block and combine there.
        moe_batch_tokens: tokens of one combined call at most; None: all tokens of the pass.
        yield_at: patterns over module names ("model.layers.*.mlp") at which sub-batches yield and combine;
            None means the sparse blocks.
        weights_memory: bytes of the device for weights, or a size; what does not fit is streamed from the
            checkpoint in every pass. None keeps all weights on the device.
        kv_residence: "device", or "host": KV pages live in the host tier, and attention stages those of one
            layer and sub-batch at a time in `kv_memory`.
        host_memory: bytes of the host tier, or a size. With kv_residence="device" it keeps the KV pages of
            rows that are suspended because pages are short, and None computes those rows again. With
            kv_residence="host" it holds all KV pages, and None means `kv_memory_fraction` of the free memory
            on a CPU, half of it on a machine with a GPU.
        host_path: a folder for the host tier as a file; None keeps it in memory.
        trace: a file to write when the engine closes: where the time of its first 200 passes went, for
            Perfetto or chrome://tracing. Each engine of a process or job needs its own.
        callbacks: objects of subclasses of `Callbacks`, or names of shipped ones ("prompt-lookup",
            "int8-kv"); see docs/callbacks.md.
    """

    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    kv_memory: int | str | None = None
    kv_memory_fraction: float | None = None
    page_tokens: int = 64
    max_sequences: int = 256
    max_step_tokens: int = 512
    max_context_tokens: int | None = None
    prefix_reuse: bool = True
    attention_sub_batch: int | None = None
    moe_batch_tokens: int | None = None
    yield_at: tuple[str, ...] | None = None
    weights_memory: int | str | None = None
    kv_residence: str = "device"
    host_memory: int | str | None = None
    host_path: str | None = None
    trace: str | None = None
    callbacks: tuple[Callbacks | str, ...] = ()

    def __post_init__(self) -> None:
        for field in (
            "num_threads",
            "page_tokens",
            "max_sequences",
            "max_step_tokens",
            "max_context_tokens",
            "attention_sub_batch",
            "moe_batch_tokens",
        ):
            value = getattr(self, field)
            optional = field in _OPTIONAL_COUNTS
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{field} must be a positive whole number, not {value!r}")
        if self.max_step_tokens < self.max_sequences:
            # Every decoding sequence takes one token of each pass.
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least "
                f"max_sequences ({self.max_sequences})"
            )
        for field in ("kv_memory", "weights_memory", "host_memory"):
            if getattr(self, field) is not None:
                parse_bytes(getattr(self, field), field)
        if self.kv_residence not in ("device", "host"):
            raise ConfigError(f'kv_residence must be "device" or "host", not {self.kv_residence!r}')
        if self.host_path is not None and not (isinstance(self.host_path, str) and self.host_path):
            raise ConfigError(f"host_path must be the path of a folder, not {self.host_path!r}")
        if self.host_path is not None and self.host_memory is None and self.kv_residence == "device":
            raise ConfigError(
                "host_path has no effect without a host tier; add host_memory, to keep the KV of suspended "
                'rows there, or kv_residence="host"'
            )
        if self.yield_at is not None:
            object.__setattr__(self, "yield_at", _patterns(self.yield_at))
        object.__setattr__(self, "callbacks", _checked_callbacks(self.callbacks))
        if self.trace is not None and not (isinstance(self.trace, str) and self.trace):
            raise ConfigError(f"trace must be the path of a file, not {self.trace!r}")
        fraction = self.kv_memory_fraction
        if fraction is not None and not (isinstance(fraction, int | float) and 0 < fraction <= 1):
            raise ConfigError(f"kv_memory_fraction must be above 0 and at most 1, not {fraction!r}")
        if not isinstance(self.prefix_reuse, bool):
            raise ConfigError(f"prefix_reuse must be true or false, not {self.prefix_reuse!r}")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"unknown device {self.device!r}; use auto, cpu, cuda or cuda:N")
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; use {', '.join(DTYPES)}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Make a config from keyword options.

        Raises:
            ConfigError: an unknown option (with the nearest name) or a bad value.
        """
        check_names(options, [field.name for field in dataclasses.fields(cls)])
        return cls(**options)


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    named = isinstance(patterns, list | tuple) and all(isinstance(item, str) and item for item in patterns)
    if not named or not patterns:
        raise ConfigError(f"yield_at must be a pattern or a list of patterns of module names, not {value!r}")
    return tuple(patterns)


def _checked_callbacks(value: Any) -> tuple[Callbacks | str, ...]:
    """As they were given: a shipped one stays a name until an engine starts, so that records can show it."""
    items = (value,) if isinstance(value, Callbacks | str) else value
    if not isinstance(items, list | tuple):
        raise ConfigError(f"callbacks must be a list of callbacks, not {type(value).__name__}")
    as_callbacks(items)
    return tuple(items)


def check_names(options: Mapping[str, Any], known: list[str], *, also: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for the first option that is not known, naming the nearest one."""
    for name in options:
        if name not in known and name not in also:
            raise ConfigError(f"unknown option {name!r}{nearest(name, [*known, *also])}")


def calls_in_flight(max_sequences: int, batch_size: int) -> int:
    """Calls that one actor should have at once, so that its engine never waits for rows.

    Args:
        max_sequences: rows an engine decodes together at most.
        batch_size: rows of one call.
    """
    return min(_MOST_CALLS, max(4, math.ceil(_ROWS_IN_FLIGHT_FACTOR * max_sequences / batch_size)))
