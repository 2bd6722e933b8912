"""Settings of the HTTP side and of how many processes there are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from llm42.config.section import Port, PositiveShare, Section, Share

Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s*]+)$")]


class ApiKeySettings(Section):
    """An API key, and what its requests may do."""

    name: Annotated[str, Field(min_length=1)]
    """The key's name in logs and error messages."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the key, as 64 hexadecimal digits: printf %s KEY | sha256sum."""
    deterministic_default: bool | None = None
    """Whether a request that does not say is deterministic. null: server.deterministic_default."""
    deterministic_share: Share = 1.0
    """Share (0 to 1) of the places for deterministic requests that the key may hold at once. 0: it may not
    ask for determinism."""


class ServerSettings(Section):
    """The HTTP server, and the number of processes. In Ray Serve's files host and port are in
    http_options."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0: all of the machine's."""
    port: Port = 8000
    """TCP port to listen on."""
    deterministic_default: bool = False
    """Whether a request without the field `deterministic` is deterministic."""
    default_seed: int = 42
    """Seed of a deterministic request that has none; the reply says which seed was used. Another value
    changes the output of such requests."""
    root_path: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._~-]+)*$")] = ""
    """Path under which a proxy publishes the API, such as /llm: /llm/v1/models is then answered like
    /v1/models, whether or not the proxy strips the prefix."""
    api_keys: tuple[ApiKeySettings, ...] = ()
    """API keys. If there are any, a request must present one ("Authorization: Bearer ..."); otherwise
    everybody may use the API. Fields of each: name; sha256 (printf %s KEY | sha256sum); deterministic_default
    (null: as above); deterministic_share, the share (0 to 1) of the places for deterministic requests that
    the key may hold at once (0: it may not ask for determinism)."""
    api_keys_file: str | None = None
    """Path of a YAML file with more keys, under the name api_keys, for example from a Kubernetes Secret. It
    is read when an ingress starts. On a cluster it must exist on every node that has an ingress."""
    cors_origins: tuple[Origin, ...] = ()
    """Web origins whose scripts may use the API from a browser (CORS), such as https://chat.example.org; "*"
    allows all of them."""
    body_timeout_s: PositiveFloat = 60.0
    """Seconds that a request's body may take to arrive; after that the request gets a 408."""
    heartbeat_s: NonNegativeFloat = 10.0
    """After this many seconds without data (a queue, a long prompt) a stream sends a comment line, which
    clients skip. It keeps proxies from closing an idle connection; the response headers are sent by then at
    the latest. 0: never."""
    max_queued: PositiveInt = 256
    """Requests of each class, deterministic and best-effort, that may wait for a place in a replica. Further
    ones get a 429. Raise it to absorb bursts, lower it to refuse early."""
    deterministic_share: PositiveShare = 0.5
    """Share (above 0, to 1) of a replica's places that deterministic requests get while both classes wait.
    With one class alone it has no effect."""
    failover_s: NonNegativeFloat = 60.0
    """When a replica is lost, its deterministic streams go on at another one; this is how many seconds they
    wait for one. 0: they end with an error."""
    resume_best_effort: bool = False
    """true: best-effort streams of a lost replica go on too, with a continuation that may differ. false: they
    end with an error event."""
    drain_s: PositiveFloat = 120.0
    """Seconds that a replica which is being replaced has to finish its streams. Raise it if your answers take
    longer."""
    ready_when: Literal["serving", "certified"] = "serving"
    """When a new replica gets traffic. serving: once its engine runs, if it has one, and it knows of a
    verifier, whatever that one's state is; it waits about a minute for such news at most. certified: once a
    verifier is ready too, or has failed; then a new cluster gets no traffic while it still certifies."""
    ingress_replicas: PositiveInt = 1
    """Number of ingress processes, which speak HTTP. Raise it if they use all of their CPU."""
    ingress_resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Other Ray resources that an ingress process needs, name -> amount, such as {front: 1} where each node
    that clients reach has one. They decide on which nodes ingresses may be placed. The application runs once
    all have a place."""
    fastpath_replicas: PositiveInt = 1
    """Number of fast-path replicas; the smallest number where they scale."""
    max_fastpath_replicas: NonNegativeInt = 0
    """Largest number of fast-path replicas. Above fastpath_replicas: Serve adds and removes replicas with the
    load. Otherwise their number is fixed."""
    target_ongoing_requests: PositiveFloat = 16.0
    """Requests per replica that this scaling aims at. Keep it below the requests that a replica decodes
    together."""
    upscale_delay_s: NonNegativeFloat = 30.0
    """Seconds that the load must be above the target before Serve adds replicas."""
    downscale_delay_s: NonNegativeFloat = 600.0
    """Seconds that fewer replicas must have been enough before Serve removes some. A removed replica must
    load the model again when it is needed."""
    verifiers: NonNegativeInt = 1
    """Number of verifiers; the smallest number where they scale. 0: deterministic requests are refused."""
    max_verifiers: NonNegativeInt = 0
    """Largest number of verifiers. Above verifiers: the supervisor adds verifiers when places, KV, step time
    or queue time exceed their targets (verifier.target_*). Otherwise their number is fixed."""
    stream_interval_s: NonNegativeFloat = 0.05
    """Best-effort tokens of a stream are sent at most once in this many seconds, less often with many
    streams. 0: each token at once. Deterministic tokens are sent when they are committed. For a whole reply,
    tokens go from replica to ingress every five seconds, unless this is 0."""
