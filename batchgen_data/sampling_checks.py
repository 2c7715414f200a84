"""What each sampling parameter may be: one check per name, which returns the value in its one stored form."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from batchgen_data.errors import ConfigError


def shown(value: object) -> str:
    """The value as a message may show it: its repr, cut at 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(name: str, value: object, legal: str) -> ConfigError:
    return ConfigError(f"{name}={shown(value)} is not valid: {name} must be {legal}")


def _real(low: float, high: float, legal: str, *, above_low: bool = False) -> Callable[[str, object], float]:
    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise _refuse(name, value, legal)
        try:
            number = float(value)
        except OverflowError as error:
            raise _refuse(name, value, legal) from error
        if not math.isfinite(number) or not low <= number <= high or (above_low and number == low):
            raise _refuse(name, value, legal)
        return number

    return check


def _is_whole(value: numbers.Real) -> bool:
    try:
        return float(value).is_integer()
    except OverflowError:  # a fraction beyond the range of floats
        return False


def _integer(low: int, high: int, legal: str) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            number = int(value)
        elif isinstance(value, numbers.Real) and not isinstance(value, bool) and _is_whole(value):
            number = int(float(value))  # an integer column that once held nulls often arrives as float
        else:
            raise _refuse(name, value, legal)
        if not low <= number <= high:
            raise _refuse(name, value, legal)
        return number

    return check


def _flag(name: str, value: object) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):
        raise _refuse(name, value, "true or false")
    return bool(value)


def _top_k(name: str, value: object) -> int:
    return max(_integer(-1, _INT32_MAX, "0 or -1 (all tokens), or a whole number from 1")(name, value), 0)


def _strings(name: str, value: object) -> tuple[str, ...]:
    legal = "a string or a list of strings, none of them empty"
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Iterable) or isinstance(items, (bytes, Mapping)):
        raise _refuse(name, value, legal)
    strings = tuple(items)
    if not all(isinstance(item, str) and item for item in strings):
        raise _refuse(name, value, legal)
    return strings


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    legal = "a token id or a list of token ids (whole numbers from 0)"
    items = (value,) if isinstance(value, numbers.Real) else value
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, Mapping)):
        raise _refuse(name, value, legal)
    return tuple(_token_id(name, item) for item in items)


def _bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    legal = "a mapping of token ids to biases from -100 to 100"
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable) or isinstance(pairs, (str, bytes)):
        raise _refuse(name, value, legal)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise _refuse(name, value, legal)
        key, bias = pair
        if bias is None:  # a key of another row, unified into this row's Arrow struct
            continue
        if isinstance(key, str):
            if not key.isdecimal() or len(key) > 10:
                raise _refuse(name, value, legal)
            key = int(key)
        token_id = _token_id(name, key)
        if token_id in biases:
            raise ConfigError(f"{name} names token id {token_id} twice")
        biases[token_id] = _real(-100.0, 100.0, legal)(name, bias)
    return tuple(sorted(biases.items()))


_INT32_MAX = 2**31 - 1
_token_id = _integer(0, _INT32_MAX, "made of token ids (whole numbers from 0)")
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _real(0.0, math.inf, "a number of at least 0 (0 is greedy)"),
    "top_p": _real(0.0, 1.0, "above 0 and at most 1", above_low=True),
    "top_k": _top_k,
    "min_p": _real(0.0, 1.0, "between 0 and 1"),
    "repetition_penalty": _real(0.0, math.inf, "a number above 0 (1 is off)", above_low=True),
    "presence_penalty": _real(-2.0, 2.0, "between -2 and 2"),
    "frequency_penalty": _real(-2.0, 2.0, "between -2 and 2"),
    "max_tokens": _integer(1, _INT32_MAX, "a whole number of at least 1"),
    "min_tokens": _integer(0, _INT32_MAX, "a whole number of at least 0"),
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "seed": _integer(-(2**63), 2**63 - 1, "a 64-bit whole number"),
    "logit_bias": _bias,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "do_sample": _flag,
}
