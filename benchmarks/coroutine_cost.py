"""What yielding and combining cost: microseconds per sub-batch and layer beyond the copies, share of a pass.

    python benchmarks/coroutine_cost.py [--rows 32] [--sub-batch 8] [--threads 1]

First without a model: sub-batches go through modules that do nothing, with yield points on them, against
`torch.cat` and `split` of the same tensors alone; the fastest of several turns counts, taken in turn: other
programs only add time. Then SmolLM2-135M, decoding with yield points at its MLPs. Writes
bench-results/coroutine_cost.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from workload import RESULTS, machine, smollm2_folder

from batchgen_data.models import wrap
from batchgen_data.models.attention import install
from batchgen_data.models.kv_pool import KVPool
from batchgen_data.runtime.coroutine import (
    CoroutineCounts,
    Point,
    at_barrier,
    run_sub_batches,
)
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.scheduler import Scheduler
from batchgen_data.runtime.sequence import Sequence
from batchgen_data.runtime.step import Limits
from batchgen_data.runtime.trace import OFF, Trace
from batchgen_data.sampling import ResolvedSampling

NUM_LAYERS, HIDDEN_SIZE, NUM_TURNS = 100, 576, 25
PROMPT_TOKENS, NEW_TOKENS, PAGE_TOKENS = 32, 9, 64
BAR_US = 30.0


def fastest(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of the fastest turn of each way, one turn of each after the other."""
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(NUM_TURNS):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def primitive_costs(num_sub_batches: int, num_tokens: int) -> dict[str, float]:
    """Microseconds per sub-batch and layer, for sub-batches of `num_tokens` tokens."""
    hidden = [torch.randn(1, num_tokens, HIDDEN_SIZE) for _ in range(num_sub_batches)]
    sizes = [num_tokens] * num_sub_batches
    modules = [torch.nn.Identity() for _ in range(NUM_LAYERS)]
    for number, module in enumerate(modules):
        wrap._install_yield_point(f"layer {number}", module, token_dim=1)
    barriers = [Point(f"layer {number}", None) for number in range(NUM_LAYERS)]

    def copies() -> None:
        parts = hidden
        for _ in range(NUM_LAYERS):
            parts = list(torch.cat(parts, dim=1).split(sizes, dim=1))

    def through_points(part: torch.Tensor) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            here = part
            for module in modules:
                here = module(here)
            return here

        return forward

    def through_barriers(part: torch.Tensor) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            for barrier in barriers:
                at_barrier(barrier)
            return part

        return forward

    def combine(trace: Trace = OFF) -> None:
        run_sub_batches([through_points(part) for part in hidden], CoroutineCounts(), trace=trace)

    def wait() -> None:
        run_sub_batches([through_barriers(part) for part in hidden], CoroutineCounts())

    seconds = fastest(
        {
            "copies": copies,
            "combine": combine,
            "traced": lambda: combine(Trace()),
            "barrier": wait,
        }
    )
    each_us = 1e6 / (NUM_LAYERS * num_sub_batches)
    return {
        "copies_us": seconds["copies"] * each_us,
        "yield_and_combine_us": (seconds["combine"] - seconds["copies"]) * each_us,
        "traced_us": (seconds["traced"] - seconds["copies"]) * each_us,
        "barrier_us": seconds["barrier"] * each_us,
    }


def decode_pass_s(executor: TorchExecutor, num_rows: int) -> tuple[float, CoroutineCounts]:
    """Median seconds of a pass that decodes `num_rows` rows, and what one of them counts."""
    limits = Limits(
        num_pages=executor.pool.num_pages,
        page_tokens=PAGE_TOKENS,
        max_sequences=num_rows,
        max_step_tokens=max(512, num_rows * PROMPT_TOKENS),
        prefix_reuse=False,
    )
    scheduler = Scheduler(limits)
    greedy = ResolvedSampling(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)
    for row in range(num_rows):
        ids = torch.randint(5, 49_000, (PROMPT_TOKENS,), generator=generator).tolist()
        scheduler.add(Sequence(row, ids, greedy, limit_tokens=PROMPT_TOKENS + NEW_TOKENS))
    seconds = []
    while (step := scheduler.plan_step()) is not None:
        executor.coroutine = CoroutineCounts()
        started = time.perf_counter()
        result = executor.run(step)
        if step.num_tokens == num_rows:
            seconds.append(time.perf_counter() - started)
        scheduler.complete(step, result.tokens, result.failed)
    return statistics.median(seconds), executor.coroutine


@torch.inference_mode()
def main() -> None:
    """Measure the primitives, then a real model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--sub-batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"machine": machine(), "options": vars(options), "primitives": {}}
    print("microseconds per sub-batch and layer")
    print("sub-batches  tokens each  copies alone  yield + combine beyond  traced  barrier")
    for num_sub_batches, num_tokens in ((2, 8), (4, 8), (16, 8), (32, 1), (4, 128)):
        costs = primitive_costs(num_sub_batches, num_tokens)
        report["primitives"][f"{num_sub_batches} x {num_tokens}"] = costs
        print(
            f"{num_sub_batches:11}  {num_tokens:11}  {costs['copies_us']:12.1f}  "
            f"{costs['yield_and_combine_us']:22.1f}  {costs['traced_us']:6.1f}  {costs['barrier_us']:7.1f}"
        )
    most_us = max(costs["yield_and_combine_us"] for costs in report["primitives"].values())
    print(f"at most {most_us:.1f} us; the bar is {BAR_US:.0f} us")

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
    pool = KVPool(install(model), 2 * options.rows, PAGE_TOKENS, torch.device("cpu"))
    executor = TorchExecutor(model, pool, sub_batch=options.sub_batch, num_threads=options.threads)
    apart_s, _ = decode_pass_s(executor, options.rows)
    num_points = len(wrap.install_yield_points(model, ["model.layers.*.mlp"]))
    together_s, counts = decode_pass_s(executor, options.rows)
    num_sub_batches = -(-options.rows // options.sub_batch)
    per_point = primitive_costs(num_sub_batches, options.sub_batch)
    spent_s = per_point["yield_and_combine_us"] * 1e-6 * num_sub_batches * num_points
    report["pass"] = {
        "sub_batches_apart_s": apart_s,
        "combined_s": together_s,
        "yields": counts.yields,
        "yield_and_combine_s": spent_s,
        "yield_and_combine_share": spent_s / together_s,
        "copies_share": counts.copy_s / together_s,
    }
    print(
        f"SmolLM2-135M, decoding {options.rows} rows in sub-batches of {options.sub_batch}: "
        f"{1e3 * apart_s:.0f} ms a pass without yield points, {1e3 * together_s:.0f} ms with its "
        f"{num_points} MLPs combined; of these {1e3 * spent_s:.1f} ms ({spent_s / together_s:.2%}) are "
        f"yield and combine, {1e3 * counts.copy_s:.1f} ms ({counts.copy_s / together_s:.2%}) the copies"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "coroutine_cost.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
