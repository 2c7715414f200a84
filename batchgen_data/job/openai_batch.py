"""OpenAI batch files: requests in, and results and errors out, as that API writes them.

A line of the input is ``{"custom_id", "method": "POST", "url": "/v1/chat/completions", "body": {...}}``. It
becomes a row of these columns, all text: `COLUMNS`. What a body holds beside model and messages are the row's
sampling settings, by their names there; what only concerns a server is left out (`_IGNORED`). After the job,
``OUT/results.jsonl`` and ``OUT/errors.jsonl`` are made from its Parquet files.

https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from batchgen_data.errors import ConfigError
from batchgen_data.job.files import LocalFiles, file_digest
from batchgen_data.job.parts import read_part

MESSAGES, SAMPLING = "messages", "sampling"
COLUMNS = ("custom_id", "url", "model", MESSAGES, SAMPLING)
SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])
RESULTS, ERRORS = "results.jsonl", "errors.jsonl"

_URL = "/v1/chat/completions"
_KEYS = ("custom_id", "method", "url", "body")
# These say who asks, how a server bills and caches, and how it answers.
_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options")
)
# These change nothing where they have one of these values; others are refused by row.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "modalities": (None, ["text"]),
}


def parse_requests(data: bytes) -> pa.Table:
    """Return one row per line that is not blank.

    Args:
        data: Whole lines.

    Raises:
        ValueError: A line is no request; the text says why, without quoting it.
    """
    rows = [_row(line) for line in data.split(b"\n") if line.strip()]
    return pa.table(
        [pa.array([row[i] for row in rows], pa.string()) for i in range(len(COLUMNS))], schema=SCHEMA
    )


def _row(line: bytes) -> tuple[str, ...]:
    try:
        request = json.loads(line)
    except ValueError:
        raise ValueError("not JSON") from None
    if not isinstance(request, dict):
        raise ValueError("not a JSON object")
    if missing := [key for key in _KEYS if key not in request]:
        raise ValueError(f"a request needs {', '.join(_KEYS)}; {missing[0]} is missing")
    custom_id, body = request["custom_id"], request["body"]
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id must be text that is not empty")
    if request["method"] != "POST":
        raise ValueError("method must be POST")
    if request["url"] != _URL:
        raise ValueError(f"url must be {_URL}, the only endpoint that is supported")
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ValueError("body must be an object with a list of messages")
    messages = [_with_plain_text(message) for message in body["messages"]]
    settings = {name: value for name, value in body.items() if not _says_nothing(name, value)}
    if "max_completion_tokens" in settings:  # today's name of max_tokens
        settings = {("max_tokens" if k == "max_completion_tokens" else k): v for k, v in settings.items()}
    texts = (
        custom_id,
        request["url"],
        str(body.get("model", "")),
        json.dumps(messages, ensure_ascii=False),
        json.dumps(settings, ensure_ascii=False),
    )
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("text with half of a surrogate pair") from None
    return texts


def _says_nothing(name: str, value: Any) -> bool:
    if name in ("model", "messages") or name in _IGNORED:
        return True
    return name in _WITHOUT_EFFECT and value in _WITHOUT_EFFECT[name]


def _with_plain_text(message: Any) -> Any:
    """Content that is a list of text parts, as one text; others are left for the row to fail with."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    texts = [
        part["text"]
        for part in content
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    ]
    return message if len(texts) < len(content) else {**message, "content": "".join(texts)}


