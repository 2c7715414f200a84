"""Kills a job again and again, and counts what is lost, doubled, invented or computed again.

    python tests/crash/bench.py --kills 200 --every-step

Every life of the job is a forked child of this process, which imports everything once and uses no threads. A
round takes one output through three phases, each until it is finished: a run, ``--retry-failed``, and
``--overwrite`` with another setting. A reader opens all visible files meanwhile. Failures print the seed.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from batchgen_data.errors import JobLockedError
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.lease import Lease
from batchgen_data.job.manifest import read_manifest
from batchgen_data.job.store import Places
from batchgen_data.job.verify import verify_output
from plain_job import PlainJob, StepFiles, write_inputs

REFUSED, TAKEN = 3, 4


def phases(job: PlainJob) -> list[PlainJob]:
    """Return a job, the same with its failed rows tried again, and another that replaces it."""
    return [
        job,
        replace(job, fails=False, options={"retry_failed": True}),
        replace(job, options={"overwrite": True, "system": "other"}),
    ]


def is_due(phase: PlainJob) -> bool:
    """Tell whether a phase is not finished yet, by what its output says."""
    manifest = read_manifest(Places.of_output(str(phase.output)), LocalFiles())
    wants_other = (phase.options or {}).get("system")
    if manifest is None or manifest.fields["system"] != wants_other:
        return True
    return bool(in_child(lambda: problems(phase), len))


def in_child(body: Callable[[], Any], code: Callable[[Any], int] = lambda _: 0) -> int:
    """Run `body` in a child to its end and return the child's exit code; negative: the signal."""
    return wait_for(fork(body, code))


def fork(body: Callable[[], Any], code: Callable[[Any], int] = lambda _: 0) -> int:
    """Start `body` in a child; its exit code is that of its result, 70 if it raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        status = code(body())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait_for(pid: int) -> int:
    """Return the exit code of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Tally:
    """Sums of the bench."""

    def __init__(self) -> None:
        self.kills = self.lives = self.rounds = 0
        self.rows = self.recomputed = self.allowed = 0
        self.worst_recomputed = 0.0
        self.differences: Counter[str] = Counter()

    def count(self, phase: PlainJob, *, num_rows: int, kills: int) -> None:
        """Check a finished phase."""
        code = in_child(lambda: check_phase(phase))
        if code:
            raise SystemExit(f"the output of {phase.output} is wrong")
        self.differences.update({"lost": 0, "doubled": 0, "invented": 0, "wrong": 0})
        assert phase.log is not None
        generated = phase.log.read_text().split() if phase.log.exists() else []
        recomputed = len(generated) - len(set(generated))
        allowed = kills * phase.in_flight_rows
        if recomputed > allowed:
            raise SystemExit(f"{recomputed} rows were computed again, {allowed} may ({phase.output})")
        if len(set(generated)) != num_rows:
            raise SystemExit(f"{len(set(generated))} rows were generated of {num_rows} ({phase.output})")
        self.rows += num_rows
        self.recomputed += recomputed
        self.allowed += allowed
        phase.log.unlink()


def problems(phase: PlainJob) -> list[str]:
    """Compare rows, and let the project's own verification look."""
    found = [f"{count} {what}" for what, count in phase.differences().items() if count]
    report = verify_output(str(phase.output))
    return found + report.problems + report.missing_inputs


def check_phase(phase: PlainJob) -> None:
    """Stop the bench if a finished phase is wrong."""
    found = problems(phase)
    if found:
        raise SystemExit(f"{phase.output}: {found}")


def num_bad(num_rows: int) -> int:
    """Return how many of the first rows are bad; see `write_inputs`."""
    return sum(row % 7 == 3 for row in range(num_rows))


def life_seconds(base: Path) -> float:
    """Return how long a life may last: enough to start, even on a busy machine, and to do some rows."""
    write_inputs(base / "life/in", [1])
    job = PlainJob(inputs=base / "life/in", output=base / "life/out")
    begin_s = time.monotonic()
    in_child(job.run)
    shutil.rmtree(base / "life")
    return 0.1 + 1.5 * (time.monotonic() - begin_s)


