"""Suspended rows: computed again, or kept in the host tier, in memory or in a file.

    python benchmarks/host_checkpoints.py [--rows 16] [--rounds 3] [--threads 2] [--folder DIR]

First what so many tokens of a row cost each way: added to a pass in which eight other rows decode, or copied.
Then rows of SmolLM2 on a KV pool so small that many of them are suspended, the ways in turn, with equal
tokens. Prints seconds, of the clock and of the processor, and ratios to computing again; writes
bench-results/host_checkpoints.json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from workload import DATA, RESULTS, machine, smollm2_folder, trace_requests

from batchgen_data.models.attention import install
from batchgen_data.models.kv_checkpoint import KVCopies
from batchgen_data.models.kv_pool import KVPool
from batchgen_data.models.load import load_model, resolve_source
from batchgen_data.prompts import EncodedRow
from batchgen_data.runtime.engine import Engine
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.resources import available_cpus
from batchgen_data.runtime.sequence import Sequence
from batchgen_data.runtime.step import Chunk, Copy, Limits, Step
from batchgen_data.sampling import ResolvedSampling

PAGE_TOKENS, PROMPT_TOKENS, NEW_TOKENS, HOST_PAGES, NUM_OTHERS = 64, 64, 256, 512, 8
WAYS = ("computed again", "memory", "file")


def seconds_of(call: Callable[[], object], repeats: int = 5) -> float:
    """Least seconds of a call, after one that warms up: others on the machine only ever add."""
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def row_of(num_tokens: int, *, first_page: int) -> Sequence:
    """A row with pages of its own from `first_page` on."""
    draw = random.Random(num_tokens + first_page)
    ids = [draw.randrange(5, 49_000) for _ in range(num_tokens)]
    sampling = ResolvedSampling(temperature=0.0, max_tokens=1)
    row = Sequence(first_page, ids, sampling, limit_tokens=num_tokens + 1)
    row.pages = [first_page + number for number in range(-(-num_tokens // PAGE_TOKENS))]
    return row


@torch.inference_mode()
def one_row(model: Any, pool: KVPool, num_threads: int, folder: str) -> dict[int, dict[str, float]]:
    """Milliseconds to compute tokens of one row beside others, and to copy their pages there and back."""
    executor = TorchExecutor(model, pool, num_threads=num_threads)
    tiers = {"memory": KVCopies(pool, 64), "file": KVCopies(pool, 64, host_path=folder)}
    costs: dict[int, dict[str, float]] = {}
    others = [
        Chunk(row_of(1, first_page=pool.num_pages - 1 - number), 0, 1, True) for number in range(NUM_OTHERS)
    ]
    alone_s = seconds_of(lambda: executor.run(Step(tuple(others))))
    print(f"a pass of {NUM_OTHERS} decoding rows: {1e3 * alone_s:.1f} ms")
    for num_tokens in (1, 4, 16, 64, 256, 1024):
        row = row_of(num_tokens, first_page=0)
        step = Step((*others, Chunk(row, 0, num_tokens, True)))
        together_s = seconds_of(lambda step=step: executor.run(step))
        costs[num_tokens] = {"computed": 1e3 * (together_s - alone_s)}
        for name, tier in tiers.items():
            for to_host in (True, False):
                pages = tuple(row.pages)

                def copy(tier=tier, to_host=to_host, pages=pages, row=row) -> None:
                    tier.start([Copy(row, to_host, pages, pages, 0, row.num_tokens)])
                    assert all(tier.wait().values())

                direction = "checkpoint" if to_host else "restore"
                costs[num_tokens][f"{direction}, {name}"] = 1e3 * seconds_of(copy)
        print(f"{num_tokens:5} tokens: " + ", ".join(f"{k} {v:.2f} ms" for k, v in costs[num_tokens].items()))
    for tier in tiers.values():
        tier.close()
    return costs


def run(
    way: str, model: Any, pool: KVPool, num_threads: int, folder: str, rows: list[EncodedRow], tokenizer: Any
) -> tuple[tuple[float, float], list[list[int]], dict[str, Any]]:
    """Seconds (clock, processor), tokens and statistics of all rows one way."""
    copies = None
    if way != "computed again":
        copies = KVCopies(pool, HOST_PAGES, host_path=folder if way == "file" else None)
    engine = Engine(
        TorchExecutor(model, pool, num_threads=num_threads, copies=copies),
        Limits(
            num_pages=pool.num_pages,
            page_tokens=PAGE_TOKENS,
            max_chunk_tokens=512 // num_threads,
            host_pages=HOST_PAGES if copies else 0,
        ),
        tokenizer,
        context_tokens=4096,
        eos_token_ids=frozenset(),
        vocab_size=model.get_input_embeddings().num_embeddings,
        num_threads=num_threads,
    )
    try:
        started = time.perf_counter(), time.process_time()
        outcomes = engine.submit(rows).wait()
        took = time.perf_counter() - started[0], time.process_time() - started[1]
        return took, [one.token_ids for one in outcomes], engine.statistics()
    finally:
        engine.close()


def main() -> None:
    """Measure one row, then the ways in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--pages", type=int, default=24, help="KV pages of 64 tokens")
    parser.add_argument("--threads", type=int, default=available_cpus())
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for the file")
    options = parser.parse_args()
    loaded = load_model(resolve_source(smollm2_folder(), None), device=torch.device("cpu"))
    shapes = install(loaded.model)
    num_threads = options.threads
    torch.set_num_threads(num_threads)
    pool = KVPool(shapes, options.pages, PAGE_TOKENS, torch.device("cpu"))
    report: dict[str, Any] = {"machine": machine(), "options": vars(options)}
    report["one_row_ms"] = one_row(loaded.model, pool, num_threads, options.folder)
    settings = ResolvedSampling(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    rows = [
        EncodedRow(prompt_token_ids=request.prompt_token_ids[:PROMPT_TOKENS], sampling=settings, row_key=b"")
        for request in trace_requests(loaded.tokenizer, options.rows, data=options.data)
    ]
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    tokens: dict[str, list[list[int]]] = {}
    for number in range(options.rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            took, tokens[way], stats = run(
                way, loaded.model, pool, num_threads, options.folder, rows, loaded.tokenizer
            )
            seconds[way].append(took)
            report[way] = {"seconds": seconds[way], "statistics": stats}
            print(
                f"{way:14} {took[0]:6.1f} s ({took[1]:.1f} s of processor), {stats['yields']} yields, "
                f"{stats['prefill_tokens']} tokens prefilled ({stats['recomputed_tokens']} again), "
                f"{stats['restored_tokens']} restored"
            )
    for way in WAYS[1:]:
        pairs = list(zip(seconds[WAYS[0]], seconds[way], strict=True))
        clock, processor = ([again[i] / kept[i] for again, kept in pairs] for i in range(2))
        equal = sum(a == b for a, b in zip(tokens[WAYS[0]], tokens[way], strict=True))
        report[way] |= {"ratios": clock, "processor_ratios": processor, "equal_rows": equal}
        print(
            f"{way}: {statistics.median(clock):.2f} times as fast as computing again "
            f"({min(clock):.2f} to {max(clock):.2f}), {statistics.median(processor):.2f} times by processor "
            f"seconds ({min(processor):.2f} to {max(processor):.2f}); {equal} of {len(rows)} rows equal"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "host_checkpoints.json").write_text(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main()
