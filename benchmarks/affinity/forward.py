"""A teacher-forced forward over whole sequences with vLLM's arithmetic, in which norms, attention and logits
can be chosen; and its score against what vLLM generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.affinity.compiled import CHUNK, Compiled
from llm42.models.weights import LayerWeights, LoadedModel
from llm42_kernels.linear_cuda import lm_head_cublas_into
from llm42_kernels.rmsnorm import launch_sum_norm
from llm42_kernels.rotary import rotary_triton
from llm42_kernels.silu_mul import silu_mul_library_exp

PAGE = 16


Launch = tuple[int, int, int]
"""Of a norm, as llm42_kernels.rmsnorm.carried_launch gives it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """launches: of the first norm, the one after attention, the one after the MLP and the final one, with the
    residual carried in float32 inside a layer; None: the layer as inductor compiles it.
    attention: "rows" (FlashAttention 3, every row a sequence) or "mixed" (prompts as chunks).
    logits: "activation" (a product with rounded output) or "rounded" (float32, then rounded)."""

    launches: tuple[Launch, Launch, Launch, Launch] | None
    attention: str = "rows"
    logits: str = "activation"


@dataclass(slots=True)
class Batch:
    """Sequences one after another; `prompts` are lengths; `following` is the token after each row."""

    tokens: Tensor
    positions: Tensor
    starts: list[int]
    lengths: list[int]
    prompts: list[int]
    following: Tensor
    logprobs: Tensor
    scored: Tensor

    @classmethod
    def make(cls, prompts: list[list[int]], outputs: list[list[int]], logprobs: list[list[float]]) -> Batch:
        """The rows of prompt + output but for the last token."""
        tokens, positions, following, values, scored, starts, lengths = [], [], [], [], [], [], []
        for prompt, output, lps in zip(prompts, outputs, logprobs, strict=True):
            whole, n = [*prompt, *output], len(prompt)
            starts.append(len(tokens))
            lengths.append(len(whole) - 1)
            tokens += whole[:-1]
            positions += range(len(whole) - 1)
            following += whole[1:]
            values += [0.0] * (n - 1) + lps
            scored += range(starts[-1] + n - 1, starts[-1] + len(whole) - 1)
        ints = [torch.tensor(x, device="cuda") for x in (tokens, positions, following, scored)]
        return cls(
            ints[0], ints[1], starts, lengths, [len(p) for p in prompts], ints[2],
            torch.tensor(values, device="cuda", dtype=torch.float64), ints[3],
        )  # fmt: skip


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Products of at most CHUNK rows: the row counts for which equality was measured."""
    return torch.cat([F.linear(part, weight) for part in x.split(CHUNK)])


def vllm_table(model: LoadedModel, positions: int) -> Tensor:
    """cos and sin as vLLM makes them: float32 on the device, then rounded. [P, D] float32."""
    dim, theta = model.config.head_dim, model.config.rope.theta
    with torch.device("cuda"):
        exponent = torch.arange(0, dim, 2, dtype=torch.float) / dim
        angles = torch.einsum("i,j -> ij", torch.arange(positions, dtype=torch.float), 1.0 / theta**exponent)
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(model.dtype).float()


class Forward:
    """One model and one batch; `run` takes a variant."""

    def __init__(self, model: LoadedModel, batch: Batch) -> None:
        self.model, self.batch = model, batch
        c, count = model.config, len(batch.starts)
        per = -(-max(batch.lengths) // PAGE)
        self.tables = torch.arange(count * per, dtype=torch.int32, device="cuda").view(count, per)
        shape = (count * per * PAGE, c.num_kv_heads, c.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=model.dtype, device="cuda") for _ in range(2))
        owner = torch.repeat_interleave(
            torch.arange(count, device="cuda"), torch.tensor(batch.lengths, device="cuda")
        )
        self.slots = owner * per * PAGE + batch.positions
        self.owner = owner
        self.prompt_row = batch.positions < torch.tensor(batch.prompts, device="cuda")[owner]
        self.table = vllm_table(model, model.weights.cos_sin.shape[0])
        self.compiled = Compiled(model, self.table.to(model.dtype))

    # --- attention

    def attend(self, variant: Variant, q: Tensor) -> Tensor:
        out = torch.empty_like(q)
        rows = torch.ones_like(self.prompt_row)
        if variant.attention == "mixed":
            rows = ~self.prompt_row
            out[self.prompt_row] = self.prompt_chunks(q[self.prompt_row])
        used = (self.batch.positions[rows] + 1).int()
        each = torch.arange(len(used) + 1, dtype=torch.int32, device="cuda")
        out[rows] = self.flash(q[rows], each, 1, used, self.tables[self.owner[rows]])
        return out

    def prompt_chunks(self, q: Tensor) -> Tensor:
        lengths = torch.tensor(self.batch.prompts, dtype=torch.int32, device="cuda")
        starts = F.pad(lengths.cumsum(0), (1, 0)).int()
        return self.flash(q, starts, max(self.batch.prompts), lengths, self.tables)

    def flash(self, q: Tensor, starts: Tensor, longest: int, used: Tensor, tables: Tensor) -> Tensor:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        paged = [x.view(-1, PAGE, *x.shape[1:]) for x in (self.k, self.v)]
        return flash_attn_varlen_func(
            q.contiguous(), *paged, max_seqlen_q=longest, cu_seqlens_q=starts, max_seqlen_k=2048,
            seqused_k=used, causal=True, block_table=tables.contiguous(), fa_version=3, num_splits=1,
        )  # fmt: skip

    # --- layers

    @torch.inference_mode()
    def run(self, variant: Variant, watch: Watch) -> Tensor:
        """Final normed hidden states of the scored rows."""
        w, positions, launches = self.model.weights, self.batch.positions, variant.launches
        residual = w.embed[self.batch.tokens]
        if launches:
            x, _ = self.norm(launches[0], (residual,), w.layers[0].input_norm, False)
        else:
            q, k, v = self.compiled.first(residual, positions)
        for index, layer in enumerate(w.layers):
            if launches:
                q, k, v = self.qkv(linear(x, layer.qkv))
            self.k[self.slots], self.v[self.slots] = k, v
            watch(index, k, v)
            mixed = self.attend(variant, q).flatten(1)
            last = index + 1 == len(w.layers)
            if launches:
                following = w.final_norm if last else w.layers[index + 1].input_norm
                x, residual = self.layer(launches, last, layer, following, mixed, residual)
            elif last:
                x, residual = self.compiled.piece(index, mixed, residual, positions)
            else:
                q, k, v, residual = self.compiled.piece(index, mixed, residual, positions)
        return x[self.batch.scored]

    def layer(
        self, launches: tuple[Launch, ...], last: bool, layer: LayerWeights, following: Tensor, mixed: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o = linear(mixed, layer.o)
        x, _ = self.norm(launches[1], (o, residual), layer.post_norm, False)
        y = linear(silu_mul_library_exp(linear(x, layer.gate_up)), layer.down)
        return self.norm(launches[3 if last else 2], (y, o, residual), following, True)

    def norm(
        self, launch: Launch, terms: tuple[Tensor, ...], weight: Tensor, store: bool
    ) -> tuple[Tensor, Tensor]:
        out, total = torch.empty_like(terms[0]), torch.empty_like(terms[0]) if store else None
        launch_sum_norm(terms, weight, out, total, self.model.config.rms_norm_eps, launch)
        return out, terms[0] if total is None else total

    def qkv(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.model.config
        q, k, v = qkv.view(len(qkv), -1, c.head_dim).split(
            (c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1
        )
        return *rotary_triton(q, k, self.batch.positions, self.table), v

    # --- scores

    @torch.inference_mode()
    def distances(self, variant: Variant, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Per scored row: whether the argmax is vLLM's token, and the distance of log-probabilities."""
        head, rows = self.model.weights.lm_head, self.batch.scored
        same, distance = [], []
        for part, at in zip(hidden.split(CHUNK), rows.split(CHUNK), strict=True):
            if variant.logits == "activation":
                logits = F.linear(part, head).float()
            else:
                logits = torch.empty(len(part), len(head), device="cuda")
                lm_head_cublas_into(part, head, logits)
                logits = logits.to(head.dtype).float()
            wanted = self.batch.following[at]
            same.append(logits.argmax(-1) == wanted)
            lse = (logits - logits.max(-1, keepdim=True).values).double().exp().sum(-1).log()
            top = logits.max(-1).values.double()
            lp = logits.gather(1, wanted[:, None])[:, 0].double() - top - lse
            distance.append((lp - self.batch.logprobs[at]).abs())
        return torch.cat(same), torch.cat(distance)


