"""How fast bytes move: between the tiers, and from the checkpoint."""

from __future__ import annotations

import itertools
import time
from contextlib import closing
from pathlib import Path

import torch

from batchgen_data.models.load import load_model, resolve_source
from batchgen_data.models.weights import WeightStream

_COPY_BYTES = 64 * 2**20
_STREAM_S = 0.5


def copy_bandwidth(device: torch.device, page_bytes: int) -> float:
    """Bytes per second that pages of so many bytes are copied from the host tier to the device with.

    On a CPU by one thread, as the staging copies.
    """
    page = max(1, min(page_bytes, _COPY_BYTES // 8))
    host = torch.zeros(_COPY_BYTES // page, page, dtype=torch.uint8, pin_memory=device.type == "cuda")
    staged = torch.zeros_like(host, device=device)
    order = torch.randperm(len(host))
    seconds = []
    callers_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(6):
        started = time.perf_counter()
        if device.type == "cuda":
            staged.copy_(host, non_blocking=True)
            torch.cuda.synchronize(device)
        else:
            torch.index_select(host, 0, order, out=staged)
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(callers_threads)
    return host.nbytes / min(seconds)


def open_stream(folder: Path, dtype: torch.dtype, device: torch.device, budget: int) -> WeightStream | None:
    """The weights of a checkpoint, streamed with `budget` bytes; None where it holds them all.

    Raises:
        BatchgenError: as `models.load.load_model`.
    """
    source = resolve_source(str(folder))
    return load_model(source, device=device, dtype=dtype, weights_memory=budget).weights


def stream_bandwidth(stream: WeightStream) -> float:
    """Bytes per second of the checkpoint that weights are streamed with while nothing computes.

    Reading, converting and placing them, layer by layer and expert by expert, as in a pass: for about half a
    second, and through one layer at least.
    """
    first = stream.counts.bytes_read
    started = time.perf_counter()
    seconds = 0.0
    for number in itertools.cycle(range(stream.num_layers)):
        stream.enter_layer(number)
        with closing(stream.experts(number, list(range(stream.num_experts(number))))) as experts:
            for _ in experts:
                pass
        seconds = time.perf_counter() - started
        if seconds > _STREAM_S and stream.counts.bytes_read > first:
            break
    return (stream.counts.bytes_read - first) / seconds
