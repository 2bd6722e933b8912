"""Audits: stored outputs are computed again and compared, many at a time.

An output whose tokens are known is replayed: prompt and output are one window, at the speed of a prefill,
with nothing taken from the verifier's cache. One of which only the text or a hash is known is generated
again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from llm42.audit.claim import Claim
from llm42.audit.compare import (
    Difference,
    Finding,
    Verdict,
    first_difference,
    logprob_problem,
    names_problem,
    question_problem,
    receipt_problem,
    text_problem,
    windows_of,
)
from llm42.audit.question import Contradiction, Questions, RequestMaker
from llm42.config import AuditSettings
from llm42.errors import LLM42Error, Overloaded, VerifierUnavailable
from llm42.fingerprint import differing_fields
from llm42.fingerprint import fingerprint as fingerprint_of
from llm42.protocol import Commit, Failure, Request, TokenLogprob, Window
from llm42.receipt import Keyring, Signature, finite, joint
from llm42.session.interfaces import Answers
from llm42.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
REGENERATIONS = 8
"""Outputs that are generated again at a time, for each of `audit.concurrency`."""
ATTEMPTS = 6
T = TypeVar("T")


def windows_per_call(max_waiting: int, calls: int) -> int:
    """Such that so many calls together fill at most half of a verifier's queue (verifier.max_waiting): the
    other half is for live requests."""
    return max(1, max_waiting // (2 * calls))


@dataclass(slots=True)
class _Case:
    """A claim on its way to a finding."""

    claim: Claim
    request: Request
    """As it was sent."""
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
        answers: Answers,
        settings: AuditSettings,
        keyring: Keyring,
        tokenizer: Tokenizer,
        make: RequestMaker,
        manifests: Mapping[str, Mapping[str, Any]] | None = None,
        batch_windows: int = 64,
    ) -> None:
        """manifests: of other fingerprints, so that a difference can be explained. batch_windows: most
        windows in one call (`windows_per_call`)."""
        self._answers, self._settings, self._keyring = answers, settings, keyring
        self._tokenizer, self._manifests = tokenizer, manifests or {}
        self._questions, self._batch_windows = Questions(make, tokenizer.vocab_size), batch_windows
        self._run = uuid.uuid4().hex[:12]
        self.fingerprint: str | None = None
        self._manifest: Mapping[str, Any] = {}

    async def audit(self, claims: Sequence[Claim], found: Callable[[Finding], None]) -> None:
        """Tells `found` about every claim, in any order. Raises VerifierUnavailable when there is no
        verifier; what goes wrong with one claim is that claim's finding."""
        self.fingerprint, self._manifest = await self._answers.fingerprint(agreed=True)
        replays: list[_Case] = []
        regenerations: list[_Case] = []
        for case in await asyncio.to_thread(lambda: [self._case(c) for c in claims]):
            if isinstance(case, Finding):
                found(case)
            else:
                (replays if case.windows else regenerations).append(case)
        bounds = self._settings.batch_tokens, self._batch_windows
        batches, again = iter(_batches(replays, *bounds)), iter(regenerations)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._settings.concurrency):
                tasks.create_task(self._replay_all(batches, found))
            for _ in range(self._settings.concurrency * REGENERATIONS):
                tasks.create_task(self._regenerate_all(again, found))

    # ---- what a claim asks for

    def _case(self, claim: Claim) -> _Case | Finding:
        """What is to be computed, or a finding where that is not needed."""
        receipts = (r for r in (claim.receipt, claim.second) if r is not None)
        signature = joint(self._keyring.check(r) for r in receipts)
        place = (claim.line, claim.choice, claim.id)
        try:
            return self._asked(claim, signature)
        except Contradiction as error:
            return Finding(*place, Verdict.DIFFERS, str(error), signature)
        except Exception as error:
            return Finding(*place, Verdict.FAILED, _reason(error), signature)

    def _asked(self, claim: Claim, signature: Signature) -> _Case | Finding:
        """The same. Raises LLM42Error for a question that cannot have been asked, and Contradiction for an
        answer to another one."""
        if signature == Signature.INVALID:
            text = "the receipt's HMAC is not that of its content: it was changed, or signed with another key"
            return Finding(claim.line, claim.choice, claim.id, Verdict.BAD_SIGNATURE, text, signature)
        if claim.fingerprint != self.fingerprint:
            return self._other_fingerprint(claim, signature)
        if claim.contradiction:
            raise Contradiction(claim.contradiction)
        if claim.manifest is not None and fingerprint_of(claim.manifest) != claim.fingerprint:
            raise Contradiction("the manifest in the record is not that of its fingerprint")
        request = self._questions.of(claim, f"audit-{self._run}-{claim.line}-{claim.choice}")
        if request.max_tokens < 1:
            raise LLM42Error("the stored request asks for no output: there is nothing to compare")
        case = _Case(claim, request, signature, claim.output)
        if problem := question_problem(claim, request):
            return case.finding(Verdict.DIFFERS, problem)
        if claim.output is not None:
            case.windows = windows_of(request, claim.output, self._settings.max_window)
        return case

    def _other_fingerprint(self, claim: Claim, signature: Signature) -> Finding:
        name, fields = claim.fingerprint, {}
        manifest = claim.manifest or self._manifests.get(name)
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

    async def _replay_all(self, batches: Iterator[list[_Case]], found: Callable[[Finding], None]) -> None:
        for batch in batches:
            windows = [w for case in batch for w in case.windows]
            try:
                answers = iter(await self._verified(windows))
            except Exception as error:
                for case in batch:
                    found(case.finding(Verdict.FAILED, _reason(error)))
                continue
            for case in batch:
                own = [next(answers) for _ in case.windows]
                found(await self._guarded(case, self._judge(case, own)))

    async def _verified(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """In order; never more than `batch_windows` of them wait in one verifier."""
        found: list[Commit | Failure] = []
        for start in range(0, len(windows), self._batch_windows):
            some = windows[start : start + self._batch_windows]
            found += await retrying(partial(self._answers.verify_cold, some))
        return found

    async def _guarded(self, case: _Case, finding: Awaitable[Finding]) -> Finding:
        """What goes wrong with one claim is that claim's finding."""
        try:
            return await finding
        except Exception as error:
            return case.finding(Verdict.FAILED, _reason(error))

    async def _judge(self, case: _Case, answers: Sequence[Commit | Failure]) -> Finding:
        """Compares what was recorded with what was computed."""
        claim, output = case.claim, case.output
        assert output is not None
        commits: list[Commit] = []
        for answer in answers:
            if isinstance(answer, Failure):
                return case.finding(Verdict.FAILED, answer.message)
            if answer.fingerprint != claim.fingerprint:
                return self._other_fingerprint(claim, case.signature)
            commits.append(answer)
        counted = {"tokens": len(output), "rows": case.rows}
        prompt_len = len(case.request.prompt)
        if (difference := first_difference(output, claim.logprobs, commits, prompt_len)) is not None:
            same = difference.canonical_token == difference.recorded_token
            what = "log-probability of" if same else "token"
            reason = f"{what} {difference.index} of the output is not the canonical one"
            difference = await self._explained(case, difference)
            return case.finding(Verdict.DIFFERS, reason, difference=difference, **counted)
        logprobs = [p.logprob for commit in commits for p in commit.logprobs]
        problem = receipt_problem(claim.receipt, output, logprobs) if claim.receipt else ""
        problem = problem or self._shown_problem(case, output)
        return case.finding(Verdict.DIFFERS if problem else Verdict.CONFIRMED, problem, **counted)

    def _shown_problem(self, case: _Case, output: Sequence[int]) -> str:
        """How canonical tokens contradict all that is text in the record."""
        problem = text_problem(case.claim, case.request, output, self._tokenizer)
        return problem or names_problem(case.claim.names, output, self._tokenizer)

    async def _explained(self, case: _Case, found: Difference) -> Difference:
        """Adds what the verifier gives the recorded token."""
        if found.recorded_token == found.canonical_token:
            return replace(found, recorded_token_canonical_logprob=found.canonical_logprob)
        assert case.output is not None
        tokens, name = (*case.request.prompt, *case.output[: found.index]), f"{case.request.request_id}-why"
        given = (found.recorded_token,)
        asked = Window(name, tokens, len(case.request.prompt), given, case.request.sampling, score=True)
        try:
            (answer,) = await self._verified([asked])
        except LLM42Error:
            return found  # the finding stands without it
        if not isinstance(answer, Commit):
            return found
        return replace(found, recorded_token_canonical_logprob=finite(answer.logprobs[0].logprob))

    # ---- generating again

    async def _regenerate_all(self, cases: Iterator[_Case], found: Callable[[Finding], None]) -> None:
        for case in cases:
            found(await self._guarded(case, retrying(partial(self._regenerate, case))))

    async def _regenerate(self, case: _Case) -> Finding:
        """As many tokens as the receipt says; where there is none, until the request's own end."""
        claim, request = case.claim, case.request
        if claim.receipt is not None:
            request = replace(request, max_tokens=claim.receipt.output_len, stop=(), stop_token_ids=())
        output: list[int] = []
        entries: list[TokenLogprob] = []
        async with aclosing(self._answers.generate(request)) as deltas:
            async for delta in deltas:
                if delta.fingerprint not in (None, claim.fingerprint):
                    return self._other_fingerprint(claim, case.signature)
                output += delta.token_ids
                entries += delta.logprobs
        problem = ""
        if claim.receipt is not None:
            problem = receipt_problem(claim.receipt, output, [p.logprob for p in entries])
        problem = problem or logprob_problem(claim.logprobs, entries)
        problem = problem or self._shown_problem(case, output)
        counted = {"tokens": len(output), "rows": len(request.prompt) + len(output)}
        return case.finding(Verdict.DIFFERS if problem else Verdict.CONFIRMED, problem, **counted)


async def retrying(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats what the verifiers were too busy for, or what died with one of them: all of it is pure."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return await call()
        except (VerifierUnavailable, Overloaded) as error:
            log.info("tried again: %s", error)
            await asyncio.sleep(min(5.0, 0.1 * 3**attempt))
    return await call()


def _reason(error: Exception) -> str:
    """A finding's reason. An error that is not ours is a bug: the log has it, the other records go on."""
    if isinstance(error, LLM42Error):
        return str(error)
    log.error("an audited record failed", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _batches(cases: Sequence[_Case], most_rows: int, most_windows: int) -> list[list[_Case]]:
    """Neighbours together, up to so many positions and windows; a longer one goes alone."""
    batches: list[list[_Case]] = []
    rows, windows = most_rows, 0
    for case in cases:
        rows, windows = rows + case.rows, windows + len(case.windows)
        if not batches or rows > most_rows or windows > most_windows:
            batches.append([])
            rows, windows = case.rows, len(case.windows)
        batches[-1].append(case)
    return batches
