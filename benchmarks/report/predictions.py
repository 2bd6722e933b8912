"""What was predicted of each figure: by the result's file, or by a table here where the file lacks it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

ELSEWHERE: dict[str, dict[str, float]] = {
    "cpu-direct-host": {"host_ms_256": 3.2},
    "cpu-soak": {
        "memory_growth_mib": 64, "control_plane_growth_mib": 128, "descriptor_growth": 16, "thread_growth": 8,
        "task_growth": 8, "kv_held_at_end": 0, "requests_held_at_end": 0,
    },
    "h200-direct": {
        "step_64_over_vllm": 0.95, "step_1_over_vllm": 1.0, "step_8_over_vllm": 1.0,
        "step_200_over_vllm": 0.95, "kept_256_256": 1.0, "kept_256_256_sampled": 0.95, "kept_1024_256": 0.9,
        "kept_512_512": 0.98, "kept_256_256_restricted": 0.8, "step_300_over_vllm": 1.0,
        "step_1_32k_over_vllm": 1.1, "step_8_32k_over_vllm": 1.12, "prefill_1k_over_vllm": 1.0,
        "prefill_4k_over_vllm": 0.97, "prefill_1k_alone_over_vllm": 1.1, "prefill_4k_alone_over_vllm": 1.0,
        "ttft_p50_over_vllm": 1.0, "ttft_p99_over_vllm": 1.0, "over_batch_invariant_256_256": 1.4,
        "over_batch_invariant_512_512": 1.22, "over_batch_invariant_1024_256": 1.2,
    },
}  # fmt: skip
"""By result and figure. Each was written down before its run: docs/measurements, and the benchmarks' code."""
IN_A_SENTENCE = re.compile(r"(\w+) (-?\d+(?:\.\d+)?):")


def predictions_of(name: str, document: Mapping[str, Any]) -> dict[str, float]:
    """By figure. A file tells them under `predicted` (a number, or a number and why) anywhere in `raw`, as a
    sentence in `prediction` ("figure 1.5: why"), or as a figure of its own, `predicted_FIGURE`."""
    found = dict(ELSEWHERE.get(name, {}))
    for key, value in _told(document["raw"]):
        if key == "prediction" and isinstance(value, str):
            found |= {figure: float(number) for figure, number in IN_A_SENTENCE.findall(value)}
        elif key == "predicted" and isinstance(value, Mapping):
            for figure, told in value.items():
                first = told[0] if isinstance(told, list) and told else told
                if isinstance(first, int | float):
                    found[figure] = float(first)
    for figure, fields in document["figures"].items():
        if figure.startswith("predicted_"):
            found[figure.removeprefix("predicted_")] = float(fields["value"])
    return found


def _told(raw: Any) -> Iterator[tuple[str, Any]]:
    """Every key that begins with `predict`, with its value, however deep."""
    if isinstance(raw, Mapping):
        for key, value in raw.items():
            if str(key).startswith("predict"):
                yield str(key), value
            else:
                yield from _told(value)
    elif isinstance(raw, list):
        for value in raw:
            yield from _told(value)
