"""Fits recover the constants that made the times, noise or not."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_data.errors import ConfigError
from batchgen_data.planner.roofline import Roofline, fit_roofline

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


@settings(deadline=None)
@given(
    memory_s=st.floats(1e-4, 1e-1),
    knee=st.floats(8, 300),
    fixed_share=st.floats(0, 0.3),
    seed=st.integers(0, 1000),
)
def test_known_constants_come_back_from_noisy_times(
    memory_s: float, knee: float, fixed_share: float, seed: int
) -> None:
    """seconds = max(fixed + bytes / bandwidth, flops / rate), each measured 3 % off."""
    truth = Roofline(
        fixed_s=fixed_share * memory_s, per_token_s=memory_s * (1 - fixed_share) / knee, knee_tokens=knee
    )
    rng = np.random.default_rng(seed)
    measured = [truth.seconds(n) * rng.normal(1, 0.03) for n in TOKENS]
    fitted = fit_roofline(TOKENS, measured)
    assert fitted.memory_s == pytest.approx(truth.memory_s, rel=0.1)
    assert fitted.per_token_s == pytest.approx(truth.per_token_s, rel=0.15)
    for num_tokens in (*TOKENS, 48, 200, 4096):
        # Noise rounds the corner; away from it the constants tell.
        near = knee / 2 < num_tokens < knee * 2
        expected = pytest.approx(truth.seconds(num_tokens), rel=0.25 if near else 0.12)
        assert fitted.seconds(num_tokens) == expected


def test_exact_times_are_fitted_exactly_with_every_corner() -> None:
    for sharpness in (1.5, 2.0, math.inf):
        truth = Roofline(fixed_s=1e-3, per_token_s=1e-5, knee_tokens=64.0, sharpness=sharpness)
        fitted = fit_roofline(TOKENS, [truth.seconds(n) for n in TOKENS])
        assert fitted.error < 0.01
        assert fitted.seconds(700) == pytest.approx(truth.seconds(700), rel=0.02)


def test_terms_are_told_apart() -> None:
    truth = Roofline(fixed_s=1e-4, per_token_s=1e-5, knee_tokens=32.0, terms={"kv": 3e-8, "hit": 2e-4})
    tokens = [n for n in TOKENS for _ in range(3)]
    kv = [n * context for n in TOKENS for context in (10, 500, 2000)]
    hit = [min(64, n * 4) for n in tokens]
    times = [truth.seconds(n, kv=k, hit=h) for n, k, h in zip(tokens, kv, hit, strict=True)]
    fitted = fit_roofline(tokens, times, terms={"kv": kv, "hit": hit})
    assert fitted.terms["kv"] == pytest.approx(3e-8, rel=0.02)
    assert fitted.terms["hit"] == pytest.approx(2e-4, rel=0.05)


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=12))
def test_no_fit_predicts_a_negative_time_or_fails(seconds: list[float]) -> None:
    fitted = fit_roofline(TOKENS[: len(seconds)] + [2048] * (len(seconds) - len(TOKENS)), seconds)
    assert min(fitted.fixed_s, fitted.per_token_s, fitted.knee_tokens) >= 0
    assert all(fitted.seconds(n) >= 0 for n in (1, 100, 10_000))


def test_one_measurement_is_a_constant_or_a_line() -> None:
    assert fit_roofline([8], [0.5]).seconds(8) == pytest.approx(0.5)


def test_nothing_to_do_takes_no_time() -> None:
    assert Roofline(fixed_s=1.0).seconds(0) == 0.0


def test_json_round_trip() -> None:
    for sharpness in (2.0, math.inf):
        fitted = Roofline(
            fixed_s=1.0, per_token_s=2.0, knee_tokens=3.0, sharpness=sharpness, terms={"x": 4.0}
        )
        assert Roofline.from_dict(json.loads(json.dumps(fitted.to_dict()))) == fitted


@pytest.mark.parametrize("values", [{}, {"sharpness": 1.0, "unknown": 2}])
def test_what_is_no_roofline_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="not a fitted roofline"):
        Roofline.from_dict(values)


@pytest.mark.parametrize(
    "tokens, seconds, terms",
    [([], [], {}), ([1], [1.0, 2.0], {}), ([1, 2], [1.0, 2.0], {"x": [1.0]})],
)
def test_lists_that_do_not_match_are_refused(
    tokens: list[int], seconds: list[float], terms: dict[str, list[float]]
) -> None:
    with pytest.raises(ConfigError, match="equally many"):
        fit_roofline(tokens, seconds, terms=terms)
