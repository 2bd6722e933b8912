"""Token ids to text, a piece at a time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import tokenizers

from llm42.errors import UnsupportedModel

if TYPE_CHECKING:
    from llm42.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


_REPLACEMENT = "\ufffd"


_SPACE = "\u2581"
"""SentencePiece's spelling of a space."""


class Detokenizer:
    """Text of a growing sequence: releases whole characters only, and never takes one back.

    The concatenation of all `push` results and `flush` equals `Tokenizer.decode` of all ids, however they
    are cut into pushes; with a `prompt`, what they add to its text: SentencePiece drops a space at the
    start of the whole, not where the output begins. O(1) amortised per token, cheap to copy (`copy.copy`).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, prompt: Iterable[int] = ()) -> None:
        self._pieces = tokenizer.pieces
        self._skip = tokenizer.special_ids if skip_special else frozenset[int]()
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


class Pieces:
    """The bytes of every token, and how the tokenizer's decoder joins them."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises UnsupportedModel for a decoder that joins pieces in another way than is known here."""
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
        self.ids = self._table.keys()

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