class CustomIds:
    """Finds ids that are given twice."""

    def __init__(self) -> None:
        self._lines: dict[bytes, tuple[str, int]] = {}

    def add(self, custom_ids: Sequence[str], lines: Sequence[int], name: str) -> None:
        """Take the ids of a block.

        Args:
            custom_ids: In order.
            lines: The line of each, from 1.
            name: The file.

        Raises:
            ConfigError: One was there before; both lines are named.
        """
        for custom_id, line in zip(custom_ids, lines, strict=True):
            key = hashlib.blake2b(custom_id.encode(), digest_size=12).digest()
            first_name, first_line = self._lines.setdefault(key, (name, line))
            if (first_name, first_line) != (name, line):
                where = f"line {first_line}" if first_name == name else f"line {first_line} of {first_name}"
                raise ConfigError(f"{name} line {line}: the custom_id of {where} again; ids must be unique")

    def add_all(self, others: CustomIds) -> None:
        """Take those of another file.

        Raises:
            ConfigError: As `add`.
        """
        for key, (name, line) in others._lines.items():
            first_name, first_line = self._lines.setdefault(key, (name, line))
            if (first_name, first_line) != (name, line):
                raise ConfigError(
                    f"{name} line {line}: the custom_id of line {first_line} of {first_name} again; ids must "
                    "be unique over all files of a job"
                )


def write_answers(
    root: str,
    parts: Sequence[str],
    *,
    prefix: str,
    model: str,
    created_at_s: int,
    files: LocalFiles,
    staging: str,
) -> None:
    """Make ``results.jsonl`` and ``errors.jsonl`` from a finished job.

    Each appears whole, and the same outcomes give the same bytes; a file that has them already stays.

    Args:
        root: The output folder.
        parts: Its Parquet files, in the order of their rows.
        prefix: Of the result columns.
        model: The model that answered.
        created_at_s: When the job began, in seconds since 1970.
        files: The file system.
        staging: A folder to write in first.

    Raises:
        OSError, pa.ArrowException: What cannot be read or written.
    """
    names = {True: RESULTS, False: ERRORS}
    staged = {is_ok: f"{staging}/{name}" for is_ok, name in names.items()}
    for path in staged.values():
        files.remove(path)
    writers: dict[bool, BinaryIO] = {is_ok: files.create(path) for is_ok, path in staged.items()}
    try:
        for answer, is_ok in _answers(root, parts, prefix, model, created_at_s):
            writers[is_ok].write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
    finally:
        for writer in writers.values():
            writer.close()
    for is_ok, name in names.items():
        final = f"{root}/{name}"
        if files.exists(final) and _is_same(staged[is_ok], final):
            files.remove(staged[is_ok])
            continue
        files.sync(staged[is_ok])
        files.replace(staged[is_ok], final)


def _answers(
    root: str, parts: Sequence[str], prefix: str, model: str, created_at_s: int
) -> Iterator[tuple[dict[str, Any], bool]]:
    names = (
        *("generated_text", "finish_reason", "num_input_tokens", "num_generated_tokens"),
        *("error_code", "error_message"),
    )
    for part in parts:
        for batch in read_part(f"{root}/{part}", ["custom_id", *(prefix + name for name in names)]):
            for row in batch.to_pylist():
                custom_id = row["custom_id"]
                values = {name: row[prefix + name] for name in names}
                yield _answer(custom_id, values, model, created_at_s), values["error_code"] is None


def _answer(custom_id: str, row: Mapping[str, Any], model: str, created_at_s: int) -> dict[str, Any]:
    # Nobody looks anything up by these; the same row gets the same ones again.
    digest = hashlib.blake2b(custom_id.encode(), digest_size=12).hexdigest()
    answer: dict[str, Any] = {"id": f"batch_req_{digest}", "custom_id": custom_id}
    if row["error_code"] is not None:
        return {
            **answer,
            "response": None,
            "error": {"code": row["error_code"], "message": row["error_message"]},
        }
    used, made = row["num_input_tokens"] or 0, row["num_generated_tokens"] or 0
    message = {"role": "assistant", "content": row["generated_text"], "refusal": None}
    body = {
        "id": f"chatcmpl-{digest}",
        "object": "chat.completion",
        "created": created_at_s,
        "model": model,
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": row["finish_reason"]}
        ],
        "usage": {"prompt_tokens": used, "completion_tokens": made, "total_tokens": used + made},
    }
    response = {"status_code": 200, "request_id": f"req_{digest}", "body": body}
    return {**answer, "response": response, "error": None}


def _is_same(path: str, other: str) -> bool:
    if os.path.getsize(path) != os.path.getsize(other):
        return False
    return file_digest(path) == file_digest(other)
