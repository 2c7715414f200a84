"""From logits to tokens. The draw is a function of the row, never of its neighbours.

Order of operations, as in vLLM: logit bias, minimum length, penalties, temperature, min-p, top-k, top-p.
Then one uniform number per token from a counter-based generator keyed by (seed, row, position) picks from
the cumulative distribution in vocabulary order.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch

from batchgen_data.errors import RowError
from batchgen_data.runtime.sequence import Sequence

# Rows whose probabilities are accumulated in float64 at once: 32 x 150,000 entries are 38 MB.
_ROWS_AT_ONCE = 32
# Most top-p sets are small: this many candidates are looked at before sorting the vocabulary
# (a sort of 49,152 entries takes 40 times as long as a top-k of 256 on a CPU).
_NUCLEUS_CANDIDATES = 256

_PHILOX_ROUND = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_KEY = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW32 = np.uint64(0xFFFFFFFF)


def draw_key(seed: int, row_key: bytes) -> int:
    """Return the 64-bit generator key of one row: a digest of its seed and identity."""
    digest = hashlib.blake2b(struct.pack("<q", seed) + row_key, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: np.ndarray, positions: np.ndarray, sample_idx: int = 0) -> np.ndarray:
    """Draw one uniform number in [0, 1) for each (key, position).

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a bijection of
    the counter under the key, so draws need no state and no order.

    Args:
        keys: uint64 [N], from `draw_key`.
        positions: index of the generated token, [N].
        sample_idx: which of several samples of the same row.

    Returns:
        float64 [N], 53 random bits each.
    """
    k0, k1 = keys & _LOW32, keys >> np.uint64(32)
    position = positions.astype(np.uint64)
    c0, c1 = position & _LOW32, position >> np.uint64(32)
    c2 = np.full_like(c0, sample_idx)
    c3 = np.zeros_like(c0)
    for _ in range(10):
        product0, product1 = _PHILOX_ROUND[0] * c0, _PHILOX_ROUND[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ k0,
            product1 & _LOW32,
            (product0 >> np.uint64(32)) ^ c3 ^ k1,
            product0 & _LOW32,
        )
        k0, k1 = (k0 + _PHILOX_KEY[0]) & _LOW32, (k1 + _PHILOX_KEY[1]) & _LOW32
    bits = ((c0 << np.uint64(32)) | c1) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[int | RowError]:
    """Pick the next token of each sequence.

    Args:
        logits: [N, vocabulary], one row per sequence; may be overwritten.
        sequences: N sequences, whose sampling settings and tokens so far count.

    Returns:
        Per row the token id, or the row's error when its logits hold NaN or infinity.
    """
    logits = logits.float()
    top, greedy_ids = logits.max(dim=-1)
    # NaN wins every comparison in torch.max, so a finite maximum rules out NaN and +inf.
    finite = torch.isfinite(top).tolist()
    results: list[int | RowError] = list(greedy_ids.tolist())
    shaped = [
        row
        for row, sequence in enumerate(sequences)
        if finite[row] and not (sequence.sampling.greedy and not _changes_logits(sequence))
    ]
    for start in range(0, len(shaped), _ROWS_AT_ONCE):
        rows = shaped[start : start + _ROWS_AT_ONCE]
        picked = _sample_rows(logits[rows], [sequences[row] for row in rows])
        for row, token in zip(rows, picked, strict=True):
            results[row] = token
    for row, sequence in enumerate(sequences):
        if not finite[row]:
            results[row] = RowError(
                "non_finite_logits",
                f"the model produced NaN or infinity at generated token {sequence.num_generated + 1}",
            )
    return results


def _changes_logits(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sequence.num_generated < sampling.min_tokens
    )


def _sample_rows(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    for row, sequence in enumerate(sequences):
        if _changes_logits(sequence):
            _shape_logits(logits[row], sequence)
    picked = logits.argmax(dim=-1).tolist()
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.sampling.greedy]
    if drawn:
        tokens = _draw(logits[drawn], [sequences[row] for row in drawn])
        for row, token in zip(drawn, tokens, strict=True):
            picked[row] = token
    return picked


def _shape_logits(logits: torch.Tensor, sequence: Sequence) -> None:
    """Apply bias, minimum length and penalties to one row, in place."""
    sampling = sequence.sampling
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        index = torch.tensor(ids, device=logits.device)
        logits[index] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
    if sequence.num_generated < sampling.min_tokens and sequence.stop_ids:
        logits[torch.tensor(sorted(sequence.stop_ids), device=logits.device)] = -torch.inf
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sequence.token_ids, device=logits.device).unique()
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and sequence.num_generated:
        generated = torch.tensor(sequence.generated_ids, device=logits.device)
        distinct, counts = generated.unique(return_counts=True)
        logits[distinct] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    temperature = logits.new_tensor([[sequence.sampling.temperature] for sequence in sequences])
    # Shifted first: a tiny temperature would turn large logits into infinities otherwise.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature
    probabilities = torch.softmax(logits, dim=-1)
    for row, sequence in enumerate(sequences):
        _keep_likely(probabilities[row], sequence)
    cumulative = probabilities.double().cumsum(dim=-1)
    keys = np.array([draw_key(s.sampling.seed, s.row_key) for s in sequences], dtype=np.uint64)
    draws = uniforms(keys, np.array([s.num_generated for s in sequences]))
    targets = torch.from_numpy(draws).to(logits.device).unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return tokens.clamp_(max=logits.shape[1] - 1).tolist()


def _keep_likely(probabilities: torch.Tensor, sequence: Sequence) -> None:
    """Zero what min-p, top-k and top-p exclude, in place; entries equal to the last kept one stay."""
    sampling = sequence.sampling
    if sampling.min_p > 0:
        probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    vocabulary = probabilities.shape[0]
    if 0 < sampling.top_k < vocabulary:
        kth = probabilities.topk(sampling.top_k).values[-1]
        probabilities[probabilities < kth] = 0
    if sampling.top_p < 1.0:
        needed = sampling.top_p * probabilities.sum()
        likely = probabilities.topk(min(_NUCLEUS_CANDIDATES, vocabulary)).values
        if likely.sum() < needed:
            likely = probabilities.sort(descending=True).values
        last = int((likely.cumsum(0) < needed).sum())
        probabilities[probabilities < likely[min(last, len(likely) - 1)]] = 0
