"""Expert batching: what it gains to run the experts once over all rows, when the device holds the KV of few.

    python benchmarks/expert_batching.py [--rows 256] [--prompt-tokens 4] [--new-tokens 12] [--threads N]

A mixture of experts with random weights (1.9 B parameters in float32, 128 experts in each of 12 layers, 8 of
them for a token: half of Qwen3-30B-A3B in every direction) and memory for the KV of 16 rows:

- B_moe = B_attn: passes of 16 rows, whose KV stays in that memory, one group of rows after another;
- combine: KV of all rows in the host tier, the memory is the staging; attention runs over those rows whose
  pages of one layer fit in half of it, and yields; the experts run once over all rows of the pass.

Both generate the same number of tokens for the same rows, greedily, after a warm-up. Before, each expert
function is timed on one layer with 16 and with 256 tokens; each way takes the faster one for its passes.
Prints tables; writes bench-results/expert_batching.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from workload import RESULTS, machine

from batchgen_data.models import experts
from batchgen_data.models.attention import install
from batchgen_data.models.kv_pool import KVPool, LayerShape
from batchgen_data.models.kv_staging import StagedKVPool
from batchgen_data.models.wrap import install_yield_points, sparse_blocks
from batchgen_data.prompts import EncodedRow
from batchgen_data.runtime.engine import Engine
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.resources import available_cpus
from batchgen_data.runtime.step import Limits
from batchgen_data.sampling import ResolvedSampling

ROWS_ON_DEVICE, PAGE_TOKENS, VOCAB_SIZE = 16, 16, 8192
CPU = torch.device("cpu")
# Of transformers and of this package, by the names in transformers' registry.
EXPERT_FUNCTIONS = ("eager", "grouped_mm", "batched_mm", experts.NAME)


class NoText:
    """Stands in for a tokenizer: only ids are compared."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


