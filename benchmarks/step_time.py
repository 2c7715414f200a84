"""What a pass costs: matrix products alone, prefill, and decoding, by number of rows and way of threading.

    python benchmarks/step_time.py [--rows 2,8,32]

Three ways: one thread; all threads in each product; one lane per thread (the way the runtime works). Prints
GFLOP/s of the products, tokens/s of prefill, and milliseconds of a decode pass; writes
bench-results/step_time.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
from workload import RESULTS, machine, smollm2_folder

from batchgen_data.models.attention import install
from batchgen_data.models.kv_pool import KVPool
from batchgen_data.runtime import executor as executor_module
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.scheduler import Scheduler
from batchgen_data.runtime.sequence import Sequence
from batchgen_data.runtime.step import Limits
from batchgen_data.sampling import ResolvedSampling

PROMPT_TOKENS, NEW_TOKENS, PAGE_TOKENS, NUM_PAGES = 100, 8, 64, 256
GREEDY = ResolvedSampling(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def product_rate(num_rows: int, num_threads: int) -> float:
    """GFLOP/s of (num_rows, 576) x (576, 1536), SmolLM2's widest layer product."""
    torch.set_num_threads(num_threads)
    x, weight = torch.randn(num_rows, 576), torch.randn(1536, 576)
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.linear(x, weight)
        seconds.append((time.perf_counter() - started) / 10)
    return 2 * num_rows * 576 * 1536 / statistics.median(seconds) / 1e9


def pass_times(executor: TorchExecutor, num_rows: int) -> tuple[float, float]:
    """Prefill tokens/s and the median seconds of a decode pass, for `num_rows` rows."""
    limits = Limits(
        num_pages=NUM_PAGES,
        page_tokens=PAGE_TOKENS,
        max_chunk_tokens=512 // executor.num_threads,
        prefix_reuse=False,
    )
    scheduler = Scheduler(limits)
    generator = torch.Generator().manual_seed(0)
    for row in range(num_rows):
        ids = torch.randint(5, 49_000, (PROMPT_TOKENS,), generator=generator).tolist()
        scheduler.add(Sequence(row, ids, GREEDY, limit_tokens=PROMPT_TOKENS + NEW_TOKENS))
    prefill_tokens, prefill_s, decode_s = 0, 0.0, []
    while (step := scheduler.plan_step()) is not None:
        started = time.perf_counter()
        tokens = executor.run(step).tokens
        took = time.perf_counter() - started
        if step.num_tokens == num_rows:
            decode_s.append(took)
        else:
            prefill_tokens += step.num_tokens
            prefill_s += took
        scheduler.complete(step, tokens)
    return prefill_tokens / prefill_s, statistics.median(decode_s)


@torch.inference_mode()
def main() -> None:
    """Measure every way at every number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="2,8,32")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    pool = KVPool(install(model), NUM_PAGES, PAGE_TOKENS, torch.device("cpu"))
    cores = os.cpu_count() or 1
    report: dict[str, Any] = {"machine": machine(), "products": {}, "passes": {}}
    for num_rows in (8, 32, 64, 256, 512):
        rates = {f"{n} threads": product_rate(num_rows, n) for n in sorted({1, cores})}
        report["products"][num_rows] = rates
        print(f"product of {num_rows:3} rows: " + ", ".join(f"{k} {v:.0f} GFLOP/s" for k, v in rates.items()))
    most_lane_share = executor_module._MOST_LANE_SHARE
    for way, num_threads, share in (
        ("1 thread", 1, most_lane_share),
        (f"{cores} threads in each product", cores, 0.0),  # no cut into lanes is even enough
        (f"{cores} lanes", cores, most_lane_share),
    ):
        executor_module._MOST_LANE_SHARE = share
        executor = TorchExecutor(model, pool, num_threads=num_threads)
        torch.set_num_threads(num_threads)
        for num_rows in map(int, options.rows.split(",")):
            prefill, decode_s = pass_times(executor, num_rows)
            report["passes"][f"{way}, {num_rows} rows"] = {"prefill_tokens_s": prefill, "decode_s": decode_s}
            print(f"{way}, {num_rows} rows: prefill {prefill:.0f} tokens/s, decode {decode_s * 1e3:.0f} ms")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "step_time.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
