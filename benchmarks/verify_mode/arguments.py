"""Options of h200.py, and results of several runs as one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.direct.model import add_arguments, model_of
from benchmarks.lib.report import validate
from benchmarks.verify_mode.cells import CELLS, stages
from tests.support import write_model

NAME = "h200-verify-mode"


def merge(out: Path, name: str, files: list[Path]) -> Path:
    """All runs side by side. A later one's figure stands, and says which run it is of. A file may be joined
    already."""
    documents = [json.loads(file.read_text()) for file in files]
    runs, figures = list[dict[str, Any]](), dict[str, dict[str, Any]]()
    for document in documents:
        mine = document["raw"].get("runs") or [
            {"date": document["date"], "command": document["command"]} | document["raw"]
        ]
        figures |= {
            key: told | {"run": len(runs) + told.get("run", 1)} for key, told in document["figures"].items()
        }
        runs += mine
    merged = documents[0] | {
        "date": documents[-1]["date"],
        "command": "; ".join(d["command"] for d in documents),
        "figures": figures,
        "raw": {"runs": runs},
    }
    validate(merged)
    path = out / f"{name}.json"
    path.write_text(json.dumps(merged, indent=1) + "\n")
    return path


def parsed(about: str | None) -> argparse.Namespace:
    """The options. about: what --help says."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default=NAME)
    parser.add_argument("--limit-s", type=float, default=560.0, help="of the whole run")
    parser.add_argument("--boot-s", type=float, default=280.0, help="who is not ready then is left out")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="in this order")
    parser.add_argument("--rounds", type=int, default=2, help="of each load; steps have five")
    parser.add_argument("--again", nargs="+", choices=CELLS, help="what runs after the first round; all")
    parser.add_argument("--reuse-s", type=float, default=0.0, help="how long a rate of vLLM's is good")
    parser.add_argument("--settle-s", type=float, default=12.0, help="what auto has to find its plan in")
    parser.add_argument("--affinity", choices=["vllm", "none"], default="vllm", help="of the verifier")
    parser.add_argument("--batched-tokens", type=int, help="in a step of our vLLM, instead of the service's")
    parser.add_argument("--engine", choices=["vllm", "torch"], help="ours; by default vllm, with --cpu torch")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="only joins results")
    add_arguments(parser)
    args = parser.parse_args()
    args.engine = args.engine or ("torch" if args.cpu else "vllm")
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    return args


def model_directory(args: argparse.Namespace) -> str:
    """The model's, whose files all sides read; empty for SmolLM2 alone."""
    if args.cpu and args.engine == "vllm":  # for CPUs, it has no attention for the usual tiny one
        return str(write_model(Path(args.scratch or args.out) / "tiny-64", head_dim=64, positions=4096))
    return "" if stages(args.cells) == ["smollm2"] and not args.cpu else model_of(args)[0]
