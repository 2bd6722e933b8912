"""Text to token ids and back, chat templates, and detokenisation of a growing sequence."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from llm42.chat_template import FIXED_DATE, ChatTemplate
from llm42.models.errors import ModelFileError, UnsupportedModel
from llm42.protocol import RequestRejected

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_SPACE = "\u2581"
"""SentencePiece's spelling of a space."""


class Tokenizer:
    """A model's tokenizer and chat template; `load` reads it from wherever the model lies."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: Iterable[int],
        template: str | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(set(eos_token_ids)))
        self.special = dict(special or {})
        self.chat_template = None if template is None else ChatTemplate(template, self.special)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._pieces = _Pieces(backend)
        self.identity = self._identity(template)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a GGUF file, or a directory with tokenizer.json. Raises ModelFileError or UnsupportedModel."""
        source = Path(path)
        return _from_directory(source) if source.is_dir() else _from_gguf(source)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token's text: n tokens never stand for more than n times as many."""
        return max(len(token) for token in self.backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids; `add_special` puts the model's beginning-of-text token in front where it wants one."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate: JSON can carry one
            raise RequestRejected(f"the text is not valid Unicode: {error}", "prompt") from error
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of all ids; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = Detokenizer(self, skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_text(self, token: int) -> str:
        """One token alone, special ones spelled out: what `logprobs` shows."""
        return (
            self.backend.id_to_token(token) or "" if token in self._special_ids else self._pieces.alone(token)
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for, whether or not they are whole characters."""
        return self._pieces.get(token)[0]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt text of a conversation (encode it without add_special). Raises RequestRejected."""
        if self.chat_template is None:
            raise RequestRejected("this model has no chat template: use /v1/completions", "messages")
        return self.chat_template.render(messages, add_generation_prompt, **kwargs)

    def _identity(self, template: str | None) -> str:
        """sha256 over all that turns text into ids: vocabulary, merges, rules, template and its date."""
        parts = [
            self.backend.to_str(),
            template,
            sorted(self.special.items()),
            list(self.eos_token_ids),
            str(FIXED_DATE),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Detokenizer:
    """Text of a growing sequence: releases whole characters only, and never takes one back.

    The concatenation of all `push` results and `flush` equals `Tokenizer.decode` of all ids, however they
    are cut into pushes; with a `prompt`, what they add to its text: SentencePiece drops a space at the
    start of the whole, not where the output begins. O(1) amortised per token, cheap to copy (`copy.copy`).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, prompt: Iterable[int] = ()) -> None:
        self._pieces = tokenizer._pieces
        self._skip = tokenizer._special_ids if skip_special else frozenset[int]()
        self._held = b""
        """Bytes that may still become a character; with byte fallback, the current run of byte tokens."""
        self._strip = self._pieces.strip
        """Spaces still to be removed at the very start of the text."""
        for token in prompt:
            if not self._strip:
                break
            self.push([token])
        self.flush()

    def push(self, ids: Iterable[int]) -> str:
        """The text that the new ids complete."""
        pieces = (self._pieces.get(token) for token in ids if token not in self._skip)
        if self._pieces.byte_fallback:
            return self._fallback(pieces)
        return self._byte_level(b"".join(p for p, _ in pieces))

    def flush(self) -> str:
        """What is left at the end of the sequence; incomplete characters become U+FFFD."""
        held, self._held = self._held, b""
        if self._pieces.byte_fallback:
            return self._left_strip(_byte_run(held))
        return held.decode("utf-8", "replace")

    def _byte_level(self, new: bytes) -> str:
        data = self._held + new
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def _fallback(self, pieces: Iterable[tuple[bytes, bool]]) -> str:
        out = []
        for piece, is_byte in pieces:
            if is_byte:
                self._held += piece
                continue
            if not piece:
                continue
            out += [_byte_run(self._held), piece.decode()]
            self._held = b""
        return self._left_strip("".join(out))

    def _left_strip(self, text: str) -> str:
        while text and self._strip:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


def _byte_run(run: bytes) -> str:
    """A run of byte-fallback tokens: text if all of it is UTF-8, else one U+FFFD per byte, as upstream."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return _REPLACEMENT * len(run)


class _Pieces:
    """The bytes of every token, and how the tokenizer's decoder joins them."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = json.loads(backend.to_str())["decoder"] or {"type": "none"}
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        names = [step["type"] for step in steps]
        self.byte_fallback = "ByteFallback" in names
        self.strip = sum(int(step["start"]) for step in steps if step["type"] == "Strip")
        known = {"Replace", "ByteFallback", "Fuse", "Strip"} if self.byte_fallback else {"ByteLevel"}
        if not set(names) <= known or not all(map(_is_known_step, steps)):
            raise UnsupportedModel(f"tokenizer decoder {'+'.join(names)} is not supported", "decoder")
        vocab = backend.get_vocab(with_added_tokens=True)
        convert = self._fallback_piece if self.byte_fallback else _byte_level_piece
        self._table = {index: convert(token) for token, index in vocab.items()}

    def get(self, token: int) -> tuple[bytes, bool]:
        """(bytes, is a byte-fallback token); an id outside the vocabulary is empty."""
        return self._table.get(token, (b"", False))

    def alone(self, token: int) -> str:
        """One token's text."""
        return self.get(token)[0].decode("utf-8", "replace")

    @staticmethod
    def _fallback_piece(token: str) -> tuple[bytes, bool]:
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(found[1], 16)]), True
        return token.replace(_SPACE, " ").encode(), False


def _is_known_step(step: Mapping[str, Any]) -> bool:
    match step["type"]:
        case "Replace":
            return bool(step["pattern"] == {"String": _SPACE} and step["content"] == " ")
        case "Strip":
            return bool(step["content"] == " " and step["stop"] == 0)
    return True


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_piece(token: str) -> tuple[bytes, bool]:
    if all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token), False
    return token.encode(), False  # an added token, spelled as itself


def _from_gguf(path: Path) -> Tokenizer:
    from llm42.models.gguf import eos_token_ids
    from llm42.models.gguf_reader import metadata, open_gguf
    from llm42.models.gguf_tokenizer import build_tokenizer

    data = metadata(open_gguf(path))
    tokens = data.get("tokenizer.ggml.tokens") or []
    ids = {name: data.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_NAMES.items()}
    special = {name: tokens[index] for name, index in ids.items() if index is not None}
    return Tokenizer(
        build_tokenizer(str(path), data),
        eos_token_ids(data.get),
        data.get("tokenizer.chat_template"),
        special,
    )


_SPECIAL_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _from_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelFileError(f"{file}: no such file (a tokenizer.json is needed)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError(f"{file}: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    settings = _read_json(path / "tokenizer_config.json")
    special = {name: _token_string(settings[name]) for name in _SPECIAL_NAMES if settings.get(name)}
    return Tokenizer(backend, _eos_from_directory(path, backend, special), _template(path, settings), special)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except ValueError as error:
        raise ModelFileError(f"{file}: not JSON: {error}") from error


def _token_string(value: Any) -> str:
    return str(value["content"] if isinstance(value, Mapping) else value)


def _template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    value = settings.get("chat_template")
    if isinstance(value, list):  # several named ones
        value = {entry["name"]: entry["template"] for entry in value}.get("default")
    return value


def _eos_from_directory(path: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> set[int]:
    """generation_config.json's ids where given, else config.json's; the tokenizer's own end token always."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        if value is not None:
            found |= set(value) if isinstance(value, list) else {value}
            break
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return found if own is None else found | {own}
