"""GET /v1/fingerprint and POST /v1/audit: what this server's bits depend on, and stored answers held against
them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field, ValidationError
from starlette.requests import Request as HttpRequest

from llm42.api import errors
from llm42.api.asgi import ClientGone, until_disconnect
from llm42.api.backend import Backend
from llm42.api.body_limits import ClosedPart, at_most
from llm42.api.json_bodies import MAX_AUDIT_PARTS, BodyReader, body_route
from llm42.api.keys import KeyPolicy
from llm42.api.plan import plan_request
from llm42.api.requests import ChatBody, CompletionBody
from llm42.audit.claim import Claim
from llm42.audit.compare import Finding, Verdict, summary
from llm42.audit.question import RequestMaker
from llm42.audit.records import claims_of, manifest_of
from llm42.audit.replayer import REGENERATIONS, Replayer, windows_per_call
from llm42.config import Settings
from llm42.errors import LLM42Error, Overloaded, RequestRejected
from llm42.protocol import Commit, Delta, Failure, Request, Window
from llm42.receipt import InvalidReceipt, Keyring
from llm42.session.interfaces import Answers
from llm42.text.tokenizer import Tokenizer
from llm42.validation import complaint

log = logging.getLogger(__name__)
MAX_RUNNING = 16
"""Audits that an ingress holds at once; beyond it 429."""
MAX_MANIFESTS = 1024
"""In one call."""
KEY_PAUSE_S, KEY_TRIES = 0.1, 600
"""How an audit waits for its key's other requests: a look after each pause, a minute in all."""


class AuditBody(ClosedPart):
    """POST /v1/audit. `records` are the objects of docs/audits.md, each judged on its own."""

    records: Annotated[list[Any], Field(min_length=1)]
    manifests: Annotated[list[dict[str, Any]], at_most(MAX_MANIFESTS)] = Field(default=[], fail_fast=True)
    """Replies of GET /v1/fingerprint, of the fingerprints that the records have."""


