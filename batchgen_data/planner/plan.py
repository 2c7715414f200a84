"""What a plan is: chosen values of EngineConfig, and what they are expected to give. No torch here."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from typing import Any

from batchgen_data.config import EngineConfig
from batchgen_data.errors import ConfigError

# Fields of EngineConfig that a plan sets. Where the caller set one of them, that is what stays.
PLANNED = (
    "weights_memory",
    "kv_residence",
    "kv_memory",
    "host_memory",
    "attention_sub_batch",
    "moe_batch_tokens",
    "yield_at",
    "max_sequences",
    "max_step_tokens",
)

FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a choice is expected to give.

    Attributes:
        bct_s: batch completion time: seconds until the last row of the workload is done.
        tokens_per_s: generated tokens over that time.
        step_s: seconds of a pass in which the usual number of sequences decode.
        step_sequences: sequences of that pass.
        device_bytes: of the device tier: weights, KV pages or their staging, and room for a pass.
        host_bytes: of the host tier.
    """

    bct_s: float
    tokens_per_s: float
    step_s: float
    step_sequences: int
    device_bytes: int
    host_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A choice of EngineConfig fields; None leaves a field to the engine's own rule.

    Attributes:
        basis: "profile" (measured and searched), "rules" (sizes only: the defaults do not fit), "defaults"
            (everything fits) or "given" (the caller shared out the memory).
        weights_memory: bytes for weights on the device; None keeps all there.
        kv_residence: "device" or "host".
        kv_memory: bytes of KV pages on the device, or of their staging.
        host_memory: bytes of KV pages in the host tier.
        attention_sub_batch: B_attn, in sequences.
        moe_batch_tokens: B_moe, in tokens.
        yield_at: where sub-batches are combined, as patterns; None means the sparse blocks.
        max_sequences: sequences decoded together at most.
        max_step_tokens: tokens of a pass at most.
        prediction: None without a profile.
    """

    basis: str = "defaults"
    weights_memory: int | None = None
    kv_residence: str = "device"
    kv_memory: int | None = None
    host_memory: int | None = None
    attention_sub_batch: int | None = None
    moe_batch_tokens: int | None = None
    yield_at: tuple[str, ...] | None = None
    max_sequences: int = EngineConfig().max_sequences
    max_step_tokens: int = EngineConfig().max_step_tokens
    prediction: Prediction | None = None

    def to_options(self) -> dict[str, Any]:
        """The fields of EngineConfig that differ from its defaults."""
        defaults = EngineConfig()
        return {name: value for name in PLANNED if (value := getattr(self, name)) != getattr(defaults, name)}

    def apply(self, config: EngineConfig) -> EngineConfig:
        """Return `config` with what the caller left alone set by this plan.

        Raises:
            ConfigError: what the caller set and what is planned cannot stand together.
        """
        given = given_fields(config)
        return dataclasses.replace(
            config, **{name: value for name, value in self.to_options().items() if name not in given}
        )

    def to_json(self) -> str:
        """As a JSON object."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The opposite of `to_json`.

        Raises:
            ConfigError: not a plan, or one of another format.
        """
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT:
                raise ConfigError("the plan was written by another version; make it again")
            prediction, points = values.pop("prediction"), values.pop("yield_at")
            values["yield_at"] = tuple(points) if points is not None else None
            return cls(**values, prediction=Prediction(**prediction) if prediction is not None else None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"not a plan: {error}") from error


def given_fields(config: EngineConfig) -> dict[str, Any]:
    """The planned fields that the caller set to something else than the default."""
    defaults = EngineConfig()
    return {name: value for name in PLANNED if (value := getattr(config, name)) != getattr(defaults, name)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a plan may use.

    Attributes:
        device_bytes: of the device tier.
        host_bytes: of the host tier.
        copy_bytes_s: bandwidth between the tiers; None takes the profile's.
        disk_bytes_s: bandwidth of the checkpoint; None takes the profile's.
    """

    device_bytes: int
    host_bytes: int = 0
    copy_bytes_s: float | None = None
    disk_bytes_s: float | None = None


def as_size(num_bytes: float) -> str:
    """A number of bytes for people: ``1.5 GiB``."""
    power = 0 if num_bytes < 1024 else min(4, int(math.log(num_bytes, 1024)))
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{num_bytes / 1024**power:.{0 if power == 0 else 1}f} {unit}"


def as_options(plan: Plan) -> str:
    """The plan as options of the command line, empty where it leaves everything to the defaults."""
    words: list[str] = []
    for name, value in plan.to_options().items():
        for one in value if isinstance(value, tuple) else (value,):
            words.append(f"--{name.replace('_', '-')} {shlex.quote(str(one))}")
    return " ".join(words)
