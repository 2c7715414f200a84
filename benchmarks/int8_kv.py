"""Int8 KV: how far logits and tokens differ, how many more rows fit, and what that gives under pressure.

    python benchmarks/int8_kv.py [--rows 32] [--new-tokens 64] [--kv-memory 96MiB] [--threads 2]

SmolLM2-135M-Instruct, float32, GSM8K questions. Logits: each text is prefilled once into full and once into
int8 pages, and all positions are compared. Tokens: greedy, int8 from the start. Pressure: the same rows in
little KV memory, with and without the callback, in turn. Writes bench-results/int8_kv.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from workload import DATA, RESULTS, machine, need, smollm2_folder

from batchgen_data import LLM, Int8KV, SamplingParams
from batchgen_data.models.attention import install
from batchgen_data.models.kv_pool import KVPool, PagedBatch, Prefill
from batchgen_data.models.load import load_model, resolve_source

PAGE_TOKENS = 64


@torch.inference_mode()
def logits_apart(texts: list[str]) -> dict[str, float]:
    """How logits of all positions differ between full and int8 pages."""
    loaded = load_model(
        resolve_source(smollm2_folder(), None), device=torch.device("cpu"), dtype=torch.float32
    )
    shapes = install(loaded.model)
    num_same = num_positions = 0
    largest = divergence = 0.0
    for text in texts:
        ids = torch.tensor(loaded.tokenizer(text)["input_ids"])
        logits = []
        for quantised in (False, True):
            pool = KVPool(shapes, -(-len(ids) // PAGE_TOKENS) + 1, PAGE_TOKENS, torch.device("cpu"))
            if quantised:
                pool.quantise()
            logits.append(_prefill(loaded.model, pool, ids).log_softmax(dim=-1))
        full, int8 = logits
        num_positions += len(ids)
        num_same += int((full.argmax(dim=-1) == int8.argmax(dim=-1)).sum())
        largest = max(largest, float((full - int8).abs().max()))
        divergence += float((full.exp() * (full - int8)).sum())
    return {
        "positions": num_positions,
        "same_likeliest_token": num_same / num_positions,
        "largest_logprob_difference": largest,
        "mean_kl_nats": divergence / num_positions,
    }


def _prefill(model: Any, pool: KVPool, ids: torch.Tensor) -> torch.Tensor:
    position = torch.arange(len(ids))
    pages = torch.arange(-(-len(ids) // PAGE_TOKENS))
    paged = PagedBatch(
        pool=pool,
        page_idx=pages[position // PAGE_TOKENS],
        offset=position % PAGE_TOKENS,
        num_decode=0,
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
        lengths=torch.zeros(0, dtype=torch.int32),
        prefills=(Prefill(0, len(ids), pages, len(ids)),),
    )
    return model(input_ids=ids[None], position_ids=position[None], use_cache=False, paged=paged).logits[0]


def complete(prompts: list[str], settings: SamplingParams, **options: Any) -> tuple[float, list[Any], dict]:
    """Seconds, tokens by row, statistics."""
    with LLM(smollm2_folder(), **options) as llm:
        started = time.perf_counter()
        tokens = [outcome.token_ids for outcome in llm.generate(prompts, settings)]
        return time.perf_counter() - started, tokens, llm.statistics()


def equal_before(first: list[Any], second: list[Any]) -> tuple[int, float]:
    """Rows that are equal, and the share of all tokens before a row's first difference."""
    same = 0
    for a, b in zip(first, second, strict=True):
        same += next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    num_rows = sum(a == b for a, b in zip(first, second, strict=True))
    return num_rows, same / sum(len(tokens) for tokens in first)


def main() -> None:
    """Measure all three and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--kv-memory", default="96MiB")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    path = need(options.data / "gsm8k_test.jsonl", "GSM8K's test set (openai/grade-school-math)")
    prompts = [json.loads(line)["question"] for line in path.read_text().splitlines()[: options.rows]]
    settings = SamplingParams(temperature=0, max_tokens=options.new_tokens)
    report: dict[str, Any] = {"machine": machine(), "options": {**vars(options), "data": None}}

    report["logits"] = apart = logits_apart(prompts)
    print(
        f"{apart['positions']} positions: the likeliest token is the same at "
        f"{apart['same_likeliest_token']:.2%}; log-probabilities differ by "
        f"{apart['largest_logprob_difference']:.3f} at most, KL {apart['mean_kl_nats']:.1e} nats",
        flush=True,
    )
    engine: dict[str, Any] = {"num_threads": options.threads, "prefix_reuse": False}
    roomy = {**engine, "kv_memory": "1GiB"}
    _, full, _ = complete(prompts, settings, **roomy)
    _, int8, _ = complete(prompts, settings, callbacks=[Int8KV(when="start")], **roomy)
    num_rows, share = equal_before(full, int8)
    report["greedy"] = {"rows": len(prompts), "rows_equal": num_rows, "tokens_before_a_difference": share}
    print(
        f"greedy, int8 from the start: {num_rows} of {len(prompts)} rows equal, {share:.1%} of the tokens "
        "stand before a row's first difference",
        flush=True,
    )
    scarce = {**engine, "kv_memory": options.kv_memory}
    report["pressure"] = rounds = []
    for number in range(options.rounds):
        ways: dict[str, Any] = {"full": (), "int8": (Int8KV(),)}
        result: dict[str, Any] = {}
        for way in ways if number % 2 == 0 else reversed(ways):
            seconds, tokens, statistics = complete(prompts, settings, callbacks=ways[way], **scarce)
            kept = {name: statistics[name] for name in ("pages", "yields", "recomputed_tokens", "steps")}
            result[way] = {"seconds": seconds, "rows_equal": equal_before(full, tokens)[0], **kept}
        rounds.append(result)
        for way in ways:
            print(f"{options.kv_memory} of KV, {way}: {result[way]}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "int8_kv.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
