"""lm-eval's `local-completions` against a running service, one request at a time and many: equal logs.

    llm42 serve &                                   # another shell
    python -m benchmarks.service.lm_eval_check --lm-eval PATH/TO/lm_eval --url http://127.0.0.1:8000

Three runs of the same two tasks: one request at a time, 64 at a time, and bodies of 64 prompts. lm-eval's
logs of single questions are compared, byte for byte. The tasks are written here, so nothing is downloaded:
one of log-likelihoods (multiple choice), one of texts that are sampled with a seed. Both ask
deterministically, through the header X-LLM42-Deterministic. With --control they do not; the logs may then
differ, and the server may be another system's. docs/recipes/lm-eval.md has the commands. lm-eval (with its
extra `api`, and transformers) may live in an environment of its own.

The exit status: 0 when the logs are equal (with --control: when they differ), 1 when not, 2 when nothing was
shown: most texts are empty, or questions are missing in a log. Such logs are equal whatever the server does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.report import Figure, report
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer

CHOICE, TEXT = "llm42_choice", "llm42_text"
LOGS = 4
"""Two tasks, of two runs that are compared with the first."""
ANIMALS = ("cat", "dog", "horse", "owl", "whale", "bee", "wolf", "crab")
FLAG = {"X-LLM42-Deterministic": "true"}
PLACES = ("sea", "forest", "desert", "river", "city", "barn", "sky", "hill")
CHOICE_TASK = """
task: {name}
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
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{story}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 48, do_sample: true, temperature: 0.8}}
metric_list: [{{metric: exact_match}}]
"""


class Refused(Exception):
    """Nothing was shown; the text says why."""


class Way(NamedTuple):
    """How lm-eval asks."""

    batch: int
    """Prompts of a request's body."""
    at_once: int
    """Requests."""

    @property
    def name(self) -> str:
        """For results."""
        return f"batch {self.batch}, {self.at_once} at once"


def write_tasks(directory: Path, questions: int) -> None:
    """The same questions every time."""
    rng, rows = random.Random(1), []
    for _ in range(questions):
        animal, place, wrong = rng.choice(ANIMALS), *rng.sample(PLACES, 2)
        known = f"The {animal} has lived near the {place} since {rng.randrange(1900, 2000)}."
        row = {"question": f"{known} Where is that?", "story": f"{known} One morning it"}
        rows.append(row | {"choices": [f" In the {wrong}.", f" Near the {place}."], "answer": 1})
    data = directory / "questions.json"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    (directory / "choice.yaml").write_text(CHOICE_TASK.format(name=CHOICE, data=data))
    (directory / "text.yaml").write_text(TEXT_TASK.format(name=TEXT, data=data))


