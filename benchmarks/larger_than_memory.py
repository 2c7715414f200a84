"""A model several times larger than its memory: weights streamed once per pass, against disk offload.

    python benchmarks/larger_than_memory.py [--limit 1GiB] [--batch-sizes 64,96,112]

Writes a random mixture-of-experts checkpoint (3.3 GB of float32, in a temporary folder, deleted at the end),
and completes GSM8K questions with it in processes of one memory cgroup (version 1; needs root):

- ours: all rows decode together, experts are streamed from the checkpoint once per pass;
- transformers `generate` with accelerate's disk offload (another 3.3 GB of disk), in batches. A full run
  takes it hours: each batch size runs one batch for a few tokens, and the time of the whole job follows from
  its prefill and its mean decode pass. A batch size that the memory does not hold is killed by the kernel.

Loading is left out on both sides. Before and after ours the disk's bandwidth is measured (O_DIRECT, with one,
two and four reads at a time; the best of the three on average), which bounds what streaming can do. Writes
bench-results/larger_than_memory.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workload import DATA, RESULTS, machine, need

from batchgen_data.config import parse_bytes

CGROUP = Path("/sys/fs/cgroup/memory")
VOCABULARY = 8192
READ_BYTES = 4 * 2**20


def questions(data: Path, count: int) -> list[str]:
    """The first `count` questions of the GSM8K test set."""
    path = need(data / "gsm8k_test.jsonl", "the test set of openai/grade-school-math")
    return [json.loads(line)["question"] for line in path.read_text().splitlines()[:count]]


def write_checkpoint(folder: Path, texts: list[str], num_layers: int) -> None:
    """A random Qwen3-MoE model and a tokenizer learnt from the texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>").save_pretrained(
        folder
    )
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCABULARY,
        hidden_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def in_cgroup(name: str, limit_bytes: int, options: list[str], timeout_s: float) -> dict[str, Any] | None:
    """Run this script in a process of a new memory cgroup; None where the kernel killed it for its memory."""
    group = CGROUP / f"batchgen-{name}-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        sys.exit(f"cannot make a memory cgroup ({error}): this needs root and cgroup version 1 in {CGROUP}")

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        done = subprocess.run(
            [sys.executable, __file__, "--child", name, *options],
            preexec_fn=enter,
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        peak_bytes = int((group / "memory.max_usage_in_bytes").read_text())
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)  # the kernel still counts its pages
    if done.returncode == -9:
        return None
    if done.returncode:
        sys.exit(f"{name} failed with exit code {done.returncode}")
    return {**json.loads(done.stdout.splitlines()[-1]), "peak_bytes": peak_bytes}


