"""Files of stored answers: JSON lines. A line that cannot be read becomes an error with its number; the rest
is audited all the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm42.audit.claim import Claim
from llm42.audit.records import claims_of, manifest_of
from llm42.audit.values import BadRecord
from llm42.errors import LLM42Error
from llm42.receipt import InvalidReceipt

log = logging.getLogger(__name__)


class AuditFileError(LLM42Error):
    """The file of records cannot be read at all."""

    code = "invalid_file"


@dataclass(frozen=True, slots=True)
class Bad:
    """A line that is no record."""

    line: int
    message: str


@dataclass(slots=True)
class Records:
    """What a file holds: every line with content is in exactly one of these."""

    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Readable records as they were stored, by line number."""
    claims: list[Claim] = field(default_factory=list)
    manifests: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fingerprint -> manifest, of lines that hold one."""
    bad: list[Bad] = field(default_factory=list)


def read_records(path: Path) -> Records:
    """Reads a file of JSON lines. Raises AuditFileError when there is none, nothing in it, or JSON of
    another layout."""
    try:
        with path.open("rb") as lines:
            records = parse_lines(lines)
        _require_lines(path, records)
    except OSError as error:
        raise AuditFileError(f"{path}: {error.strerror or error}") from error
    if not (records.claims or records.bad):
        raise AuditFileError(f"{path} holds no records: one JSON object a line is needed (docs/audits.md)")
    return records


def parse_lines(lines: Iterable[bytes]) -> Records:
    """Reads every line; blank ones are skipped."""
    records = Records()
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            value = _json(raw)
            if (found := manifest_of(value)) is not None:
                records.manifests[found[0]] = found[1]
                continue
            claims = claims_of(value, number)
            records.lines[number] = value
            records.claims += claims
        except InvalidReceipt as error:
            records.bad.append(Bad(number, str(error)))
        except Exception as error:  # a bug: the log has it, the other lines go on
            log.exception("line %d could not be read", number)
            records.bad.append(Bad(number, f"{type(error).__name__}: {error}"))
    return records


def _json(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_name_twice)
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise BadRecord(f"not JSON: {error.msg} at column {error.colno}") from error
    except BadRecord:
        raise
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise BadRecord("a record must be a JSON object")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a name be there twice, and readers differ in which one they take."""
    value: dict[str, Any] = {}
    for name, item in pairs:
        if name in value:
            raise BadRecord(f"{name!r} is there twice in one object: remove one")
        value[name] = item
    return value


def _require_lines(path: Path, records: Records) -> None:
    """Raises AuditFileError for one JSON value where one in each line is needed: told once, and not for every
    line of it."""
    if not records.bad:
        return
    text = path.read_bytes().decode("utf-8-sig", "replace").strip()
    try:
        first, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return
    listed = isinstance(first, list) and end == len(text)
    if listed or "\n" in text[:end]:
        what = "one JSON array" if isinstance(first, list) else "JSON over several lines"
        how = "'.[]'" if isinstance(first, list) else "."
        raise AuditFileError(
            f"{path} holds {what}; JSON Lines is needed: one record a line"
            f" (jq -c {how} {path.name} > records.jsonl makes it)"
        )
