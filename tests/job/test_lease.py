"""One writer: of many that try one wins, a dead one is succeeded at once, a stopped one cannot come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchgen_data.errors import JobLockedError
from batchgen_data.job import lease as lease_module
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.lease import Lease, last_owner, running_owner

HOLD = """
import sys, time
from batchgen_data.errors import JobLockedError
from batchgen_data.job.files import LocalFiles
from batchgen_data.job.lease import Lease

lease = Lease(sys.argv[1], LocalFiles(), shown="out")
try:
    sys.stdin.readline()
    lease.acquire()
except JobLockedError:
    print("refused", flush=True)
else:
    print("taken", flush=True)
    time.sleep(600)
"""


def new(state: Path, **options: float) -> Lease:
    return Lease(str(state), LocalFiles(), shown="out", **options)  # type: ignore[arg-type]


def start(state: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_numbers_rise_and_only_the_last_leases_are_kept(tmp_path: Path) -> None:
    for generation in range(1, 6):
        lease = new(tmp_path)
        lease.acquire()
        assert lease.generation == generation
        assert running_owner(str(tmp_path), LocalFiles()) is not None
        lease.release()
        assert running_owner(str(tmp_path), LocalFiles()) is None
    assert sorted(os.listdir(tmp_path / "leases")) == ["00000004.json", "00000005.json"]
    assert os.listdir(tmp_path / "owners") == []


def test_a_second_run_is_refused_at_once_and_names_the_first(tmp_path: Path) -> None:
    first = new(tmp_path)
    first.acquire()
    begin_s = time.monotonic()
    with pytest.raises(JobLockedError, match=f"another run .process {os.getpid()} on "):
        new(tmp_path).acquire()
    assert time.monotonic() - begin_s < 5
    first.check()
    first.release()
    new(tmp_path).acquire()


def test_of_processes_that_start_together_one_wins(tmp_path: Path) -> None:
    """Promise 4; the crash bench has more."""
    for race in range(3):
        state = tmp_path / str(race)
        state.mkdir()
        processes = [start(state) for _ in range(3)]
        for process in processes:
            go(process)
        assert sorted(answer(process) for process in processes) == ["refused", "refused", "taken"]
        for process in processes:
            end(process)


def test_a_killed_owner_is_succeeded_at_once_and_its_folder_inherited(tmp_path: Path) -> None:
    process = start(tmp_path)
    go(process)
    assert answer(process) == "taken"
    (tmp_path / "owners/00000001/left").write_text("x")
    end(process)
    lease = new(tmp_path)
    lease.acquire()
    assert lease.generation == 2
    assert [Path(folder, "left").read_text() for folder in lease.inherited] == ["x"]


def test_folders_inherited_by_an_owner_that_died_are_not_lost(tmp_path: Path) -> None:
    for name in ("owners/00000001", "owners/00000003/inherited/00000002/inherited/00000001b"):
        (tmp_path / name).mkdir(parents=True)
    lease = new(tmp_path)
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases/00000003.json").write_text("torn")
    lease.acquire()
    assert lease.generation == 4
    names = [Path(folder).name for folder in lease.inherited]
    assert names == ["00000001", "00000001b", "00000002", "00000003"]


def test_a_stopped_owner_is_succeeded_when_silent_and_can_do_nothing_afterwards(tmp_path: Path) -> None:
    process = start(tmp_path)
    go(process)
    assert answer(process) == "taken"
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(JobLockedError):
        new(tmp_path, expiry_s=30).acquire()
    heartbeat = tmp_path / "owners/00000001/heartbeat"
    os.utime(heartbeat, (time.time() - 31, time.time() - 31))
    lease = new(tmp_path, expiry_s=30)
    lease.acquire()
    assert lease.generation == 2
    process.send_signal(signal.SIGCONT)
    assert not heartbeat.exists()
    end(process)


def test_an_owner_that_lost_its_lease_notices(tmp_path: Path) -> None:
    first = new(tmp_path)
    first.acquire()
    os.utime(f"{first.folder}/heartbeat", (0, 0))
    second = new(tmp_path)
    second.acquire()
    with pytest.raises(JobLockedError, match="another run took over"):
        first.check()
    with pytest.raises(FileNotFoundError):
        LocalFiles().write(f"{first.folder}/job/anything", b"")
    second.check()
    first.release()
    second.check()


def test_an_owner_of_another_machine_is_believed_as_long_as_it_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "_machine", lambda: "elsewhere")
        first = new(tmp_path)
        first.acquire()
    with pytest.raises(JobLockedError, match=r"s ago; if it is gone, try again in 60 s"):
        new(tmp_path).acquire()
    os.utime(f"{first.folder}/heartbeat", (time.time() - 61, time.time() - 61))
    new(tmp_path).acquire()


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_S", 0.01)
    lease = new(tmp_path)
    lease.acquire()
    heartbeat = f"{lease.folder}/heartbeat"
    os.utime(heartbeat, (0, 0))
    deadline_s = time.monotonic() + 10
    while os.stat(heartbeat).st_mtime == 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    lease.release()
    last = last_owner(str(tmp_path), LocalFiles())
    assert last is not None
    assert last.is_alive()
