"""What the protocol and unit tests share: a tiny random model on disk, the parts of a service around it, the
oracle, and the comparison that every guarantee is judged by."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from llm42.cache import BlockPool, KVCache
from llm42.checkpoint.load import load_for
from llm42.config import Settings
from llm42.engine.base import Engine, EngineOutput
from llm42.engine.corrupt import CorruptingEngine
from llm42.engine.torch.engine import TorchEngine
from llm42.engine.vllm.engine import VllmEngine
from llm42.host.threads import set_threads, torch_threads
from llm42.local.demo_products import batch_dependent
from llm42.models.weights import LoadedModel
from llm42.protocol import (
    Commit,
    Failure,
    FinishReason,
    Request,
    RequestStats,
    SamplingParams,
    TokenLogprob,
    Window,
)
from llm42.session.driver import Generator
from llm42.session.interfaces import VerifierClient
from llm42.text.detokenizer import Detokenizer
from llm42.text.tokenizer import Tokenizer
from llm42.verifier.build import certificate_for
from llm42.verifier.certify.certificate import Certificate
from llm42.verifier.certify.plants_cpu import with_plants
from llm42.verifier.cpu.operators import canonical_set
from llm42.verifier.cpu.runner import CPURunner
from llm42.verifier.scheduler import Verifier
from llm42_kernels.cpu import cpu_operators

VOCAB = 512
END = 0
"""The tiny model's end-of-text id."""
SPECIAL = ("<|end|>", "<|begin|>")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": END,
}
ENGINES = ("torch", pytest.param("vllm", marks=pytest.mark.vllm))
both_engines = pytest.mark.parametrize("lab", ENGINES, indirect=True)
"""For tests that hold whatever proposes the candidates: the torch engine, and vLLM where it is installed."""
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
PENALISED = SamplingParams(
    temperature=0.8,
    seed=5,
    repetition_penalty=1.3,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    logit_bias=((17, 2.5), (300, -4.0)),
    min_tokens=9,
    min_tokens_banned=tuple(range(256)),
)


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_model(
    directory: Path, head_dim: int = CONFIG["head_dim"], chat: bool = False, positions: int = 1024
) -> Path:
    """A random Llama and a byte-level BPE tokenizer as a Hugging Face directory; the same bytes every
    time. `chat`: with a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    changes = {"head_dim": head_dim, "max_position_embeddings": positions}
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(_tensors(head_dim), directory / "model.safetensors")
    _backend().save(str(directory / "tokenizer.json"))
    names = {"eos_token": SPECIAL[0], "bos_token": SPECIAL[1]}
    names |= {"chat_template": CHAT_TEMPLATE} if chat else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


def _tensors(head_dim: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(42)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    q_rows, kv_rows = 4 * head_dim, 2 * head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=gen) * gain / columns**0.5

    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=gen)}
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes = {
            # sharp attention: what a token attends to must matter, or a wrong cache would go unnoticed
            "self_attn.q_proj": (q_rows, hidden, 2.5),
            "self_attn.k_proj": (kv_rows, hidden, 2.5),
            "self_attn.v_proj": (kv_rows, hidden, 1.5),
            "self_attn.o_proj": (hidden, q_rows, 2.0),
            "mlp.gate_proj": (inner, hidden, 1.5),
            "mlp.up_proj": (inner, hidden, 1.5),
            "mlp.down_proj": (hidden, inner, 1.5),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=gen)
    tensors["model.norm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=gen)
    tensors["lm_head.weight"] = matrix(VOCAB, hidden, 2.0)
    return tensors


def _backend() -> tokenizers.Tokenizer:
    """512 tokens: two special ones, 256 bytes, and 254 pairs of letters, so that text is often readable."""
    letters = "etaoinshrdlucmfwypvb"
    pairs = [(a, b) for a in letters for b in letters][: VOCAB - 258]
    vocab = {token: i for i, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    vocab |= {a + b: 258 + i for i, (a, b) in enumerate(pairs)}
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend


@dataclass
class Client:
    """What one request's sink heard: the output of its present epoch."""

    outputs: list[EngineOutput] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    epoch: int = 0
    finish: FinishReason | None = None
    error: str | None = None

    def __call__(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        self.finish, self.error = output.finish, output.error
        if output.epoch == self.epoch and output.error is None:
            assert output.start == len(self.tokens), "output tokens are missing or came twice"
            self.tokens += output.tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """An output: what must be equal, with `==`. Log-probabilities are compared with the alternatives asked
    for."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    text: str
    finish: FinishReason | None
    stats: RequestStats = field(default_factory=RequestStats, compare=False)


def differences(got: Answer, want: Answer) -> list[str]:
    """In which ways an output is not the oracle's; an output that goes on too long or ends early counts."""
    found = []
    for name in ("tokens", "logprobs"):
        a, b = getattr(got, name), getattr(want, name)
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is not None:
            found.append(f"{name}[{at}]: {a[at]} instead of {b[at]}")
        if len(a) != len(b):
            found.append(f"{len(a)} {name} instead of {len(b)}")
    if got.text != want.text:
        found.append(f"text {got.text!r} instead of {want.text!r}")
    if got.finish != want.finish:
        found.append(f"finish {got.finish} instead of {want.finish}")
    return found


def vllm_missing() -> str | None:
    """Why tests with vLLM cannot run here, or None."""
    if importlib.util.find_spec("vllm") is not None:
        return None
    return "vLLM is not installed here; `make test-vllm` runs this where it is"


def vllm_settings(**more: Any) -> dict[str, Any]:
    """engine.vllm for a test on a CPU: a small cache, small blocks, prompts in chunks."""
    arguments = {"kv_cache_memory_bytes": 256 << 20, "block_size": 32} | more.pop("extra_args", {})
    common = {"enforce_eager": True, "max_num_seqs": 32, "max_num_batched_tokens": 64}
    # vLLM checks this share of the memory before it looks at kv_cache_memory_bytes
    return common | {"gpu_memory_utilization": 0.05, "extra_args": arguments} | more


def wait_until(condition: Callable[[], bool], seconds: float = 1.0) -> bool:
    """Polls; whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


class VllmPool:
    """vLLM engines that tests share, since one takes half a minute to start."""

    def __init__(self) -> None:
        self._engines: dict[str, VllmEngine] = {}

    def get(self, settings: Settings, **vllm: Any) -> VllmEngine:
        """An engine with these vLLM settings that nobody uses; started when there is none yet."""
        engine = {"kind": "vllm", "vllm": vllm_settings(**vllm)}
        wanted = Settings.load(settings.model_dump(mode="json") | {"engine": engine})
        key = wanted.model_dump_json()
        if key in self._engines and not self._engines[key].alive:
            self._engines.pop(key).close()
        if key not in self._engines:
            self._engines[key] = VllmEngine(wanted).start()
        found = self._engines[key]
        wait_until(lambda: not found._streams and found.load().kv_used == 0)
        assert not found._streams, "an earlier test has left a request behind"
        return found

    def close(self) -> None:
        """Ends them all."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


AnyEngine = TorchEngine | VllmEngine


def bare(engine: Any) -> Any:
    """The engine itself, without the test plant around it."""
    return engine.engine if isinstance(engine, CorruptingEngine) else engine


def check_blocks(engine: Engine) -> None:
    """The torch engine's own accounting of its cache; vLLM's is its own affair."""
    if isinstance(bare(engine), TorchEngine):
        bare(engine)._pool.check()


@dataclass
class Lab:
    """The tiny model with its certificate, and what is made of it. Everything it starts is closed by
    `close`, but for vLLM engines, which are the pool's."""

    settings: Settings
    model: LoadedModel
    tokenizer: Tokenizer
    certificate: Certificate
    answers: dict[Request, Answer] = field(default_factory=dict)
    parts: list[TorchEngine | Verifier] = field(default_factory=list)
    vllm: VllmPool | None = None
    """Set: `engine` makes vLLM engines."""

    @classmethod
    def make(
        cls,
        directory: Path,
        head_dim: int = CONFIG["head_dim"],
        vllm: VllmPool | None = None,
        dtype: str = "bfloat16",
    ) -> Lab:
        """Writes, loads and certifies the model. vLLM's attention on CPU needs a head_dim of 32 at least."""
        settings = Settings.load(
            {
                "model": {
                    "path": str(write_model(directory, head_dim)),
                    "name": "tiny",
                    "max_model_len": 768,
                    "dtype": dtype,
                },
                "engine": {"threads": 1, "kv_tokens": 8192},
                "verifier": {"certificate_dir": str(directory), "kv_tokens": 8192},
            }
        )
        model, tokenizer = load_for(settings)
        certificate = certificate_for(settings, model, tokenizer)
        return cls(settings, model, tokenizer, certificate, vllm=vllm)

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

    def _engine(self, model: LoadedModel | None, start: bool, changes: dict[str, Any]) -> AnyEngine:
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
        changed = self.settings.session.model_copy(update=session)
        settings = self.settings.model_copy(update={"session": changed, "engine": bare(engine).settings})
        return Generator(engine, self.tokenizer, settings, verifier)

    def oracle(self, request: Request) -> Answer:
        """The verifier decoding alone, one token at a time, with a cold cache: written without the session,
        the driver and OutputText."""
        plain = replace(request, request_id="oracle", deterministic=True)
        if plain not in self.answers:
            self.answers[plain] = self._decode_alone(plain)
        return self.answers[plain]

    def _decode_alone(self, request: Request) -> Answer:
        verifier = self.verifier(1024)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        finish = None
        text = ""
        with torch_threads(self.settings.verifier.threads):
            while finish is None:
                commit = answer_of(verifier, window_of(request, tokens))
                assert isinstance(commit, Commit), commit
                tokens.append(commit.next_token)
                logprobs += commit.logprobs
                finish = _ended(request, tokens)
                # "replace" turns a character that is not complete yet into U+FFFD: wait for its end
                ended = tokens[-1] in request.stop_token_ids and not request.include_stop
                text = self.tokenizer.decode(tokens[:-1] if ended else tokens)
                least = len(Detokenizer(self.tokenizer).push(tokens[: request.sampling.min_tokens]))
                cut = _first_stop(text, request, least)
                if cut is not None:
                    finish, text = FinishReason.STOP, text[:cut]
        shown = tuple(logprobs) if request.num_logprobs is not None else ()
        return Answer(tuple(tokens), shown, text, finish)

    def close(self) -> None:
        """Ends every thread started through the lab since the last call."""
        for part in self.parts:
            part.close()
        self.parts.clear()


def _ended(request: Request, tokens: list[int]) -> FinishReason | None:
    if tokens[-1] in request.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= request.max_tokens else None


def _first_stop(text: str, request: Request, least: int) -> int | None:
    """Where the text ends because of a stop string that is complete only after `least` characters, or
    None."""
    starts = [(at, s) for s in request.stop for at in range(len(text)) if text.startswith(s, at)]
    found = [(at, s) for at, s in starts if not request.sampling.min_tokens or at + len(s) > least]
    if not found:
        return None
    at, stop = min(found)
    return at + (len(stop) if request.include_stop else 0)


def window_of(request: Request, output: Sequence[int], candidates: Sequence[int] = ()) -> Window:
    """The window that asks for what follows `output`, with candidates for it."""
    return Window(
        request.request_id,
        (*request.prompt, *output),
        len(request.prompt),
        tuple(candidates),
        request.sampling,
        request.num_logprobs or 0,
    )


class Wrapped:
    """A verifier whose answers a test changes, loses or delays: it overrides `verify`."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    async def verify(self, windows: Sequence[Window]) -> list[Commit | Failure]:
        """Awaits the verifier's own answers."""
        return await self.verifier.verify(windows)

    def release(self, request_id: str) -> None:
        """Drops what is held for a request."""
        self.verifier.release(request_id)


def verified(verifier: Verifier, *windows: Window) -> list[Commit | Failure]:
    """Waits for the answers of a verifier whose thread runs."""
    return [future.result() for future in [verifier.submit(window) for window in windows]]


def answer_of(verifier: Verifier, window: Window) -> Any:
    """Steps a verifier that has no thread until the window is answered."""
    future = verifier.submit(window)
    while not future.done():
        verifier.step()
    return future.result()


async def collect(generator: Generator, request: Request) -> Answer:
    """One whole output through the driver."""
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    text, finish, stats = "", None, RequestStats()
    async for delta in generator.generate(request):
        tokens += delta.token_ids
        logprobs += delta.logprobs
        text += delta.text
        finish, stats = delta.finish_reason, delta.stats or stats
    return Answer(tuple(tokens), tuple(logprobs), text, finish, stats)


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    """Random token ids, no special ones."""
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, VOCAB, (length,), generator=gen).tolist())


def request_of(
    name: str,
    seed: int,
    length: int = 20,
    max_tokens: int = 48,
    sampling: SamplingParams = SAMPLED,
    **more: Any,
) -> Request:
    """A deterministic request with log-probabilities and two alternatives."""
    base = Request(name, prompt_of(seed, length), max_tokens, sampling, True, num_logprobs=2)
    return replace(base, **more)