def write_tokenizer(path: str, directory: Path) -> Path:
    """The model's tokenizer as a Hugging Face directory, which is what lm-eval reads."""
    tokenizer, place = Tokenizer.load(path), directory / "tokenizer"
    place.mkdir()
    tokenizer.backend.save(str(place / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


def require_flag(args: argparse.Namespace) -> str:
    """The header is what makes lm-eval's requests deterministic. Returns the fingerprint."""
    body = {"model": args.model, "prompt": "x", "max_tokens": 1}
    headers = {"Content-Type": "application/json", **FLAG}
    asked = urllib.request.Request(f"{args.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=120) as reply:
        answer = json.load(reply)
    if not answer["llm42"]["deterministic"]:
        raise SystemExit("the server does not heed X-LLM42-Deterministic")
    return str(answer["system_fingerprint"])


def run(args: argparse.Namespace, directory: Path, way: Way) -> tuple[dict[str, bytes], float]:
    """lm-eval's logs of single questions by task, and the seconds it took."""
    out = directory / f"out-{way.batch}-{way.at_once}"
    model = {
        "model": args.model, "base_url": f"{args.url}/v1/completions", "num_concurrent": way.at_once,
        "tokenizer_backend": "huggingface", "tokenizer": str(directory / "tokenizer"),
        "max_retries": 1, "seed": 7, "max_length": 1024, "timeout": 1800,
    }  # fmt: skip
    if not args.control:
        model["header"] = FLAG
    command = [
        args.lm_eval, "run", "--model", "local-completions", "--model_args", json.dumps(model),
        "--include_path", str(directory), "--tasks", f"{CHOICE},{TEXT}",
        "--output_path", str(out), "--log_samples", "--batch_size", str(way.batch),
    ]  # fmt: skip
    environment = os.environ | {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    began = time.monotonic()
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    logs = {
        f.name.removeprefix("samples_").split("_2")[0]: f.read_bytes()
        for f in sorted(out.rglob("samples_*.jsonl"))
    }
    return logs, time.monotonic() - began


def texts_of(log: bytes) -> list[str]:
    """What was generated, by the log of a task of texts."""
    return [str(json.loads(line)["resps"][0][0]) for line in log.splitlines()]


def require_answers(logs: dict[str, bytes], questions: int) -> None:
    """Raises Refused where equal logs would show nothing."""
    for task in (CHOICE, TEXT):
        if (logged := len(logs.get(task, b"").splitlines())) != questions:
            raise Refused(f"{task}: lm-eval has logged {logged} of {questions} questions")
    empty = sum(not text.strip() for text in texts_of(logs[TEXT]))
    if 2 * empty > questions:
        raise Refused(
            f"{TEXT}: {empty} of {questions} texts are empty. Empty texts are equal whatever the server "
            "does, so this run shows nothing: ask for something that the model goes on with"
        )


def differing(alone: dict[str, bytes], together: dict[str, bytes]) -> dict[str, int]:
    """By task, how many lines of the logs (one is one question) differ."""
    pairs = {task: (text.splitlines(), together.get(task, b"").splitlines()) for task, text in alone.items()}
    return {task: sum(x != y for x, y in zip_longest(a, b)) for task, (a, b) in pairs.items()}


def compared(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All runs, and what they differ in. Raises Refused."""
    ways = (Way(1, 1), Way(1, args.concurrency), Way(args.concurrency, 1))
    logs, raw = dict[Way, dict[str, bytes]](), dict[str, Any](runs={})
    for way in ways:
        logs[way], seconds = run(args, directory, way)
        require_answers(logs[way], args.questions)
        hashes = {task: hashlib.sha256(text).hexdigest()[:16] for task, text in logs[way].items()}
        raw["runs"][way.name] = {"seconds": round(seconds, 1), "sha256": hashes}
        raw["runs"][way.name]["differing_lines"] = differing(logs[ways[0]], logs[way])
    for file in directory.rglob("results_*.json"):
        raw["lm_eval"] = json.loads(file.read_text()).get("lm_eval_version")
    texts = texts_of(logs[ways[0]][TEXT])
    raw["bytes"] = {task: len(text) for task, text in logs[ways[0]].items()}
    raw["texts"] = {
        "empty": sum(not text.strip() for text in texts), "different": len(set(texts)),
        "median_characters": statistics.median(map(len, texts)), "first": texts[:3],
    }  # fmt: skip
    return raw


def figures_of(raw: dict[str, Any], control: bool) -> dict[str, Figure]:
    """How many logs are those of the first run, and the most lines of a task that are not."""
    found = [each["differing_lines"] for each in raw["runs"].values()][1:]
    counts = [lines for each in found for lines in each.values()]
    equal, target = float(counts.count(0)), None if control else 0.0
    figures = {"equal_logs": Figure(equal, f"of {len(counts)}", None if control else len(counts), "higher")}
    for task, what in ((CHOICE, "scores"), (TEXT, "texts")):
        worst = float(max(each[task] for each in found))
        figures[f"differing_{what}"] = Figure(worst, f"of {raw['questions']}", target, "lower")
    return figures


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lm-eval", default="lm_eval")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--model-path", default=Settings().model.path, help="where its tokenizer is")
    parser.add_argument("--questions", type=int, default=64, help="of each task")
    parser.add_argument(
        "--concurrency", type=int, default=64, help="requests at a time, or prompts of a body"
    )
    parser.add_argument("--system", default="llm42", help="what was run, in words, for the result")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--result", help="also write benchmarks/results/NAME.json")
    return parser.parse_args()


def main() -> int:
    """Prints one JSON object."""
    args = parsed()
    fingerprint = None if args.control else require_flag(args)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tasks(directory, args.questions)
        write_tokenizer(args.model_path, directory)
        try:
            raw = compared(args, directory)
        except Refused as refusal:
            print(f"refused: {refusal}", file=sys.stderr)
            return 2
    raw |= {"system": args.system, "questions": args.questions, "deterministic": not args.control}
    if fingerprint is not None:
        raw["fingerprints"] = sorted({fingerprint, require_flag(args)})
    figures = figures_of(raw, args.control)
    raw["equal"] = figures["equal_logs"].value == LOGS
    print(json.dumps(raw))
    if args.result:
        report(args.result, figures, raw)
    return int(raw["equal"] == args.control)


if __name__ == "__main__":
    sys.exit(main())