def build_model() -> Any:
    """The model, made in memory."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=384,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.inference_mode()
def expert_functions(model: Any, block: nn.Module) -> dict[str, dict[int, float]]:
    """Best milliseconds of one sparse block, by expert function and number of tokens; taken in turn."""
    report: dict[str, dict[int, float]] = {name: {} for name in EXPERT_FUNCTIONS}
    for num_tokens, rounds in ((16, 6), (256, 4)):
        hidden = torch.randn(1, num_tokens, model.config.hidden_size)
        for _ in range(rounds):
            for name in EXPERT_FUNCTIONS:
                if name == "batched_mm" and num_tokens > 16:
                    continue  # it copies the weights of every token's experts: 10 GB
                model.set_experts_implementation(name)
                started = time.perf_counter()
                block(hidden)
                took_ms = 1e3 * (time.perf_counter() - started)
                report[name][num_tokens] = min(took_ms, report[name].get(num_tokens, took_ms))
    return report


@dataclasses.dataclass
class Way:
    """One way to run rows, and what it took."""

    name: str
    executor: TorchExecutor
    limits: Limits
    expert_function: str
    seconds: float = 0.0
    cpu_s: float = 0.0
    passes: int = 0
    token_ids: list[list[int]] = dataclasses.field(default_factory=list)

    def run(self, rows: list[EncodedRow], sampling: ResolvedSampling) -> None:
        """Generate for `rows` until the last is done."""
        self.executor.model.set_experts_implementation(self.expert_function)
        engine = Engine(
            self.executor,
            self.limits,
            NoText(),
            context_tokens=1024,
            eos_token_ids=frozenset(),
            vocab_size=VOCAB_SIZE,
            num_threads=self.executor.num_threads,
        )
        try:
            started, cpu_before_s = time.perf_counter(), time.process_time()
            outcomes = engine.submit([dataclasses.replace(row, sampling=sampling) for row in rows]).wait()
            self.seconds += time.perf_counter() - started
            self.cpu_s += time.process_time() - cpu_before_s
        finally:
            engine.close()
        assert all(len(outcome.token_ids) == sampling.max_tokens for outcome in outcomes)
        self.passes += engine.statistics()["steps"]
        self.token_ids += [outcome.token_ids for outcome in outcomes]


def resident(
    model: Any, shapes: dict[int, LayerShape], row_pages: int, num_threads: int, expert_function: str
) -> Way:
    """KV of 16 rows on the device, and passes of those."""
    num_pages = ROWS_ON_DEVICE * row_pages
    limits = Limits(
        num_pages=num_pages, page_tokens=PAGE_TOKENS, max_sequences=ROWS_ON_DEVICE, prefix_reuse=False
    )
    pool = KVPool(shapes, num_pages, PAGE_TOKENS, CPU)
    executor = TorchExecutor(model, pool, num_threads=num_threads)
    return Way("B_moe = B_attn", executor, limits, expert_function)


def combining(
    model: Any,
    shapes: dict[int, LayerShape],
    num_pages: int,
    staging_bytes: int,
    num_threads: int,
    expert_function: str,
) -> Way:
    """KV of all rows in the host tier, staged layer by layer in the same memory."""
    pool = StagedKVPool(shapes, num_pages, PAGE_TOKENS, CPU, staging_bytes=staging_bytes)
    limits = Limits(
        num_pages=num_pages,
        page_tokens=PAGE_TOKENS,
        max_sequences=256,
        max_sequence_pages=pool.sub_batch_pages,
        prefix_reuse=False,
    )
    executor = TorchExecutor(model, pool, num_threads=num_threads)
    return Way("combine", executor, limits, expert_function)


def main() -> None:
    """Run both ways and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--threads", type=int, default=available_cpus())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = build_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters / 1e9:.2f} B parameters, {options.threads} threads")
    blocks = sparse_blocks(model)
    functions = expert_functions(model, blocks[0])
    for name, times in functions.items():
        print(f"{name:16}" + ",".join(f"{ms:8.1f} ms for {n} tokens" for n, ms in times.items()))
    shapes = install(model)
    install_yield_points(model)

    generator = torch.Generator().manual_seed(1)
    sampling = ResolvedSampling(temperature=0.0, max_tokens=options.new_tokens, ignore_eos=True)
    prompts = torch.randint(VOCAB_SIZE, (options.rows, options.prompt_tokens), generator=generator).tolist()
    rows = [
        EncodedRow(prompt_token_ids=ids, sampling=sampling, row_key=index.to_bytes(8, "little"))
        for index, ids in enumerate(prompts)
    ]
    # The last token of a row is never written.
    row_pages = -(-(options.prompt_tokens + options.new_tokens - 1) // PAGE_TOKENS)
    device_bytes = ROWS_ON_DEVICE * row_pages * PAGE_TOKENS * sum(s.token_bytes for s in shapes.values())

    def fastest(num_tokens: int) -> str:
        return min(functions, key=lambda name: functions[name].get(num_tokens, float("inf")))

    alone = resident(model, shapes, row_pages, options.threads, fastest(16))
    combine = combining(model, shapes, row_pages * options.rows, device_bytes, options.threads, fastest(256))
    for way in (alone, combine):
        way.run(rows[:ROWS_ON_DEVICE], dataclasses.replace(sampling, max_tokens=2))
        way.seconds, way.cpu_s, way.passes, way.token_ids = 0.0, 0.0, 0, []
    # The machine's speed drifts: half of the many small passes run before the large ones, half after.
    half = options.rows // 2 // ROWS_ON_DEVICE * ROWS_ON_DEVICE
    alone.run(rows[:half], sampling)
    combine.run(rows, sampling)
    alone.run(rows[half:], sampling)

    for way in (alone, combine):
        rate = options.rows * options.new_tokens / way.seconds
        print(
            f"{way.name:16}{way.seconds:8.1f} s ({way.cpu_s:.1f} s of CPU time){rate:8.1f} tokens/s"
            f"{way.passes:6} passes, {way.expert_function}"
        )
    times_sooner = alone.seconds / combine.seconds
    rows_equal = sum(a == b for a, b in zip(alone.token_ids, combine.token_ids, strict=True))
    print(
        f"combine: {times_sooner:.2f} times sooner, {alone.cpu_s / combine.cpu_s:.2f} times less CPU time; "
        f"{rows_equal} of {options.rows} rows have equal tokens"
    )
    report = {
        "machine": machine(),
        **vars(options),
        "parameters": num_parameters,
        "kv_device_bytes": device_bytes,
        "rows_in_half_the_staging": combine.executor.pool.sub_batch_pages // row_pages,
        "expert_function_ms": functions,
        "ways": {
            way.name: {
                "seconds": way.seconds,
                "cpu_s": way.cpu_s,
                "passes": way.passes,
                "expert_function": way.expert_function,
            }
            for way in (alone, combine)
        },
        "staging": dataclasses.asdict(combine.executor.pool.counts),
        "times_sooner": times_sooner,
        "rows_equal": rows_equal,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "expert_batching.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
