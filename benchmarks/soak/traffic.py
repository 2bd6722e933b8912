"""What the clients of a soak do: requests of every kind that come and go, and what became of each."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

KINDS = 24
"""Different deterministic requests; each is sent many times, and its answers are compared."""


@dataclass(slots=True)
class Tally:
    """What was seen so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """By kind of request and what became of it."""
    answers: dict[int, Counter[str]] = field(default_factory=dict)
    """Of each deterministic request: its different answers, ids and log-probabilities as they were sent."""
    cut: list[tuple[int, list[int]]] = field(default_factory=list)
    """What came of deterministic streams that broke off: the request, and token ids."""
    tokens: int = 0
    failovers: int = 0

    def wrong(self, right: Mapping[int, str]) -> int:
        """Answers that are not the right ones, bit for bit, and beginnings that are not theirs."""
        whole = sum(
            count
            for number, found in self.answers.items()
            for text, count in found.items()
            if text != right[number]
        )
        return whole + sum(json.loads(right[n])[0][: len(tokens)] != tokens for n, tokens in self.cut)

    def different(self) -> dict[int, int]:
        """Deterministic requests with more than one answer, and how many they have."""
        return {number: len(found) for number, found in self.answers.items() if len(found) > 1}


def question(number: int, ids: int) -> dict[str, Any]:
    """The deterministic request of this number: greedy and sampled ones, short and longer prompts, of token
    ids below `ids`."""
    rng = random.Random(number)
    prompt = [rng.randrange(2, ids) for _ in range(rng.choice((4, 20, 60, 150)))]
    sampled = number % 2 == 1
    return {
        "prompt": prompt, "max_tokens": rng.randrange(6, 40), "logprobs": rng.choice((0, 2)),
        "temperature": 0.9 if sampled else 0.0, "top_p": 0.95 if sampled else 1.0, "seed": number,
        "ignore_eos": True, "return_token_ids": True, "deterministic": True,
    }  # fmt: skip


def noise(rng: random.Random, ids: int) -> dict[str, Any]:
    """A best-effort request."""
    prompt = [rng.randrange(2, ids) for _ in range(rng.randrange(3, 200))]
    return {"prompt": prompt, "max_tokens": rng.randrange(4, 64), "temperature": rng.choice((0.0, 0.8, 1.3))}


BAD: tuple[tuple[str, bytes], ...] = (
    ("/v1/completions", b'{"prompt": '),
    ("/v1/completions", b'{"model": "nobody", "prompt": "a"}'),
    ("/v1/completions", b'{"model": "MODEL", "prompt": "a", "temperature": -1}'),
    ("/v1/completions", b'{"model": "MODEL", "prompt": "a", "max_tokens": 99999999}'),
    ("/v1/chat/completions", b'{"model": "MODEL", "messages": []}'),
    ("/v1/nothing", b"{}"),
)


class Clients:
    """Clients of a service at `url`; each does one thing after another until it is told to stop."""

    def __init__(self, url: str, model: str, ids: int, tally: Tally) -> None:
        """ids: of the model's vocabulary, how many may be in prompts."""
        self._url, self._model, self._ids, self.tally = url, model, ids, tally
        self._stop = asyncio.Event()

    async def run(self, count: int) -> None:
        """Until `stop`."""
        limits = httpx.Limits(max_connections=count * 2)
        async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._one(http, random.Random(i)) for i in range(count)))

    def stop(self) -> None:
        """What is under way is finished; nothing new begins."""
        self._stop.set()

    async def _one(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        ways: Sequence[Callable[[httpx.AsyncClient, random.Random], Awaitable[str]]]
        ways = (self.stream, self.whole, self.stream, self.best_effort, self.leave, self.refused, self.audit)
        while not self._stop.is_set():
            way = rng.choice(ways)
            try:
                outcome = await way(http, rng)
            except httpx.HTTPError as error:
                outcome = type(error).__name__
            except Exception as error:  # a client must go on; the tally says what it met
                outcome = f"{type(error).__name__}: {error}"[:80]
            self.tally.outcomes[f"{way.__name__}: {outcome}"] += 1
            # requests come and go: now and then a client thinks for a while
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.2, 3.0)))

    async def stream(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        """A deterministic stream, read to its end."""
        number = rng.randrange(KINDS)
        body = {"model": self._model, "stream": True, **question(number, self._ids)}
        tokens: list[int] = []
        logprobs: list[float] = []
        outcome = "cut"
        try:
            async with http.stream("POST", f"{self._url}/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    return str(reply.status_code)
                async for line in reply.aiter_lines():
                    if line == "data: [DONE]":
                        # an error event has one behind it, too
                        outcome = "finished" if outcome == "cut" else outcome
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            outcome = f"event {event['error'].get('code')}"
                            continue
                        self.tally.failovers += (event.get("llm42") or {}).get("failovers", 0)
                        for choice in event["choices"]:
                            tokens += choice.get("token_ids") or []
                            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        finally:
            if outcome == "finished":
                self._keep(number, tokens, logprobs)
            else:
                self.tally.cut.append((number, tokens))
        return outcome

    async def whole(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        """A deterministic answer in one piece."""
        number = rng.randrange(KINDS)
        reply = await http.post(
            f"{self._url}/v1/completions", json={"model": self._model, **question(number, self._ids)}
        )
        if reply.status_code != 200:
            return str(reply.status_code)
        (choice,) = reply.json()["choices"]
        self._keep(number, choice["token_ids"], choice["logprobs"]["token_logprobs"])
        return "finished"

    def _keep(self, number: int, tokens: list[int], logprobs: list[float]) -> None:
        self.tally.tokens += len(tokens)
        answers = self.tally.answers.setdefault(number, Counter())
        answers[json.dumps([tokens, logprobs])] += 1

    async def best_effort(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        """A best-effort answer."""
        reply = await http.post(
            f"{self._url}/v1/completions", json={"model": self._model, **noise(rng, self._ids)}
        )
        if reply.status_code != 200:
            return str(reply.status_code)
        self.tally.tokens += reply.json()["usage"]["completion_tokens"]
        return "finished"

    async def leave(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        """A client that goes away: before the answer, or in the middle of a stream."""
        body = {
            "model": self._model,
            **question(rng.randrange(KINDS), self._ids),
            "stream": rng.random() < 0.5,
        }
        if rng.random() < 0.5:
            body = {"model": self._model, **noise(rng, self._ids), "max_tokens": 400, "stream": True}
        try:
            async with asyncio.timeout(rng.uniform(0.05, 3.0)):
                async with http.stream("POST", f"{self._url}/v1/completions", json=body) as reply:
                    async for _ in reply.aiter_lines():
                        if rng.random() < 0.1:
                            return "left"
            return "finished before"
        except TimeoutError:
            return "left"

    async def refused(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        """A body that is wrong."""
        path, body = rng.choice(BAD)
        reply = await http.post(
            self._url + path,
            content=body.replace(b"MODEL", self._model.encode()),
            headers={"content-type": "application/json"},
        )
        return str(reply.status_code)

    async def audit(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        """An answer, and the audit of it."""
        body = {"model": self._model, **question(rng.randrange(KINDS), self._ids)}
        reply = await http.post(f"{self._url}/v1/completions", json=body)
        if reply.status_code != 200:
            return str(reply.status_code)
        records = [{"request": body, "response": reply.json()}]
        reply = await http.post(f"{self._url}/v1/audit", json={"records": records})
        if reply.status_code != 200:
            return f"audit {reply.status_code}"
        return " ".join(sorted({found["verdict"] for found in reply.json()["results"]}))
