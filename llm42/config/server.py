"""Settings of the HTTP side and of how many processes there are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llm42.config.section import Section

Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s*]+)$")]


class ApiKeySettings(Section):
    """A key that clients authenticate with, and what its requests may do."""

    name: str = Field(min_length=1, description="What logs and errors call it.")
    sha256: str = Field(
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the key, in hexadecimal digits: printf %s KEY | sha256sum.",
    )
    deterministic_default: bool | None = Field(
        None, description="What a request without the field gets; null: server.deterministic_default."
    )
    deterministic_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the deterministic places that it may hold at once; 0: no determinism.",
    )


class ServerSettings(Section):
    """The HTTP side, and how many processes there are. Ray Serve's files have host and port in
    http_options."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    deterministic_default: bool = Field(
        False, description="What a request without the field `deterministic` gets."
    )
    default_seed: int = Field(
        42, description="The seed of a deterministic request that names none; the reply echoes it."
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="The path under which a proxy in front publishes the API, such as /llm: /llm/v1/models is"
        " then answered as /v1/models is, whether the proxy strips it or not.",
    )
    api_keys: tuple[ApiKeySettings, ...] = Field(
        (),
        description='Keys, one of which a request must present ("Authorization: Bearer ..."); with none,'
        " nobody is asked. Each: name; sha256 (printf %s KEY | sha256sum); deterministic_default (null: as"
        " above); deterministic_share, the share of the places for deterministic requests that the key's may"
        " hold at once (0: it may not ask for determinism).",
    )
    cors_origins: tuple[Origin, ...] = Field(
        (),
        description="Pages whose scripts may use the API from a browser (CORS), such as"
        ' https://chat.example.org; "*" is every page.',
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="A request whose body has not arrived after so many seconds is refused."
    )
    heartbeat_s: float = Field(
        10.0,
        ge=0,
        description="A stream that has had nothing to send for so many seconds (a queue, a long prompt) sends"
        " a comment line, which clients skip: else proxies take the connection for dead. Its head comes by"
        " then at the latest. 0: never.",
    )
    max_queued: int = Field(
        256,
        gt=0,
        description="Requests of each class, deterministic and best-effort, that may wait for a place in a"
        " replica; beyond it: 429.",
    )
    deterministic_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of a replica's places that deterministic requests get while both classes wait.",
    )
    failover_s: float = Field(
        60.0,
        ge=0,
        description="When a replica is lost, its deterministic streams go on elsewhere; they wait so many"
        " seconds for it. 0: never.",
    )
    resume_best_effort: bool = Field(
        False,
        description="Whether best-effort streams go on elsewhere too, with some continuation; else they end"
        " with an error event.",
    )
    drain_s: float = Field(
        120.0,
        gt=0,
        description="A replica that is being replaced may finish its streams for this long (seconds).",
    )
    ready_when: Literal["serving", "certified"] = Field(
        "serving",
        description="When a new replica joins: as soon as it can serve best-effort requests, or (certified)"
        " once a verifier is ready too, or has failed. With `certified` a new cluster gets no traffic while"
        " it still certifies.",
    )
    ingress_replicas: int = Field(1, gt=0, description="Processes that speak HTTP.")
    fastpath_replicas: int = Field(1, gt=0, description="Replicas of the fast path.")
    max_fastpath_replicas: int = Field(
        0, ge=0, description="Above fastpath_replicas: Serve adds replicas by load, and removes them again."
    )
    target_ongoing_requests: float = Field(
        16.0, gt=0, description="Requests per replica that this scaling aims at."
    )
    verifiers: int = Field(1, ge=0, description="Verifiers. 0: deterministic requests are refused.")
    max_verifiers: int = Field(
        0, ge=0, description="Above verifiers: the supervisor adds verifiers by queue time."
    )
    stream_interval_s: float = Field(
        0.05,
        ge=0,
        description="Best-effort tokens are sent at most this often (seconds), less often with many streams"
        " or where the client waits for the whole (0: each at once); verified ones as they are committed.",
    )
