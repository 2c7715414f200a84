"""A mixture of experts with real weights: SmolLM2, upcycled, through every tier.

    python benchmarks/upcycle.py [--rows 16] [--new-tokens 24] [--experts 8] [--modes resident,...]

Each MLP is copied into E experts behind a random router whose top-k weights sum to 1: whatever the router
picks, the output is the dense model's. Logits of both are compared in transformers on real text, then greedy
tokens of MT-bench and GSM8K prompts, dense against upcycled, in each tier mode. Writes
bench-results/upcycle.json. The upcycled model takes 2.6 GB of disk while this runs, and 2.6 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fidelity import TIE, logit_gap, prompts
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, MixtralConfig
from workload import DATA, RESULTS, machine, smollm2_folder

LOGITS_TOLERANCE = 1e-3

# Sizes for SmolLM2-135M: 1.4 MiB of KV are 16 tokens in all layers; a row of 400 tokens takes 18 MiB.
MODES: dict[str, dict[str, Any]] = {
    "resident": {"kv_memory": "2GiB"},
    "yields at sparse blocks": {"kv_memory": "2GiB", "attention_sub_batch": 4},
    # Pages of 4 tokens: the reserve of two does not reach to a row's end, so that rows are suspended.
    "few KV pages": {"kv_memory": "40MiB", "page_tokens": 4},
    "few KV pages and a host tier": {
        "kv_memory": "40MiB",
        "page_tokens": 4,
        "host_memory": "256MiB",
    },
    "KV in the host tier": {"kv_residence": "host", "host_memory": "1GiB", "kv_memory": "4MiB"},
    "weights streamed": {"kv_memory": "1GiB", "weights_memory": "900MiB"},
    "KV in the host tier, weights streamed": {
        "kv_residence": "host",
        "host_memory": "1GiB",
        "kv_memory": "4MiB",
        "weights_memory": "900MiB",
    },
}

_EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MLP = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate_proj|up_proj|down_proj)\.weight")
# What both configs mean the same by.
_SHARED_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
)


def upcycle(
    dense_folder: str | Path, out_folder: str | Path, num_experts: int = 8, top_k: int = 2, *, seed: int = 0
) -> Path:
    """Write a Mixtral checkpoint that computes what the Llama checkpoint in `dense_folder` does.

    One file per layer is written, so that little more than one layer is in memory.

    Args:
        dense_folder: config.json, safetensors, tokenizer files.
        out_folder: where to write; made when absent, empty otherwise.
        num_experts: copies of each MLP.
        top_k: experts of each token.
        seed: of the routers.

    Returns:
        `out_folder`.

    Raises:
        ValueError: no Llama, biases that Mixtral has no place for, an occupied folder, top_k out of range.
    """
    dense, out = Path(dense_folder), Path(out_folder)
    config = AutoConfig.from_pretrained(dense)
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise ValueError(f"{dense} is no Llama without biases, but {config.model_type}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must be from 1 to num_experts={num_experts}")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"{out} is not empty")
    for file in dense.iterdir():
        if file.name != "config.json" and "safetensors" not in file.name:
            shutil.copy(file, out / file.name)
    sparse = MixtralConfig(
        **{name: getattr(config, name) for name in _SHARED_SETTINGS},
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        architectures=["MixtralForCausalLM"],
    )
    sparse.save_pretrained(out)

    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    groups = _by_layer(dense)
    for number, names in enumerate(groups.values(), start=1):
        tensors: dict[str, torch.Tensor] = {}
        for name, path in names:
            with safe_open(path, framework="pt") as opened:
                tensor = opened.get_tensor(name)
            tensors |= _upcycled(name, tensor, num_experts, generator)
        file_name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file(tensors, out / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file_name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return out


def _by_layer(folder: Path) -> dict[str, list[tuple[str, Path]]]:
    """Tensor names with their files, by layer; what belongs to no layer comes under its own name."""
    groups: dict[str, list[tuple[str, Path]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                layer = re.match(r"model\.layers\.\d+", name)
                groups.setdefault(layer[0] if layer else name, []).append((name, path))
    return groups


def _upcycled(
    name: str, tensor: torch.Tensor, num_experts: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """What becomes of one tensor; a layer's router comes with its down projection."""
    match = _MLP.fullmatch(name)
    if match is None:
        return {name: tensor}
    block = f"{match[1]}.block_sparse_moe"
    weight = _EXPERT_NAMES[match[2]]
    tensors = {f"{block}.experts.{expert}.{weight}.weight": tensor.clone() for expert in range(num_experts)}
    if weight == "w2":
        hidden_size = tensor.shape[0]
        router = torch.randn(num_experts, hidden_size, generator=generator) * hidden_size**-0.5
        tensors[f"{block}.gate.weight"] = router.to(tensor.dtype)
    return tensors


