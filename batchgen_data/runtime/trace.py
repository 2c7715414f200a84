"""Where the time of the first passes went, as a file for a trace viewer (Perfetto, chrome://tracing).

Spans come from every thread of the runtime. They are times of the host: what a GPU still works on when its
kernels have been asked for is not in them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

_NOTHING: AbstractContextManager[Any] = nullcontext()


class Trace:
    """A bounded record of spans: named stretches of time, each on a track. Any thread may add to it.

    Args:
        most_passes: passes that are recorded; 0 records nothing.
        most_spans: spans that are kept, whatever the number of passes.

    Attributes:
        on: whether spans are still recorded. Where even making their arguments costs, ask first.
    """

    def __init__(self, most_passes: int = 200, most_spans: int = 500_000) -> None:
        self.on = most_passes > 0
        self._passes_left = most_passes
        self._most_spans = most_spans
        self._began_s = time.perf_counter()
        # Appending is atomic, so that threads need no lock.
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def begin_pass(self) -> None:
        """A pass begins; after the last one that is recorded this turns the trace off."""
        self._passes_left -= 1
        if self._passes_left < 0:
            self.on = False

    def span(self, name: str, track: str, **args: Any) -> AbstractContextManager[Any]:
        """Record how long the block takes.

        Args:
            name: what is done.
            track: the line it is drawn on; spans of one track follow or enclose each other.
            args: details to show, as JSON allows.
        """
        return _Span(self, name, track, args) if self.on else _NOTHING

    def add(self, name: str, track: str, started_s: float, ended_s: float, **args: Any) -> None:
        """Record a span whose times are known, in seconds of `time.perf_counter`."""
        if not self.on:
            return
        if len(self._spans) >= self._most_spans:
            self.on = False
            return
        self._spans.append((name, track, started_s, ended_s, args))

    def write(self, path: str | Path) -> None:
        """Write what was recorded, in Chrome's trace format; the file appears whole.

        Raises:
            OSError: the file cannot be written.
        """
        spans = list(self._spans)
        tracks = {track: number for number, track in enumerate(dict.fromkeys(span[1] for span in spans))}
        pid = os.getpid()
        events: list[dict[str, Any]] = []
        for track, tid in tracks.items():
            common = {"ph": "M", "pid": pid, "tid": tid}
            events.append({**common, "name": "thread_name", "args": {"name": track}})
            events.append({**common, "name": "thread_sort_index", "args": {"sort_index": tid}})
        for name, track, started_s, ended_s, args in spans:
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": pid,
                    "tid": tracks[track],
                    "ts": (started_s - self._began_s) * 1e6,
                    "dur": (ended_s - started_s) * 1e6,
                    "args": args,
                }
            )
        target = Path(path)
        staged = target.with_name(f".{target.name}.{pid}-{threading.get_ident()}")
        try:
            staged.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)


class _Span:
    __slots__ = ("_args", "_name", "_started_s", "_trace", "_track")

    def __init__(self, trace: Trace, name: str, track: str, args: dict[str, Any]) -> None:
        self._trace = trace
        self._name = name
        self._track = track
        self._args = args

    def __enter__(self) -> None:
        self._started_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._trace.add(self._name, self._track, self._started_s, time.perf_counter(), **self._args)


OFF = Trace(most_passes=0)
