"""A teacher-forced forward over whole sequences in which every operator's arithmetic can be chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.affinity.compiled import CHUNK, Compiled
from benchmarks.affinity_kernels import norm, silu_mul
from llm42.models.weights import LayerWeights, LoadedModel
from llm42.verifier.cuda.runner import attention_shape
from llm42_kernels.attention import TritonAttention
from llm42_kernels.linear import lm_head_cublas_into
from llm42_kernels.rmsnorm import launch_sum_norm, rms_norm_triton
from llm42_kernels.rotary import rotary_triton
from llm42_kernels.silu_mul import silu_mul_triton

PAGE = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """norms: "rounded" (the residual after every add), "chain" (inside a layer it is carried in float32),
    "custom" (vLLM's own kernels, activation and rotary too), "compiled" (the layer as inductor compiles it).
    attention: "triton", "rows" (FlashAttention 3, every row a sequence), "mixed" (prompts as chunks).
    logits: "float32", "activation" (a product with rounded output), "rounded" (float32, then rounded).
    launches: of the norms of "chain", as rmsnorm.carried_launch gives them, for the first norm, the
    one after attention, the one after the MLP and the final one; None: one block, `warps`."""

    norms: str = "rounded"
    table: str = "float64"
    attention: str = "triton"
    logits: str = "float32"
    warps: int = 1
    launches: tuple[tuple[int, int, int], ...] | None = None


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
        self.attention = TritonAttention(
            attention_shape(c.num_heads, c.num_kv_heads, c.head_dim, PAGE), torch.device("cuda")
        )
        self.compiled: Compiled | None = None

    # --- attention

    def attend(self, variant: Variant, q: Tensor) -> Tensor:
        if variant.attention == "triton":
            starts, tables = [0] * len(self.batch.starts), self.tables.tolist()
            return self.attention.run(q, self.k, self.v, starts, self.batch.lengths, tables)
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
    def run(self, variant: Variant, watch: Callable[[int, Tensor, Tensor], None] | None = None) -> Tensor:
        """Final normed hidden states of the scored rows."""
        w = self.model.weights
        table = w.cos_sin if variant.table == "float64" else vllm_table(self.model, w.cos_sin.shape[0])
        layers, positions = w.layers, self.batch.positions
        residual = w.embed[self.batch.tokens]
        graphs = self.graphs(table) if variant.norms == "compiled" else None
        if graphs:
            q, k, v = graphs.first(residual, positions)
        else:
            x = self.norm(variant, (residual,), layers[0].input_norm, False)[0]
        for index, layer in enumerate(layers):
            if graphs is None:
                q, k, v = self.qkv(variant, linear(x, layer.qkv), table)
            self.k[self.slots], self.v[self.slots] = k, v
            if watch:
                watch(index, k, v)
            mixed = self.attend(variant, q).flatten(1)
            last = index + 1 == len(layers)
            if graphs is None:
                following = w.final_norm if last else layers[index + 1].input_norm
                x, residual = self.layer(variant, layer, following, mixed, residual)
            elif last:
                x, residual = graphs.piece(index, mixed, residual, positions)
            else:
                q, k, v, residual = graphs.piece(index, mixed, residual, positions)
        return x[self.batch.scored]

    def graphs(self, table: Tensor) -> Compiled:
        if self.compiled is None:
            self.compiled = Compiled(self.model, table.to(self.model.dtype))
        return self.compiled

    def layer(
        self, variant: Variant, layer: LayerWeights, following: Tensor, mixed: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        o = linear(mixed, layer.o)
        if variant.norms == "chain":
            x, _ = self.norm(variant, (o, residual), layer.post_norm, False)
            y = linear(self.act(variant, linear(x, layer.gate_up)), layer.down)
            return self.norm(variant, (y, o, residual), following, True)
        x, residual = self.norm(variant, (o, residual), layer.post_norm, True)
        y = linear(self.act(variant, linear(x, layer.gate_up)), layer.down)
        return self.norm(variant, (y, residual), following, True)

    def norm(
        self, variant: Variant, terms: tuple[Tensor, ...], weight: Tensor, store: bool
    ) -> tuple[Tensor, Tensor]:
        eps = self.model.config.rms_norm_eps
        if variant.launches:
            out, total = torch.empty_like(terms[0]), torch.empty_like(terms[0]) if store else None
            place = 3 if weight is self.model.weights.final_norm else len(terms) - 1
            launch_sum_norm(terms, weight, out, total, eps, variant.launches[place])
            return out, terms[0] if total is None else total
        if variant.norms == "chain":
            return norm(terms, weight, eps, store=store, warps=variant.warps)
        if variant.norms == "rounded":
            return rms_norm_triton(terms[0], terms[1] if len(terms) > 1 else None, weight, eps)
        if len(terms) == 1:
            out = torch.empty_like(terms[0])
            torch.ops._C.rms_norm(out, terms[0], weight, eps)
            return out, terms[0]
        x, residual = terms[0].clone(), terms[1].clone()
        torch.ops._C.fused_add_rms_norm(x, residual, weight, eps)
        return x, residual

    def act(self, variant: Variant, gate_up: Tensor) -> Tensor:
        if variant.norms == "chain":
            return silu_mul(gate_up)
        if variant.norms != "custom":
            return silu_mul_triton(gate_up)
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        torch.ops._C.silu_and_mul(out, gate_up)
        return out

    def qkv(self, variant: Variant, qkv: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.model.config
        q, k, v = qkv.view(len(qkv), -1, c.head_dim).split(
            (c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1
        )
        if variant.norms != "custom":
            return *rotary_triton(q, k, self.batch.positions, table), v
        q, k = q.flatten(1).contiguous(), k.flatten(1).contiguous()
        torch.ops._C.rotary_embedding(
            self.batch.positions, q, k, c.head_dim, table.to(self.model.dtype), True
        )
        return q.view(len(q), -1, c.head_dim), k.view(len(k), -1, c.head_dim), v

    # --- scores

    @torch.inference_mode()
    def score(self, variant: Variant, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Per scored row: whether the argmax is vLLM's token, and the distance of log-probabilities."""
        head, rows = self.model.weights.lm_head, self.batch.scored
        same, distance = [], []
        for part, at in zip(hidden.split(CHUNK), rows.split(CHUNK), strict=True):
            if variant.logits == "activation":
                logits = F.linear(part, head).float()
            else:
                logits = torch.empty(len(part), len(head), device="cuda")
                lm_head_cublas_into(part, head, logits)
            if variant.logits == "rounded":
                logits = logits.to(head.dtype).float()
            wanted = self.batch.following[at]
            same.append(logits.argmax(-1) == wanted)
            lse = (logits - logits.max(-1, keepdim=True).values).double().exp().sum(-1).log()
            top = logits.max(-1).values.double()
            lp = logits.gather(1, wanted[:, None])[:, 0].double() - top - lse
            distance.append((lp - self.batch.logprobs[at]).abs())
        return torch.cat(same), torch.cat(distance)