def random_kills(base: Path, kills: int, random_: random.Random, tally: Tally) -> None:
    """Kill at random moments until there were so many kills."""
    while tally.kills < kills:
        folder = base / f"round-{tally.rounds}"
        num_rows = write_inputs(
            folder / "in", [random_.randrange(150, 260), 0, 1, random_.randrange(60, 140)]
        )
        life_s = life_seconds(base)
        job = PlainJob(
            inputs=folder / "in",
            output=folder / "out",
            log=folder / "log",
            rows_per_item=3,
            num_calls=4,
            call_s=0.004,
            shard_rows=25,
        )
        for phase, rows in zip(phases(job), (num_rows, num_bad(num_rows), num_rows), strict=True):
            before = tally.kills
            while True:
                pid = fork(phase.run)
                tally.lives += 1
                if tally.kills < kills:
                    time.sleep(random_.uniform(0, life_s))
                    os.kill(pid, signal.SIGKILL)
                code = wait_for(pid)
                if code not in (0, -signal.SIGKILL):
                    raise SystemExit(f"a life ended with {code}")
                tally.kills += code == -signal.SIGKILL
                if code == 0 or not is_due(phase):
                    break
            tally.count(phase, num_rows=rows, kills=tally.kills - before)
        tally.rounds += 1
        shutil.rmtree(folder)


def kills_at_steps(base: Path, tally: Tally, *, every: bool) -> int:
    """Kill before changes on disk of a small job, each once; a write is half done then.

    Args:
        base: Scratch folder.
        tally: Counts.
        every: Each single change; otherwise one of each kind (method and place).

    Returns:
        The number of changes killed at.
    """
    work = base / "work"
    finished = work / "finished"
    num_rows = write_inputs(finished / "in", [4, 0, 2])
    seen: set[str] = set()
    job = PlainJob(inputs=finished / "in", output=finished / "out", log=finished / "log")
    num_steps = 0
    for number, rows in enumerate((num_rows, num_bad(num_rows), num_rows)):
        before, trace = work / "before", work / "trace"
        shutil.copytree(finished, before)
        if in_child(partial(trace_changes, phases(job)[number], trace, every)):
            raise SystemExit("the job fails without a kill")
        for step, *kind in json.loads(trace.read_text()):
            if not every and str(kind) in seen:
                continue
            seen.add(str(kind))
            folder = base / f"step-{number}-{step}"
            # Copied out of the reader's sight: a copy is half there for a moment.
            shutil.copytree(before, work / "copy")
            (work / "copy").rename(folder)
            scratch = replace(job, inputs=folder / "in", output=folder / "out", log=folder / "log")
            phase = phases(scratch)[number]
            code = in_child(partial(run_until, phase, step))
            tally.kills += code == -signal.SIGKILL
            if code == -signal.SIGKILL and is_due(phase):
                code = in_child(phase.run)
            if code not in (0, -signal.SIGKILL):
                raise SystemExit(f"killed at change {step} of phase {number}, the next run ended with {code}")
            tally.count(phase, num_rows=rows, kills=1)
            shutil.rmtree(folder)
            num_steps += 1
        (finished / "log").unlink()
        shutil.rmtree(before)
    return num_steps


def trace_changes(phase: PlainJob, trace: Path, every: bool) -> None:
    """Run a phase and write down its changes: number, method, place."""
    files = StepFiles()
    phase.run(files)
    steps = range(1, files.num_steps + 1) if every else files.first_of_each_kind()
    trace.write_text(json.dumps([(step, *files.trace[step - 1]) for step in steps]))


