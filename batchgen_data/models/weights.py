"""Weights larger than the device tier: what does not stay is streamed, in every pass, in order of use.

A decoder layer's own weights are one unit, each expert of a sparse block another. One thread fills a ring of
buffers, allocated once, with the units that come next, while the model computes with those that are there.
Outside its turn a streamed parameter is on the meta device: using it by mistake raises, it never reads
what another layer left in a buffer.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from batchgen_data.errors import BatchgenError, DeviceError, InternalError
from batchgen_data.models.checkpoint_map import Part
from batchgen_data.models.experts import install_source
from batchgen_data.models.residency import Residency
from batchgen_data.models.weight_files import Read, WeightFiles, copy_weights, read_buffer
from batchgen_data.models.weight_units import NUM_READ_BUFFERS, StreamableWeights, Unit
from batchgen_data.runtime.trace import OFF, Trace


@dataclass(slots=True)
class WeightCounts:
    """What streaming did, in total.

    Attributes:
        resident_bytes: Weights that stay on the device.
        ring_bytes: Buffers, the reader's included.
        streamed_bytes: Weights outside `resident_bytes`: what a pass reads that needs all of them.
        bytes_read: Read from the checkpoint since the start, in its own types.
        hits: Units that were there when they were needed.
        waits: Units that had to be waited for.
        wait_s: Seconds that took.
    """

    resident_bytes: int
    ring_bytes: int
    streamed_bytes: int
    bytes_read: int = 0
    hits: int = 0
    waits: int = 0
    wait_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Slot:
    memory: torch.Tensor  # bytes
    unit: Unit | None = None
    wanted: bool = False
    reads_left: int = 0
    error: Exception | None = None
    computed: Any = None  # CUDA event: the device is through with what was here before

    def views(self) -> list[torch.Tensor]:
        assert self.unit is not None
        return [
            self.memory[offset : offset + part.num_bytes].view(part.dtype).view(part.shape)
            for part, offset in zip(self.unit.parts, self.unit.offsets, strict=True)
        ]


@dataclass(slots=True, eq=False)
class _Ring:
    """Buffers of one size and the units they shall hold next, in order of use.

    `held` are the buffers that threads compute with, one each at most.
    """

    slots: list[_Slot]
    queue: deque[Unit] = field(default_factory=deque)
    held: dict[int, _Slot] = field(default_factory=dict)

    def want(self, units: Iterable[Unit]) -> None:
        """Replace what is wanted; nothing is held.

        A buffer keeps what it has only if that is among the next to be used: were all of them kept for later
        units, the first one would wait for a buffer for ever.
        """
        assert not self.held
        units = list(units)
        missing = {id(unit) for unit in units[: len(self.slots)]}
        there: set[int] = set()
        for slot in self.slots:
            slot.wanted = slot.unit is not None and slot.error is None and id(slot.unit) in missing
            if slot.wanted:
                missing.remove(id(slot.unit))
                there.add(id(slot.unit))
        self.queue = deque(unit for unit in units if id(unit) not in there)

    def find(self, unit: Unit) -> _Slot | None:
        return next((slot for slot in self.slots if slot.unit is unit and slot.wanted), None)

    def free_slot(self) -> _Slot | None:
        return next(
            (
                slot
                for slot in self.slots
                if not slot.wanted and not slot.reads_left and slot not in self.held.values()
            ),
            None,
        )

    def release(self, thread: int) -> None:
        slot = self.held.pop(thread, None)
        if slot is None:
            return
        slot.wanted = False
        if slot.memory.is_cuda:
            slot.computed = torch.cuda.Event()
            slot.computed.record()

    def release_all(self) -> None:
        for thread in tuple(self.held):
            self.release(thread)


class WeightStream:
    """The streamed weights of one model: layers for one thread at a time, experts of a layer for several.

    Wraps the `forward` of every decoder layer: the first call of a layer brings its weights, and those of
    the layers before it make room. Sub-batches of a pass must therefore all go through a layer before one
    enters the next; a layer that is entered again after a later one is read again.

    Args:
        streamable: The model's weights; what is resident is loaded already, but for experts.
        residency: What stays and how many buffers there are.
        files: The open checkpoint; closed with the stream.
        device: Where the model runs.

    Attributes:
        trace: Where to record reads.
    """

    def __init__(
        self,
        streamable: StreamableWeights,
        residency: Residency,
        files: WeightFiles,
        device: torch.device,
    ) -> None:
        self.trace: Trace = OFF
        self._files = files
        self._device = device
        self._layers = streamable.layers
        self._units = streamable.units
        self._experts = streamable.experts
        self._streamed = sorted(residency.streamed_layers)
        self._parameters = {
            number: _locate(self._layers[number], self._units[number].parts) for number in self._streamed
        }
        self._resident_experts = [
            self._load_resident(units[:count])
            for units, count in zip(self._experts, residency.resident_experts, strict=True)
        ]
        self.counts = WeightCounts(
            resident_bytes=residency.resident_bytes,
            ring_bytes=residency.ring_bytes,
            streamed_bytes=streamable.sizes.total_bytes - residency.resident_bytes,
        )
        layer_bytes = max(unit.num_bytes for unit in self._units)
        expert_bytes = max((units[0].num_bytes for units in self._experts if units), default=0)
        self._layer_ring = _Ring(self._slots(residency.layer_slots, layer_bytes))
        self._expert_ring = _Ring(self._slots(residency.expert_slots, expert_bytes))
        self._read_bytes = streamable.read_bytes
        self._layer: int | None = None
        self._turn: StreamedExperts | None = None  # the latest call of a sparse block
        # Whether a layer's last call needed all its streamed experts, as it does while many rows decode:
        # then the next one's are read before its router has run.
        self._all_hit = [False] * len(self._experts)
        self._changed = threading.Condition()
        self._urgent: list[Unit] = []
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="batchgen-weights", daemon=True)
        for number, layer in enumerate(self._layers):
            _wrap_forward(layer, functools.partial(self.enter_layer, number))
            if (module := streamable.expert_modules[number]) is not None:
                # One buffer more than threads, so that the next expert comes while each has its own.
                most_threads = max(1, residency.expert_slots - 1)
                install_source(module, functools.partial(self.experts, number), most_threads)
        self._thread.start()

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return len(self._layers)

    def num_experts(self, number: int) -> int:
        """Experts of a layer that come one by one, resident ones included."""
        return len(self._experts[number])

    def enter_layer(self, number: int) -> None:
        """Make a layer's own weights ready; again within the same layer nothing happens.

        Raises:
            DeviceError: They cannot be read.
        """
        if number == self._layer:
            return
        with self._changed:
            self._leave()
            if self._streamed:
                here = next((i for i, one in enumerate(self._streamed) if one >= number), 0)
                order = self._streamed[here:] + self._streamed[:here]
                self._layer_ring.want(self._units[one] for one in order[: len(self._layer_ring.slots)])
            self._foresee(number)
            self._changed.notify_all()
        if number in self._parameters:
            views = self._acquire(self._layer_ring, self._units[number])
            for (module, name, _), view in zip(self._parameters[number], views, strict=True):
                module._parameters[name] = nn.Parameter(view, requires_grad=False)
        self._layer = number

    def experts(self, number: int, hit: list[int]) -> StreamedExperts:
        """Begin to go through the experts that got tokens; what an earlier call left over is void.

        Args:
            number: The layer.
            hit: Experts, ascending.
        """
        units = self._experts[number]
        resident = self._resident_experts[number]
        streamed = [units[expert] for expert in hit if expert >= len(resident)]
        self._all_hit[number] = len(streamed) == len(units) - len(resident) > 0
        with self._changed:
            self._turn = turn = StreamedExperts(self, number, hit)
            self._expert_ring.release_all()
            self._expert_ring.want(streamed)
            self._changed.notify_all()
        return turn

    def take_expert(self, turn: StreamedExperts, expert: int) -> dict[str, torch.Tensor]:
        """An expert's weights, held for this thread, whose last ones make room. See `StreamedExperts`."""
        unit, resident = self._experts[turn.layer][expert], self._resident_experts[turn.layer]
        views = resident[expert] if expert < len(resident) else self._acquire(self._expert_ring, unit)
        return {part.name: view for part, view in zip(unit.parts, views, strict=True)}

    def leave_experts(self, turn: StreamedExperts, *, is_over: bool) -> None:
        """This thread has computed with what it held; `is_over`: and no thread will ask for more."""
        with self._changed:
            if turn is not self._turn:
                return  # a later call has the buffers
            self._expert_ring.release(threading.get_ident())
            if is_over:
                self._turn = None
                self._expert_ring.release_all()
                self._expert_ring.want(())
                if turn.layer == len(self._experts) - 1:
                    self._foresee(0)  # the next pass follows
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads and give the buffers back; the model cannot run afterwards. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._leave()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._layer_ring, self._expert_ring = _Ring([]), _Ring([])
        self._resident_experts = [[] for _ in self._experts]
        self._files.close()

    def _leave(self) -> None:
        """The layer's weights are used no more: its parameters go back to the meta device."""
        if self._layer is not None:
            for module, name, placeholder in self._parameters.get(self._layer, ()):
                module._parameters[name] = placeholder
        self._layer = None
        self._layer_ring.release_all()

    def _foresee(self, number: int) -> None:
        """Ask for the experts of the next sparse block from `number` on, where all will be needed."""
        following = next((at for at in range(number, len(self._experts)) if self._experts[at]), None)
        if following is not None and self._all_hit[following] and not self._expert_ring.held:
            self._expert_ring.want(self._experts[following][len(self._resident_experts[following]) :])

    def _acquire(self, ring: _Ring, unit: Unit) -> list[torch.Tensor]:
        """Wait until a unit is there and hold it; the one held before makes room."""
        with self._changed:
            thread = threading.get_ident()
            if thread in ring.held and ring.held[thread].unit is not unit:
                ring.release(thread)
                self._changed.notify_all()
            slot = ring.find(unit)
            if self._closing:
                raise BatchgenError("the weights of this model are closed")
            if slot is None and unit not in ring.queue:
                raise InternalError("weights were asked for that are not the next to be used")
            if slot is not None and not slot.reads_left:
                self.counts.hits += 1
            else:
                self.counts.waits += 1
                started = time.perf_counter()
                self._urgent.append(unit)
                self._changed.notify_all()
                try:
                    while (slot := ring.find(unit)) is None or slot.reads_left:
                        if self._closing:
                            raise BatchgenError("the weights of this model are closed")
                        if not self._thread.is_alive():
                            raise InternalError("the thread that reads weights has stopped")
                        self._changed.wait(1.0)
                finally:
                    self._urgent.remove(unit)
                self.counts.wait_s += time.perf_counter() - started
            if slot.error is not None:
                slot.wanted = False
                raise slot.error
            ring.held[thread] = slot
            return slot.views()

    def _slots(self, count: int, num_bytes: int) -> list[_Slot]:
        if self._device.type == "cpu":
            return [_Slot(read_buffer(num_bytes)) for _ in range(count)]
        return [_Slot(torch.empty(num_bytes, dtype=torch.uint8, device=self._device)) for _ in range(count)]

    def _load_resident(self, units: Sequence[Unit]) -> list[list[torch.Tensor]]:
        loaded = []
        for unit in units:
            tensors = [torch.empty(part.shape, dtype=part.dtype, device=self._device) for part in unit.parts]
            self._files.fill(unit.parts, tensors)
            loaded.append(tensors)
        return loaded

    # Everything below runs in the thread that fills the ring.

    @torch.inference_mode()  # buffers made in that mode can only be written in it
    def _main(self) -> None:
        torch.set_num_threads(1)  # of this thread only: the others belong to the computation
        cuda = self._device.type == "cuda"
        buffers = deque(read_buffer(self._read_bytes, pinned=cuda) for _ in range(NUM_READ_BUFFERS))
        stream = torch.cuda.Stream(self._device) if cuda else None
        under_way: deque[tuple[_Slot, Read, torch.Tensor, Future[None]]] = deque()
        coming: deque[tuple[_Slot, Read]] = deque()
        with (
            ThreadPoolExecutor(NUM_READ_BUFFERS - 1, thread_name_prefix="batchgen-read") as readers,
            torch.cuda.stream(stream) if stream is not None else nullcontext(),
        ):
            while True:
                with self._changed:
                    while not self._closing and not coming and not under_way and not self._start(coming):
                        self._changed.wait()
                    if self._closing:
                        break
                while buffers and (coming or self._start(coming)):
                    slot, read = coming.popleft()
                    # Also where none is needed: so many reads are under way at once.
                    buffer = buffers.popleft()
                    into = buffer if read.place is None else slot.memory[read.place :]
                    under_way.append((slot, read, buffer, readers.submit(self._read, read, into)))
                slot, read, buffer, future = under_way.popleft()
                self._finish(slot, read, buffer, future, stream)
                buffers.append(buffer)

    def _read(self, read: Read, buffer: torch.Tensor) -> None:
        with self.trace.span("prefetch", threading.current_thread().name, bytes=read.length):
            self._files.read(read, buffer)

    def _start(self, coming: deque[tuple[_Slot, Read]]) -> bool:
        """Give the most urgent unit that is wanted a free buffer, if there are both."""
        with self._changed:
            rings = (self._expert_ring, self._layer_ring)
            for ring in sorted(rings, key=lambda ring: not any(one in ring.queue for one in self._urgent)):
                slot = ring.free_slot()
                if not ring.queue or slot is None:
                    continue
                unit = ring.queue.popleft()
                reads = unit.plan_reads(self._read_bytes, in_place=not slot.memory.is_cuda)
                slot.unit, slot.wanted, slot.reads_left, slot.error = unit, True, len(reads), None
                coming.extend((slot, read) for read in reads)
                return True
        return False

    def _finish(
        self, slot: _Slot, read: Read, buffer: torch.Tensor, future: Future[None], stream: Any
    ) -> None:
        error: Exception | None = None
        try:
            future.result()
            if slot.computed is not None:
                slot.computed.synchronize()
                slot.computed = None
            if slot.error is None and read.place is None:
                copy_weights(read, buffer, slot.views())
                if stream is not None:
                    stream.synchronize()
        except Exception as caught:
            error = (
                caught if isinstance(caught, BatchgenError) else DeviceError(f"streaming weights: {caught!r}")
            )
        with self._changed:
            self.counts.bytes_read += 0 if error else read.weight_bytes
            slot.error = slot.error or error
            slot.reads_left -= 1
            self._changed.notify_all()


