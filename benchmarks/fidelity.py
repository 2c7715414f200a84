"""Greedy tokens against transformers' own unbatched generate, in float32.

    python benchmarks/fidelity.py [--mt-bench 80] [--gsm8k 200] [--new-tokens 64]

80 MT-bench first turns and 200 GSM8K questions through the chat template, 64 new tokens each, batched here
at a roomy and at a tight KV pool (which, with short pages, forces suspensions). Each difference is followed
to its first token, and the gap between the two candidates' logits in transformers' own forward pass is shown:
below 1e-4 it is a tie that float32 cannot decide. Writes bench-results/fidelity-POOLS.json. The reference
takes about half an hour on 2 cores and is kept there for the next run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from workload import DATA, RESULTS, machine, need, smollm2_folder

TIE = 1e-4
POOLS: dict[str, dict[str, Any]] = {
    "roomy": {"kv_memory": "4GiB"},
    "tight": {"kv_memory": "160MiB", "page_tokens": 16},
}


def prompts(data: Path, num_mt_bench: int, num_gsm8k: int) -> list[str]:
    """First turns of MT-bench, then questions of GSM8K."""
    mt_bench = need(data / "mt_bench_questions.jsonl", "MT-bench questions (lm-sys/FastChat)")
    gsm8k = need(data / "gsm8k_test.jsonl", "GSM8K test set (openai/grade-school-math)")
    turns = [json.loads(line)["turns"][0] for line in mt_bench.read_text().splitlines()[:num_mt_bench]]
    return turns + [json.loads(line)["question"] for line in gsm8k.read_text().splitlines()[:num_gsm8k]]


def reference(model: Any, prompt_ids: list[list[int]], new_tokens: int) -> list[list[int]]:
    """transformers' generate, one prompt at a time; kept on disk by what it depends on."""
    import torch
    import transformers

    what = [prompt_ids, new_tokens, str(model.dtype), model.config.to_dict(), transformers.__version__]
    key = hashlib.blake2b(json.dumps(what, default=str).encode(), digest_size=8).hexdigest()
    kept = RESULTS / f"fidelity-reference-{key}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    outputs = []
    for number, ids in enumerate(prompt_ids):
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
            )
        outputs.append(out[0, len(ids) :].tolist())
        if number % 20 == 19:
            print(f"  reference: {number + 1} of {len(prompt_ids)}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    kept.write_text(json.dumps(outputs))
    return outputs


def logit_gap(model: Any, prompt: list[int], want: list[int], got: list[int]) -> tuple[int, float]:
    """Position of the first difference, and how far apart the two candidates are in the reference."""
    import torch

    at = next(
        (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got))
    )
    if at >= len(want) or at >= len(got):
        return at, float("inf")
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + want[:at]])).logits[0, -1]
    return at, float((logits[want[at]] - logits[got[at]]).abs())


def main() -> None:
    """Compare at both pool sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mt-bench", type=int, default=80)
    parser.add_argument("--gsm8k", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--pools", default=",".join(POOLS), help="which KV pools to run with")
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from batchgen_data import LLM, SamplingParams

    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = prompts(options.data, options.mt_bench, options.gsm8k)
    prompt_ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = reference(model, prompt_ids, options.new_tokens)
    report: dict[str, Any] = {"machine": machine(), "rows": len(texts), "new_tokens": options.new_tokens}
    for name in options.pools.split(","):
        pool = POOLS[name]
        with LLM(folder, **pool) as llm:
            started = time.perf_counter()
            outcomes = llm.generate(texts, SamplingParams(temperature=0, max_tokens=options.new_tokens))
            seconds = time.perf_counter() - started
            yields = llm.statistics()["yields"]
        differences = []
        for row, (want, outcome) in enumerate(zip(wanted, outcomes, strict=True)):
            if outcome.token_ids != want:
                at, gap = logit_gap(model, prompt_ids[row], want, outcome.token_ids)
                differences.append({"row": row, "at": at, "gap": gap})
        ties = [d for d in differences if d["gap"] < TIE]
        print(
            f"{name} pool ({pool['kv_memory']}, {yields} suspensions, {seconds:.0f} s): "
            f"{len(texts) - len(differences)} of {len(texts)} rows equal, {len(ties)} differ at a tie "
            f"below {TIE}, {len(differences) - len(ties)} differ otherwise"
        )
        for difference in differences:
            print(f"  row {difference['row']}: token {difference['at']}, logit gap {difference['gap']:.2e}")
        report[name] = {"suspensions": yields, "seconds": seconds, "differences": differences}
    (RESULTS / f"fidelity-{options.pools}.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