def run_until(phase: PlainJob, last: int) -> None:
    """Run a phase and die before its change number `last`; a write is half done."""

    def before(number: int, name: str, arguments: Sequence[Any]) -> None:
        if number == last:
            if name == "write":
                Path(arguments[0]).write_bytes(arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    phase.run(StepFiles(before))


def races(base: Path, count: int, *, racers: int = 3) -> dict[str, float]:
    """Let processes take one lease at the same moment; one must win, the others must refuse soon."""
    slowest_s = 0.0
    for race in range(count):
        state = base / f"race-{race}"
        state.mkdir()
        start = time.monotonic() + 0.05
        pids = [fork(partial(take_lease, state, start), int) for _ in range(racers)]
        codes = sorted(wait_for(pid) for pid in pids)
        slowest_s = max(slowest_s, time.monotonic() - start)
        if codes != [*[REFUSED] * (racers - 1), TAKEN]:
            raise SystemExit(f"race {race} ended with {codes}")
    return {"races": count, "slowest_refusal_s": round(slowest_s, 2)}


def take_lease(state: Path, start_s: float) -> int:
    """Try to take a lease at a given moment; a winner keeps it for as long as others try."""
    lease = Lease(str(state), LocalFiles(), shown="out", beat=False)
    time.sleep(max(0.0, start_s - time.monotonic()))
    try:
        lease.acquire()
    except JobLockedError:
        return REFUSED
    time.sleep(0.3)
    lease.check()
    return TAKEN


@contextmanager
def reader(base: Path) -> Iterator[dict[str, int]]:
    """Let a child open every visible file over and over while the block runs; then fill in what it saw."""
    seen: dict[str, int] = {}
    stop, result = base / "stop", base / "opens"
    pid = fork(lambda: result.write_text(json.dumps(read_all(base, stop))))
    try:
        yield seen
    finally:
        stop.touch()
        if wait_for(pid):
            raise SystemExit("the reader failed")
        seen.update(json.loads(result.read_text()))


def read_all(base: Path, stop: Path) -> dict[str, int]:
    """Open visible files until told to stop: each must be whole, and never change."""
    digests: dict[tuple[str, int, int], str] = {}
    seen = {"opens": 0, "failures": 0, "changed": 0}
    while not stop.exists():
        # glob passes over folders that vanish meanwhile, where pathlib raises.
        for path in glob.glob(f"{base}/*/out/[de]*/**/*.parquet", recursive=True):
            try:
                with open(path, "rb") as source:
                    stat = os.fstat(source.fileno())
                    digest = hashlib.blake2b(source.read()).hexdigest()
                    pq.ParquetFile(source, page_checksum_verification=True).read(use_threads=False)
            except FileNotFoundError:
                continue  # replaced or retired between two calls
            except Exception:
                traceback.print_exc()
                seen["failures"] += 1
                continue
            seen["opens"] += 1
            key = (path, stat.st_ino, stat.st_mtime_ns)
            seen["changed"] += digests.setdefault(key, digest) != digest
        time.sleep(0.01)
    return seen


def main() -> int:
    """Run the bench and print what it counted; 0 if all promises held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="random kills")
    parser.add_argument("--steps", action="store_true", help="also kill at each kind of change on disk")
    parser.add_argument("--every-step", action="store_true", help="also kill at each single change on disk")
    parser.add_argument("--races", type=int, default=0, help="times that processes race for one lease")
    parser.add_argument("--seed", type=int, default=None, help="of the random kills")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}", flush=True)
    begin_s = time.monotonic()
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="batchgen-crash-") as folder:
        base = Path(folder)
        with reader(base) as seen:
            random_kills(base, options.kills, random.Random(seed), tally)
            report: dict[str, float] = {
                "random_kills": tally.kills,
                "lives": tally.lives,
                "rounds": tally.rounds,
            }
            if options.races:
                report |= races(base, options.races)
            if options.steps or options.every_step:
                report["steps_killed_at"] = kills_at_steps(base, tally, every=options.every_step)
    report |= {
        **tally.differences,
        "rows": tally.rows,
        "recomputed": tally.recomputed,
        "recomputed_allowed": tally.allowed,
        **seen,
        "seconds": round(time.monotonic() - begin_s, 1),
    }
    print(json.dumps(report))
    return int(bool(seen["failures"] or seen["changed"]))


if __name__ == "__main__":
    sys.exit(main())
