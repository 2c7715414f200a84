"""How well plans predict: step times of many configurations, and the choice against a sweep.

    python benchmarks/plan_accuracy.py [--steps-only] [--models smollm2,moe,small]

SmolLM2-135M, a mixture of experts with random weights (100 M parameters, 32 experts in each of 8 layers, 4 of
them for a token) and a small dense model (20 M). Each is profiled first, as `batchgen plan` does. Then

- passes of fixed shapes run in engines of several configurations: resident, in sub-batches that combine, KV
  in the host tier, weights streamed;
- rows of equal length are completed under every configuration of a grid, and under the plan's own.

Everything of a model is measured in turn, round after round, and the fastest round of each counts, as in the
profile: on a machine that others use too, this is what repeats. In a round each pass runs twice, and the
second counts: the first finds the caches full of another engine's weights. A shared disk's bandwidth is
another every minute, so it is measured again beside the passes that stream, and predictions use the best, as
measurements do. Prints tables; writes bench-results/plan_accuracy.json. Takes nine minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3MoeConfig
from workload import RESULTS, machine, smollm2_folder

from batchgen_data import LLM, EngineConfig, SamplingParams
from batchgen_data.models.load import local_folder, quiet_transformers, read_config, resolve_source
from batchgen_data.planner.bandwidth import open_stream, stream_bandwidth
from batchgen_data.planner.cost import CostModel, Profile
from batchgen_data.planner.meta import model_sizes
from batchgen_data.planner.plan import Budget, Plan
from batchgen_data.planner.profile import profile_model, stream_budget
from batchgen_data.planner.search import Problem, predictor, search
from batchgen_data.planner.sizes import ModelSizes
from batchgen_data.planner.timing import Shape, pass_of, timed
from batchgen_data.planner.workload import Workload
from batchgen_data.runtime.resources import available_cpus
from batchgen_data.runtime.startup import start_engine

CPU, GIB, MIB = torch.device("cpu"), 2**30, 2**20
STEP_ROUNDS, SWEEP_ROUNDS = 5, 3
# Configurations of the sweep that are this much slower than the best are not repeated.
FAR = 1.2
JOB = Workload.uniform(48, 32, 12)
# Engine options, and the passes to time under them.
Case = tuple[dict[str, Any], list[Shape]]


def model_folder(name: str, scratch: Path) -> str:
    """SmolLM2, or a random model with its tokenizer, written to `scratch`."""
    if name == "smollm2":
        return smollm2_folder()
    shape: dict[str, Any] = {
        "vocab_size": 49152,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    }
    experts = {
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    }
    config: Any = {
        "moe": lambda: Qwen3MoeConfig(**shape, **experts),
        "small": lambda: LlamaConfig(**{**shape, "hidden_size": 256, "head_dim": 32}, intermediate_size=768),
    }[name]()
    torch.manual_seed(0)
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(scratch / name)
        AutoTokenizer.from_pretrained(smollm2_folder()).save_pretrained(scratch / name)
    return str(scratch / name)


def cases(sizes: ModelSizes) -> list[Case]:
    """Configurations of one model and the passes to time in each."""
    decode, many = Shape(16, 1, 200), Shape(64, 1, 200)
    host: dict[str, Any] = {"kv_residence": "host", "host_memory": 512 * MIB, "kv_memory": 16 * MIB}
    streamed = {"weights_memory": (sizes.least_weights_bytes + sizes.weights_bytes) // 2}
    resident: Case = (
        {},
        [Shape(4, 1, 200), decode, many, Shape(128, 1, 400), Shape(4, 96, 0), Shape(2, 192, 100)],
    )
    if sizes.is_sparse:
        return [
            resident,
            ({"attention_sub_batch": 16}, [many]),
            ({"attention_sub_batch": 8, "moe_batch_tokens": 32}, [many]),
            ({**host, "attention_sub_batch": 16}, [decode, many]),
            ({**host, "attention_sub_batch": 8, "moe_batch_tokens": 32}, [many]),
            (streamed, [Shape(4, 1, 200), many]),
            ({**host, **streamed, "attention_sub_batch": 16}, [many]),
        ]
    combined = {"yield_at": (sizes.layers[0].feed_forward,)}
    return [
        resident,
        ({"attention_sub_batch": 16, **combined}, [many]),
        (host, [decode, many]),
        ({**host, "kv_memory": 4 * MIB, **combined}, [many]),
        (streamed, [decode, many]),
    ]


def steps(folder: str, sizes: ModelSizes, profile: Profile, num_threads: int) -> list[dict[str, Any]]:
    """Predicted and measured seconds of every case."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as opened, torch.inference_mode():
        stream = open_stream(local_folder(resolve_source(folder)), torch.float32, CPU, stream_budget(sizes))
        assert stream is not None
        opened.callback(stream.close)
        passes = []
        for options, shapes in cases(sizes):
            settings = {"kv_memory": 1 * GIB, **options}
            engine, _ = start_engine(
                resolve_source(folder), EngineConfig(num_threads=num_threads, **settings)
            )
            opened.callback(engine.close)
            for shape in shapes:
                row = {
                    "options": options,
                    "rows": shape.rows,
                    "tokens": shape.tokens,
                    "before": shape.before,
                    "measured_s": float("inf"),
                }
                rows.append(row)
                executor: Any = engine._executor
                passes.append((row, executor, pass_of(executor, shape), Plan(**settings), shape))
        disk_bytes_s = 0.0
        for _ in range(STEP_ROUNDS):
            for row, executor, step, plan, _ in passes:
                torch.set_num_threads(num_threads)  # as the engine's own thread does; lanes leave one
                timed(executor, step)
                torch.set_num_threads(num_threads)
                row["measured_s"] = min(row["measured_s"], timed(executor, step))
                if plan.weights_memory is not None:
                    disk_bytes_s = max(disk_bytes_s, stream_bandwidth(stream))
    budget = Budget(device_bytes=8 * GIB, disk_bytes_s=disk_bytes_s)
    for row, _, _, plan, shape in passes:
        row["predicted_s"] = CostModel(sizes, profile, budget, plan).pass_s(shape.pass_shape)
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        print(
            f"  {row['rows']:4} x {row['tokens']:3} tokens after {row['before']:3}: predicted "
            f"{row['predicted_s'] * 1e3:7.1f} ms, measured {row['measured_s'] * 1e3:7.1f} ms, "
            f"{row['error']:+4.0%}  {shown(row['options'])}",
            flush=True,
        )
    return rows


