"""Sampling parameters: what a caller may ask for, and what a row ends up with.

Three layers meet here: the row's own settings over the job's, over the model's generation config, over
built-in values. `SamplingParams` is one layer (unset fields are None), `resolve` folds them into a
`ResolvedSampling` that the runtime reads. Names are vLLM's; `from_dict` also takes Hugging Face's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from batchgen_data.errors import ConfigError, nearest
from batchgen_data.sampling_checks import CHECKS, shown

logger = logging.getLogger(__name__)

# Below this, dividing logits by the temperature overflows float32 long before it changes a choice.
GREEDY_BELOW_TEMPERATURE = 1e-5

_ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
}
_ONLY_ONE = ("n", "num_return_sequences")
# Settings of transformers that change which tokens come out, with the value at which they do nothing.
_UNSUPPORTED: dict[str, float] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("typical_p", "top_h", "guidance_scale", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("penalty_alpha", "epsilon_cutoff", "eta_cutoff", "diversity_penalty"), 0.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), 0),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), -1),
    **dict.fromkeys(("force_words_ids", "constraints", "exponential_decay_length_penalty"), 0),
    **dict.fromkeys(("watermarking_config", "dola_layers", "max_time", "token_healing"), 0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose tokens; every field left at None takes the model's default, then the built-in one.

    Attributes:
        temperature: At least 0; 0 is greedy (and so is anything below 1e-5).
        top_p: Nucleus mass in (0, 1].
        top_k: Number of tokens kept; 0 or -1 keeps all.
        min_p: Least probability relative to the likeliest token, in [0, 1].
        repetition_penalty: Above 0; 1 is off. Counts prompt and generated tokens.
        presence_penalty: In [-2, 2]; counts generated tokens.
        frequency_penalty: In [-2, 2]; counts generated tokens.
        max_tokens: Most tokens to generate, at least 1; unset: up to the context limit.
        min_tokens: No end token or stop string before this many tokens.
        stop: A string or several that end the generation.
        stop_token_ids: Token ids that end the generation, besides the model's own.
        ignore_eos: Go on after the model's end tokens (for benchmarks).
        seed: 64-bit; every row draws its own numbers from it.
        logit_bias: Token id to a bias in [-100, 100].
        include_stop_str_in_output: Keep the stop string at the end of the text.
        skip_special_tokens: Leave special tokens out of the text.
        do_sample: Hugging Face's switch. False is stored as ``temperature=0``; True without a temperature
            takes the model's own if that samples, else 1.

    Raises:
        ConfigError: A value has the wrong type or is out of range.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Iterable[str] | None = None
    stop_token_ids: int | Iterable[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    logit_bias: Mapping[int | str, float] | Iterable[tuple[int | str, float]] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    do_sample: bool | None = None

    def __post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, CHECKS[name](name, value))
        if self.do_sample is not None and self.temperature is not None:
            if self.do_sample != (self.temperature >= GREEDY_BELOW_TEMPERATURE):
                raise ConfigError(
                    f"do_sample={self.do_sample} contradicts temperature={self.temperature:g}: "
                    "set temperature alone (0 is greedy)"
                )
            object.__setattr__(self, "do_sample", None)
        if self.do_sample is False:
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "do_sample", None)
        _check_token_limits(self.min_tokens, self.max_tokens)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of names or Hugging Face aliases; None means unset.

        Raises:
            ConfigError: An unknown key (the nearest name is suggested), a name given twice through an alias,
                more than one completion per row, or a bad value.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"sampling parameters must be a mapping, not {type(mapping).__name__}")
        given: dict[str, Any] = {}
        for key, value in mapping.items():
            name = _ALIASES.get(key, key)
            if key in _ONLY_ONE:
                if value is not None and value != 1:
                    raise ConfigError(
                        f"{key}={shown(value)}: only 1 completion per row is supported so far; "
                        "repeat the row to get more, with a column that numbers the copies (wholly equal "
                        "rows of different calls draw the same tokens)"
                    )
                continue
            if name not in CHECKS:
                raise ConfigError(
                    f"unknown sampling parameter {shown(key)}{nearest(str(key), [*_NAMES, *_ALIASES])}"
                )
            if value is None:
                continue
            if name in given:
                raise ConfigError(f"sampling parameter {name!r} is given twice, once through an alias")
            given[name] = value
        return cls(**given)

    @classmethod
    def from_generation_config(cls, config: Any) -> SamplingParams:
        """Read a model's defaults from its Hugging Face generation config (object or plain dict).

        Without ``do_sample`` the model is greedy. End token ids and ``max_length`` are left out: the first
        belong to the model whatever the parameters, the second counts the prompt. Settings that this
        package does not have are logged as a warning; see `ignored_generation_settings`.

        Raises:
            ConfigError: The config holds a value out of range.
        """
        read = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
        if ignored := ignored_generation_settings(config):
            logger.warning(
                "the model's generation config asks for what is not supported and has no effect here: %s",
                ", ".join(ignored),
            )
        names = ["top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens"]
        names.append("stop_strings")
        given = {_ALIASES.get(name, name): read(name) for name in names}
        for name in ("presence_penalty", "frequency_penalty"):
            given[name] = read(name)
        temperature = read("temperature")
        if not read("do_sample"):
            temperature = 0.0
        elif temperature is None:
            temperature = 1.0
        try:
            return cls(temperature=temperature, **given)
        except ConfigError as error:
            raise ConfigError(f"the model's generation config: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set, JSON-ready (`logit_bias` as a dict with string keys)."""
        set_fields: dict[str, Any] = {}
        for name in _NAMES:
            value = getattr(self, name)
            if value is None:
                continue
            if name == "logit_bias":
                value = {str(token_id): bias for token_id, bias in value}
            set_fields[name] = list(value) if isinstance(value, tuple) else value
        return set_fields

    def over(self, base: SamplingParams) -> SamplingParams:
        """Return these settings laid over `base`: fields set here win, the others come from `base`.

        Raises:
            ConfigError: The two together contradict each other (min_tokens above max_tokens).
        """
        merged = {name: getattr(base, name) for name in _NAMES}
        if self.temperature is not None:
            merged["do_sample"] = None
        elif self.do_sample and base.temperature is not None:
            merged["temperature"] = None if base.temperature < GREEDY_BELOW_TEMPERATURE else base.temperature
        for name in _NAMES:
            if (value := getattr(self, name)) is not None:
                merged[name] = value
        return SamplingParams(**merged)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedSampling:
    """One row's settings with nothing left open; hashable, so equal requests can be found.

    `max_tokens` None means up to the context limit; `top_k` 0 means all tokens. Under greedy decoding the
    filters (`top_p`, `top_k`, `min_p`) are stored as off, because they cannot change the choice.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken (no random number is drawn)."""
        return self.temperature == 0.0


