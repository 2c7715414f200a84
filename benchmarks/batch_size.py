"""Does the user's batch_size matter? And what does Ray cost beside the runtime alone?

    python benchmarks/batch_size.py [--rows 256] [--rounds 3] [--sizes 1,16,64,256]

The same rows through LLM in this process, through generate(ds, batch_size=...), and through a plain
map_batches with the compute strategy that the README recommends. Start-up is excluded: the clock runs from
the first call to the end of the last. Lengths come from the Azure trace divided by 16; each row has its own
exact output length. Prints medians and ratios; writes bench-results/batch_size.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
from workload import DATA, RESULTS, machine, smollm2_folder, trace_requests

from batchgen_data import BatchGenLLM
from batchgen_data.config import calls_in_flight

# Eight times as many rows as decode at once, so that refilling and the tail count.
MAX_SEQUENCES = 32


class TimedStage(BatchGenLLM):
    """The stage, telling in two more columns when each call began and ended."""

    def __call__(self, batch: pa.Table) -> pa.Table:
        began_at = time.time()
        table = super().__call__(batch)
        for name, value in (("began_at", began_at), ("done_at", time.time())):
            table = table.append_column(name, pa.array([value] * table.num_rows, pa.float64()))
        return table


def rows(folder: str, count: int, data: Path) -> pa.Table:
    """Prompts as text, each with its own exact output length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    requests = trace_requests(tokenizer, count, data=data, divisor=16)
    return pa.table(
        {
            "prompt": [f"{i}: " + tokenizer.decode(r.prompt_token_ids) for i, r in enumerate(requests)],
            "settings": [json.dumps({"max_tokens": r.num_output, "ignore_eos": True}) for r in requests],
        }
    )


def run_llm(folder: str, table: pa.Table) -> float:
    """The runtime alone, in this process."""
    from batchgen_data import LLM

    with LLM(folder, max_sequences=MAX_SEQUENCES) as llm:
        started = time.perf_counter()
        llm.map_table(table, prompt_column="prompt", sampling_column="settings")
        return time.perf_counter() - started


def run_ray(folder: str, table: pa.Table, way: str, batch_size: int) -> float:
    """Through Ray Data, by `generate` or by a plain map_batches."""
    import ray

    from batchgen_data import operator

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    ds = ray.data.from_arrow(table)
    options = {"prompt_column": "prompt", "sampling_column": "settings", "max_sequences": MAX_SEQUENCES}
    if way == "generate":
        operator.BatchGenLLM = TimedStage  # type: ignore[misc]
        ds = operator.generate(ds, folder, batch_size=batch_size, **options)
    else:
        ds = ds.repartition(target_num_rows_per_block=batch_size).map_batches(
            TimedStage,
            fn_constructor_kwargs={"model": folder, **options},
            batch_format="pyarrow",
            batch_size=batch_size,
            num_cpus=0,
            compute=ray.data.ActorPoolStrategy(
                size=1,
                max_concurrent_calls_per_actor=calls_in_flight(MAX_SEQUENCES, batch_size),
                enable_true_multi_threading=True,
            ),
        )
    # Read here, without another Ray stage: starting its workers takes seconds of a small machine's CPUs.
    times = pa.concat_tables(ds.iter_batches(batch_size=None, batch_format="pyarrow"))
    assert times.num_rows == table.num_rows
    assert set(times["finish_reason"].to_pylist()) == {"length"}
    return max(times["done_at"].to_pylist()) - min(times["began_at"].to_pylist())


def main() -> None:
    """Run every way in turn and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="1,16,64,256")
    parser.add_argument("--ways", default="generate,map_batches")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--child", nargs=3, metavar=("WAY", "SIZE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = smollm2_folder()
    if options.child:
        way, size, out = options.child
        table = rows(folder, options.rows, options.data)
        seconds = run_llm(folder, table) if way == "LLM" else run_ray(folder, table, way, int(size))
        Path(out).write_text(json.dumps(seconds))
        return
    sizes = [int(size) for size in options.sizes.split(",")]
    ways = [("LLM", 0)] + [(way, size) for size in sizes for way in options.ways.split(",")]
    seconds: dict[str, list[float]] = {f"{way} {size or ''}".strip(): [] for way, size in ways}
    for number in range(options.rounds):
        for way, size in ways:
            with tempfile.TemporaryDirectory() as temporary:
                out = Path(temporary) / "out.json"
                command = [sys.executable, __file__, "--rows", str(options.rows), "--data", str(options.data)]
                command += ["--child", way, str(size), str(out)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{way} {size} failed:\n{done.stderr[-3000:]}")
                took = json.loads(out.read_text())
            seconds[f"{way} {size or ''}".strip()].append(took)
            print(f"round {number + 1} {way} {size or ''}: {took:.1f} s", flush=True)
    base = statistics.median(seconds["LLM"])
    print(f"\n{'way':18} {'median s':>9} {'min':>7} {'max':>7} {'against LLM':>12}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:18} {median:9.1f} {min(values):7.1f} {max(values):7.1f} {median / base:11.2f}x")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "batch_size.json").write_text(
        json.dumps({"machine": machine(), "rows": options.rows, "seconds": seconds}, indent=1)
    )


if __name__ == "__main__":
    main()
