"""Calls that run beside one another, and calls that run alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Lets threads through together, or one alone; who wants to be alone waits for no new ones."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_together = 0
        self._num_waiting = 0
        self._is_alone = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Beside others."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone and not self._num_waiting)
            self._num_together += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_together -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody else is inside."""
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._is_alone and not self._num_together)
                self._is_alone = True
            finally:
                self._num_waiting -= 1
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()
