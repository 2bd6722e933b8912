"""A verifier's KV pool as another process on the same machine sees it: mapped once, read in place.

CPU: both tensors lie in files that both processes map (memory, below /dev/shm). CUDA: IPC handles of the two
allocations. A description is plain JSON, so it may travel inside a request.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from llm42.cache import KVCache

SHARED_MEMORY = Path("/dev/shm")


def describe(kv: KVCache) -> dict[str, Any]:
    """Makes `kv` readable by other processes; call it before the first write (on CPU the tensors move).

    The blocks that a handle names must neither change nor be freed before the reader is done: nothing here
    guards that.
    """
    name = f"llm42-kv-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    common = {"name": name, "shape": list(kv.keys.shape), "dtype": str(kv.keys.dtype).removeprefix("torch.")}
    if kv.keys.is_cuda:
        return common | {"keys": _export(kv.keys), "values": _export(kv.values)}
    files = {part: str(SHARED_MEMORY / f"{name}-{part}") for part in ("keys", "values")}
    kv.keys, kv.values = (_mapped(files[part], kv.keys.shape, kv.keys.dtype) for part in ("keys", "values"))
    return common | files


def remove(description: Mapping[str, Any]) -> None:
    """Unlinks the files of a CPU pool; mappings stay valid."""
    for part in ("keys", "values"):
        if isinstance(description[part], str):
            Path(description[part]).unlink(missing_ok=True)


def open_pool(description: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Keys and values, each [layers, blocks, block_size, kv_heads, head_dim], without a copy. Raises OSError
    or RuntimeError when the pool is gone."""
    dtype, shape = getattr(torch, description["dtype"]), tuple(description["shape"])
    keys, values = description["keys"], description["values"]
    if isinstance(keys, str):
        for file in (keys, values):
            os.stat(file)  # from_file would make a missing one
        return _mapped(keys, shape, dtype), _mapped(values, shape, dtype)
    return _import(keys, shape, dtype), _import(values, shape, dtype)


def slots_of(blocks: list[int], begin: int, end: int, block_size: int) -> Tensor:
    """Cache slots (block * block_size + offset) of positions [begin, end), int64."""
    positions = torch.arange(begin, end)
    table = torch.tensor(blocks, dtype=torch.int64)
    return table[positions // block_size] * block_size + positions % block_size


def _mapped(file: str, shape: Any, dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.from_file(file, shared=True, size=count, dtype=dtype).view(tuple(shape))


def _export(tensor: Tensor) -> dict[str, Any]:
    _, arguments = reduce_tensor(tensor)
    stride, offset, device = arguments[2], arguments[3], arguments[6]
    handle, size, begin, _, counter, counter_at, event, sync = arguments[7:]
    return {
        "stride": list(stride), "offset": offset, "device": device, "uuid": _uuid(device),
        "handle": handle.hex(), "size": size, "begin": begin,
        "counter": counter.hex(), "counter_at": counter_at, "event": event.hex(), "sync": sync,
    }  # fmt: skip


def _import(d: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    uuids = [_uuid(i) for i in range(torch.cuda.device_count())]
    if d["uuid"] not in uuids:
        raise RuntimeError(f"the pool is on GPU {d['uuid']}, this process sees {uuids}")
    return rebuild_cuda_tensor(
        Tensor, shape, tuple(d["stride"]), d["offset"], torch.storage.TypedStorage, dtype,
        uuids.index(d["uuid"]), bytes.fromhex(d["handle"]), d["size"], d["begin"], False,
        bytes.fromhex(d["counter"]), d["counter_at"], bytes.fromhex(d["event"]), d["sync"],
    )  # fmt: skip


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
