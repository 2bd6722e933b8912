"""Audits: stored outputs are computed again and compared, many at a time.

An output whose tokens are known is replayed: prompt and output are one window, at the speed of a prefill,
with nothing taken from the verifier's cache. One of which only the text or a hash is known is generated
again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from llm42.canon import Canon, Planner, patiently
from llm42.claims import Claim
from llm42.config import AuditSettings
from llm42.fingerprint import differing_fields
from llm42.fingerprint import fingerprint as fingerprint_of
from llm42.protocol import (
    Commit,
    Failure,
    LLM42Error,
    Request,
    TokenLogprob,
    Window,
)
from llm42.receipt import Keyring, Signature, finite
from llm42.tokenizer import Tokenizer
from llm42.verdict import (
    Canonical,
    Difference,
    Finding,
    Verdict,
    canonical,
    first_difference,
    question_problem,
    receipt_problem,
    text_problem,
    windows_of,
)

log = logging.getLogger(__name__)
REGENERATIONS = 8
"""Outputs that are generated again at a time, for each of `audit.concurrency`."""


@dataclass(slots=True)
class _Case:
    """A claim on its way to a finding."""

    claim: Claim
    request: Request
    signature: Signature
    output: tuple[int, ...] | None
    windows: list[Window] = field(default_factory=list)

    def finding(self, verdict: Verdict, reason: str = "", **more: Any) -> Finding:
        c = self.claim
        more.setdefault("regenerated", self.output is None)
        return Finding(c.line, c.choice, c.id, verdict, reason, self.signature, **more)

    @property
    def rows(self) -> int:
        """Positions that its windows compute."""
        return sum(len(w.tokens) + len(w.candidates) for w in self.windows)


class Replayer:
    """One audit."""

    def __init__(
        self,
        canon: Canon,
        settings: AuditSettings,
        keyring: Keyring,
        tokenizer: Tokenizer,
        planner: Planner,
        manifests: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """manifests: of other fingerprints, so that a difference can be explained."""
        self._canon, self._settings, self._keyring = canon, settings, keyring
        self._tokenizer, self._planner, self._manifests = tokenizer, planner, manifests or {}
        self._run = uuid.uuid4().hex[:12]
        self.fingerprint: str | None = None
        self._manifest: Mapping[str, Any] = {}

    async def audit(self, claims: Sequence[Claim], found: Callable[[Finding], None]) -> None:
        """Tells `found` about every claim, in any order. Raises VerifierUnavailable when there is no
        verifier; what goes wrong with one claim is that claim's finding."""
        self.fingerprint, self._manifest = await self._canon.identity()
        replays: list[_Case] = []
        regenerations: list[_Case] = []
        for case in await asyncio.to_thread(lambda: [self._case(c) for c in claims]):
            if isinstance(case, Finding):
                found(case)
            else:
                (replays if case.windows else regenerations).append(case)
        batches, again = iter(_batches(replays, self._settings.batch_tokens)), iter(regenerations)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._settings.concurrency):
                tasks.create_task(self._replay_all(batches, found))
            for _ in range(self._settings.concurrency * REGENERATIONS):
                tasks.create_task(self._regenerate_all(again, found))

    # ---- what a claim asks for
    # ---------------------------------------------------------------------------------------

    def _case(self, claim: Claim) -> _Case | Finding:
        """What is to be computed, or a finding where that is not needed."""
        receipt = claim.receipt
        signature = self._keyring.check(receipt) if receipt else Signature.UNSIGNED
        place = (claim.line, claim.choice, claim.id)
        if signature == Signature.INVALID:
            text = "the receipt's HMAC is not that of its content: it was changed, or signed with another key"
            return Finding(*place, Verdict.BAD_SIGNATURE, text, signature)
        if claim.fingerprint != self.fingerprint:
            return self._other_fingerprint(claim, claim.fingerprint, signature)
        try:
            request = self._request(claim)
        except LLM42Error as error:
            return Finding(*place, Verdict.FAILED, f"the stored request: {error}", signature)
        if request.max_tokens < 1:
            text = "the stored request asks for no output: there is nothing to compare"
            return Finding(*place, Verdict.FAILED, text, signature)
        case = _Case(claim, request, signature, claim.output)
        if problem := question_problem(claim, request):
            return case.finding(Verdict.DIFFERS, problem)
        if claim.output is not None:
            case.windows = windows_of(request, claim.output, self._settings.max_window)
        return case

    def _request(self, claim: Claim) -> Request:
        """The question. Where only a receipt's hash is known, tokens are generated up to its length."""
        name = f"audit-{self._run}-{claim.line}-{claim.choice}"
        if claim.body is not None:
            planned = self._planner(claim.body)
            if claim.choice >= len(planned):
                raise LLM42Error(f"it has no choice {claim.choice}")
            request = planned[claim.choice]
        else:
            assert claim.prompt is not None
            assert claim.sampling is not None
            request = Request(name, claim.prompt, 1, claim.sampling)
        if claim.output is None and claim.receipt is not None:
            request = replace(request, max_tokens=claim.receipt.output_len, stop=(), stop_token_ids=())
        return replace(request, request_id=name, deterministic=True, num_logprobs=0, prompt_logprobs=None)

    def _other_fingerprint(self, claim: Claim, name: str, signature: Signature) -> Finding:
        manifest, fields = claim.manifest or self._manifests.get(name), {}
        reason = f"the answer's fingerprint is {name}, the verifier's is {self.fingerprint}"
        if manifest is None:
            reason += "; no manifest of it is stored"
        elif fingerprint_of(manifest) != name:
            reason += "; the stored manifest belongs to neither"
        else:
            fields = differing_fields(manifest, self._manifest)
        place = (claim.line, claim.choice, claim.id)
        return Finding(*place, Verdict.OTHER_FINGERPRINT, reason, signature, fields=fields)

    # ---- replaying
    # ---------------------------------------------------------------------------------------

    async def _replay_all(self, batches: Any, found: Callable[[Finding], None]) -> None:
        for batch in batches:
            windows = [w for case in batch for w in case.windows]
            try:
                answers = iter(await self._answers(windows))
            except Exception as error:
                for case in batch:
                    found(case.finding(Verdict.FAILED, _told(error)))
                continue
            for case in batch:
                found(await self._judge(case, [next(answers) for _ in case.windows]))

    async def _answers(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        return await patiently(partial(self._canon.replay, windows))

    async def _judge(self, case: _Case, answers: Sequence[Commit | Failure]) -> Finding:
        """Compares what was recorded with what was computed."""
        claim, output = case.claim, case.output
        assert output is not None
        parts: list[Canonical] = []
        for window, answer in zip(case.windows, answers, strict=True):
            if isinstance(answer, Failure):
                return case.finding(Verdict.FAILED, answer.message)
            if answer.fingerprint != claim.fingerprint:
                return self._other_fingerprint(claim, claim.fingerprint, case.signature)
            parts.append(canonical(window, answer))
        counted = {"tokens": len(output), "rows": case.rows}
        if (difference := first_difference(output, claim.logprobs, parts)) is not None:
            what = (
                "token" if difference.canonical_token != difference.recorded_token else "log-probability of"
            )
            reason = f"{what} {difference.index} of the output is not the canonical one"
            difference = await self._explained(case, difference)
            return case.finding(Verdict.DIFFERS, reason, difference=difference, **counted)
        logprobs = [p.logprob for part in parts for p in part.entries]
        problem = receipt_problem(claim.receipt, output, logprobs) if claim.receipt else ""
        problem = problem or text_problem(claim, case.request, output, self._tokenizer)
        return case.finding(Verdict.DIFFERS if problem else Verdict.CONFIRMED, problem, **counted)

    async def _explained(self, case: _Case, found: Difference) -> Difference:
        """Adds what the verifier gives the recorded token."""
        if found.recorded_token == found.canonical_token:
            return replace(found, recorded_token_canonical_logprob=found.canonical_logprob)
        assert case.output is not None
        tokens, name = (*case.request.prompt, *case.output[: found.index]), f"{case.request.request_id}-why"
        given = (found.recorded_token,)
        asked = Window(name, tokens, len(case.request.prompt), given, case.request.sampling, score=True)
        try:
            (answer,) = await self._answers([asked])
        except LLM42Error:
            return found  # the finding stands without it
        if not isinstance(answer, Commit):
            return found
        return replace(found, recorded_token_canonical_logprob=finite(answer.logprobs[0].logprob))

    # ---- generating again
    # ---------------------------------------------------------------------------------------

    async def _regenerate_all(self, cases: Any, found: Callable[[Finding], None]) -> None:
        for case in cases:
            try:
                found(await patiently(partial(self._regenerate, case)))
            except Exception as error:
                found(case.finding(Verdict.FAILED, _told(error)))

    async def _regenerate(self, case: _Case) -> Finding:
        claim, text = case.claim, ""
        output: list[int] = []
        entries: list[TokenLogprob] = []
        async with aclosing(self._canon.regenerate(case.request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                if delta.fingerprint not in (None, claim.fingerprint):
                    return self._other_fingerprint(claim, claim.fingerprint, case.signature)
                output += delta.token_ids
                entries += delta.logprobs
                text += delta.text
        rows = len(case.request.prompt) + len(output)
        problem = self._regenerated_problem(claim, output, entries, text)
        verdict = Verdict.DIFFERS if problem else Verdict.CONFIRMED
        return case.finding(verdict, problem, tokens=len(output), rows=rows)

    def _regenerated_problem(
        self, claim: Claim, output: Sequence[int], entries: Sequence[TokenLogprob], text: str
    ) -> str:
        if claim.receipt is not None:
            return receipt_problem(claim.receipt, output, [p.logprob for p in entries])
        if text != claim.text:
            assert claim.text is not None
            same = next((i for i, (a, b) in enumerate(zip(text, claim.text, strict=False)) if a != b), None)
            at = min(len(text), len(claim.text)) if same is None else same
            return f"the text differs from character {at} on: {text[at : at + 24]!r} is canonical"
        if claim.logprobs is None:
            return ""
        found = [finite(p.logprob) for p in entries]
        return "" if found == list(claim.logprobs) else "the log-probabilities are not the canonical ones"


def _told(error: Exception) -> str:
    """A finding's reason. An error that is not ours is a bug: the log has it, the other records go on."""
    if isinstance(error, LLM42Error):
        return str(error)
    log.error("an audited record failed", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _batches(cases: Sequence[_Case], most: int) -> list[list[_Case]]:
    """Neighbours together, up to `most` positions; a longer one goes alone."""
    batches: list[list[_Case]] = []
    rows = most
    for case in cases:
        if not batches or rows + case.rows > most:
            batches.append([])
            rows = 0
        batches[-1].append(case)
        rows += case.rows
    return batches
