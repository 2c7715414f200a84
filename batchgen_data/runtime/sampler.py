"""From logits to tokens. The draw is a function of the row, never of its neighbours.

Order of operations, as in vLLM: logit bias, minimum length, penalties, temperature, min-p, top-k, top-p.
Then one uniform number per token from a counter-based generator keyed by (seed, row, position) picks from the
cumulative distribution: in vocabulary order, or likeliest first where top-k, top-p or min-p limit it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch

from batchgen_data.errors import RowError
from batchgen_data.runtime.drafts import Ahead
from batchgen_data.runtime.sequence import Sequence as RunningSequence

# What is sampled for: a sequence as it is, or as it is if a draft is right.
Place = RunningSequence | Ahead

# Rows drawn at once: 32 x 150,000 weights are 19 MB.
_ROWS_AT_ONCE = 32
# Most top-k and top-p sets are smaller than this; a row whose set is not is sorted whole.
_CANDIDATES = 256
_BLOCK = 256

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


def sample(logits: torch.Tensor, sequences: Sequence[Place]) -> list[int | RowError]:
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


def _changes_logits(sequence: Place) -> bool:
    sampling = sequence.sampling
    return bool(
        sampling.logit_bias
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sequence.num_generated < sampling.min_tokens
    )


def _sample_rows(logits: torch.Tensor, sequences: list[Place]) -> list[int]:
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


def _shape_logits(logits: torch.Tensor, sequence: Place) -> None:
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


def _draw(logits: torch.Tensor, sequences: list[Place]) -> list[int]:
    temperature = logits.new_tensor([[sequence.sampling.temperature] for sequence in sequences])
    # Shifted first: a tiny temperature would turn large logits into infinities otherwise.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    keys = np.array([draw_key(s.sampling.seed, s.row_key) for s in sequences], dtype=np.uint64)
    draws = uniforms(keys, np.array([s.num_generated for s in sequences]))
    tokens = [0] * len(sequences)
    limited = [row for row, sequence in enumerate(sequences) if _limits_tokens(sequence)]
    unlimited = [row for row in range(len(sequences)) if row not in set(limited)]
    if unlimited:
        for row, token in zip(unlimited, _draw_any(logits[unlimited], draws[unlimited]), strict=True):
            tokens[row] = token
    if limited:
        num_candidates = min(_CANDIDATES, logits.shape[1])
        top = logits[limited].topk(num_candidates)
        for position, row in enumerate(limited):
            likely = top.values[position], top.indices[position]
            tokens[row] = _draw_likely(logits[row], likely, sequences[row], float(draws[row]))
    return tokens


def _limits_tokens(sequence: Place) -> bool:
    sampling = sequence.sampling
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0


def _draw_any(logits: torch.Tensor, draws: np.ndarray) -> list[int]:
    """Inverse of the cumulative distribution over the whole vocabulary, in its order, in two levels.

    The first level adds up blocks, the second looks inside one: accumulating all entries in float64 takes
    three times as long.
    """
    num_rows, vocabulary = logits.shape
    num_blocks = -(-vocabulary // _BLOCK)
    weights = torch.zeros(num_rows, num_blocks * _BLOCK, dtype=torch.float32, device=logits.device)
    torch.exp(logits, out=weights[:, :vocabulary])
    blocks = weights.view(num_rows, num_blocks, _BLOCK)
    cumulative = blocks.sum(dim=-1).double().cumsum(dim=-1)
    targets = torch.from_numpy(draws).to(logits.device).unsqueeze(1) * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, targets, right=True).clamp_(max=num_blocks - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(num_rows, device=logits.device), block[:, 0]].double().cumsum(dim=-1)
    place = torch.searchsorted(inside, targets - before, right=True)
    # Rounding may put a target on the far edge of its block: the last token that has any weight is meant.
    last = (inside < inside[:, -1:]).sum(dim=-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(place, last)).squeeze(1).tolist()


def _draw_likely(
    logits: torch.Tensor, likely: tuple[torch.Tensor, torch.Tensor], sequence: Place, draw: float
) -> int:
    """Draw among the tokens that min-p, top-k and top-p leave, likeliest first.

    Args:
        logits: the row's logits over temperature, their maximum 0.
        likely: its largest logits and their tokens, in descending order.
        draw: uniform in [0, 1).
    """
    sampling = sequence.sampling
    vocabulary = logits.shape[0]
    values, tokens = likely
    count = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary
    # exp(values) are probabilities up to a factor, and the likeliest token has 1.
    weights = values.double().exp()
    total = float(logits.double().exp().sum()) if count == vocabulary else None
    enough = len(values) >= min(count, vocabulary)
    if not enough and sampling.min_p > 0:
        enough = bool(weights[-1] < sampling.min_p)
    if not enough and total is not None and sampling.top_p < 1.0:
        enough = bool(weights.sum() >= sampling.top_p * total)
    if not enough:
        values, tokens = logits.sort(descending=True)
        weights = values.double().exp()
    if sampling.min_p > 0:
        weights = weights[weights >= sampling.min_p]
    weights = weights[:count]
    if sampling.top_p < 1.0:
        # Of what top-k and min-p left, as in vLLM; without them, of the whole vocabulary.
        whole = total if total is not None and not sampling.min_p else float(weights.sum())
        cumulative = weights.cumsum(0)
        num_kept = int((cumulative < sampling.top_p * whole).sum()) + 1
        weights = weights[:num_kept]
    cumulative = weights.cumsum(0)
    picked = int(torch.searchsorted(cumulative, draw * cumulative[-1], right=True))
    return int(tokens[min(picked, len(weights) - 1)])
