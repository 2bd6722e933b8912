"""Timing on a CUDA device: work captured into a graph, replayed, timed with events; medians."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def graph_ms(work: Callable[[], object], repeats: int = 20, warm: int = 3) -> float:
    """Median milliseconds of one replay of `work` captured as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        for _ in range(warm):
            graph.replay()
        return _median(graph.replay, repeats)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` as a CUDA graph, run once before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
    stream.synchronize()
    return graph


def _median(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