def logits_difference(dense: Any, sparse: Any, token_ids: list[list[int]]) -> float:
    """Largest difference of any logit, over all texts."""
    with torch.inference_mode():
        return max(
            float((dense(torch.tensor([ids])).logits - sparse(torch.tensor([ids])).logits).abs().max())
            for ids in token_ids
        )


def texts(data: Path, rows: int) -> Iterator[str]:
    """MT-bench and GSM8K in turn."""
    for pair in zip(prompts(data, rows, 0), prompts(data, 0, rows), strict=False):
        yield from pair


def main() -> None:
    """Upcycle, compare, print rows equal for each mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--modes", default=";".join(MODES), help="names, separated by semicolons")
    options = parser.parse_args()

    from transformers import AutoModelForCausalLM

    from batchgen_data import LLM, SamplingParams

    dense_folder = smollm2_folder()
    rows = list(texts(options.data, options.rows))[: options.rows]
    settings = SamplingParams(temperature=0, max_tokens=options.new_tokens)
    common = {"num_threads": options.threads, "max_context_tokens": 1024}
    report: dict[str, Any] = {"machine": machine(), "rows": len(rows), "new_tokens": options.new_tokens}
    with LLM(dense_folder, **common, kv_memory="1GiB") as llm:
        wanted = [outcome.token_ids for outcome in llm.generate(rows, settings)]
        prompt_ids = [
            llm.tokenizer.apply_chat_template(
                [{"role": "user", "content": row}], add_generation_prompt=True, return_dict=False
            )
            for row in rows
        ]
    with tempfile.TemporaryDirectory() as scratch:
        sparse_folder = str(upcycle(dense_folder, Path(scratch) / "moe", options.experts, options.top_k))
        dense = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.float32)
        sparse = AutoModelForCausalLM.from_pretrained(sparse_folder, dtype=torch.float32)
        whole = [ids + tokens for ids, tokens in zip(prompt_ids, wanted, strict=True)]
        off = logits_difference(dense, sparse, whole)
        del sparse
        print(
            f"logits of {sum(map(len, whole)):,} tokens: largest difference {off:.1e} "
            f"({'within' if off <= LOGITS_TOLERANCE else 'ABOVE'} {LOGITS_TOLERANCE})",
            flush=True,
        )
        report["logits_difference"] = off
        for mode in options.modes.split(";"):
            with LLM(sparse_folder, **common, **MODES[mode]) as llm:
                started = time.perf_counter()
                outcomes = llm.generate(rows, settings)
                seconds = time.perf_counter() - started
                statistics = llm.statistics()
            differences = [
                (row, *logit_gap(dense, prompt_ids[row], want, outcome.token_ids))
                for row, (want, outcome) in enumerate(zip(wanted, outcomes, strict=True))
                if outcome.token_ids != want
            ]
            ties = sum(gap < TIE for _, _, gap in differences)
            print(
                f"{mode}: {len(rows) - len(differences)} of {len(rows)} rows equal, {ties} differ at a tie, "
                f"{statistics['yields']} suspensions, {seconds:.0f} s",
                flush=True,
            )
            for row, at, gap in differences:
                print(f"  row {row}: token {at}, logit gap {gap:.2e}")
            report[mode] = {"differences": differences, "seconds": seconds, "statistics": statistics}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "upcycle.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
