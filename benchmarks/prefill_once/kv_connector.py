"""A vLLM KV connector that reads a prompt's keys and values from the verifier's cache: a proof, not a part of
the service (docs/measurements/prefill-once.md).

A request takes part when `SamplingParams.extra_args["kv_transfer_params"]` is a handle:
`{"pool": description of a KV pool (kv_pool.describe), "blocks": [ids], "tokens": n}`: the blocks hold the
KV of the request's first n tokens. All other requests are left alone. The KV is copied into vLLM's own blocks
in the step that schedules the request; the copy runs on the stream of the forward, before it.

Only vLLM's processes import this module, through `kv_transfer_config` (kv_handoff_sides.transfer_config).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from benchmarks.prefill_once.kv_pool import open_pool, slots_of

NOTHING = 0, False


@dataclass(slots=True)
class Load:
    """Positions [begin, end) of a request come from `source` blocks of a pool and go to `target` blocks."""

    request_id: str
    pool: dict[str, Any]
    source: list[int]
    target: list[int]
    begin: int
    end: int


@dataclass
class Loads(KVConnectorMetadata):
    """What one step has to load."""

    loads: list[Load] = field(default_factory=list)


class VerifierKV(KVConnectorBase_V1, SupportsHMA):
    """Both halves: vLLM makes one instance beside its scheduler and one in every worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        if parallel.world_size != 1 or len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("VerifierKV needs one worker and one kind of attention in all layers")
        self._layers = vllm_config.compilation_config.static_forward_context
        self._block_size = vllm_config.cache_config.block_size
        trace = self._kv_transfer_config.get_from_extra_config("trace", None)
        self._trace = Path(trace) if trace else None
        self._pending: dict[str, Load] = {}
        self._names: list[str] = []
        self._pools: dict[str, tuple[Tensor, Tensor]] = {}
        self._failed: set[int] = set()

    # ---- beside the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """At least the last token stays to be computed: vLLM needs its logits."""
        handle = request.kv_transfer_params
        if not handle or request.num_preemptions:  # the lease ended with the first token
            return NOTHING
        usable = min(handle["tokens"], request.num_tokens - 1)
        return max(0, usable - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes where the load goes; what is cached locally already is not loaded."""
        if num_external_tokens == 0:
            return
        handle = request.kv_transfer_params
        end = min(handle["tokens"], request.num_tokens - 1)
        self._pending[request.request_id] = Load(
            request.request_id, handle["pool"], handle["blocks"], blocks.get_block_ids()[0],
            end - num_external_tokens, end,
        )  # fmt: skip

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """The loads of the step that was just planned."""
        loads, self._pending = list(self._pending.values()), {}
        self._note(
            scheduled=dict(scheduler_output.num_scheduled_tokens),
            loaded={load.request_id: load.end - load.begin for load in loads},
            preempted=len(scheduler_output.preempted_req_ids or ()),
        )
        return Loads(loads)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's own blocks may be freed at once: nothing is sent from them."""
        return False, None

    # ---- in the worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Keeps the layers' names, in the order of the layers."""
        self._names = sorted(kv_caches, key=lambda name: next(int(p) for p in name.split(".") if p.isdigit()))
        first = kv_caches[self._names[0]]
        impl = self._layers[self._names[0]].impl
        self._note(layout=[list(first.shape), list(first.stride())], attention=type(impl).__name__)

    @torch.inference_mode()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Queues all copies of the step; a pool that cannot be read makes vLLM compute the tokens itself."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for load in metadata.loads:
            began = time.perf_counter()
            try:
                self._copy(load)
            except (OSError, RuntimeError, ValueError) as error:
                first = load.begin // self._block_size
                self._failed.update(load.target[first : -(-load.end // self._block_size)])
                self._note(failed=load.request_id, error=str(error))
                continue
            queued = time.perf_counter() - began
            if self._trace is not None and torch.cuda.is_available():
                torch.cuda.synchronize()
            done = time.perf_counter() - began
            self._note(request=load.request_id, tokens=load.end - load.begin, queued_s=queued, done_s=done)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: the copies are in the forward's stream."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not filled since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def _copy(self, load: Load) -> None:
        keys, values = self._pool(load.pool)
        source = slots_of(load.source, load.begin, load.end, keys.shape[2])
        target = slots_of(load.target, load.begin, load.end, self._block_size)
        device = self._layers[self._names[0]].kv_cache.device
        source, target = source.to(keys.device, non_blocking=True), target.to(device, non_blocking=True)
        for index, name in enumerate(self._names):
            layer = self._layers[name]
            k, v = (pool[index].flatten(0, 1)[source].to(device) for pool in (keys, values))
            # the backend's own write: whatever layout, packing or quantisation it keeps its cache in
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, target)

    def _pool(self, description: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        name = description["name"]
        if name not in self._pools:
            keys, values = open_pool(description)
            layer = self._layers[self._names[0]]
            found, wanted = (
                (keys.shape[0], *keys.shape[3:]),
                (len(self._names), layer.num_kv_heads, layer.head_size),
            )
            if found != wanted:
                raise ValueError(f"pool {name} has (layers, KV heads, head size) {found}, vLLM {wanted}")
            self._pools[name] = keys, values
        return self._pools[name]

    def _note(self, **facts: Any) -> None:
        if self._trace is not None:
            with self._trace.open("a") as stream:
                stream.write(json.dumps(facts) + "\n")
