"""An audit by a running server: records go to POST /v1/audit, several in a call and a few calls at a time."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from llm42.audit.compare import Finding, Verdict
from llm42.audit.file import Records
from llm42.errors import LLM42Error
from llm42.host.direct import open_url

BATCH_ANSWERS, BATCH_BYTES = 32, 1 << 20
CONCURRENCY = 4
ATTEMPTS = 8
TIMEOUT_S = 1800.0
RETRIED = (429, 502, 503)
STRANGER = "what answers there is not an LLM-42 server: check the URL"
FINDING = TypeAdapter(Finding)
Numbered = list[tuple[int, dict[str, Any]]]


class ServerProblem(LLM42Error):
    """The server cannot be reached, or does not audit."""

    code = "server_problem"


class NotAllowed(ServerProblem):
    """The key may not have anything audited."""


class RemoteAudit:
    """A client of one server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """url: the server's root, such as http://127.0.0.1:8000. Raises ServerProblem for what is no URL."""
        if not url.startswith(("http://", "https://")):
            raise ServerProblem(f"{url}: a URL such as http://127.0.0.1:8000 is needed")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def fingerprint(self) -> str:
        """The server's. Raises ServerProblem."""
        found = self._call("/v1/fingerprint").get("fingerprint")
        if not isinstance(found, str):
            raise ServerProblem(f"{self._url}/v1/fingerprint: {STRANGER}")
        return found

    def audit(self, records: Records, found: Callable[[Finding], None]) -> None:
        """Tells `found` about every claim, in their order. What the server refuses to look at is a finding
        of the records of that call. Raises ServerProblem when it is not there, or audits nothing for this
        key."""
        self.fingerprint()
        manifests = [{"fingerprint": k, "manifest": v} for k, v in records.manifests.items()]
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            for findings in pool.map(partial(self._audited, manifests), _batches(records)):
                for finding in findings:
                    found(finding)

    def _audited(self, manifests: list[dict[str, Any]], batch: Numbered) -> list[Finding]:
        body = {"records": [without_alternatives(record) for _, record in batch], "manifests": manifests}
        try:
            results = self._call("/v1/audit", body)["results"]
            return [FINDING.validate_python({**r, "line": batch[r["record"]][0]}) for r in results]
        except NotAllowed:
            raise
        except (ServerProblem, LookupError, TypeError, ValueError) as error:
            return [Finding(line, 0, f"line {line}", Verdict.FAILED, str(error)) for line, _ in batch]

    def _call(self, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(ATTEMPTS):
            request = urllib.request.Request(self._url + path, data, self._headers)
            try:
                with open_url(request, TIMEOUT_S) as reply:
                    return _object(reply.read())
            except urllib.error.HTTPError as error:
                message = _message(error)
                if error.code not in RETRIED or attempt == ATTEMPTS - 1:
                    problem = NotAllowed if error.code in (401, 403) else ServerProblem
                    raise problem(f"{self._url}{path}: {error.code}: {message}") from error
                time.sleep(_pause(error, attempt))
            except (OSError, ValueError, http.client.HTTPException) as error:
                strange = isinstance(error, (ValueError, http.client.HTTPException))
                reason = STRANGER if strange else getattr(error, "reason", None) or error
                raise ServerProblem(f"{self._url}{path}: {reason}") from error
        raise AssertionError("unreachable")


def without_alternatives(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without the alternatives of its answer's tokens. No audit compares them, and they are most of
    a long answer: with them it may be larger than what a server takes. What was asked stays as it is."""
    answer = record.get("response", record)
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list):
        return dict(record)
    lean = {**answer, "choices": [_lean_choice(choice) for choice in choices]}
    return {**record, "response": lean} if "response" in record else lean


def _lean_choice(choice: Any) -> Any:
    found = choice.get("logprobs") if isinstance(choice, Mapping) else None
    if not isinstance(found, Mapping):
        return choice
    kept = {key: value for key, value in found.items() if key != "top_logprobs"}
    if isinstance(content := kept.get("content"), list):
        kept["content"] = [
            {k: v for k, v in e.items() if k != "top_logprobs"} if isinstance(e, Mapping) else e
            for e in content
        ]
    return {**choice, "logprobs": kept}


def _object(reply: bytes) -> dict[str, Any]:
    """What an answer holds. Raises ValueError for anything but a JSON object."""
    answer = json.loads(reply)
    if not isinstance(answer, dict):
        raise ValueError("no JSON object")
    return answer


def _pause(error: urllib.error.HTTPError, attempt: int) -> float:
    """Seconds until the next attempt: what the server says, if it is a number."""
    seconds: float = 0.5 * 2**attempt
    with suppress(ValueError):
        seconds = float(error.headers.get("Retry-After") or seconds)
    return min(10.0, max(0.0, seconds))


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)


def _batches(records: Records) -> Iterator[Numbered]:
    """Neighbours together, up to so many answers and bytes; a larger record goes alone."""
    answers = Counter(claim.line for claim in records.claims)
    batch: Numbered = []
    count = size = 0
    for line, record in records.lines.items():
        length = len(json.dumps(record))
        if batch and (count + answers[line] > BATCH_ANSWERS or size + length > BATCH_BYTES):
            yield batch
            batch, count, size = [], 0, 0
        batch.append((line, record))
        count, size = count + answers[line], size + length
    if batch:
        yield batch
