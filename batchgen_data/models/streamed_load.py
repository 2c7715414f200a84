"""Loading what stays of a model that is larger than its device tier.

transformers does the loading, with all its renaming, conversion and checks, from a state dict whose tensors
are read when they are asked for, or come without data: those are streamed later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from batchgen_data.errors import ConfigError, DeviceError
from batchgen_data.models.checkpoint_map import StoredTensor, parameter_pieces, stored_tensors
from batchgen_data.models.experts import install_experts
from batchgen_data.models.residency import choose_residency
from batchgen_data.models.weight_files import WeightFiles
from batchgen_data.models.weight_units import StreamableWeights
from batchgen_data.models.weights import WeightStream
from batchgen_data.runtime.resources import free_memory_bytes

logger = logging.getLogger(__name__)


def load_streamed(
    load: Callable[[dict[str, Any]], Any],
    files: Sequence[Path],
    device: torch.device,
    budget_bytes: int,
) -> tuple[Any, WeightStream] | None:
    """Load the part of a model that stays within `budget_bytes`, and start to stream the rest.

    Args:
        load: Makes the model from a state dict, with all checks.
        files: The checkpoint's safetensors files.
        device: Where the model runs.
        budget_bytes: Of the device, for weights and the buffers they are streamed through.

    Returns:
        The model and what brings its other weights; None where all of it fits.

    Raises:
        ConfigError: What `load` raises, or a file cannot be read.
        PlanError: The budget is below what always stays plus the smallest ring.
    """
    stored = stored_tensors(files)
    skeleton = load({name: _Unread(tensor) for name, tensor in stored.items()})
    pieces = parameter_pieces(skeleton, stored)
    streamable = StreamableWeights(skeleton, pieces)
    residency = choose_residency(streamable.sizes, budget_bytes, type(skeleton).__name__)
    if residency is None:
        return None
    # The page cache serves a GPU as host tier, where the machine's memory holds the files.
    file_bytes = sum(file.stat().st_size for file in files)
    cached = device.type == "cuda" and file_bytes < free_memory_bytes(torch.device("cpu"))
    reader = WeightFiles(files, keep_cached=cached)
    try:
        left_out = {piece.source.name for piece in streamable.streamed_pieces(residency)}
        model = load(
            {name: _Unread(tensor, None if name in left_out else reader) for name, tensor in stored.items()}
        )
        model.eval().requires_grad_(False)
        _move_resident(model, device)
        install_experts(model)
        weights = WeightStream(StreamableWeights(model, pieces), residency, reader, device)
    except DeviceError as error:
        reader.close()
        raise ConfigError(str(error)) from error  # nothing has run
    except BaseException:
        reader.close()
        raise
    logger.info(
        "%s: %d bytes of weights stay, %d are streamed through buffers of %d",
        type(model).__name__,
        weights.counts.resident_bytes,
        weights.counts.streamed_bytes,
        weights.counts.ring_bytes,
    )
    return model, weights


class _Unread:
    """A stored tensor as transformers takes it: indexed, then moved. Without a reader it has no data."""

    def __init__(self, stored: StoredTensor, reader: WeightFiles | None = None) -> None:
        self._stored = stored
        self._reader = reader

    def __getitem__(self, _: Any) -> _Unread:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read the tensor, or make it on the meta device, in `dtype`."""
        if self._reader is None:
            return torch.empty(self._stored.shape, dtype=dtype or self._stored.dtype, device="meta")
        return self._reader.tensor(self._stored).to(device=device, dtype=dtype)


def _move_resident(model: Any, device: torch.device) -> None:
    """Move what is not on the meta device; tied parameters stay tied."""
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.is_meta or parameter.device == device:
                continue
            if id(parameter) not in moved:
                moved[id(parameter)] = torch.nn.Parameter(parameter.to(device), requires_grad=False)
            module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