class StreamedExperts:
    """The experts of one call of a sparse block, in order; several threads may take from it.

    Gives an expert and its weights by parameter name, without the dimension of experts. They are valid until
    the thread that took them asks for the next, or the call is closed.
    """

    def __init__(self, stream: WeightStream, layer: int, hit: Sequence[int]) -> None:
        self.layer = layer
        self._stream = stream
        self._left = deque(hit)

    def __iter__(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        return self

    def __next__(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Wait for the next expert.

        Raises:
            DeviceError: It cannot be read.
        """
        self._stream.leave_experts(self, is_over=False)
        try:
            expert = self._left.popleft()
        except IndexError:
            raise StopIteration from None
        return expert, self._stream.take_expert(self, expert)

    def close(self) -> None:
        """No thread computes with these experts any more, or will ask for one. Safe to call twice."""
        self._left.clear()
        self._stream.leave_experts(self, is_over=True)


def _locate(layer: nn.Module, parts: Sequence[Part]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Of each part: the module that owns the parameter, its name there, and its stand-in without data."""
    found = []
    for part in parts:
        path, _, name = part.name.rpartition(".")
        module = layer.get_submodule(path)
        placeholder = module._parameters[name]
        assert placeholder is not None
        assert placeholder.is_meta
        found.append((module, name, placeholder))
    return found


def _wrap_forward(module: nn.Module, before: Any) -> None:
    """Call `before` at the start of `forward`, after everything that hooks and later wrappers do.

    A barrier between sub-batches lies outside: weights may only move once all of them have left a layer.
    """
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        before()
        return original(*args, **kwargs)

    module.forward = forward
