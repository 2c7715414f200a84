"""Cost models fitted to measured times. Pure NumPy.

A module reads its weights and computes with them. For few tokens the first takes longer, for many the second:
seconds(n) = fixed + per_token_s * soft_max(knee_tokens, n), a roofline whose corner may be rounded, since
memory and arithmetic overlap less than fully on most devices. What grows with something else than tokens
(keys and values read, experts hit) is added as a term of its own. Libraries switch algorithms with the
number of tokens, which no smooth curve follows: at the sizes that were measured a factor brings it to what
they took.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from batchgen_data.errors import ConfigError

# How round the corner is: the exponent of a p-norm; infinity is the sharp maximum.
_SHARPNESS = (2.0, 4.0, math.inf)
_KNEES = tuple(float(2.0 ** (step / 2)) for step in range(-2, 25))
# A measured time below this is the clock's, not the module's.
_LEAST_S = 1e-7
_MOST_FACTOR = 1.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Seconds of a module by number of tokens and further terms.

    Attributes:
        fixed_s: of every call.
        per_token_s: of each token, once there are many.
        knee_tokens: tokens that take as long to compute as the weights take to read; 0 for no such corner.
        sharpness: exponent of the p-norm that joins both sides; infinity for a sharp corner.
        terms: seconds for each unit of a further quantity, by its name.
        factors: at numbers of tokens, ascending, what the part that depends on them is multiplied by;
            between them it is interpolated on the logarithm.
        error: median relative error of the fit on what it was fitted to.
    """

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    knee_tokens: float = 0.0
    sharpness: float = math.inf
    terms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    factors: tuple[tuple[float, float], ...] = ()
    error: float = 0.0

    def seconds(self, num_tokens: float, **quantities: float) -> float:
        """Seconds of one call on `num_tokens` tokens; none for no tokens."""
        if num_tokens <= 0:
            return 0.0
        seconds = self.fixed_s + self.per_token_s * _corner(num_tokens, self.knee_tokens, self.sharpness)
        if self.factors:
            seconds *= _between(self.factors, num_tokens)
        for name, per_unit_s in self.terms.items():
            seconds += per_unit_s * quantities.get(name, 0.0)
        return seconds

    @property
    def memory_s(self) -> float:
        """Seconds of a call on hardly any token: what reading the weights takes, with the fixed part."""
        return self.fixed_s + self.per_token_s * self.knee_tokens

    def scaled(self, factor: float) -> Roofline:
        """The same, `factor` times as long."""
        return dataclasses.replace(
            self,
            fixed_s=factor * self.fixed_s,
            per_token_s=factor * self.per_token_s,
            terms={name: factor * value for name, value in self.terms.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        values = dataclasses.asdict(self)
        return values | {"sharpness": None if math.isinf(self.sharpness) else self.sharpness}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Roofline:
        """The opposite of `to_dict`.

        Raises:
            ConfigError: these are not the fields of a roofline.
        """
        try:
            sharpness = math.inf if values["sharpness"] is None else values["sharpness"]
            factors = tuple((n, factor) for n, factor in values["factors"])
            return cls(**{**values, "sharpness": sharpness, "factors": factors})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a fitted roofline: {error}") from error


def _corner(num_tokens: float, knee: float, sharpness: float) -> float:
    larger = max(num_tokens, knee)
    if math.isinf(sharpness) or knee <= 0:
        return larger
    # Scaled by the larger side, so that powers stay in range.
    return float(
        larger * ((num_tokens / larger) ** sharpness + (knee / larger) ** sharpness) ** (1 / sharpness)
    )


def fit_roofline(
    num_tokens: Sequence[float],
    seconds: Sequence[float],
    *,
    terms: Mapping[str, Sequence[float]] | None = None,
) -> Roofline:
    """Fit a roofline to measured times; every coefficient is at least 0.

    The corner is chosen from a grid; given one, the rest is a linear least-squares problem, weighted so that
    relative errors count. The same input gives the same fit.

    Args:
        num_tokens: of each measurement, above 0.
        seconds: what it took.
        terms: further quantities of each measurement, by name.

    Raises:
        ConfigError: no measurement, or lists of different lengths.
    """
    terms = dict(terms or {})
    tokens = np.asarray(num_tokens, float)
    measured = np.maximum(np.asarray(seconds, float), _LEAST_S)
    columns = {name: np.asarray(values, float) for name, values in terms.items()}
    if not len(tokens) or any(len(column) != len(tokens) for column in (measured, *columns.values())):
        raise ConfigError(
            "a roofline is fitted to at least one measurement, of equally many of each quantity"
        )
    best: tuple[float, np.ndarray, float, float] | None = None
    lowest, highest = tokens.min() / 2, tokens.max() * 2
    knees = [0.0, *(knee for knee in _KNEES if lowest <= knee <= highest)]
    for knee, sharpness in itertools.product(knees, _SHARPNESS):
        if knee == 0.0 and not math.isinf(sharpness):
            continue
        corner = np.array([_corner(n, knee, sharpness) for n in tokens])
        matrix = np.stack([np.ones_like(tokens), corner, *columns.values()], axis=1) / measured[:, None]
        coefficients, residual = _non_negative(matrix, np.ones_like(tokens))
        # Nearly equal fits: the first, which has the simpler corner, so that noise does not choose.
        if best is None or residual < 0.98 * best[0]:
            best = residual, coefficients, knee, sharpness
    assert best is not None  # there is always the fit without a corner
    _, coefficients, knee, sharpness = best
    fitted = Roofline(
        fixed_s=float(coefficients[0]),
        per_token_s=float(coefficients[1]),
        knee_tokens=float(knee),
        sharpness=sharpness,
        terms={name: float(value) for name, value in zip(columns, coefficients[2:], strict=True)},
    )
    others = sum((fitted.terms[name] * column for name, column in columns.items()), np.zeros_like(tokens))
    fitted = dataclasses.replace(fitted, factors=_factors(fitted, tokens, measured, others))
    errors = [
        abs(fitted.seconds(n, **{name: column[at] for name, column in columns.items()}) / measured[at] - 1)
        for at, n in enumerate(tokens)
    ]
    return dataclasses.replace(fitted, error=float(np.median(errors)))


def _between(factors: Sequence[tuple[float, float]], num_tokens: float) -> float:
    after = bisect.bisect_left(factors, (num_tokens, 0.0))
    if after == 0:
        return factors[0][1]
    if after == len(factors):
        return factors[-1][1]
    (low, low_factor), (high, high_factor) = factors[after - 1], factors[after]
    return low_factor + (high_factor - low_factor) * math.log(num_tokens / low) / math.log(high / low)


def _factors(
    fitted: Roofline, tokens: np.ndarray, measured: np.ndarray, others: np.ndarray
) -> tuple[tuple[float, float], ...]:
    """What brings the fit to the measurements of each number of tokens, within bounds."""
    factors = []
    for number in np.unique(tokens):
        smooth = fitted.seconds(float(number))
        there = tokens == number
        if smooth > 0:
            wanted = float(np.median((measured[there] - others[there]) / smooth))
            factors.append((float(number), min(_MOST_FACTOR, max(1 / _MOST_FACTOR, wanted))))
    return tuple(factors)


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, float]:
    """Least squares with coefficients of at least 0 (Lawson and Hanson), and its squared residual."""
    # Columns of one size, so that the tolerance means the same for each.
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    solution = np.zeros(matrix.shape[1])
    active = np.zeros(matrix.shape[1], bool)
    for _ in range(10 * matrix.shape[1]):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[active] = -np.inf
        if gradient.max() <= 1e-10:
            break
        active[int(gradient.argmax())] = True
        while True:
            trial = np.zeros_like(solution)
            trial[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
            falling = active & (trial <= 0)
            if not falling.any():
                break
            step = min(solution[at] / (solution[at] - trial[at]) for at in np.flatnonzero(falling))
            solution = solution + step * (trial - solution)
            active &= solution > 1e-12
            solution[~active] = 0.0
            if not active.any():
                trial = solution
                break
        solution = trial
    residual = target - matrix @ solution
    return solution / scale, float(residual @ residual)
