"""Watchdogs: where nothing moves for too long, something ends it by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Watchdog:
    """Calls `on_stall`, once, when `position` has not changed for `limit_s` seconds of being busy.

    Args:
        position: How far the work is; asked from a thread of the watchdog's own. What it raises is ignored.
        is_busy: Whether it should move at all.
        on_stall: What to do about it.
        limit_s: Seconds.
    """

    def __init__(
        self,
        position: Callable[[], Any],
        on_stall: Callable[[], None],
        *,
        limit_s: float,
        is_busy: Callable[[], bool] = lambda: True,
    ) -> None:
        self._position = position
        self._is_busy = is_busy
        self._on_stall = on_stall
        self._limit_s = limit_s

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="batchgen-watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    def watch_forever(self) -> None:
        """Watch until the process ends."""
        arguments = (threading.Event(),)
        threading.Thread(target=self._watch, args=arguments, name="batchgen-watchdog", daemon=True).start()

    def _watch(self, ended: threading.Event) -> None:
        seen, since_s = None, time.monotonic()
        while not ended.wait(min(5.0, self._limit_s / 10)):
            try:
                position = self._position()
            except Exception:
                continue  # who cannot answer may still be at work: its own watchdog knows
            now_s = time.monotonic()
            if position != seen or not self._is_busy():
                seen, since_s = position, now_s
            elif now_s - since_s > self._limit_s:
                self._on_stall()
                return
