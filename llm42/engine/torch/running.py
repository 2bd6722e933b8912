"""One request inside the torch engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm42.engine.base import Sink
from llm42.protocol import Request, TokenLogprob


@dataclass(slots=True, eq=False)
class Running:
    """A request in the engine: KV is written for tokens[:computed] in `blocks`; the rest is to be
    computed. Compared by identity: the lists of them are searched in each step."""

    request: Request
    sink: Sink
    limit: int
    tokens: list[int]
    epoch: int = 0
    computed: int = 0
    parked: bool = False
    """Waits for a rollback or an abort after an end-of-text candidate."""
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    cached: int | None = None
    """Prompt tokens found in the cache at the first admission."""
    first_reported: bool = False
    """What comes with the first output has been reported."""
    scores: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of prompt[1:], as far as they are computed."""

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are still to be computed."""
        request = self.request
        wanted = request.prompt_logprobs is not None and not request.deterministic and not request.output
        return wanted and len(self.scores) < len(request.prompt) - 1

    @property
    def output_len(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def runnable(self) -> bool:
        """Whether it may decode another token now."""
        return not self.parked and self.output_len < self.limit