def disk_bandwidth(folder: Path) -> dict[int, float]:
    """Bytes/s of reading 1 GiB of the checkpoint past the page cache, by number of reads at a time."""
    import mmap

    files = sorted(folder.glob("*.safetensors"))
    rates = {}
    for depth in (1, 2, 4):
        buffers = [mmap.mmap(-1, READ_BYTES) for _ in range(depth)]
        descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
        spans = [
            (descriptor, offset)
            for descriptor in descriptors
            for offset in range(0, os.fstat(descriptor).st_size, READ_BYTES)
        ][: 2**30 // READ_BYTES]

        def read(number: int, spans: Any = spans, buffers: Any = buffers) -> int:
            own = spans[number :: len(buffers)]
            return sum(os.preadv(descriptor, [buffers[number]], offset) for descriptor, offset in own)

        started = time.perf_counter()
        with ThreadPoolExecutor(depth) as threads:
            total = sum(threads.map(read, range(depth)))
        rates[depth] = total / (time.perf_counter() - started)
        for descriptor in descriptors:
            os.close(descriptor)
    return rates


def run_ours(options: argparse.Namespace) -> dict[str, Any]:
    """All rows in one engine."""
    from batchgen_data import LLM, SamplingParams

    texts = questions(options.data, options.rows)
    started = time.perf_counter()
    with LLM(
        str(options.folder),
        weights_memory=options.weights_memory,
        kv_memory=options.kv_memory,
        page_tokens=32,
        max_sequences=options.rows,
        max_step_tokens=max(options.rows, options.step_tokens),
    ) as llm:
        llm.generate("warm up", SamplingParams(max_tokens=2), apply_chat_template=False)
        loaded_s = time.perf_counter() - started
        before = llm.statistics()
        started = time.perf_counter()
        outcomes = llm.generate(
            texts,
            SamplingParams(temperature=0.0, max_tokens=options.new_tokens, ignore_eos=True),
            apply_chat_template=False,
        )
        took_s = time.perf_counter() - started
        after = llm.statistics()
    assert all(len(outcome.token_ids) == options.new_tokens for outcome in outcomes)
    return {
        "loaded_s": loaded_s,
        "took_s": took_s,
        "passes": after["steps"] - before["steps"],
        "prompt_tokens": after["input_tokens"] - before["input_tokens"],
        "bytes_read": after["weights"]["bytes_read"] - before["weights"]["bytes_read"],
        "wait_s": after["weights"]["wait_s"] - before["weights"]["wait_s"],
        "weights": after["weights"],
    }


def run_theirs(options: argparse.Namespace) -> dict[str, Any]:
    """One batch: seconds of the prefill and of each decode pass after it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.folder, padding_side="left")
    layers = json.loads((options.folder / "config.json").read_text())["num_hidden_layers"]
    device_map = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    device_map |= {f"model.layers.{layer}": "disk" for layer in range(layers)}
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        options.folder,
        dtype=torch.float32,
        device_map=device_map,
        offload_folder=options.folder / "offload",
    )
    loaded_s = time.perf_counter() - started
    batch = tokenizer(questions(options.data, options.batch_size), return_tensors="pt", padding=True)
    times = [time.perf_counter()]

    def stamp(_: Any, logits: Any) -> Any:
        times.append(time.perf_counter())
        return logits

    with torch.inference_mode():
        model.generate(
            **batch,
            do_sample=False,
            min_new_tokens=options.measured_tokens,
            max_new_tokens=options.measured_tokens,
            logits_processor=LogitsProcessorList([stamp]),
        )
    passes_s = [end - start for start, end in itertools.pairwise(times)]
    return {"loaded_s": loaded_s, "prefill_s": passes_s[0], "decode_s": passes_s[1:]}


def main() -> None:
    """Write the checkpoint, run both sides, print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", default="1GiB", help="memory of each side, caches and Python included")
    parser.add_argument("--weights-memory", default="200MiB", help="of it, ours for weights")
    parser.add_argument("--kv-memory", default="240MiB", help="of it, ours for keys and values")
    parser.add_argument("--step-tokens", type=int, default=4096, help="tokens of our prefill passes")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8, help="0.4 GB each")
    parser.add_argument("--batch-sizes", default="64,96,112", help="of transformers")
    parser.add_argument("--measured-tokens", type=int, default=4, help="that transformers really generates")
    parser.add_argument("--sides", default="ours,theirs")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here, or use the one that is here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--batch-size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps((run_ours if options.child == "ours" else run_theirs)(options)))
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="batchgen-larger-than-memory-"))
    try:
        compare(options, folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def compare(options: argparse.Namespace, folder: Path) -> None:
    """Run both sides on the checkpoint in `folder`, made first where it is missing."""
    limit_bytes = parse_bytes(options.limit, "--limit")
    texts = questions(options.data, options.rows)
    if not (folder / "config.json").exists():
        print("writing the checkpoint", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        # In a process of its own, so that this one does not keep the memory of the whole model.
        writer = multiprocessing.get_context("spawn").Process(
            target=write_checkpoint, args=(folder, texts, options.layers)
        )
        writer.start()
        writer.join()
        if writer.exitcode:
            sys.exit("writing the checkpoint failed")
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(
        f"weights {weight_bytes / 1e9:.2f} GB, {weight_bytes / limit_bytes:.1f} times the limit of "
        f"{options.limit}"
    )
    shared = ["--folder", str(folder), "--data", str(options.data)]
    shared += ["--rows", str(options.rows), "--new-tokens", str(options.new_tokens)]
    report: dict[str, Any] = {"machine": machine(), "weight_bytes": weight_bytes, "limit_bytes": limit_bytes}
    rates = [disk_bandwidth(folder)]
    sides = options.sides.split(",")
    if "ours" in sides:
        own = ["--weights-memory", options.weights_memory, "--kv-memory", options.kv_memory]
        own += ["--step-tokens", str(options.step_tokens)]
        report["ours"] = ours = in_cgroup("ours", limit_bytes, [*shared, *own], 1800)
        if ours is None:
            sys.exit(f"ours does not fit into {options.limit}: lower --weights-memory or --kv-memory")
        rates.append(disk_bandwidth(folder))
        rate = max(statistics.mean(one[depth] for one in rates) for depth in rates[0])
        bound_s = ours["bytes_read"] / rate
        report["ours"]["bound_s"] = bound_s
        report["disk_bytes_s"] = rates
        print(
            f"disk {rate / 1e9:.2f} GB/s ({min(min(one.values()) for one in rates) / 1e9:.2f} to "
            f"{max(max(one.values()) for one in rates) / 1e9:.2f})\n"
            f"ours: {options.rows} rows in {ours['took_s']:.1f} s, {ours['passes']} passes, peak "
            f"{ours['peak_bytes'] / 2**20:.0f} MiB; {ours['bytes_read'] / 1e9:.1f} GB read, which the disk "
            f"allows in {bound_s:.1f} s: {bound_s / ours['took_s']:.0%} of the bound"
        )
    if "theirs" in sides:
        report["theirs"] = {}
        for batch_size in map(int, options.batch_sizes.split(",")):
            own = ["--batch-size", str(batch_size), "--measured-tokens", str(options.measured_tokens)]
            result = in_cgroup("theirs", limit_bytes, [*shared, *own], 1800)
            shutil.rmtree(folder / "offload", ignore_errors=True)
            if result is None:
                print(f"transformers, batches of {batch_size}: killed, more than {options.limit}")
                continue
            decode_s = statistics.mean(result["decode_s"])
            batches = -(-options.rows // batch_size)
            result["took_s"] = batches * (result["prefill_s"] + (options.new_tokens - 1) * decode_s)
            report["theirs"][batch_size] = result
            print(
                f"transformers, batches of {batch_size}: prefill {result['prefill_s']:.1f} s, decode "
                f"{decode_s:.1f} s a pass, peak {result['peak_bytes'] / 2**20:.0f} MiB; {batches} batches "
                f"would take {result['took_s']:.0f} s"
            )
    if report.get("ours") and report.get("theirs"):
        best = min(report["theirs"].values(), key=lambda result: result["took_s"])
        print(f"ours is {best['took_s'] / report['ours']['took_s']:.1f} times as fast as its best batch size")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "larger_than_memory.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
