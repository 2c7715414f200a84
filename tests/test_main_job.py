"""`batchgen run` as a user runs it: real files, a real (tiny) model, Ray, a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_data import LLM, SamplingParams
from tiny_models import tiny_checkpoint

pytestmark = pytest.mark.ray
MODEL_OPTIONS = ["--num-threads", "1", "--kv-memory", "32MiB", "--max-context-tokens", "96"]
SETTINGS = ["--max-tokens", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", chat_template=True))


def batchgen(*arguments) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "batchgen_data.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def write_inputs(folder: Path) -> None:
    """Case 65: string, large_string and dictionary prompts; other orders, widths and columns."""
    folder.mkdir()
    prompts = [f"say {i}" for i in range(30)]
    pq.write_table(pa.table({"prompt": prompts, "n": pa.array(range(30), pa.int64())}), folder / "a.parquet")
    table = pa.table(
        {
            "n": pa.array(range(4), pa.int32()),
            "prompt": pa.array(["x", None, "", "word " * 300], pa.large_string()),
        }
    )
    pq.write_table(table.replace_schema_metadata({"origin": "elsewhere"}), folder / "b.parquet")
    words = pa.array(["p", "q", "p"]).dictionary_encode()
    pq.write_table(pa.table({"prompt": words, "extra": [1.5, None, 2.5]}), folder / "c.parquet")
    (folder / "d.jsonl").write_text('{"prompt": "from json", "n": 1}\n{"prompt": "again", "n": null}\n')
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "e.parquet")


def test_parquet_to_parquet(model, tmp_path):
    source, output = tmp_path / "in", tmp_path / "out"
    write_inputs(source)
    done = batchgen(
        "run", source, "-o", output, "--model", model, "--prompt-column", "prompt", *SETTINGS, *MODEL_OPTIONS
    )
    assert done.returncode == 3, done.stderr  # finished, with row errors
    files = sorted(path.name for path in (output / "data").iterdir())
    assert files == [f"{name}-00000.parquet" for name in "abcde"]
    with LLM(model, num_threads=1, kv_memory="32MiB", max_context_tokens=96) as llm:
        for name in ("a", "b", "c", "e"):
            want = pq.read_table(source / f"{name}.parquet")
            if name == "b":  # its last two rows failed
                want = want.slice(0, 2)
            got = pq.read_table(output / "data" / f"{name}-00000.parquet")
            kept = got.select(want.column_names)
            assert kept.equals(want)
            assert kept.schema.types == want.schema.types
            assert (got.schema.metadata or {}).get(b"origin") == (want.schema.metadata or {}).get(b"origin")
            outcomes = llm.generate(
                [prompt or "" for prompt in want["prompt"].to_pylist()],
                SamplingParams(max_tokens=6, ignore_eos=True),
            )
            assert got["generated_text"].to_pylist() == [outcome.text for outcome in outcomes]
    b = pq.read_table(output / "data" / "b-00000.parquet")
    assert b["finish_reason"].to_pylist() == ["length", "skipped"]
    assert b["error_code"].to_pylist() == [None, "null_input"]
    failed = pq.read_table(output / "errors" / "b-00000.parquet")
    assert failed.schema.equals(b.schema)
    assert failed["finish_reason"].to_pylist() == ["error", "error"]
    assert failed["error_code"].to_pylist() == ["empty_prompt", "prompt_too_long"]

    record = json.loads((output / "_batchgen" / "run.json").read_text())
    assert record["status"] == "finished"
    assert sum(part["rows"] for part in record["files"]) == 39
    assert record["worker"]["sampling"]["max_tokens"] == 6
    assert record["worker"]["sampling_sources"]["max_tokens"] == "user"
    assert record["worker"]["sampling_sources"]["temperature"] == "model"
    assert "say 3" not in json.dumps(record)
    assert "39" in done.stdout + done.stderr

    given = ["run", source, "-o", output, "--model", model, "--prompt-column", "prompt"]
    again = batchgen(*given, *SETTINGS, *MODEL_OPTIONS)
    assert (again.returncode, again.stdout.splitlines()[0]) == (3, done.stdout.splitlines()[0])
    assert again.stderr == "all 39 rows in 5 files are done; nothing to do\n"
    other = batchgen(*given)
    assert other.returncode == 2
    assert "what differs: sampling" in other.stderr
    assert "Traceback" not in other.stderr
    assert batchgen("verify", output).returncode == 0
    status = batchgen("status", output)
    assert status.returncode == 0
    assert status.stdout.startswith("state: finished\nprogress: 39 of 39 rows (100.0%)")


def test_preview_shows_prompts_and_completions_without_ray(model, tmp_path):
    write_inputs(tmp_path / "in")
    done = batchgen(
        "preview",
        tmp_path / "in" / "a.parquet",
        "-n",
        2,
        "--model",
        model,
        "--prompt",
        "Twice: {{ prompt }} {{ prompt }}",
        *SETTINGS,
        *MODEL_OPTIONS,
    )
    assert done.returncode == 0, done.stderr
    assert "Twice: say 1 say 1" in done.stdout
    assert "say 2" not in done.stdout


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--prompt-column", "promt"], "did you mean 'prompt'"),
        (["--prompt", "{{ text }}"], "text"),
        (["--prompt-column", "prompt", "--max-token", "4"], "--max-tokens"),
        (["--prompt-column", "prompt", "--model", "no/such/model/folder"], "no/such/model/folder"),
    ],
)
def test_mistakes_end_at_once_with_one_clear_line(model, tmp_path, arguments, message):
    write_inputs(tmp_path / "in")
    if "--model" not in arguments:
        arguments = [*arguments, "--model", model]
    done = batchgen("run", tmp_path / "in", "-o", tmp_path / "out", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
