"""Which fast-path replica a request goes to: one that has probably cached its prompt's beginning, unless it
is busy.

A request router on Serve's public extension point (`ray.serve.request_router`); Serve still asks the chosen
replicas for their queue lengths and takes the shortest within a rank.
"""

from __future__ import annotations

import random

import ray
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from llm42.protocol import Request
from llm42_serve.placement import PREFIX_TOKENS, is_busy, preferred

NEAR = "near_status"
"""The method of which a replica of the caller's machine is asked, where it has one."""


def ranks(prefix: tuple[int, ...], held: dict[str, int]) -> list[list[str]]:
    """Names in order of preference, from the requests that each is thought to hold."""
    names = list(held)
    first = preferred(prefix, names)
    others = [name for name in names if name != first]
    if not others:
        return [[first]]
    return [others, [first]] if is_busy(first, held) else [[first], others]


class PrefixRouter(FIFOMixin, RequestRouter):
    """Ranks replicas by prefix preference and load; calls that are no requests go to any."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's hook: ranked lists of replicas to try."""
        if not candidate_replicas:
            return []
        by_name = {r.replica_id.unique_id: r for r in candidate_replicas}
        if pending_request is not None and pending_request.metadata.call_method == NEAR:
            here = ray.get_runtime_context().get_node_id()
            near = [r for r in candidate_replicas if r.node_id == here]
            return [[random.choice(near or candidate_replicas)]]
        request = pending_request.args[0] if pending_request and pending_request.args else None
        if pending_request is None or not isinstance(request, Request):
            # a question about a replica's state: all of them in turn, not the idlest
            return [[random.choice(candidate_replicas)]]
        if len(pending_request.args) > 2 and pending_request.args[2]:
            return [candidate_replicas]  # refused or lost once: wherever the queue is shortest
        lengths = self.replica_queue_len_cache
        held = {name: lengths.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        return [[by_name[n] for n in rank] for rank in ranks(request.prompt[:PREFIX_TOKENS], held) if rank]