class Watch:
    """Share of equal elements of keys and values per layer, prompt and output apart."""

    def __init__(self, batch: Batch, kept: dict[int, Tensor]) -> None:
        self.batch, self.kept, self.found = batch, kept, dict[int, list[list[float]]]()

    def __call__(self, layer: int, k: Tensor, v: Tensor) -> None:
        dim = k.shape[-1]
        for index, cache in self.kept.items():
            start, length, prompt = (
                x[index] for x in (self.batch.starts, self.batch.lengths, self.batch.prompts)
            )
            length = min(length, cache.shape[1])
            want = cache[layer][:length].cuda()
            shares = []
            for ours, theirs in ((k, want[..., :dim]), (v, want[..., dim:])):
                same = ours[start : start + length].view(torch.int16) == theirs.contiguous().view(torch.int16)
                rows = same.flatten(1).float().mean(1)
                shares += [round(float(rows[:prompt].mean()), 5), round(float(rows[prompt:].mean()), 5)]
            self.found.setdefault(index, []).append(shares)


def score(forward: Forward, variant: Variant, kept: dict[int, Tensor]) -> dict[str, Any]:
    """Flips and equal shares of one variant; per layer the least share of equal keys and values of the kept
    sequences, prompts and outputs."""
    watch = Watch(forward.batch, kept)
    same, distance = forward.distances(variant, forward.run(variant, watch))
    return {
        "flips_per_1000": float((~same).double().mean() * 1000),
        "equal_1e-5": float((distance <= 1e-5).double().mean()),
        "mean_distance": float(distance.mean()),
        "equal_kv": [
            min(min(layer) for layer in layers) for layers in zip(*watch.found.values(), strict=True)
        ],
    }
