"""A quiet Ray session for one run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray._private.worker as ray_worker
import ray.data

from batchgen_data.errors import JobError
from batchgen_data.job.filesystem import without_credentials
from batchgen_data.job.signals import signals_ignored


@contextmanager
def ray_session() -> Iterator[None]:
    """Use the Ray session there is (initialised, or named by RAY_ADDRESS), else start one for the block.

    Raises:
        JobError: Ray cannot be started or reached.
    """
    was_initialized = ray.is_initialized()
    address = os.environ.get("RAY_ADDRESS")
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        if not was_initialized:
            _start_ray(address, num_cpus)
            _print_error_messages(False)
        _quiet_ray_data()
        yield
    finally:
        if not was_initialized:
            with signals_ignored():
                ray.shutdown()
            _print_error_messages(True)


def _start_ray(address: str | None, num_cpus: int) -> None:
    # Workers reserve no CPU (see `open_pipeline`), so the number matters only to Ray's own tasks, which
    # wait for ever on one or two CPUs.
    own: dict[str, Any] = {} if address else {"include_dashboard": False, "num_cpus": max(4, num_cpus)}
    # Ray's C++ side writes to the terminal by itself, at each start an "error" about constructor arguments
    # that concerns nobody. What goes wrong comes as an exception; set the variable to see the rest.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        with _stderr_dropped():  # it announces the level that it was set to
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:
        place = f"at RAY_ADDRESS={without_credentials(address)} reached" if address else "started"
        raise JobError(f"Ray cannot be {place}: {error}") from error


def _print_error_messages(enabled: bool) -> None:
    """Let Ray's thread print what it hears from its daemons, or not.

    It writes to stdout whatever the log level, and when a run is interrupted that an actor was killed and its
    task "will be retried", which is not so. The switch is the one of Ray's own debugger.
    """
    if hasattr(ray_worker, "_worker_logs_enabled"):
        ray_worker._worker_logs_enabled = enabled


@contextmanager
def _stderr_dropped() -> Iterator[None]:
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _quiet_ray_data() -> None:
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
