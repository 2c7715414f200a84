"""Draws depend on the row alone; settings do what vLLM's of the same names do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchgen_data.errors import RowError
from batchgen_data.runtime.sampler import draw_key, sample, uniforms
from batchgen_data.runtime.sequence import Sequence
from fake_model import sampling

VOCABULARY = 600


def sequence(prompt=(1, 2, 3), generated=(), *, row_key=b"row", eos=frozenset({7}), **settings):
    s = Sequence(0, list(prompt), sampling(**settings), limit_tokens=100, eos_token_ids=eos, row_key=row_key)
    s.token_ids += list(generated)
    return s


def random_logits(rows, seed=0):
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def draws(count, logits, **settings):
    """Tokens drawn by `count` rows that differ only in their identity."""
    rows = [sequence(row_key=b"%d" % i, temperature=1.0, **settings) for i in range(count)]
    return sample(logits.expand(count, -1).clone(), rows)


def test_philox_gives_the_published_numbers():
    """Known answers of Random123's philox4x32-10: counter 0 under key 0, and the digits of pi."""
    zero = uniforms(np.array([0], dtype=np.uint64), np.array([0]))
    assert zero[0] == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) * 2.0**-53


def test_uniforms_are_uniform_and_independent_of_their_order():
    keys = np.array([draw_key(0, b"%d" % i) for i in range(4000)], dtype=np.uint64)
    values = uniforms(keys, np.zeros(4000, dtype=np.int64))
    assert 0 <= values.min() < 0.01
    assert 0.99 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    assert np.array_equal(uniforms(keys[::-1], np.zeros(4000, dtype=np.int64))[::-1], values)
    assert len(np.unique(uniforms(keys[:1].repeat(500), np.arange(500)))) == 500


def test_case_28_one_seed_does_not_give_every_row_the_same_noise():
    """2,000 rows choosing between two equally likely tokens under one seed: near half and half."""
    logits = torch.full((1, VOCABULARY), -50.0)
    logits[0, [10, 20]] = 5.0
    picked = draws(2000, logits, seed=1234)
    assert set(picked) == {10, 20}
    assert 900 < picked.count(10) < 1100
    assert picked == draws(2000, logits, seed=1234), "and again the same"
    assert picked != draws(2000, logits, seed=1235)


def test_case_29_a_seeded_row_is_the_same_alone_and_in_company():
    logits = random_logits(5)
    rows = [sequence(row_key=b"%d" % i, temperature=0.8, top_p=0.9, seed=i) for i in range(5)]
    together = sample(logits.clone(), rows)
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(5)]
    backwards = sample(logits.flip(0).clone(), rows[::-1])[::-1]
    greedy_mates = sample(logits.clone(), [rows[0]] + [sequence()] * 4)
    assert together == alone == backwards
    assert greedy_mates[0] == together[0]


def test_draws_follow_the_distribution():
    logits = torch.full((1, VOCABULARY), -torch.inf)
    wanted = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits[0, :4] = wanted.log()
    counts = torch.bincount(torch.tensor(draws(6000, logits)), minlength=4)[:4] / 6000
    torch.testing.assert_close(counts, wanted, atol=0.025, rtol=0)


def test_temperature_sharpens_and_a_tiny_one_is_greedy():
    logits = random_logits(1)
    assert set(draws(200, logits, seed=3)) != {int(logits.argmax())}
    rows = [sequence(row_key=b"%d" % i, temperature=1e-4) for i in range(50)]
    assert set(sample(logits.expand(50, -1).clone(), rows)) == {int(logits.argmax())}


@pytest.mark.parametrize(
    "settings,kept",
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 0.79}, 2),
        ({"top_p": 0.81}, 3),
        ({"min_p": 0.5}, 2),
        ({"top_k": 3, "top_p": 0.5}, 1),
    ],
)
def test_unlikely_tokens_are_left_out(settings, kept):
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, :4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(draws(800, logits, **settings)) == set(range(kept))


def test_top_p_over_a_flat_vocabulary_goes_beyond_the_first_candidates():
    picked = draws(3000, torch.zeros(1, VOCABULARY), top_p=0.9)
    assert len(set(picked)) > 500


def test_greedy_takes_the_maximum():
    logits = random_logits(4)
    assert sample(logits.clone(), [sequence()] * 4) == logits.argmax(-1).tolist()


def test_penalties_and_bias_change_the_choice():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 5], logits[0, 6], logits[0, 1] = 3.0, 2.9, 2.8
    assert sample(logits.clone(), [sequence()]) == [5]
    assert sample(logits.clone(), [sequence(generated=[5], presence_penalty=0.5)]) == [6]
    assert sample(logits.clone(), [sequence(generated=[5, 5], frequency_penalty=0.06)]) == [6]
    assert sample(logits.clone(), [sequence(generated=[5, 6], repetition_penalty=1.2)]) == [5]
    # The prompt holds token 1: the repetition penalty counts it, presence and frequency do not.
    assert sample(logits.clone(), [sequence(generated=[5, 6], presence_penalty=1.0)]) == [1]
    assert sample(logits.clone(), [sequence(logit_bias=((9, 50.0),))]) == [9]
    assert sample(logits.clone(), [sequence(logit_bias=((5, -100.0),))]) == [6]


def test_negative_logits_are_penalised_downwards():
    logits = torch.full((1, VOCABULARY), -10.0)
    logits[0, 5], logits[0, 6] = -1.0, -1.1
    assert sample(logits.clone(), [sequence(generated=[5], repetition_penalty=1.5)]) == [6]


def test_end_tokens_wait_for_min_tokens():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 7], logits[0, 8], logits[0, 9] = 3.0, 2.0, 1.0
    short = {"min_tokens": 2, "stop_token_ids": (8,)}
    assert sample(logits.clone(), [sequence(**short)]) == [9]
    assert sample(logits.clone(), [sequence(generated=[9, 9], **short)]) == [7]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_37_non_finite_logits_fail_their_row_only(bad, temperature):
    logits = random_logits(3)
    expected = sample(logits.clone(), [sequence(temperature=temperature)] * 3)
    logits[1, 17] = bad
    results = sample(logits.clone(), [sequence(temperature=temperature)] * 3)
    assert isinstance(results[1], RowError)
    assert results[1].code == "non_finite_logits"
    assert "generated token 1" in results[1].message
    assert [results[0], results[2]] == [expected[0], expected[2]]


def test_masked_tokens_are_legal():
    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[0, 3] = 0.0
    assert sample(logits.clone(), [sequence(temperature=1.0)]) == [3]
