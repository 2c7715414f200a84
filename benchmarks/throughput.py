"""Time to the last row, beside transformers: static batches of 32, and its own continuous batching.

    python benchmarks/throughput.py [--requests 96] [--rounds 3] [--engines ours,continuous,static]

Every engine gets the same token ids and generates exact lengths (end token ignored) greedily, in float32,
with all cores. Engines run alternately, each in a process of its own; loading and a warm-up are not timed.
Prints medians and ratios, and writes bench-results/throughput.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workload import DATA, RESULTS, Request, machine, smollm2_folder, trace_requests

Runner = Callable[[str, list[Request]], tuple[float, list[list[int]]]]
WARM_UP = [Request([1, 2, 3, 4, 5], 4), Request(list(range(5, 105)), 3)]


def run_ours(model: str, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """This package, without Ray."""
    from batchgen_data import LLM, SamplingParams

    def settings(batch: list[Request]) -> list[SamplingParams]:
        return [SamplingParams(temperature=0, max_tokens=r.num_output, ignore_eos=True) for r in batch]

    with LLM(model) as llm:
        llm.generate([r.prompt_token_ids for r in WARM_UP], settings(WARM_UP))
        started = time.perf_counter()
        outcomes = llm.generate([r.prompt_token_ids for r in requests], settings(requests))
        return time.perf_counter() - started, [outcome.token_ids for outcome in outcomes]


def run_static(
    model_path: str, requests: list[Request], batch_size: int = 32
) -> tuple[float, list[list[int]]]:
    """transformers' generate on left-padded batches in input order; a batch ends with its longest row."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    def run(batch: list[Request]) -> list[list[int]]:
        widest = max(len(r.prompt_token_ids) for r in batch)
        ids = torch.zeros((len(batch), widest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, widest - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask[row, widest - len(request.prompt_token_ids) :] = 1
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(r.num_output for r in batch),
                eos_token_id=None,
                pad_token_id=0,
            )
        return [out[row, widest : widest + r.num_output].tolist() for row, r in enumerate(batch)]

    run(WARM_UP)
    started = time.perf_counter()
    outputs: list[list[int]] = []
    for start in range(0, len(requests), batch_size):
        outputs += run(requests[start : start + batch_size])
    return time.perf_counter() - started, outputs


def run_continuous(model_path: str, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """transformers' continuous batching (the engine behind generate_batch), with room for every request."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    page = 64
    room = sum((len(r.prompt_token_ids) + r.num_output) // page + 1 for r in requests)
    config = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=room,
        max_batch_tokens=512,
        max_requests_per_batch=len(requests),
        use_cuda_graph=False,
        use_async_batching=False,
    )
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=4096)

    def run(batch: list[Request], manager: Any) -> list[list[int]]:
        places = {
            manager.add_request(list(r.prompt_token_ids), max_new_tokens=r.num_output): i
            for i, r in enumerate(batch)
        }
        outputs: list[list[int]] = [[] for _ in batch]
        left = len(batch)
        while left:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the continuous batching loop died")
            elif result.is_finished():
                outputs[places[result.request_id]] = result.generated_tokens
                left -= 1
        return outputs

    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=config
        ) as manager,
    ):
        run(WARM_UP, manager)
        started = time.perf_counter()
        outputs = run(requests, manager)
        return time.perf_counter() - started, outputs


ENGINES: dict[str, Runner] = {"ours": run_ours, "continuous": run_continuous, "static": run_static}


def child(engine: str, num_requests: int, data: Path, out: Path) -> None:
    """Run one engine in this process and write what it took."""
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(os.cpu_count() or 1)
    model = smollm2_folder()
    requests = trace_requests(AutoTokenizer.from_pretrained(model), num_requests, data=data)
    cpu_before = time.process_time()
    seconds, outputs = ENGINES[engine](model, requests)
    assert [len(o) for o in outputs] == [r.num_output for r in requests], "an engine generated other lengths"
    out.write_text(
        json.dumps({"seconds": seconds, "cpu_s": time.process_time() - cpu_before, "outputs": outputs})
    )


def main() -> None:
    """Run every engine in turn and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="ours,continuous,static")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--child", nargs=2, metavar=("ENGINE", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], options.requests, options.data, Path(options.child[1]))
        return
    engines = options.engines.split(",")
    seconds: dict[str, list[float]] = {engine: [] for engine in engines}
    outputs: dict[str, list[list[int]]] = {}
    for number in range(options.rounds):
        for engine in engines:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out.json"
                command = [sys.executable, __file__, "--requests", str(options.requests)]
                command += ["--data", str(options.data), "--child", engine, str(out)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{engine} failed:\n{done.stderr[-3000:]}")
                result = json.loads(out.read_text())
            seconds[engine].append(result["seconds"])
            outputs[engine] = result["outputs"]
            load = os.getloadavg()[0]
            print(
                f"round {number + 1} {engine}: {result['seconds']:.1f} s "
                f"({result['cpu_s']:.0f} CPU-s, load {load:.1f})",
                flush=True,
            )
    generated = sum(len(o) for o in outputs[engines[0]])
    medians = {engine: statistics.median(values) for engine, values in seconds.items()}
    base = medians.get("ours", medians[engines[0]])
    heads = ("median s", "min", "max", "tokens/s", "ours is", "same rows")
    print(f"\n{'engine':12} " + " ".join(f"{head:>9}" for head in heads))
    for engine, values in seconds.items():
        same = sum(a == b for a, b in zip(outputs[engine], outputs[engines[0]], strict=True))
        print(
            f"{engine:12} {medians[engine]:9.1f} {min(values):9.1f} {max(values):9.1f} "
            f"{generated / medians[engine]:9.1f} {medians[engine] / base:8.2f}x {same:5}/{options.requests}"
        )
    RESULTS.mkdir(exist_ok=True)
    summary = {"machine": machine(), "requests": options.requests, "generated_tokens": generated}
    (RESULTS / "throughput.json").write_text(json.dumps({**summary, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
