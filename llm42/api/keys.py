"""Who may ask for what: API keys, what a request gets that does not say, and each key's share of determinism.

Keys are optional. Only their SHA-256 is configured; a presented key is hashed and compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from llm42.api import errors
from llm42.api.asgi import HttpOnly
from llm42.api.requests import GenerationBody
from llm42.config import ApiKeySettings, Settings
from llm42.config.server import ServerSettings
from llm42.config.yaml_file import YamlProblem, read_yaml
from llm42.errors import Overloaded, RequestRejected
from llm42.protocol import Request
from llm42.receipt import KeyProblem
from llm42.telemetry.logs import bound

HEADER = "X-LLM42-Deterministic"
"""A request's wish for determinism, where its body cannot be changed."""
OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/docs", "/openapi.json"})
"""What is answered without a key."""
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class KeyPolicy:
    """One key's rights, and how many deterministic outputs it has under way through this process."""

    def __init__(self, key: ApiKeySettings | None, settings: Settings) -> None:
        """key: None where nobody is asked for a key."""
        self._key, self._server = key, settings.server
        replicas = max(self._server.fastpath_replicas, self._server.max_fastpath_replicas)
        # deterministic outputs that one ingress process may have under way in all
        places = settings.engine.places * replicas / self._server.ingress_replicas
        self._most = None if key is None else _most(places * key.deterministic_share)
        self._held = 0

    @property
    def name(self) -> str:
        """What logs call it; empty without a key."""
        return self._key.name if self._key is not None else ""

    def wants_determinism(self, body: GenerationBody, headers: Mapping[str, str]) -> bool:
        """Body and header, which must not disagree; else the key's default; else the server's.

        Raises RequestRejected, Forbidden.
        """
        asked, said = body.asks_for_determinism, headers.get(HEADER)
        if said is not None:
            word = _BOOLEANS.get(said.strip().lower())
            if word is None:
                raise RequestRejected(f"{HEADER} must be 'true' or 'false'.", HEADER)
            if asked not in (None, word):
                raise RequestRejected(
                    f"{HEADER} and the field deterministic disagree: send one of them.", HEADER
                )
            asked = word
        if asked is None and self._key is not None:
            asked = self._key.deterministic_default
        wanted = self._server.deterministic_default if asked is None else asked
        if wanted and self._most == 0:
            raise errors.Forbidden(
                f"The key '{self.name}' may not ask for deterministic output (deterministic_share 0):"
                " send deterministic: false, or use another key."
            )
        return wanted

    def salted(self, request: Request) -> Request:
        """The request, so that it shares cached prompts with its own key's requests only (and among them
        with those of the same `cache_salt`): else the time and the numbers of a reply would tell what others
        have asked. As it is, where nobody is asked for a key."""
        if self._key is None:
            return request
        salt = hashlib.sha256(f"{self._key.sha256}:{request.cache_salt}".encode()).hexdigest()
        return replace(request, cache_salt=salt)

    @property
    def may_verify(self) -> bool:
        """Whether it may use the verifiers at all."""
        return self._most != 0

    def require_share(self, outputs: int) -> None:
        """Refuses a request of more deterministic outputs than the key may ever hold: after a 429 it
        would be sent again for nothing. Raises RequestRejected."""
        if self._most is not None and outputs > self._most:
            raise RequestRejected(
                f"The request has {outputs} deterministic outputs (prompts times n); the key '{self.name}'"
                f" may have {self._most} at a time (deterministic_share): send several smaller requests.",
                "n",
            )

    @contextmanager
    def held(self, outputs: int) -> Iterator[None]:
        """Counts `outputs` deterministic outputs as under way. Raises Overloaded."""
        if self._most is not None and self._held + outputs > self._most:
            raise Overloaded(
                f"The key '{self.name}' has {self._held} deterministic outputs under way; it may have"
                f" {self._most} (deterministic_share): send the request again when one has ended."
            )
        self._held += outputs
        try:
            yield
        finally:
            self._held -= outputs


def _most(share: float) -> int:
    """Whole outputs in a share of the places; one, where it is less than one place but not nothing."""
    return max(1, math.floor(round(share, 6))) if share > 0 else 0


def configured_keys(server: ServerSettings) -> tuple[ApiKeySettings, ...]:
    """The keys of the settings and of their file. A file that has none is an error: it would open the API to
    everybody. Raises KeyProblem."""
    if server.api_keys_file is None:
        return server.api_keys
    try:
        found = read_yaml(Path(server.api_keys_file))
        if set(found) != {"api_keys"}:
            raise ValueError("the file must be a mapping with api_keys as its only name")
        more = TypeAdapter(tuple[ApiKeySettings, ...]).validate_python(found["api_keys"])
        if not more:
            raise ValueError("there are no keys in it: add one, or the API would be open to everybody")
    except YamlProblem as error:
        raise KeyProblem(f"server.api_keys_file: {error}") from error
    except ValidationError as error:  # without what was found there: it may be a key
        where = ", ".join(sorted({".".join(map(str, e["loc"])) or "api_keys" for e in error.errors()}))
        raise KeyProblem(f"server.api_keys_file: {server.api_keys_file}: wrong or missing: {where}") from None
    except ValueError as error:
        raise KeyProblem(f"server.api_keys_file: {server.api_keys_file}: {error}") from error
    return server.api_keys + more


class KeyGate(HttpOnly):
    """ASGI: refuses requests without a valid key (HTTP 401) where keys are configured, and puts the key's
    policy into the request's state and its name into lines of the log."""

    def __init__(self, app: ASGIApp, settings: Settings, answers: errors.Errors) -> None:
        super().__init__(app)
        self._answers, keys = answers, configured_keys(settings.server)
        self._policies = [(bytes.fromhex(k.sha256), KeyPolicy(k, settings)) for k in keys]
        self._anyone = KeyPolicy(None, settings)

    async def http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses, or passes on with the policy."""
        policy = self._find(Headers(scope=scope).get("authorization", ""))
        if policy is None and get_route_path(scope) not in OPEN_PATHS:
            refusal = errors.Unauthorized(
                "A valid API key is needed: send the header 'Authorization: Bearer KEY'."
            )
            await self._answers.from_exception(refusal)(scope, receive, send)
            return
        scope.setdefault("state", {})["policy"] = policy = policy or self._anyone
        with bound(key=policy.name):
            await self._app(scope, receive, send)

    def _find(self, header: str) -> KeyPolicy | None:
        """The policy of the presented key. Every key is compared, whichever fits: the time tells nothing."""
        if not self._policies:
            return self._anyone
        scheme, _, key = header.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = [policy for known, policy in self._policies if hmac.compare_digest(known, digest)]
        return found[-1] if found and scheme.lower() == "bearer" else None
