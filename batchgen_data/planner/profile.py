"""Times a model's modules on the real device: a few layers of each kind, with random weights.

The passes are those of the runtime: its executor packs and runs them, as one unit, in lanes, in sub-batches
and through the KV staging. So what packing, attention through block tables, sampling, switching and copying
cost is all in the costs, and is measured where it is paid.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from batchgen_data.errors import PlanError
from batchgen_data.models.experts import install_experts
from batchgen_data.models.kv_pool import KVPool, LayerShape
from batchgen_data.models.kv_staging import StagedKVPool
from batchgen_data.models.load import quiet_transformers
from batchgen_data.models.wrap import install_yield_points
from batchgen_data.planner.bandwidth import copy_bandwidth, open_stream, stream_bandwidth
from batchgen_data.planner.cost import CostModel, LayerCosts, PassCosts, Profile
from batchgen_data.planner.meta import layer_shapes
from batchgen_data.planner.plan import Budget, Plan
from batchgen_data.planner.roofline import Roofline, fit_roofline
from batchgen_data.planner.sizes import ModelSizes
from batchgen_data.planner.timing import Run, Sample, Shape, Stopwatch, measure
from batchgen_data.runtime.executor import TorchExecutor
from batchgen_data.runtime.resources import free_memory_bytes

PAGE_TOKENS = 64
# So much that one layer's weights are gone from the processor's caches when its turn comes again.
_LEAST_WEIGHTS_BYTES = 128 * 2**20
_MOST_KV_BYTES, _MOST_KV_SHARE = 512 * 2**20, 0.25
# About so long each way of running passes is measured.
_SECONDS = 8.0

_DECODING = (1, 2, 4, 8, 16, 24, 32, 64, 128, 256)
# Longer contexts add the reading of keys and values only: fewer points tell how much.
_DECODING_LONG = (4, 16, 64)
_PREFILLS = (32, 128, 512)
_CONTEXTS = (64, 512)
_SHORT_PROMPTS = 16
# (rows, sub-batches) of passes that tell what sub-batches and copies cost beyond their work.
_SUB_BATCHES = ((16, 4), (64, 8))
_STAGED = ((16, 1), (16, 4), (64, 4))
_LEAST_LANE_SHAPES = 8
_SHARES = tuple(step / 8 for step in range(13))
_TURNS_S = (0.0, 2e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4)


def profile_model(
    config: Any,
    sizes: ModelSizes,
    *,
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int,
    folder: Path | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Measure a model on a device; takes some ten seconds, and up to a minute where a layer is large.

    Args:
        config: the model's.
        sizes: from `planner.meta.model_sizes`.
        device: where to run.
        dtype: the running type.
        num_threads: CPU threads, as the engine would use.
        folder: of the checkpoint, whose files are read to learn the disk's bandwidth.
        notify: called with what is being measured.

    Raises:
        PlanError: not even the layers to measure fit in memory.
    """
    callers_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model, measured = _representative(config, sizes, device, dtype)
        shapes = layer_shapes(model)
        bench = _Bench(model, measured, shapes, device, num_threads if device.type == "cpu" else 1)
        with torch.inference_mode():
            notify("passes as one unit and in lanes" if bench.num_threads > 1 else "passes as one unit")
            together, lanes = bench.passes()
            profile = Profile(
                together=together,
                lanes=lanes,
                lane_tokens=bench.lane_tokens if lanes else 0,
                num_lanes=bench.num_threads,
                copy_bytes_s=copy_bandwidth(
                    device, PAGE_TOKENS * max(s.token_bytes for s in shapes.values())
                ),
            )
            notify("sub-batches and copies between the tiers")
            profile = bench.sub_batches(profile)
            if measured.is_sparse and device.type == "cpu":
                # The very function, and resident experts come one by one as well.
                profile = dataclasses.replace(profile, streamed_mlp=together.layers["sparse"].mlp)
            elif measured.is_sparse:
                notify("experts one by one, as where they are streamed")
                profile = dataclasses.replace(profile, streamed_mlp=bench.experts_one_by_one())
        del model, bench
        gc.collect()
        disk_bytes_s = math.inf
        if folder is not None and any(folder.glob("*.safetensors")):
            notify("reading the checkpoint")
            disk_bytes_s = _streaming(folder, sizes, device, dtype)
    finally:
        torch.set_num_threads(callers_threads)
    return dataclasses.replace(
        profile,
        # JSON has no infinity; without files nothing is streamed either.
        disk_bytes_s=min(disk_bytes_s, 1e15),
        facts={
            "architecture": sizes.architecture,
            "device": device_name(device),
            "dtype": str(dtype).removeprefix("torch."),
            "threads": num_threads,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )


def _streaming(folder: Path, sizes: ModelSizes, device: torch.device, dtype: torch.dtype) -> float:
    stream = open_stream(folder, dtype, device, stream_budget(sizes))
    if stream is None:
        return math.inf  # so small a model is never streamed
    try:
        return stream_bandwidth(stream)
    finally:
        stream.close()


def stream_budget(sizes: ModelSizes) -> int:
    """Bytes for weights with which to learn how fast they are streamed: the least, and more buffers."""
    widest = max(layer.expert_bytes or layer.core_bytes for layer in sizes.layers)
    some = sizes.least_weights_bytes + 16 * 2**20 + 8 * widest
    return min(some, (sizes.least_weights_bytes + sizes.weights_bytes) // 2)


def device_name(device: torch.device) -> str:
    """The device's own name, as far as it tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"cpu: {names[0]}" if names else "cpu"


def _representative(
    config: Any, sizes: ModelSizes, device: torch.device, dtype: torch.dtype
) -> tuple[PreTrainedModel, ModelSizes]:
    """The model with its first layers only, and its sizes: each kind, and enough to leave the caches."""
    each = [layer for layer in sizes.layers for _ in range(layer.count)]
    text = copy.deepcopy(config).get_text_config()
    total_layers = text.num_hidden_layers
    count, kinds, layers_bytes = 0, set(), 0
    for layer in each:
        count += 1
        kinds.add(layer.kind)
        layers_bytes += layer.layer_bytes
        if kinds == {one.kind for one in sizes.layers} and layers_bytes >= _LEAST_WEIGHTS_BYTES:
            break
    needed = layers_bytes + sizes.other_bytes
    free = free_memory_bytes(device)
    if needed * (1 + _MOST_KV_SHARE) > free:
        raise PlanError(
            f"measuring {sizes.architecture} needs {needed:,} bytes on {device} for {count} of its layers, "
            f"and {free:,} are free; stop other programs, or use a smaller dtype"
        )
    text.num_hidden_layers = count
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == total_layers:
            setattr(text, name, value[:count])
    with quiet_transformers(), torch.device(device):
        model = AutoModelForCausalLM.from_config(text, dtype=dtype, attn_implementation="eager")
    left, layers = count, []
    for layer in sizes.layers:
        taken = min(left, layer.count)
        left -= taken
        if taken:
            layers.append(dataclasses.replace(layer, count=taken))
    if device.type == "cpu":  # as `load_model` does
        install_experts(model)
    return model.eval().requires_grad_(False), dataclasses.replace(sizes, layers=tuple(layers))


class _Bench:
    """The representative model and the executors that run it."""

    def __init__(
        self,
        model: PreTrainedModel,
        sizes: ModelSizes,
        shapes: dict[int, LayerShape],
        device: torch.device,
        num_threads: int,
    ) -> None:
        self.model, self.sizes, self.shapes, self.device = model, sizes, shapes, device
        self.num_threads = num_threads
        self.page_bytes = PAGE_TOKENS * sum(shape.token_bytes for shape in shapes.values())
        most = min(_MOST_KV_BYTES, int(free_memory_bytes(device) * _MOST_KV_SHARE))
        self.num_pages = max(32, min(4096, most // self.page_bytes))
        self.pool = KVPool(shapes, self.num_pages, PAGE_TOKENS, device)
        # Tokens from which a pass is cut into lanes.
        self.lane_tokens = 2 * self._executor().least_lane_tokens

    def passes(self) -> tuple[PassCosts, PassCosts | None]:
        """Costs of passes as one unit, and in lanes where there are several threads."""
        watch = Stopwatch(self.model, self.device)
        together = self._executor(sub_batch=1 << 30)
        runs = [Run(together, shape, watch) for shape in self._shapes()]
        lane_runs: list[Run] = []
        if self.num_threads > 1:
            in_lanes = self._executor()
            shapes = self._shapes(self.num_threads)
            if self.lane_tokens > _PREFILLS[-1]:
                # Experts want so many tokens each before lanes pay: such passes are prompts.
                row_tokens = min(_PREFILLS[-1], max(1, self.sizes.context_tokens - 2))
                for tokens in (self.lane_tokens, 2 * self.lane_tokens):
                    rows = self.num_threads * -(-tokens // (row_tokens * self.num_threads))
                    shapes.append(Shape(rows, -(-tokens // rows), 0))
            wide = [shape for shape in shapes if shape.num_tokens >= self.lane_tokens]
            lane_runs = [Run(in_lanes, shape, watch) for shape in wide]
            if len(wide) < _LEAST_LANE_SHAPES:
                runs += [Run(together, shape, watch) for shape in wide if shape not in self._shapes()]
        measure([*runs, *lane_runs], _SECONDS * (2 if lane_runs else 1))
        watch.close()
        costs = self._fitted(watch, runs)
        if len(lane_runs) >= _LEAST_LANE_SHAPES:
            return costs, self._fitted(watch, lane_runs)
        # Too few to be fitted by themselves: as much faster as they were.
        together_s = {run.shape: run.sample.wall_s for run in runs if run.sample is not None}
        ratios = [run.sample.wall_s / together_s[run.shape] for run in lane_runs if run.sample is not None]
        return costs, costs.scaled(median(ratios)) if ratios else None

    def experts_one_by_one(self) -> Roofline:
        """Costs of a sparse block with the expert function that streamed experts need."""
        install_experts(self.model)
        watch = Stopwatch(self.model, self.device)
        together = self._executor(sub_batch=1 << 30)
        runs = [Run(together, shape, watch) for shape in self._shapes() if shape.before <= _CONTEXTS[0]]
        measure(runs, _SECONDS)
        watch.close()
        return self._fitted(watch, runs).layers["sparse"].mlp

    def sub_batches(self, profile: Profile) -> Profile:
        """Add to a profile what sub-batches and the KV staging cost beyond their work.

        Whole passes are compared with what the cost model makes of the rest, so that its own view of what
        overlaps is what is fitted.
        """
        pattern = next((layer.feed_forward for layer in self.sizes.layers if layer.feed_forward), None)
        points = () if self.sizes.is_sparse or pattern is None else (pattern,)
        if not self.sizes.is_sparse and not points:
            return profile
        install_yield_points(self.model, points or None)
        context = min(_CONTEXTS[1], max(1, self.sizes.context_tokens - 2))
        cases: list[tuple[Run, Plan]] = []
        for rows, parts in _SUB_BATCHES:
            plan = Plan(attention_sub_batch=rows // parts, yield_at=points or None)
            executor = self._executor(sub_batch=plan.attention_sub_batch)
            cases.append((Run(executor, Shape(rows, 1, min(_CONTEXTS[0], context))), plan))
        row_pages = -(-(context + 2) // PAGE_TOKENS)
        pools = []
        for rows, parts in _STAGED:
            widest = PAGE_TOKENS * max(shape.token_bytes for shape in self.shapes.values())
            staging = 2 * max(2, rows // parts * row_pages) * widest
            # Enough pages for all, or sequences would share some, which are staged once.
            num_pages = rows * row_pages
            if num_pages * self.page_bytes > free_memory_bytes(torch.device("cpu")) * _MOST_KV_SHARE:
                continue
            pool = StagedKVPool(self.shapes, num_pages, PAGE_TOKENS, self.device, staging_bytes=staging)
            pools.append(pool)
            plan = Plan(kv_residence="host", kv_memory=staging, yield_at=points or None)
            cases.append((Run(self._executor(pool=pool), Shape(rows, 1, context)), plan))
        measure([run for run, _ in cases], _SECONDS)
        return self._closest(profile, cases)

    def _closest(self, profile: Profile, cases: Sequence[tuple[Run, Plan]]) -> Profile:
        """The costs of switching and copying, of a grid, that come closest to what was measured."""

        def error(profile: Profile, with_copies: bool) -> float:
            total = 0.0
            for run, plan in cases:
                if (plan.kv_residence == "host") == with_copies:
                    assert run.sample is not None
                    cost = CostModel(self.sizes, profile, Budget(device_bytes=0), plan, PAGE_TOKENS)
                    total += math.log(cost.pass_s(run.shape.pass_shape) / run.sample.wall_s) ** 2
            return total

        profile = min(
            (dataclasses.replace(profile, sub_batch_s=seconds) for seconds in _TURNS_S),
            key=lambda one: error(one, with_copies=False),
        )
        return min(
            (
                dataclasses.replace(profile, copy_share=share, copy_turn_s=seconds)
                for share, seconds in itertools.product(_SHARES, _TURNS_S)
            ),
            key=lambda one: error(one, with_copies=True),
        )

    def _executor(self, *, pool: KVPool | None = None, sub_batch: int | None = None) -> TorchExecutor:
        return TorchExecutor(self.model, pool or self.pool, sub_batch=sub_batch, num_threads=self.num_threads)

    def _shapes(self, num_lanes: int = 1) -> list[Shape]:
        most = max(1, self.sizes.context_tokens - 2)
        contexts = [min(context, most) for context in _CONTEXTS]
        shapes = [Shape(rows, 1, contexts[0]) for rows in _DECODING]
        shapes += [Shape(rows, 1, contexts[1]) for rows in _DECODING_LONG]
        for before in (0, contexts[1] // 2):
            for tokens in _PREFILLS[1:] if before else _PREFILLS:
                rows = max(num_lanes, -(-(tokens + before) // max(2, most)))
                if tokens // rows >= 2:
                    shapes.append(Shape(rows, tokens // rows, min(before, most - tokens // rows)))
        # Many short prompts cost more than one long one of as many tokens.
        shapes += [
            Shape(_SHORT_PROMPTS, tokens // _SHORT_PROMPTS, 0)
            for tokens in _PREFILLS[1:]
            if tokens // _SHORT_PROMPTS <= most
        ]
        return list(dict.fromkeys(shape for shape in shapes if shape.before >= 0))

    def _fitted(self, watch: Stopwatch, runs: Sequence[Run]) -> PassCosts:
        samples = [run.sample for run in runs if run.sample is not None]
        tokens = [float(sample.shape.num_tokens) for sample in samples]
        layers = {}
        for kind in dict.fromkeys(watch.kinds):
            attention = fit_roofline(
                tokens,
                [sample.attention_s[kind] for sample in samples],
                terms={
                    "kv_tokens": [_kv_tokens(sample) for sample in samples],
                    "prefill_pairs": [_prefill_pairs(sample) for sample in samples],
                    "chunks": [float(sample.shape.pass_shape.chunks) for sample in samples],
                },
            )
            terms = {"experts_hit": [sample.experts_hit for sample in samples]} if kind == "sparse" else {}
            mlp = fit_roofline(tokens, [sample.mlp_s[kind] for sample in samples], terms=terms)
            layers[kind] = LayerCosts(attention, mlp)
        rows = [float(sample.shape.rows) for sample in samples]
        rest = fit_roofline(rows, [sample.rest_s for sample in samples], terms={"tokens": tokens})
        return PassCosts(layers, rest)


def _kv_tokens(sample: Sample) -> float:
    shape = sample.shape.pass_shape
    return shape.decoding * (shape.context + 1)


def _prefill_pairs(sample: Sample) -> float:
    shape = sample.shape.pass_shape
    return shape.prefill_tokens * shape.prefill_context
