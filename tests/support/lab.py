"""The parts of a service in one process, around a model that is loaded and certified once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from llm42.cache import BlockPool, KVCache
from llm42.checkpoint.load import load_for
from llm42.config import Settings
from llm42.engine.base import Engine
from llm42.engine.corrupt import CorruptingEngine
from llm42.engine.torch.engine import TorchEngine
from llm42.host.threads import set_threads, torch_threads
from llm42.local.demo_products import batch_dependent
from llm42.models.weights import LoadedModel
from llm42.protocol import Request
from llm42.session.driver import Generator
from llm42.session.interfaces import VerifierClient
from llm42.session.policy import choose, choose_best_effort
from llm42.session.ways import Decide
from llm42.text.tokenizer import Tokenizer
from llm42.verifier.build import certificate_for
from llm42.verifier.certify.certificate import Certificate
from llm42.verifier.certify.plants_cpu import with_plants
from llm42.verifier.cpu.operators import canonical_set
from llm42.verifier.cpu.runner import CPURunner
from llm42.verifier.scheduler import Verifier
from llm42_kernels.cpu import cpu_operators
from tests.support.engines import VllmPool, bare
from tests.support.oracle import Answer, decode_alone, differences
from tests.support.tiny_model import CONFIG, write_model


@dataclass
class Lab:
    """A model with its certificate, and what is made of it. Everything it starts is closed by `close`, but
    for vLLM engines, which are the pool's."""

    settings: Settings
    model: LoadedModel
    tokenizer: Tokenizer
    certificate: Certificate
    answers: dict[Request, Answer] = field(default_factory=dict)
    parts: list[TorchEngine | Verifier] = field(default_factory=list)
    vllm: VllmPool | None = None
    """Set: `engine` makes vLLM engines."""
    mode: Literal["auto", "verify", "direct"] = "verify"
    """Of the sessions of `generator`, unless a test says otherwise."""
    decide: Decide | None = None
    """Says at each commit of a session in mode auto which way it goes on; None: the policy does, when it
    wants to."""
    decide_best_effort: Decide | None = None
    """The same of best effort."""

    @classmethod
    def make(
        cls,
        directory: Path,
        head_dim: int = CONFIG["head_dim"],
        vllm: VllmPool | None = None,
        dtype: str = "bfloat16",
    ) -> Lab:
        """Writes, loads and certifies the tiny model. vLLM's attention on CPU needs a head_dim of 32 at
        least."""
        path = str(write_model(directory, head_dim, chat=True, positions=4096))
        tree = {
            "model": {"path": path, "name": "tiny", "max_model_len": 768, "dtype": dtype},
            "engine": {"threads": 1, "kv_tokens": 8192},
            "verifier": {"certificate_dir": str(directory), "kv_tokens": 8192},
            "session": {"mode": "verify"},
        }
        return cls.load(Settings.load(tree), vllm)

    @classmethod
    def load(cls, settings: Settings, vllm: VllmPool | None = None) -> Lab:
        """With the model that the settings name."""
        return cls.certified(settings, *load_for(settings), vllm)

    @classmethod
    def certified(
        cls, settings: Settings, model: LoadedModel, tokenizer: Tokenizer, vllm: VllmPool | None = None
    ) -> Lab:
        """With the model's kept certificate, or a new one."""
        return cls(settings, model, tokenizer, certificate_for(settings, model, tokenizer), vllm=vllm)

    def verifier(
        self,
        kv_tokens: int = 8192,
        buckets: Sequence[int] | None = None,
        plants: Sequence[str] = (),
        model: LoadedModel | None = None,
        dirt: float | None = None,
        wrap: Callable[[CPURunner], Any] = lambda runner: runner,
    ) -> Verifier:
        """A verifier with a cache of its own, not started. `dirt` fills the whole cache beforehand; plants
        break its operators; `wrap` may put a test's runner around the real one."""
        model, size = model or self.model, self.settings.verifier.block_size
        c, blocks = model.config, -(-kv_tokens // size)
        kv = KVCache(c.num_layers, blocks, size, c.num_kv_heads, c.head_dim, model.dtype)
        if dirt is not None:
            kv.fill(range(blocks), dirt)
        parts = with_plants(canonical_set(self.certificate.providers), plants)
        steps = tuple(buckets or self.certificate.buckets)
        runner = CPURunner(model, parts.ops, kv, steps, parts.attention, parts.sampler)
        verifier = Verifier(
            wrap(runner),
            BlockPool(blocks, size, root=b"tiny"),
            buckets=steps,
            max_len=self.settings.model.max_model_len,
            vocab_size=c.vocab_size,
            fingerprint="tiny",
            on_thread_start=lambda: set_threads(self.settings.verifier.threads),
        )
        self.parts.append(verifier)
        return verifier

    def engine(
        self, model: LoadedModel | None = None, start: bool = True, corrupt_share: float = 0.0, **changes: Any
    ) -> Any:
        """A fast path; with a share, in the test plant. The torch engine's products depend on the batch, as
        GPU libraries' do, on every machine; vLLM takes of the changes kv_tokens, as the least that it starts
        with."""
        made = self._engine(model, start, changes)
        return CorruptingEngine(made, corrupt_share) if corrupt_share else made

    def _engine(self, model: LoadedModel | None, start: bool, changes: dict[str, Any]) -> Engine:
        if self.vllm is not None:
            assert model is None, "a test with a model of its own is not for vLLM"
            blocks = {"extra_args": {"num_gpu_blocks_override": 26}} if "kv_tokens" in changes else {}
            return self.vllm.get(self.settings, **blocks)
        settings = self.settings.engine.model_copy(update=changes)
        engine = TorchEngine(model or self.model, settings, batch_dependent(cpu_operators()))
        self.parts.append(engine)
        return engine.start() if start else engine

    def generator(self, engine: Engine, verifier: VerifierClient | None, **session: Any) -> Generator:
        """A driver; keyword arguments change the session's settings."""
        changed = self.settings.session.model_copy(update={"mode": self.mode} | session)
        settings = self.settings.model_copy(update={"session": changed, "engine": bare(engine).settings})
        decide = self.decide or choose, self.decide_best_effort or choose_best_effort
        made = Generator(engine, self.tokenizer, settings, verifier, None, None, *decide)
        if self.decide is not None:
            made.ways.hold = 0
        return made

    def oracle(self, request: Request) -> Answer:
        """What must come out: the verifier decoding alone with a cold cache, each request once."""
        plain = replace(request, request_id="oracle", deterministic=True)
        if plain not in self.answers:
            verifier = self.verifier(max(1024, len(plain.prompt) + plain.max_tokens))
            with torch_threads(self.settings.verifier.threads):
                self.answers[plain] = decode_alone(verifier, self.tokenizer, plain)
        return self.answers[plain]

    def wrong(self, answers: Sequence[Answer], requests: Sequence[Request]) -> list[str]:
        """Every difference to the oracle."""
        return [d for a, r in zip(answers, requests, strict=True) for d in differences(a, self.oracle(r))]

    def close(self) -> None:
        """Ends every thread started through the lab since the last call."""
        for part in self.parts:
            part.close()
        self.parts.clear()


def canonical(settings: Settings, **session: Any) -> Settings:
    """The same in the canonical layout."""
    tree = settings.model_dump(mode="json")
    tree["session"] |= {"mode": None, **session}
    return Settings.load(tree | {"engine": {"kind": "canonical"}})
