"""Prompt lookup for the last rows: how much sooner they end, with the same tokens.

    python benchmarks/prompt_lookup.py [--rows 8] [--at-once 1] [--new-tokens 128] [--threads 2]

SmolLM2-135M-Instruct, greedy, three tasks: repeat a text (GSM8K questions), pick sentences out of one (worked
answers of GSM8K), and chat (MT-bench first turns), in which there is little to copy. Groups of `--at-once`
rows stand for a tail; each group runs with and without the callback, in turn. Compares all tokens. Writes
bench-results/prompt_lookup.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from workload import DATA, RESULTS, machine, need, smollm2_folder

from batchgen_data import LLM, PromptLookup, SamplingParams

WAYS = ("without", "with")


def tasks(data: Path, rows: int) -> dict[str, list[str]]:
    """Prompts of each task."""

    def read(name: str, what: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in need(data / name, what).read_text().splitlines()]

    maths = read("gsm8k_test.jsonl", "GSM8K's test set (openai/grade-school-math)")
    chat = read("mt_bench_questions.jsonl", "MT-bench questions (lm-sys/FastChat)")
    return {
        "repeat": [f"Repeat this text word for word:\n\n{row['question']}" for row in maths[:rows]],
        "extract": [
            "Here are a problem and its solution. Quote all sentences that contain a number.\n\n"
            f"{row['question']}\n\n{row['answer']}"
            for row in maths[rows : 2 * rows]
        ],
        # Of all categories.
        "chat": [row["turns"][0] for row in chat[:: max(1, len(chat) // rows)][:rows]],
    }


def main() -> None:
    """Run each task both ways and print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    settings = SamplingParams(temperature=0, max_tokens=options.new_tokens)
    common: dict[str, Any] = {"num_threads": options.threads, "kv_memory": "256MiB", "prefix_reuse": False}
    report: dict[str, Any] = {"machine": machine(), "options": {**vars(options), "data": None}, "tasks": {}}
    with (
        LLM(smollm2_folder(), **common) as plain,
        LLM(smollm2_folder(), callbacks=[PromptLookup(max_active=options.at_once)], **common) as looking,
    ):
        engines = dict(zip(WAYS, (plain, looking), strict=True))
        for llm in engines.values():
            llm.generate(["Hello"], SamplingParams(max_tokens=4))
        for task, prompts in tasks(options.data, options.rows).items():
            report["tasks"][task] = result = run_task(engines, prompts, settings, options.at_once)
            print(
                f"{task}: {result['without_s']:.1f} s without, {result['with_s']:.1f} s with: "
                f"{result['ratio']:.2f}x; {result['tokens_per_pass']:.2f} tokens a pass and row, "
                f"{result['accepted_per_draft_token']:.0%} of the guessed tokens right, "
                f"{result['num_equal']} of {result['num_rows']} rows equal",
                flush=True,
            )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "prompt_lookup.json").write_text(json.dumps(report, indent=1))


def run_task(
    engines: dict[str, LLM], prompts: list[str], settings: SamplingParams, at_once: int
) -> dict[str, Any]:
    """Seconds of both ways over all groups, which take turns in going first, and what drafts gave."""
    seconds = dict.fromkeys(WAYS, 0.0)
    tokens: dict[str, list[Any]] = {way: [] for way in WAYS}
    before = engines["with"].statistics()
    for number, first in enumerate(range(0, len(prompts), at_once)):
        group = prompts[first : first + at_once]
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            started = time.perf_counter()
            outcomes = engines[way].generate(group, settings)
            seconds[way] += time.perf_counter() - started
            tokens[way] += [outcome.token_ids for outcome in outcomes]
    after = engines["with"].statistics()
    counts = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
    return {
        "without_s": seconds["without"],
        "with_s": seconds["with"],
        "ratio": seconds["without"] / seconds["with"],
        "num_rows": len(prompts),
        "num_equal": sum(a == b for a, b in zip(tokens["without"], tokens["with"], strict=True)),
        "generated_tokens": counts["generated_tokens"],
        "accepted_draft_tokens": counts["accepted_draft_tokens"],
        "drafted_tokens": counts["drafted_tokens"],
        "tokens_per_pass": counts["generated_tokens"]
        / (counts["generated_tokens"] - counts["accepted_draft_tokens"]),
        "accepted_per_draft_token": counts["accepted_draft_tokens"] / max(1, counts["drafted_tokens"]),
    }


if __name__ == "__main__":
    main()
