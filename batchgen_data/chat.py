"""Prompts through the tokenizer: chat template and special tokens, exactly one beginning-of-text token."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from batchgen_data.errors import ConfigError, PromptError, RowError

# Arguments of `apply_chat_template` that are ours to set, or would change the kind of its result.
_RESERVED = frozenset(
    {
        "conversation",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
# A call of a fast tokenizer may set its padding and truncation first, which fails ("Already borrowed")
# while another thread encodes with it.
_ENCODING = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """How prompts become token ids.

    Attributes:
        system: Put before conversations that do not begin with a system message.
        enabled: Whether text prompts become a user message where there is a chat template.
        template_kwargs: Variables for the chat template.
        control_tokens: "text": a control token's name inside a message, such as an end-of-turn marker, is
            encoded as the text it is, so that data cannot end a turn or begin another. "tokens": it
            becomes the control token.

    Raises:
        ConfigError: `template_kwargs` names something this package sets itself.
    """

    system: str | None = None
    enabled: bool = True
    template_kwargs: Mapping[str, Any] | None = None
    control_tokens: str = "text"

    def __post_init__(self) -> None:
        if self.control_tokens not in ("text", "tokens"):
            raise ConfigError(f'control_tokens must be "text" or "tokens", not {self.control_tokens!r}')
        if self.template_kwargs is not None and not isinstance(self.template_kwargs, Mapping):
            raise ConfigError(
                f"chat_template_kwargs must be a mapping, not {type(self.template_kwargs).__name__}"
            )
        if reserved := sorted(_RESERVED.intersection(self.template_kwargs or ())):
            raise ConfigError(f"chat_template_kwargs cannot set {', '.join(reserved)}: it is set per row")

    def is_available(self, tokenizer: Any) -> bool:
        """Return whether there is a chat template to apply."""
        kwargs = self.template_kwargs or {}
        try:
            return bool(tokenizer.get_chat_template(kwargs.get("chat_template"), kwargs.get("tools")))
        except ValueError:  # what transformers raises when there is none, or no default among several
            return False

    def render(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], control_names: Sequence[str] = ()
    ) -> str | list[int]:
        """Return a conversation as the text that is to be tokenized without added special tokens.

        One that contains any of `control_names` comes back as token ids, those names encoded as text: in
        the text they could not be told from the template's own. A conversation that ends with an assistant
        message is continued; if that message is blank, a new one is begun.

        Raises:
            RowError: `chat_template_error`, with the template's own message if it refused in fixed words.
        """
        conversation = [dict(message) for message in messages]
        if self.system is not None and conversation[0]["role"] != "system":
            conversation.insert(0, {"role": "system", "content": self.system})
        continues = conversation[-1]["role"] == "assistant"
        if continues and not conversation[-1]["content"].strip():
            conversation.pop()
            continues = False
        options: dict[str, Any] = {
            **(self.template_kwargs or {}),
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
        }
        try:
            if _names_any(conversation, control_names):
                with _ENCODING:
                    return tokenizer.apply_chat_template(
                        conversation,
                        tokenize=True,
                        return_dict=False,
                        sanitize_control_tokens=True,
                        **options,
                    )
            return tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        except TemplateError as error:
            message = "the chat template refused the conversation"
            if self._is_in_template(str(error), tokenizer):
                message += f": {str(error)[:200]}"
            raise RowError("chat_template_error", message) from error
        except Exception as error:
            # Only the kind: transformers quotes the whole conversation in some of its messages.
            message = f"applying the chat template raised {type(error).__name__}"
            if continues:
                message += "; the conversation ends with an assistant message, which could not be continued"
            raise RowError("chat_template_error", message) from error

    def _is_in_template(self, message: str, tokenizer: Any) -> bool:
        """Whether a template's message stands in its source; one put together may quote the conversation."""
        kwargs = self.template_kwargs or {}
        source = str(tokenizer.get_chat_template(kwargs.get("chat_template"), kwargs.get("tools")))
        return bool(message) and message in re.sub(r"\\(.)", r"\1", source)

    def encode(
        self, prompts: Sequence[str | list[dict[str, Any]] | list[int] | RowError], tokenizer: Any
    ) -> list[list[int] | RowError]:
        """Return token ids for each prompt, or its error; one tokenizer call per kind of prompt.

        Conversations, and text where the chat template applies, get exactly the special tokens that the
        template writes. Other text gets the tokenizer's own; if it begins with the beginning-of-text
        string already, that one is kept and no second is added. Token ids and errors pass through.
        """
        has_template = self.is_available(tokenizer)
        control_names: list[str] = []
        if has_template and self.control_tokens == "text":
            control_names = [str(token) for token in tokenizer.added_tokens_decoder.values()]
            control_names = [name for name in control_names if not name.isspace()]
        results: list[list[int] | RowError] = []
        chats: dict[int, str] = {}
        texts: dict[int, str] = {}
        unset = PromptError("empty_prompt", "the prompt has no tokens")
        for index, prompt in enumerate(prompts):
            results.append(unset)
            if isinstance(prompt, RowError):
                results[index] = prompt
            elif isinstance(prompt, str) and not (self.enabled and has_template):
                texts[index] = prompt
            elif isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
                results[index] = prompt
            elif not has_template:
                message = "the tokenizer has no chat template, so a conversation cannot be encoded"
                results[index] = RowError("chat_template_error", message)
            else:
                messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                try:
                    rendered = self.render(tokenizer, messages, control_names)
                except RowError as error:
                    results[index] = error
                    continue
                if isinstance(rendered, str):
                    chats[index] = rendered
                elif rendered:
                    results[index] = rendered
        for index, ids in _tokenize(chats, tokenizer, add_special_tokens=False).items():
            results[index] = ids if ids else unset
        for index, ids in _tokenize(texts, tokenizer, add_special_tokens=True).items():
            results[index] = ids if ids else unset
        return results