def ignored_generation_settings(config: Any) -> dict[str, Any]:
    """Return what a generation config asks for that would change the choice of tokens and is not supported.

    Args:
        config: A Hugging Face generation config, or a plain dict.

    Returns:
        Names and values, JSON-ready; settings at their neutral value are left out.
    """
    read = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    ignored = {}
    for name, neutral in _UNSUPPORTED.items():
        value = read(name)
        if isinstance(value, Iterable | Mapping) and not value:
            continue
        if value is None or value is False or value == neutral:
            continue
        ignored[name] = value if isinstance(value, str | int | float | list) else str(value)
    return ignored


def resolve(params: SamplingParams, defaults: SamplingParams) -> ResolvedSampling:
    """Fold the caller's settings over the model's defaults over the built-in ones.

    Raises:
        ConfigError: A filter is asked for while decoding is greedy by the model's default (it would be
            ignored), or min_tokens exceeds max_tokens.
    """
    merged = params.over(defaults)
    values = {name: getattr(merged, name) for name in _RESOLVED_NAMES}
    values = {name: value for name, value in values.items() if value is not None}
    values.setdefault("temperature", 1.0)
    if values["temperature"] < GREEDY_BELOW_TEMPERATURE:
        if params.temperature is None:
            _refuse_idle_filters(params)
        values.update(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    return ResolvedSampling(**values)


def sources(
    params: SamplingParams, defaults: SamplingParams
) -> dict[str, Literal["user", "model", "built-in"]]:
    """Say for each field of `ResolvedSampling` which layer it came from, for the run's record."""
    merged = params.over(defaults)
    origin: dict[str, Literal["user", "model", "built-in"]] = {}
    for name in _RESOLVED_NAMES:
        if getattr(params, name) is not None:
            origin[name] = "user"
        else:
            origin[name] = "model" if getattr(merged, name) is not None else "built-in"
    return origin


def _refuse_idle_filters(params: SamplingParams) -> None:
    active = {
        "top_p": params.top_p is not None and params.top_p < 1.0,
        "top_k": bool(params.top_k),
        "min_p": bool(params.min_p),
    }
    if named := [name for name, is_active in active.items() if is_active]:
        raise ConfigError(
            f"{', '.join(named)} would have no effect: this model decodes greedily by default; "
            "set temperature (for example 1.0) to sample, or temperature=0 to keep greedy decoding"
        )


def _check_token_limits(min_tokens: int | None, max_tokens: int | None) -> None:
    if min_tokens is not None and max_tokens is not None and min_tokens > max_tokens:
        raise ConfigError(f"min_tokens={min_tokens} is above max_tokens={max_tokens}")


_NAMES = tuple(field.name for field in fields(SamplingParams))
_RESOLVED_NAMES = tuple(field.name for field in fields(ResolvedSampling))
