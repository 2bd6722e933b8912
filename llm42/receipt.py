"""Receipts: what a client keeps of a verified answer, so that the answer can be replayed and compared later.

A receipt names the question (prompt, sampling), the answer (token ids and the bits of their
log-probabilities, as hashes) and the fingerprint that promises the one for the other. With a key the server
signs it: then it also shows who gave the answer. docs/audits.md explains both in plain words.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from llm42.config import AuditSettings
from llm42.errors import LLM42Error
from llm42.protocol import SamplingParams, TokenLogprob
from llm42.validation import words

VERSION = 1
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold (vLLM's convention)."""
MAX_TOKEN = 2**31
MIN_KEY_BYTES = 16
_NEUTRAL = asdict(SamplingParams())
T = TypeVar("T")


class InvalidReceipt(LLM42Error):
    """A receipt, or a part of a stored record, that cannot be read; the message says what is wrong."""

    code = "invalid_record"


class KeyProblem(LLM42Error):
    """A key file of the configuration cannot be used."""

    code = "invalid_key"


def finite(logprob: float) -> float:
    """The value itself, bit for bit, unless JSON cannot hold it: what a client sees of a log-probability."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def token_hash(tokens: Sequence[int]) -> str:
    """SHA-256 of the ids as little-endian 32-bit integers, hexadecimal."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).hexdigest()


def logprob_hash(logprobs: Iterable[float]) -> str:
    """SHA-256 of the values, as a client sees them, as little-endian IEEE 754 doubles, hexadecimal."""
    return hashlib.sha256(b"".join(struct.pack("<d", finite(p)) for p in logprobs)).hexdigest()


@dataclass(frozen=True, slots=True)
class Receipt:
    """One answer. `prompt` and `output` are there on request; their hashes always are. `hmac` covers
    everything but these two lists, which may thus be dropped or added later."""

    id: str
    model: str
    created: int
    """Seconds since 1970."""
    fingerprint: str
    prompt_len: int
    prompt_sha256: str
    sampling: SamplingParams
    output_len: int
    output_sha256: str
    logprobs_sha256: str
    finish: str | None = None
    prompt: tuple[int, ...] | None = None
    output: tuple[int, ...] | None = None
    key: str | None = None
    hmac: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Compact: neutral sampling fields and absent parts are left out."""
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        body = {name: value for name, value in shown.items() if value is not None}
        for name in ("prompt", "output"):
            if name in body:
                body[name] = list(body[name])
        return {"v": VERSION, **body, "sampling": sampling_to_json(self.sampling)}

    @classmethod
    def from_json(cls, value: Any) -> Receipt:
        """Reads what `to_json` wrote. Raises InvalidReceipt."""
        if not isinstance(value, Mapping):
            raise InvalidReceipt("a receipt must be a JSON object")
        if type(value.get("v")) is not int or value["v"] != VERSION:  # true is equal to 1, too
            raise InvalidReceipt(f"receipt: v is {value.get('v')!r}; this version reads {VERSION}")
        known = {f.name for f in fields(cls)}
        body = {name: v for name, v in value.items() if name != "v"}
        if unknown := sorted(set(body) - known):
            raise InvalidReceipt(f"receipt: unknown field {unknown[0]!r}")
        body["sampling"] = sampling_dict(body.get("sampling"))
        receipt = _strictly(_RECEIPT, body, "receipt")
        for tokens in (receipt.prompt, receipt.output):
            require_token_ids(tokens or (), "receipt")
        return receipt

    def signed_fields(self) -> Receipt:
        """Without the signature and without the ids that the hashes stand for."""
        return replace(self, prompt=None, output=None, key=None, hmac=None)

    def signed_bytes(self) -> bytes:
        """What an HMAC covers: the typed values, so that another JSON writer's spelling does not matter."""
        bare = replace(self, prompt=None, output=None, hmac=None)
        return json.dumps(bare.to_json(), sort_keys=True, separators=(",", ":")).encode()


_RECEIPT = TypeAdapter(Receipt)
_SAMPLING = TypeAdapter(SamplingParams)


def sampling_to_json(sampling: SamplingParams) -> dict[str, Any]:
    """Fields that are not neutral. The seed is always there, as text: it may need 64 bits, which not every
    JSON reader keeps."""
    body = {name: value for name, value in asdict(sampling).items() if value != _NEUTRAL[name]}
    return body | {"seed": str(sampling.seed)}


