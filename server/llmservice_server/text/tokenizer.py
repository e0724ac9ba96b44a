"""A checkpoint's tokenizer, as the HTTP process needs it: text and messages to ids, and the ids that end a sequence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from llmservice_server.sampling.token_bytes import TokenBytes
from llmservice_server.text.chat_template import ChatTemplate, ChatTemplateError, TemplateOptions
from llmservice_server.text.decoded_bytes import decoded_bytes
from llmservice_server.text.token_bound import most_bytes_per_token
from llmservice_server.text.tool_format import ToolFormat

LONG_TEXT_BYTES = 4096
"""Longer texts are tokenized without the interpreter's lock, which is worth its overhead from about here on."""


class TextTooLongError(Exception):
    """A text has more tokens than it may: one sentence for the client."""


class TokenizerLoadError(Exception):
    """The folder's tokenizer cannot be used: one sentence for the user."""


class Tokenizer:
    """Thread-safe: the library keeps no state between calls. It releases the interpreter's lock for long texts only."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        chat: ChatTemplate | None = None,
    ) -> None:
        self._library = library
        self._chat = chat
        self.eos_token_ids = eos_token_ids
        self.token_bytes = TokenBytes(library)
        self.decoded_bytes = decoded_bytes(library)
        self.tool_format, self.tag_ids = _tools(library, None if chat is None else chat.tool_format)
        self._most_bytes_per_token = most_bytes_per_token(library)
        self.vocab_size: int = max(library.get_vocab().values(), default=-1) + 1

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json and, where they exist, template and configurations. Raises TokenizerLoadError."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerLoadError(
                f"{path} does not exist: a checkpoint needs a fast tokenizer in Hugging Face's format"
            )
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerLoadError(f"{path} cannot be read: {error}") from error
        library.no_truncation()
        library.no_padding()
        settings = _read_json(directory / "tokenizer_config.json")
        special_tokens = _special_tokens(settings)
        return cls(
            library,
            eos_token_ids=_eos_token_ids(directory, library.token_to_id(special_tokens.get("eos_token", ""))),
            chat=_chat_template(directory, settings, special_tokens),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Ids of a bare prompt, with the special tokens that the model wants around it (Llama: the begin token).

        Raises TextTooLongError, without tokenizing it, for a text that is certainly longer than `max_tokens`.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens, max_tokens=max_tokens)[0]

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[list[int]]:
        """`encode` of several; `max_tokens` is for each."""
        if max_tokens is not None:
            self._refuse_longer(texts, max_tokens)
        if sum(map(len, texts)) > LONG_TEXT_BYTES:
            return [each.ids for each in self._library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        return [self._library.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]

    def _refuse_longer(self, texts: Sequence[str], max_tokens: int) -> None:
        num_bytes = max((len(text.encode()) for text in texts), default=0)
        fewest = 0 if self._most_bytes_per_token is None else -(-num_bytes // self._most_bytes_per_token)
        if fewest > max_tokens:
            raise TextTooLongError(
                f"This model's maximum is {max_tokens} tokens. However, a text of {num_bytes} bytes has {fewest} or "
                "more: shorten it"
            )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions = TemplateOptions(),  # noqa: B008  # it is frozen
        max_tokens: int | None = None,
    ) -> list[int]:
        """Ids of the templated messages; the template writes the special tokens itself.

        Raises ChatTemplateError, and TextTooLongError as `encode`.
        """
        if self._chat is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions with a prompt of your own")
        prompt = self._chat.render(messages, tools, options)
        return self.encode(prompt, add_special_tokens=False, max_tokens=max_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text without special tokens, unless asked for; bytes that are no whole character become U+FFFD."""
        text: str = self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def words(self, ids: Sequence[int]) -> list[str]:
        """Each id's entry of the vocabulary, in the tokenizer's own spelling; empty for an id without one."""
        return [self._library.id_to_token(token_id) or "" for token_id in ids]


def _tools(library: tokenizers.Tokenizer, layout: ToolFormat | None) -> tuple[ToolFormat | None, dict[str, int]]:
    """How the model writes tool calls, None where that is unknown, and which of its tags are tokens of their own."""
    if layout is None:
        return None, {}
    tags = {i: token for i, token in library.get_added_tokens_decoder().items() if token.content in layout.tags}
    if any(token.special for token in tags.values()):
        return None, {}  # special tokens are no text, so nobody would see the call
    return layout, {token.content: token_id for token_id, token in tags.items()}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like: strings, or objects whose `content` is the string."""
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _eos_token_ids(directory: Path, tokenizer_eos: int | None) -> frozenset[int]:
    """generation_config.json rules, else config.json; the tokenizer's own end token counts as well."""
    ids = set() if tokenizer_eos is None else {tokenizer_eos}
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(directory / name).get("eos_token_id")
        if eos is not None:
            return frozenset(ids.union(eos if isinstance(eos, list) else [eos]))
    return frozenset(ids)


def _chat_template(directory: Path, settings: dict[str, Any], special_tokens: dict[str, str]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    try:
        source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return None if source is None else ChatTemplate(source, special_tokens)
    except (jinja2.TemplateError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise TokenizerLoadError(f"the chat template in {directory} cannot be used: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerLoadError(f"{path} holds a {type(content).__name__}, expected an object")
    return content
