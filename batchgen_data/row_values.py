"""One row's values checked: its prompt, its conversation, its sampling parameters."""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from typing import Any

from batchgen_data.errors import ConfigError, PromptError, RowError
from batchgen_data.sampling import ResolvedSampling, SamplingParams, resolve

Message = dict[str, Any]
# What a row asks the tokenizer for: text, a conversation, or ids that need no tokenizer.
Prompt = str | list[Message] | list[int]


def prompt_text(value: Any) -> str:
    """Return a prompt that is text with at least one character.

    Raises:
        RowError: `wrong_type` or `empty_prompt`.
    """
    if not isinstance(value, str):
        raise PromptError("wrong_type", f"reading the prompt: it is {type(value).__name__}, not text")
    if not value:
        raise PromptError("empty_prompt", "the prompt is an empty string")
    return value


def conversation(cell: Any) -> list[Message]:
    """Return a cell as messages: a list of {role, content}, or the same as JSON text.

    Null keys are dropped; keys besides role and content stay, for the chat template.

    Raises:
        RowError: `invalid_messages`, or `empty_prompt` when there is no message or no text in any.
    """
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise PromptError("invalid_messages", "reading messages: the text is not valid JSON") from error
    if not isinstance(cell, (list, tuple)):
        raise PromptError("invalid_messages", f"reading messages: {type(cell).__name__} instead of a list")
    if not cell:
        raise PromptError("empty_prompt", "the list of messages is empty")
    messages = []
    for number, item in enumerate(cell, start=1):
        if not isinstance(item, Mapping):
            found = "null" if item is None else type(item).__name__
            raise PromptError(
                "invalid_messages", f"reading messages: message {number} is {found}, not an object"
            )
        # Arrow gives every struct every key of the column; a null key was absent.
        message = {key: value for key, value in item.items() if value is not None}
        for key in ("role", "content"):
            if key not in message:
                raise PromptError("invalid_messages", f"reading messages: message {number} has no {key!r}")
            if not isinstance(message[key], str):
                found = type(message[key]).__name__
                raise PromptError(
                    "invalid_messages", f"reading messages: {key!r} of message {number} is {found}, not text"
                )
        messages.append(message)
    if not any(message["content"] for message in messages):
        raise PromptError("empty_prompt", "every message is empty")
    return messages


def python_prompt(prompt: Any, vocab_size: int) -> Prompt | RowError:
    """Check one prompt given from Python: text, token ids below `vocab_size`, or messages."""
    try:
        if prompt is None:
            raise RowError("null_input", "the prompt is None", skipped=True)
        if isinstance(prompt, str):
            return prompt_text(prompt)
        items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(items, (list, tuple)):
            raise PromptError(
                "wrong_type",
                f"the prompt is {type(prompt).__name__}; give text, token ids or a list of messages",
            )
        if items and not isinstance(items[0], numbers.Integral):
            return conversation(items)
        if not items:
            raise PromptError("empty_prompt", "the prompt has no tokens")
        for item in items:
            if (
                not isinstance(item, numbers.Integral)
                or isinstance(item, bool)
                or not 0 <= int(item) < vocab_size
            ):
                raise PromptError(
                    "wrong_type",
                    f"token ids must be whole numbers from 0 to {vocab_size - 1} (the vocabulary)",
                )
        return [int(item) for item in items]
    except RowError as error:
        return error
    except Exception as error:
        return PromptError("wrong_type", f"reading the prompt raised {type(error).__name__}")


def row_sampling(cell: Any, base: SamplingParams, defaults: SamplingParams) -> ResolvedSampling | RowError:
    """Resolve a row's own settings (a struct, the pairs of a map, or JSON text) over the job's.

    Returns an `invalid_sampling` error instead of raising.
    """
    try:
        if isinstance(cell, RowError):
            return RowError("invalid_sampling", cell.message)
        if isinstance(cell, str):
            try:
                cell = json.loads(cell)
            except (ValueError, RecursionError) as error:
                raise ConfigError("the text is not valid JSON") from error
            if cell is None:
                cell = {}
        elif isinstance(cell, list):  # an Arrow map: pairs, which may repeat a key
            if len({key for key, _ in cell}) < len(cell):
                raise ConfigError("the map has a key twice")
            cell = {key: _map_value(key, value) for key, value in cell}
        if not isinstance(cell, dict):
            raise ConfigError(f"the value is {type(cell).__name__}, not an object")
        # Arrow gives every struct every key of the column; a null key was not asked for, even an unknown one.
        asked = {key: value for key, value in cell.items() if value is not None}
        return resolve(SamplingParams.from_dict(asked).over(base), defaults)
    except Exception as error:
        what = str(error) if isinstance(error, ConfigError) else f"raised {type(error).__name__}"
        return RowError("invalid_sampling", f"reading the row's sampling parameters: {what}")


def _map_value(key: str, value: Any) -> Any:
    """Parse a value of a map of strings, in which numbers and lists are JSON text."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    # A stop string "1" stays the text it is.
    return value if key in ("stop", "stop_strings") and not isinstance(parsed, list) else parsed


def prompt_sampling(
    item: SamplingParams | Mapping[str, Any] | None, defaults: SamplingParams
) -> ResolvedSampling | RowError:
    """Resolve the settings given for one prompt; an `invalid_sampling` error instead of raising."""
    try:
        params = item if isinstance(item, SamplingParams) else SamplingParams.from_dict(item or {})
        return resolve(params, defaults)
    except ConfigError as error:
        return RowError("invalid_sampling", str(error))
