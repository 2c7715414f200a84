"""OpenAI batch files: what requests become, what is refused at the start, and what comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen_data.errors import ConfigError
from batchgen_data.job import text
from batchgen_data.job.check import JobConfig, check_job
from batchgen_data.job.inputs import resolve_inputs
from batchgen_data.job.openai_batch import parse_requests
from batchgen_data.job.reader import RangeReader, WorkItem


def request(custom_id: str, content: Any = "Hello", **body: Any) -> dict[str, Any]:
    messages = body.pop("messages", [{"role": "user", "content": content}])
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "gpt-4o-mini", "messages": messages, **body},
    }


def write(path: Path, *requests: Any) -> str:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in requests]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def parsed(*requests: Any) -> list[dict[str, Any]]:
    rows = parse_requests("\n".join(map(json.dumps, requests)).encode()).to_pylist()
    return [
        {**row, "messages": json.loads(row["messages"]), "sampling": json.loads(row["sampling"])}
        for row in rows
    ]


def test_a_request_becomes_a_row_of_text_columns() -> None:
    one, two = parsed(
        request("a", max_tokens=5, temperature=0.5, stop=["\n"], seed=7, user="u", stream=False, n=1),
        request("b", max_completion_tokens=9, response_format={"type": "text"}, logit_bias={"5": -1}),
    )
    assert (one["custom_id"], one["url"], one["model"]) == ("a", "/v1/chat/completions", "gpt-4o-mini")
    assert one["messages"] == [{"role": "user", "content": "Hello"}]
    assert one["sampling"] == {"max_tokens": 5, "temperature": 0.5, "stop": ["\n"], "seed": 7, "n": 1}
    assert two["sampling"] == {"max_tokens": 9, "logit_bias": {"5": -1}}


def test_what_is_not_supported_stays_a_setting_for_the_row_to_fail_with() -> None:
    (row,) = parsed(request("a", stream=True, logprobs=True, tools=[{"type": "function"}], surprise=1))
    assert set(row["sampling"]) == {"stream", "logprobs", "tools", "surprise"}


def test_text_parts_are_joined_and_others_are_left() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    image = [{"type": "image_url", "image_url": {"url": "https://x"}}]
    one, two = parsed(request("a", parts), request("b", image))
    assert one["messages"][0]["content"] == "one two"
    assert two["messages"][0]["content"] == image


@pytest.mark.parametrize(
    "line, why",
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        (json.dumps({"custom_id": "x", "method": "POST", "body": {}}), "url is missing"),
        (json.dumps({**request("x"), "custom_id": 7}), "custom_id must be text"),
        (json.dumps({**request("x"), "custom_id": ""}), "custom_id must be text"),
        (json.dumps({**request("x"), "method": "GET"}), "method must be POST"),
        (json.dumps({**request("x"), "url": "/v1/embeddings"}), "url must be /v1/chat/completions"),
        (json.dumps({**request("x"), "body": {"prompt": "x"}}), "body must be an object with a list of mess"),
        (json.dumps(request("x", "half \ud83d")), "surrogate"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = write(tmp_path / "in.jsonl", request("a", "secret"), "", line, request("b"))
    with pytest.raises(ConfigError, match=rf"in\.jsonl line 3: .*{why}") as caught:
        resolve_inputs([path], format="openai")
    assert "secret" not in str(caught.value)


def test_ids_given_twice_are_refused_with_both_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_BLOCK_BYTES", 300)  # in another block
    path = write(
        tmp_path / "in.jsonl", request("a"), "  ", *(request(f"b{i}") for i in range(5)), request("a")
    )
    with pytest.raises(ConfigError, match=r"in\.jsonl line 8: the custom_id of line 1 again"):
        resolve_inputs([path], format="openai")
    first, second = write(tmp_path / "1.jsonl", request("x"), request("y")), str(tmp_path / "2.jsonl")
    write(tmp_path / "2.jsonl", request("z"), request("y"))
    with pytest.raises(ConfigError, match=r"2\.jsonl line 2: the custom_id of line 2 of .*1\.jsonl again"):
        resolve_inputs([first, second], format="openai")


def test_any_range_of_rows_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_BLOCK_BYTES", 500)
    path = write(tmp_path / "in.jsonl", *(request(f"id-{i}", "ü" * i) for i in range(50)))
    files = resolve_inputs([path], format="openai").files
    assert files[0].num_rows == 50
    assert files[0].index is not None
    assert files[0].index.custom_ids is None, "ids would go to every worker"
    reader = RangeReader(files)
    for first, count in ((0, 50), (17, 3), (49, 1)):
        ids = reader.read(WorkItem(0, first, count)).column("custom_id").to_pylist()
        assert ids == [f"id-{i}" for i in range(first, first + count)]


def test_prompt_options_have_no_effect_on_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", request("a"))
    for name in ("prompt", "prompt_column", "messages_column", "sampling_column"):
        options: dict[str, Any] = {name: "x"}
        with pytest.raises(ConfigError, match=f"{name} has no effect on batch requests"):
            check_job(JobConfig(inputs=(path,), model="m", format="openai", **options))
