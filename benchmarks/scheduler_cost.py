"""What the scheduler costs per step at 256 active sequences, and as a share of a real step.

    python benchmarks/scheduler_cost.py [--sequences 256]

Decoding 256 sequences: seconds of planning, accepting and packing per step beside the forward pass, all
measured in the same run on SmolLM2-135M. Writes bench-results/scheduler_cost.json.
"""

from __future__ import annotations

import argparse
import json

from workload import RESULTS, machine, smollm2_folder

from batchgen_data import LLM, SamplingParams


def main() -> None:
    """Run 256 short rows and read the engine's clocks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=80)
    options = parser.parse_args()
    with LLM(smollm2_folder(), max_sequences=options.sequences) as llm:
        # Different prompts (equal ones would run once) that cross page boundaries while they decode; the
        # common prefix keeps prefill short.
        prefix = list(range(100, 228))
        prompts = [[*prefix, *range(i + 5, i + 55)] for i in range(options.sequences)]
        llm.generate(prompts, SamplingParams(max_tokens=options.new_tokens, ignore_eos=True))
        statistics = llm.statistics()
    timings, steps = statistics["timings"], statistics["steps"]
    total = statistics["schedule_s"] + statistics["run_s"]
    report = {
        "machine": machine(),
        "sequences": options.sequences,
        "steps": steps,
        "schedule_ms_per_step": 1e3 * statistics["schedule_s"] / steps,
        "pack_ms_per_step": 1e3 * timings["pack_s"] / steps,
        "step_ms": 1e3 * total / steps,
        "schedule_share": statistics["schedule_s"] / total,
        "pack_share": timings["pack_s"] / total,
        "sample_share": timings["sample_s"] / total,
    }
    print(
        f"{steps} steps of {options.sequences} sequences: {report['step_ms']:.1f} ms a step, of which "
        f"scheduling {report['schedule_ms_per_step']:.2f} ms ({report['schedule_share']:.2%}), "
        f"packing {report['pack_ms_per_step']:.2f} ms ({report['pack_share']:.2%}), "
        f"sampling {report['sample_share']:.2%}"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scheduler_cost.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
