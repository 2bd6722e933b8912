"""How long a verifier of an 8B's shape takes to certify a GPU and to record its graphs, and what those take.

    python -m benchmarks.direct.start --out DIR         one H200; needs CUBLASLT_WORKSPACE_SIZE=0
                                                        CUBLAS_WORKSPACE_CONFIG=:0:0
    python -m benchmarks.direct.start --out DIR --cpu   a tiny model on a CPU: tries the script

certify_s: a fresh certificate at the device's usual step sizes, kernels compiled anew if the machine is bare;
`parts` says how long each operator took. graphs_s, graphs_gib: a runner with graphs beside one without.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from benchmarks.lib.random_model import LLAMA_8B, random_model
from benchmarks.lib.report import Figure, arguments, report
from llm42.checkpoint.load import load_for
from llm42.config import Settings
from llm42.models.weights import LoadedModel
from llm42.verifier.build import certify
from llm42.verifier.certify.certificate import Certificate
from tests.support import write_model

TARGET_S = 60.0
KV_BLOCKS = 512


def certified(settings: Settings, model: LoadedModel) -> tuple[Certificate, dict[str, float]]:
    """The certificate, and seconds by what was being certified."""
    marks: list[tuple[str, float]] = []
    found = certify(settings, model, (), lambda doing: marks.append((doing, time.monotonic())))
    marks.append(("", time.monotonic()))
    parts: dict[str, float] = {}
    for (doing, began), (_, ended) in pairwise(marks):
        parts[doing] = round(parts.get(doing, 0.0) + ended - began, 2)
    return found, parts


def graphs(settings: Settings, model: LoadedModel, certificate: Certificate) -> dict[str, float]:
    """What a runner's graphs cost: seconds, and GiB of the device."""
    from llm42.verifier.cuda.runner import cuda_runner

    v, taken = settings.verifier, dict[bool, tuple[float, int]]()
    for with_graphs in (False, True):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, began = torch.cuda.mem_get_info()[0], time.monotonic()
        runner = cuda_runner(
            model, certificate.providers, v, certificate.buckets, KV_BLOCKS, 32768, graphs=with_graphs
        )
        taken[with_graphs] = time.monotonic() - began, free - torch.cuda.mem_get_info()[0]
        count = len(runner._bodies) + len(runner._heads)
        del runner
    (plain_s, plain), (whole_s, whole) = taken[False], taken[True]
    return {"graphs_s": whole_s - plain_s, "graphs_gib": (whole - plain) / 2**30, "graphs": count}


def main() -> None:
    """Writes DIR/h200-direct-start.json, or cpu-direct-start.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    path = str(write_model(Path(mkdtemp()))) if args.cpu else Settings().model.path
    device = "cpu" if args.cpu else "cuda"
    length = 512 if args.cpu else 32768
    settings = Settings.load({"model": {"path": path, "device": device, "max_model_len": length}})
    model = load_for(settings)[0] if args.cpu else random_model(LLAMA_8B, max_len=32768)
    certificate, parts = certified(settings, model)
    raw: dict[str, Any] = {"arguments": arguments(args), "certificate": certificate.to_json(), "parts": parts}
    figures = {
        "certify_s": Figure(certificate.seconds, "s", TARGET_S),
        "step_sizes": Figure(len(certificate.buckets), "sizes", len(settings.verifier.buckets), "higher"),
    }
    print(certificate.seconds, "s", certificate.buckets, parts, flush=True)
    name = f"{'cpu' if args.cpu else 'h200'}-direct-start"
    report(name, figures, raw, args.out)
    if not args.cpu:
        raw["graphs"] = costs = graphs(settings, model, certificate)
        figures["graphs_s"] = Figure(round(costs["graphs_s"], 2), "s")
        figures["graphs_gib"] = Figure(round(costs["graphs_gib"], 3), "GiB")
        print(costs, flush=True)
        report(name, figures, raw, args.out)


if __name__ == "__main__":
    main()