def _names_any(conversation: Sequence[Mapping[str, Any]], names: Sequence[str]) -> bool:
    return any(
        name in text
        for message in conversation
        for text in (message["role"], message["content"])
        for name in names
    )


def _tokenize(
    texts: Mapping[int, str], tokenizer: Any, *, add_special_tokens: bool
) -> dict[int, list[int] | RowError]:
    if not texts:
        return {}

    def call(batch: list[str]) -> list[list[int]]:
        with _ENCODING:
            return tokenizer(
                batch,
                add_special_tokens=add_special_tokens,
                padding=False,
                truncation=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]

    encoded = _isolating(call, list(texts.values()))
    if add_special_tokens:
        encoded = _without_second_bos(encoded, list(texts.values()), tokenizer, call)
    return dict(zip(texts, encoded, strict=True))


def _isolating(call: Callable[[list[str]], list[list[int]]], texts: list[str]) -> list[list[int] | RowError]:
    """Encode all texts at once; if that raises, one by one, so that only the culprits fail."""
    try:
        return list(call(texts))
    except BaseException as error:
        if not _is_row_failure(error):
            raise
        if len(texts) == 1:
            return [RowError("tokenize_error", f"tokenizing the prompt raised {type(error).__name__}")]
    return [_isolating(call, [text])[0] for text in texts]


def _is_row_failure(error: BaseException) -> bool:
    # A panic inside the Rust tokenizer arrives as a BaseException.
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _without_second_bos(
    encoded: list[list[int] | RowError],
    texts: list[str],
    tokenizer: Any,
    call: Callable[[list[str]], list[list[int]]],
) -> list[list[int] | RowError]:
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    if not bos or not any(text.startswith(bos) for text in texts):
        return encoded
    if call(["a"])[0][:1] != [bos_id]:  # nothing is added in front, so nothing is doubled
        return encoded
    return [
        ids[1:] if text.startswith(bos) and isinstance(ids, list) and ids[:2] == [bos_id, bos_id] else ids
        for ids, text in zip(encoded, texts, strict=True)
    ]
