"""Text to token ids and back, chat templates, and detokenisation of a growing sequence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from llm42.errors import ModelFileError, RequestRejected
from llm42.text.chat_template import FIXED_DATE, ChatTemplate
from llm42.text.detokenizer import Detokenizer, Pieces
from llm42.text.gguf_tokenizer import read_gguf
from llm42.text.templates import DEFAULT, TOOL_USE, read_text
from llm42.text.tokenizer_directory import read_directory
from llm42.text.tokenizer_parts import added_around

LONG_TEXT = 4096
"""Characters; a shorter text is encoded within a few milliseconds."""


class Tokenizer:
    """A model's tokenizer and chat template; `load` reads it from wherever the model lies."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: Iterable[int],
        template: str | Mapping[str, str] | None = None,
        special: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """template: a chat template, or several by name. vocab_size: rows of the model's matrix, where it is
        padded beyond the tokens. Raises ModelFileError or UnsupportedModel."""
        self.backend = backend
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(set(eos_token_ids)))
        self.special = dict(special or {})
        sources = {DEFAULT: template} if isinstance(template, str) else dict(template or {})
        self._templates = {
            name: ChatTemplate(sources[name], self.special) for name in (DEFAULT, TOOL_USE) if name in sources
        }
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.pieces = Pieces(backend)
        self.token_count: int = max(self.pieces.ids, default=-1) + 1
        """The largest id of a token, plus one: ids may have holes."""
        self.vocab_size: int = self.token_count if vocab_size is None else vocab_size
        """Ids below it can be drawn, so they are taken everywhere; one that is no token has the text ""."""
        self.identity = self._identity(sources)

    @classmethod
    def load(
        cls, path: str | Path, chat_template: str | Path | None = None, vocab_size: int | None = None
    ) -> Tokenizer:
        """From a GGUF file, or a directory with tokenizer.json. chat_template: a Jinja file to be used
        instead of the model's own templates. vocab_size: the model's. Raises ModelFileError or
        UnsupportedModel."""
        source = Path(path)
        parts = read_directory(source) if source.is_dir() else read_gguf(source)
        own = parts.templates if chat_template is None else {DEFAULT: read_text(Path(chat_template))}
        made = cls(parts.backend, parts.eos_token_ids, own, parts.special, vocab_size)
        if made.token_count > made.vocab_size:
            sizes = f"the tokenizer has ids to {made.token_count - 1}, the model {made.vocab_size} rows"
            raise ModelFileError(f"{source}: {sizes}")
        return made

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template of requests without tools."""
        return self._templates.get(DEFAULT)

    @property
    def template_sources(self) -> dict[str, str]:
        """Name -> source of every template that a request may be rendered with."""
        return {name: template.source for name, template in self._templates.items()}

    def template_for(self, tools: bool) -> ChatTemplate:
        """The template of a request with or without tools. Raises RequestRejected where there is none."""
        found = (self._templates.get(TOOL_USE) if tools else None) or self.chat_template
        if found is None:
            raise RequestRejected(
                "this model has no chat template: use /v1/completions (the operator can give it one:"
                " model.chat_template)",
                "messages",
            )
        return found

    @cached_property
    def begin_ids(self) -> tuple[int, ...]:
        """What `encode` with `add_special` puts in front of a text."""
        return added_around(self.backend)[0]

    @cached_property
    def turn_end_ids(self) -> tuple[int, ...]:
        """The special token that the chat template puts behind an answer, if it is not an end token already:
        a chat answer ends there too."""
        if self.chat_template is None:
            return ()
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        try:
            behind = self.chat_template.render(messages, add_generation_prompt=False).rpartition("answer")[2]
        except RequestRejected:
            return ()
        first = self.encode(behind.lstrip())[:1]
        return tuple(i for i in first if i in self.special_ids and i not in self.eos_token_ids)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token's text: n tokens never stand for more than n times as many."""
        return max(len(token) for token in self.backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids; `add_special` puts the model's beginning-of-text token in front where it wants one.
        Raises RequestRejected for a lone surrogate."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate: JSON can carry one
            raise RequestRejected(f"the text is not valid Unicode: {error}", "prompt") from error
        if len(text) > LONG_TEXT:  # the same ids; only this way the library gives the interpreter free
            (made,) = self.backend.encode_batch([text], add_special_tokens=add_special)
        else:
            made = self.backend.encode(text, add_special_tokens=add_special)
        ids: list[int] = made.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of all ids; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_text(self, token: int) -> str:
        """One token alone, special ones spelled out: what `logprobs` shows."""
        return (
            self.backend.id_to_token(token) or "" if token in self.special_ids else self.pieces.alone(token)
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for, whether or not they are whole characters."""
        return self.pieces.get(token)[0]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt text of a conversation (encode it without add_special). Raises RequestRejected."""
        template = self.template_for(bool(kwargs.get("tools")))
        return template.render(messages, add_generation_prompt, **kwargs)

    def _identity(self, templates: Mapping[str, str]) -> str:
        """sha256 over all that turns text into ids: vocabulary, merges, rules, templates and their date."""
        parts = [
            self.backend.to_str(),
            sorted(templates.items()),
            sorted(self.special.items()),
            list(self.eos_token_ids),
            str(FIXED_DATE),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
