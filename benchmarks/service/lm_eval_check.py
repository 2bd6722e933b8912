"""lm-eval's `local-completions` against a running service at concurrency 1 and 64: equal logs, byte for byte.

    llm42 serve &                                   # another shell
    python -m benchmarks.service.lm_eval_check --lm-eval PATH/TO/lm_eval --url http://127.0.0.1:8000

The tasks are written here, so nothing is downloaded: one of log-likelihoods (multiple choice), one of
generated text. Both ask deterministically, through the header X-LLM42-Deterministic. With --control they do
not; the logs may then differ, and the exit status says whether they did; the server may then be another
system's. docs/recipes/lm-eval.md has the commands. lm-eval (with its extra `api`, and
transformers) may live in an environment of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Figure, report
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer

ANIMALS = ("cat", "dog", "horse", "owl", "whale", "bee", "wolf", "crab")
FLAG = {"X-LLM42-Deterministic": "true"}
PLACES = ("sea", "forest", "desert", "river", "city", "barn", "sky", "hill")
CHOICE_TASK = """
task: llm42_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT_TASK = """
task: llm42_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 48, do_sample: true, temperature: 0.8}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(directory: Path, questions: int) -> None:
    """The same questions every time."""
    rng, rows = random.Random(1), []
    for _ in range(questions):
        animal, place, wrong = rng.choice(ANIMALS), *rng.sample(PLACES, 2)
        text = f"The {animal} has lived near the {place} since {rng.randrange(1900, 2000)}. Where is that?"
        rows.append({"question": text, "choices": [f" In the {wrong}.", f" Near the {place}."], "answer": 1})
    data = directory / "questions.json"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    (directory / "choice.yaml").write_text(CHOICE_TASK.format(data=data))
    (directory / "text.yaml").write_text(TEXT_TASK.format(data=data))


def write_tokenizer(path: str, directory: Path) -> Path:
    """The model's tokenizer as a Hugging Face directory, which is what lm-eval reads."""
    tokenizer, place = Tokenizer.load(path), directory / "tokenizer"
    place.mkdir()
    tokenizer.backend.save(str(place / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


def require_flag(args: argparse.Namespace) -> None:
    """The header is what makes lm-eval's requests deterministic: without it nothing is shown."""
    body = {"model": args.model, "prompt": "x", "max_tokens": 1}
    headers = {"Content-Type": "application/json", **FLAG}
    asked = urllib.request.Request(f"{args.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=120) as reply:
        if not json.load(reply)["llm42"]["deterministic"]:
            raise SystemExit("the server does not heed X-LLM42-Deterministic")


def run(args: argparse.Namespace, directory: Path, concurrency: int) -> tuple[dict[str, bytes], float]:
    """lm-eval's per-sample logs by task, without what is a time or a path; and the seconds it took."""
    out = directory / f"out{concurrency}"
    model = {
        "model": args.model, "base_url": f"{args.url}/v1/completions", "num_concurrent": concurrency,
        "tokenizer_backend": "huggingface", "tokenizer": str(directory / "tokenizer"),
        "max_retries": 1, "seed": 7, "max_length": 1024,
    }  # fmt: skip
    if not args.control:
        model["header"] = FLAG
    command = [
        args.lm_eval, "run", "--model", "local-completions", "--model_args", json.dumps(model),
        "--include_path", str(directory), "--tasks", "llm42_choice,llm42_text",
        "--output_path", str(out), "--log_samples", "--batch_size", "1",
    ]  # fmt: skip
    environment = os.environ | {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    began = time.monotonic()
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    return {f.name.split("_2")[0]: f.read_bytes() for f in sorted(out.rglob("samples_*.jsonl"))}, (
        time.monotonic() - began
    )


def differing(alone: dict[str, bytes], together: dict[str, bytes]) -> dict[str, int]:
    """By task, how many lines of the logs (one is one question) differ."""
    pairs = {task: (text.splitlines(), together.get(task, b"").splitlines()) for task, text in alone.items()}
    return {task: sum(x != y for x, y in zip_longest(a, b)) for task, (a, b) in pairs.items()}


def main() -> int:
    """Prints one JSON object; 0 when the logs are equal (with --control: when they differ)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lm-eval", default="lm_eval")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--model-path", default=Settings().model.path, help="where its tokenizer is")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=64, help="of the second run; the first has 1")
    parser.add_argument("--system", default="llm42", help="what was run, in words, for the result")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--result", help="also write benchmarks/results/NAME.json")
    args = parser.parse_args()
    if not args.control:
        require_flag(args)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tasks(directory, args.questions)
        write_tokenizer(args.model_path, directory)
        logs, raw = {}, dict[str, Any](questions=args.questions, deterministic=not args.control)
        for concurrency in (1, args.concurrency):
            logs[concurrency], seconds = run(args, directory, concurrency)
            raw[f"seconds_{concurrency}"] = round(seconds, 1)
            raw[f"sha256_{concurrency}"] = {
                task: hashlib.sha256(text).hexdigest()[:16] for task, text in logs[concurrency].items()
            }
        raw["bytes"] = {task: len(text) for task, text in logs[1].items()}
    equal = sum(logs[1][task] == logs[args.concurrency].get(task) for task in logs[1])
    raw["equal"] = len(logs[1]) == 2 == equal
    raw |= {"system": args.system, "differing_lines": differing(logs[1], logs[args.concurrency])}
    print(json.dumps(raw))
    if args.result:
        target = None if args.control else 2.0
        report(args.result, {"equal_logs": Figure(float(equal), "of 2 tasks", target, "higher")}, raw)
    return int(raw["equal"] == args.control)


if __name__ == "__main__":
    sys.exit(main())
