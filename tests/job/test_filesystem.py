"""File systems that are not this machine's: URLs keep their host, failures are ours, secrets stay secret."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import infer_storage_options

from batchgen_data import cli
from batchgen_data.errors import ConfigError, InputError
from batchgen_data.job.filesystem import cause, open_filesystem, without_credentials
from batchgen_data.job.inputs import resolve_inputs
from batchgen_data.job.output import check_output
from batchgen_data.job.reader import RangeReader, WorkItem


class ServiceFailed(Exception):
    """What a client library raises; no OSError."""


class Hosted(MemoryFileSystem):
    """Like FTP: the host and the user are in the URL only, the paths of the file system have neither."""

    protocol = "hosted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False
    failing: ClassVar[set[str]] = set()

    def __init__(self, host: str = "", username: str = "", password: str = "", **options: Any) -> None:
        super().__init__(**options)
        if (host, username) != ("example.org", "me"):
            raise ServiceFailed(f"cannot reach hosted://{username}:{password}@{host}/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        options = infer_storage_options(path)
        return {name: options[name] for name in ("host", "username", "password") if name in options}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = infer_storage_options(path)["path"] if "://" in path else path
        return "/" + path.strip("/") if path.strip("/") else ""

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._asked(mode)
        return super()._open(path, mode, **options)

    def isfile(self, path: str) -> bool:
        return self._asked("isfile") or super().isfile(path)

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        return self._asked("find") or super().find(path, *args, **options)

    def _asked(self, what: str) -> None:
        if what in self.failing:
            raise ServiceFailed(f"no {what} today")


@pytest.fixture(autouse=True)
def hosted() -> Iterator[type[Hosted]]:
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    yield Hosted
    for cleared in (Hosted.store, Hosted.failing):
        cleared.clear()
    Hosted.pseudo_dirs[:] = [""]


URL = "hosted://me:pa@ss@example.org"


def write(*paths: str) -> None:
    filesystem, _ = open_filesystem(URL)
    for path in paths:
        with filesystem.open(path, "wb") as sink:
            pq.write_table(pa.table({"n": [1, 2]}), sink)


@pytest.mark.parametrize("source", ["/in/a.parquet", "/in", "/in/*.parquet"])
def test_the_host_and_user_of_a_url_reach_every_reader(source: str) -> None:
    write("/in/a.parquet")
    inputs = resolve_inputs([URL + source])
    (file,) = inputs.files
    assert file.name == "hosted://example.org/in/a.parquet"
    assert file.output_name == "a.parquet"
    assert RangeReader(inputs.files).read(WorkItem(0, 0, 2)).column("n").to_pylist() == [1, 2]


@pytest.mark.parametrize("what", ["isfile", "find", "rb"])
def test_a_storage_that_fails_at_the_start_is_a_config_error(what: str) -> None:
    write("/in/a.parquet")
    Hosted.failing.add(what)
    with pytest.raises(ConfigError, match=r"hosted://example\.org/in.*ServiceFailed: no .* today"):
        resolve_inputs([f"{URL}/in"])


def test_a_storage_that_fails_later_is_an_input_error() -> None:
    write("/in/a.parquet")
    inputs = resolve_inputs([f"{URL}/in"])
    Hosted.failing.add("rb")
    with pytest.raises(InputError, match=r"a\.parquet cannot be read: ServiceFailed"):
        RangeReader(inputs.files).read(WorkItem(0, 0, 2))


def test_results_go_to_a_folder_of_this_machine() -> None:
    """Nothing else can be locked and renamed in; the message keeps the secret."""
    with pytest.raises(ConfigError, match=r"output hosted://example\.org/out: .* local or mounted folder"):
        check_output(f"{URL}/out")
    with pytest.raises(ConfigError, match=r"hosted://elsewhere.*cannot reach hosted://elsewhere"):
        check_output("hosted://me:secret@elsewhere/out")


def test_a_host_that_is_not_there_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-m", "x", "--prompt-column", "p"]
    assert cli.main(["run", "hosted://me:secret@nowhere/x.parquet", "-o", "out", *arguments]) == 2
    assert cli.main(["run", "x.parquet", "-o", "hosted://me:secret@nowhere/out", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.count("error: hosted://nowhere/") == 2
    assert "bug" not in printed
    assert "secret" not in printed


@pytest.mark.parametrize(
    "url, shown",
    [
        ("/data/a?b#c@d.parquet", "/data/a?b#c@d.parquet"),
        ("s3://bucket/a/b.parquet", "s3://bucket/a/b.parquet"),
        ("s3://bucket/user@x/part-?.parquet", "s3://bucket/user@x/part-?.parquet"),
        ("ftp://user@host/a@b", "ftp://host/a@b"),
        ("ftp://user:p@ss@host:21/x", "ftp://host:21/x"),
        ("s3://KEY:ab/cd@bucket/x", "s3://bucket/x"),
        ("s3://KEY:a@b/c@d@bucket/x", "s3://bucket/x"),
        ("https://host/x.parquet?X-Amz-Signature=abc&y=1#part", "https://host/x.parquet"),
        ("https://host/x.parquet?token", "https://host/x.parquet"),
        ("HTTPS://user:p@host/x?token", "HTTPS://host/x"),
        ("abfs://container/x?sv=2020&sig=abc", "abfs://container/x"),
        ("github://org:repo@main/x.csv", "github://main/x.csv"),
    ],
)
def test_credentials_are_left_out_of_a_url(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def test_a_cause_is_one_line_without_credentials() -> None:
    assert cause(ServiceFailed("GET s3://K:secret@b/x?sig=secret failed\nmore")) == (
        "ServiceFailed: GET s3://b/x failed"
    )
    assert cause(ConnectionRefusedError(111, "Connection refused")) == "Connection refused"
    assert cause(ServiceFailed()) == "ServiceFailed: ServiceFailed"