def sampling_dict(value: Any) -> dict[str, Any]:
    """The keywords of SamplingParams, not yet checked, with the seed as a number. Raises InvalidReceipt."""
    if not isinstance(value, Mapping):
        raise InvalidReceipt("sampling: a JSON object is needed")
    if unknown := sorted(set(value) - set(_NEUTRAL)):
        raise InvalidReceipt(f"sampling: unknown field {unknown[0]!r}")
    seed = value.get("seed", 0)
    if isinstance(seed, str):
        seed = int(seed) if seed.isascii() and seed.isdecimal() and len(seed) <= 20 else -1
    if isinstance(seed, int) and not 0 <= seed < 2**64:
        raise InvalidReceipt("sampling.seed: an unsigned number of 64 bits is needed")
    return {**value, "seed": seed}


def sampling_from_json(value: Any) -> SamplingParams:
    """Reads what `sampling_to_json` wrote. Raises InvalidReceipt."""
    return _strictly(_SAMPLING, sampling_dict(value), "sampling")


def require_token_ids(tokens: Iterable[int], where: str) -> None:
    """Raises InvalidReceipt for an id that no vocabulary has."""
    for token in tokens:
        if not 0 <= token < MAX_TOKEN:
            raise InvalidReceipt(f"{where}: {token} is not a token id")


def _strictly(adapter: TypeAdapter[T], value: Any, where: str) -> T:
    try:
        # as JSON, because strict mode then takes lists for tuples
        return adapter.validate_json(json.dumps(value, allow_nan=False), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join((where, *map(str, first["loc"])))
        raise InvalidReceipt(f"{place}: {words(first)}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidReceipt(f"{where}: {error}") from error


@dataclass(frozen=True, slots=True)
class Answered:
    """One finished output, as a receipt needs it. logprobs: one for each output token."""

    id: str
    model: str
    created: int
    fingerprint: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    output: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: str | None


def make_receipt(answer: Answered, prompt_ids: bool, output_ids: bool) -> Receipt:
    """The receipt, not yet signed; the flags choose ids besides hashes."""
    return Receipt(
        id=answer.id,
        model=answer.model,
        created=answer.created,
        fingerprint=answer.fingerprint,
        prompt_len=len(answer.prompt),
        prompt_sha256=token_hash(answer.prompt),
        sampling=answer.sampling,
        output_len=len(answer.output),
        output_sha256=token_hash(answer.output),
        logprobs_sha256=logprob_hash(p.logprob for p in answer.logprobs),
        finish=answer.finish,
        prompt=answer.prompt if prompt_ids else None,
        output=answer.output if output_ids else None,
    )


class Signature(StrEnum):
    """What is known of a receipt's signature."""

    VALID = "valid"
    INVALID = "invalid"
    UNSIGNED = "unsigned"
    UNKNOWN_KEY = "unknown_key"
    """Signed with a key that is not configured here."""


def joint(signatures: Iterable[Signature]) -> Signature:
    """Of receipts with the same content: one that is invalid spoils the others, one that is valid proves
    all."""
    order = (Signature.INVALID, Signature.VALID, Signature.UNKNOWN_KEY, Signature.UNSIGNED)
    return min(signatures, key=order.index, default=Signature.UNSIGNED)


class Keyring:
    """The secrets that sign and check receipts, by key id."""

    def __init__(self, keys: Mapping[str, bytes], signing: str | None = None) -> None:
        self._keys, self._signing = dict(keys), signing

    @classmethod
    def load(cls, settings: AuditSettings) -> Keyring:
        """Reads the key files. Raises KeyProblem."""
        keys = {name: _read_key(name, Path(file)) for name, file in settings.keys.items()}
        return cls(keys, settings.signing_key)

    def sign(self, receipt: Receipt) -> Receipt:
        """The receipt with key id and HMAC; as it is when no signing key is configured."""
        if self._signing is None:
            return receipt
        named = replace(receipt, key=self._signing, hmac=None)
        return replace(named, hmac=_mac(self._keys[self._signing], named))

    def check(self, receipt: Receipt) -> Signature:
        """Compares in a time that does not depend on where two signatures differ."""
        if receipt.hmac is None and receipt.key is None:
            return Signature.UNSIGNED
        if receipt.hmac is None or receipt.key is None:
            return Signature.INVALID
        secret = self._keys.get(receipt.key)
        if secret is None:
            return Signature.UNKNOWN_KEY
        same = hmac.compare_digest(_mac(secret, receipt).encode(), receipt.hmac.encode())
        return Signature.VALID if same else Signature.INVALID


def _mac(secret: bytes, receipt: Receipt) -> str:
    return hmac.new(secret, receipt.signed_bytes(), hashlib.sha256).hexdigest()


def _read_key(name: str, file: Path) -> bytes:
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise KeyProblem(f"audit.keys.{name}: {file}: {error.strerror}") from error
    if len(secret) < MIN_KEY_BYTES:
        raise KeyProblem(f"audit.keys.{name}: {file} holds fewer than {MIN_KEY_BYTES} bytes")
    return secret