def shown(options: dict[str, Any]) -> str:
    """Options in few words."""
    return (
        ", ".join(
            f"{name}={value // MIB} MiB"
            if name.endswith("_memory")
            else f"{name}={value[0] if isinstance(value, tuple) else value}"
            for name, value in options.items()
            if name != "host_memory"
        )
        or "the defaults"
    )


def sweep(folder: str, problem: Problem, num_threads: int) -> dict[str, Any]:
    """Completion times under every configuration of a grid and under the plan's own choice."""
    plan = search(problem).best
    names = ("max_sequences", "max_step_tokens", "attention_sub_batch", "moe_batch_tokens", "yield_at")
    chosen = {name: value for name, value in plan.to_options().items() if name in names}
    assert (plan.weights_memory, plan.kv_residence) == (None, "device")
    grid: list[dict[str, Any]] = [
        {"max_sequences": sequences, "max_step_tokens": tokens}
        for sequences in (8, 16, 48)
        for tokens in (64, 256, 1024)
    ]
    if problem.sizes.is_sparse:
        grid += [{"attention_sub_batch": 8}, {"attention_sub_batch": 16, "moe_batch_tokens": 32}]
    prompts = [
        [(row * 7919 + at * 104_729 + 17) % 40_000 + 10 for at in range(length)]
        for row, length in enumerate(problem.workload.prompt_tokens)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=problem.workload.output_tokens[0], ignore_eos=True)
    predict = predictor(problem)
    results: list[dict[str, Any]] = []
    with ExitStack() as opened:
        engines = []
        for options in [chosen, *grid]:
            settings = {"kv_memory": 512 * MIB, **options}
            llm = opened.enter_context(LLM(folder, num_threads=num_threads, prefix_reuse=False, **settings))
            llm.generate(prompts[:2], SamplingParams(temperature=0.0, max_tokens=2))
            predicted = predict(Plan(**settings))
            assert predicted is not None
            results.append({"options": options, "seconds": float("inf"), "predicted_s": predicted.bct_s})
            engines.append(llm)
        for _ in range(SWEEP_ROUNDS):
            best = min(one["seconds"] for one in results)
            for result, llm in zip(results, engines, strict=True):
                if result["seconds"] < float("inf") and result["seconds"] > FAR * best:
                    continue
                started = time.perf_counter()
                llm.generate(prompts, sampling)
                result["seconds"] = min(result["seconds"], time.perf_counter() - started)
    for result in results:
        print(
            f"  {result['seconds']:7.3f} s, predicted {result['predicted_s']:7.3f} s  "
            f"{'chosen: ' if result is results[0] else ''}{shown(result['options'])}",
            flush=True,
        )
    best = min(one["seconds"] for one in results)
    return {"times": results, "chosen_over_best": results[0]["seconds"] / best}


def main() -> None:
    """Profile, time steps, sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps-only", action="store_true")
    parser.add_argument("--models", default="smollm2,moe,small")
    options = parser.parse_args()
    num_threads = available_cpus()
    torch.set_num_threads(num_threads)
    report: dict[str, Any] = {"machine": machine(), "threads": num_threads, "models": {}}
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models.split(","):
            folder = model_folder(name, Path(scratch))
            path, config, context_tokens = read_config(resolve_source(folder))
            sizes = model_sizes(config, torch.float32, context_tokens)
            started = time.perf_counter()
            profile = profile_model(
                config, sizes, device=CPU, dtype=torch.float32, num_threads=num_threads, folder=path
            )
            profile_s = time.perf_counter() - started
            print(f"{name}: profiled in {profile_s:.0f} s", flush=True)
            result: dict[str, Any] = {"profile_s": profile_s, "profile": profile.to_dict()}
            result["steps"] = steps(folder, sizes, profile, num_threads)
            errors += [abs(row["error"]) for row in result["steps"]]
            if not options.steps_only:
                budget = Budget(device_bytes=sizes.weights_bytes + 2 * GIB)
                problem = Problem(sizes=sizes, profile=profile, budget=budget, workload=JOB)
                result["sweep"] = sweep(folder, problem, num_threads)
                print(f"{name}: the choice takes {result['sweep']['chosen_over_best']:.3f} of the best")
            report["models"][name] = result
    near = sum(error <= 0.15 for error in errors)
    report |= {"median_error": median(errors), "worst_error": max(errors), "within_15_percent": near}
    print(
        f"step time of {len(errors)} configurations: {near} within 15 % ({near / len(errors):.0%}), median "
        f"error {median(errors):.1%}, worst {max(errors):.1%}"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "plan_accuracy.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
