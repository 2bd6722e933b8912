"""Settings of the HTTP side and of how many processes there are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from llm42.config.section import Port, PositiveShare, Section, Share

Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s*]+)$")]


class ApiKeySettings(Section):
    """A key that clients authenticate with, and what its requests may do."""

    name: Annotated[str, Field(min_length=1)]
    """What logs and errors call it."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the key, in hexadecimal digits: printf %s KEY | sha256sum."""
    deterministic_default: bool | None = None
    """What a request without the field gets; null: server.deterministic_default."""
    deterministic_share: Share = 1.0
    """Share of the deterministic places that it may hold at once; 0: no determinism."""


class ServerSettings(Section):
    """The HTTP side, and how many processes there are. Ray Serve's files have host and port in
    http_options."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8000
    """Port to listen on."""
    deterministic_default: bool = False
    """What a request without the field `deterministic` gets."""
    default_seed: int = 42
    """The seed of a deterministic request that names none; the reply echoes it."""
    root_path: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._~-]+)*$")] = ""
    """The path under which a proxy in front publishes the API, such as /llm: /llm/v1/models is then
    answered as /v1/models is, whether the proxy strips it or not."""
    api_keys: tuple[ApiKeySettings, ...] = ()
    """Keys, one of which a request must present ("Authorization: Bearer ..."); with none, nobody is asked.
    Each: name; sha256 (printf %s KEY | sha256sum); deterministic_default (null: as above);
    deterministic_share, the share of the places for deterministic requests that the key's may hold at once
    (0: it may not ask for determinism)."""
    api_keys_file: str | None = None
    """A YAML file with more of them, under the name api_keys, read when an ingress starts: so they can come
    from a Secret. On a cluster it must exist on every node that has an ingress."""
    cors_origins: tuple[Origin, ...] = ()
    """Pages whose scripts may use the API from a browser (CORS), such as https://chat.example.org; "*" is
    every page."""
    body_timeout_s: PositiveFloat = 60.0
    """A request whose body has not arrived after so many seconds is refused."""
    heartbeat_s: NonNegativeFloat = 10.0
    """A stream that has had nothing to send for so many seconds (a queue, a long prompt) sends a comment
    line, which clients skip: else proxies take the connection for dead. Its head comes by then at the
    latest. 0: never."""
    max_queued: PositiveInt = 256
    """Requests of each class, deterministic and best-effort, that may wait for a place in a replica;
    beyond it: 429."""
    deterministic_share: PositiveShare = 0.5
    """Share of a replica's places that deterministic requests get while both classes wait."""
    failover_s: NonNegativeFloat = 60.0
    """When a replica is lost, its deterministic streams go on elsewhere; they wait so many seconds for it.
    0: never."""
    resume_best_effort: bool = False
    """Whether best-effort streams go on elsewhere too, with some continuation; else they end with an error
    event."""
    drain_s: PositiveFloat = 120.0
    """A replica that is being replaced may finish its streams for this long (seconds)."""
    ready_when: Literal["serving", "certified"] = "serving"
    """When a new replica joins: as soon as its engine runs (at once where it has none), or (certified) once a
    verifier is ready too, or has failed. With `certified` a new cluster gets no traffic while it still
    certifies."""
    ingress_replicas: PositiveInt = 1
    """Processes that speak HTTP."""
    ingress_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Other Ray resources that such a process needs, such as {front: 1} where each node that clients reach
    announces one: they decide which nodes it may be on. The application runs once all have a place."""
    fastpath_replicas: PositiveInt = 1
    """Replicas of the fast path."""
    max_fastpath_replicas: NonNegativeInt = 0
    """Above fastpath_replicas: Serve adds replicas by load, and removes them again."""
    target_ongoing_requests: PositiveFloat = 16.0
    """Requests per replica that this scaling aims at."""
    upscale_delay_s: NonNegativeFloat = 30.0
    """It adds replicas after so many seconds in which there were more requests."""
    downscale_delay_s: NonNegativeFloat = 600.0
    """It removes replicas after so many seconds in which fewer would have done: each must load the model when
    it is needed again."""
    verifiers: NonNegativeInt = 1
    """Verifiers. 0: deterministic requests are refused."""
    max_verifiers: NonNegativeInt = 0
    """Above verifiers: the supervisor adds verifiers by their places, KV, step time and queue time."""
    stream_interval_s: NonNegativeFloat = 0.05
    """Best-effort tokens are sent at most this often (seconds), less often with many streams (0: each at
    once); those of a deterministic stream as they are committed. Where the client waits for the whole, every
    five seconds, unless this is 0."""