class LimitedAnswers:
    """The service's `Answers`, for one audit of one key."""

    def __init__(
        self, answers: Answers, policy: KeyPolicy, calls: asyncio.Semaphore, outputs: asyncio.Semaphore
    ) -> None:
        """calls, outputs: `verify_cold`s and outputs under way; all audits of an ingress share them."""
        self._answers, self._policy, self._calls, self._outputs = answers, policy, calls, outputs
        self._turn = asyncio.Lock()

    async def fingerprint(self, agreed: bool = False) -> tuple[str, Mapping[str, Any]]:
        """The pool's."""
        return await self._answers.fingerprint(agreed)

    async def verify_cold(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """By some verifier."""
        async with self._calls:
            return await self._answers.verify_cold(windows)

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Like any other deterministic request of the key: it counts towards its `deterministic_share`, and
        waits for a place in it. Raises LLM42Error, at last also when there comes none."""
        with ExitStack() as place:
            async with self._turn:
                await self._take(place)
            asked = self._policy.salted(request)
            async with self._outputs, aclosing(self._answers.generate(asked)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _take(self, place: ExitStack) -> None:
        for _ in range(KEY_TRIES):
            try:
                return place.enter_context(self._policy.held(1))
            except Overloaded:
                await asyncio.sleep(KEY_PAUSE_S)
        raise LLM42Error(
            f"the key '{self._policy.name}' had no place left to generate the answer again: audit it when the"
            " key has fewer requests under way"
        )


class _Audits:
    """The handlers' logic."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, backend: Backend, keyring: Keyring) -> None:
        self._settings, self._tokenizer, self._keyring = settings, tokenizer, keyring
        self._backend, self._make, self._running = backend, request_maker(settings, tokenizer), 0
        most = settings.audit.concurrency
        self._limits = asyncio.Semaphore(most), asyncio.Semaphore(most * REGENERATIONS)

    async def audit(self, body: AuditBody, policy: KeyPolicy) -> dict[str, Any]:
        """Findings in the records' order. Raises RequestRejected, Overloaded or VerifierUnavailable."""
        self._require_few(len(body.records), "records")
        if self._running >= MAX_RUNNING:
            raise Overloaded(f"{MAX_RUNNING} audits are running already: send it again later.")
        self._running += 1
        try:
            return await self._run(body, policy)
        finally:
            self._running -= 1

    def _require_few(self, count: int, what: str) -> None:
        most = self._settings.audit.max_records
        if count > most:
            text = f"{count} {what}; one call takes {most} (audit.max_records): send several calls."
            raise RequestRejected(text, "records")

    async def _run(self, body: AuditBody, policy: KeyPolicy) -> dict[str, Any]:
        began, findings = time.monotonic(), list[Finding]()
        claims = await asyncio.to_thread(read_claims, body.records, findings)
        self._require_few(len(claims), "answers in these records")
        manifests = await asyncio.to_thread(_manifests, body.manifests)
        answers, settings = LimitedAnswers(self._backend, policy, *self._limits), self._settings
        calls = settings.audit.concurrency * settings.server.ingress_replicas
        most = windows_per_call(settings.verifier.max_waiting, calls)
        parts = (self._keyring, self._tokenizer, self._make, manifests, most)
        replayer = Replayer(answers, settings.audit, *parts)
        await replayer.audit(claims, findings.append)
        findings.sort(key=lambda f: (f.line, f.choice))
        results = [f.to_json() for f in findings]
        for result in results:
            result["record"] = result.pop("line")
        counted = summary(findings, began)
        return {
            "object": "audit",
            "fingerprint": replayer.fingerprint,
            "results": results,
            "summary": counted,
        }


def read_claims(records: Sequence[Any], findings: list[Finding]) -> list[Claim]:
    """The records' outputs, numbered from 0; a record that cannot be read is a finding."""
    claims: list[Claim] = []
    for number, record in enumerate(records):
        place = (number, 0, f"record {number}")
        try:
            claims += claims_of(record, number)
        except InvalidReceipt as error:
            findings.append(Finding(*place, Verdict.BAD_RECORD, str(error)))
        except Exception as error:  # a bug: the log has it, the other records go on
            log.exception("a record could not be read")
            findings.append(Finding(*place, Verdict.FAILED, f"{type(error).__name__}: {error}"))
    return claims


def _manifests(given: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Those that can be read; one that is wrong explains nothing."""
    known: dict[str, Mapping[str, Any]] = {}
    for value in given:
        with suppress(InvalidReceipt):
            known |= [found] if (found := manifest_of(value)) else []
    return known


def _answer(value: Any) -> Response:
    """In ASCII, because findings may quote what no other encoding can write."""
    return Response(json.dumps(value), media_type="application/json")


def request_maker(settings: Settings, tokenizer: Tokenizer) -> RequestMaker:
    """What the service makes of a stored request's body, whether it was streamed or not."""

    def made(body: Mapping[str, Any]) -> Sequence[Request]:
        kept = {k: v for k, v in body.items() if k not in ("stream", "stream_options", "is_deterministic")}
        asked = {**kept, "deterministic": True}
        try:
            kind = ChatBody if "messages" in body else CompletionBody
            return plan_request(kind.model_validate(asked), settings, tokenizer).requests
        except ValidationError as error:
            raise RequestRejected(complaint(error.errors()).text) from error

    return made


def audit_routes(
    settings: Settings,
    tokenizer: Tokenizer,
    backend: Backend,
    answers: errors.Errors,
    keyring: Keyring,
    reader: BodyReader,
) -> APIRouter:
    """Both endpoints."""
    audits = _Audits(settings, tokenizer, backend, keyring)
    router = APIRouter(route_class=body_route(reader, MAX_AUDIT_PARTS))

    @router.get("/v1/fingerprint")
    async def fingerprint() -> Response:
        name, manifest = await backend.fingerprint()
        return _answer({"object": "fingerprint", "fingerprint": name, "manifest": manifest})

    @router.post("/v1/audit")
    async def audit(body: AuditBody, http: HttpRequest) -> Response:
        policy: KeyPolicy = http.state.policy
        try:
            if not policy.may_verify:
                raise errors.Forbidden(
                    f"The key '{policy.name}' may not audit: its deterministic_share is 0."
                )
            return _answer(await until_disconnect(http.receive, audits.audit(body, policy)))
        except ClientGone:
            return Response(status_code=499)
        except Exception as error:
            if errors.status_of(error) == 500:
                log.exception("an audit failed")
            return answers.from_exception(error)

    return router
