"""The files of the model that actor.py and http.py serve."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.lib.random_model import LLAMA_8B, write_random
from llm42.config import Settings
from llm42.text.tokenizer import Tokenizer
from tests.support import VOCAB, write_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where they go, and whose vocabulary it is."""
    parser.add_argument("--scratch", help="where the model is written, if it is not there; by default --out")
    parser.add_argument("--tokenizer", default=Settings().model.path, help="a GGUF file: SmolLM2's")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on a CPU")


def model_of(args: argparse.Namespace) -> tuple[str, int]:
    """Its directory and its vocabulary: an 8B's shape with random weights in bfloat16, with as many ids as
    the tokenizer has."""
    place = Path(args.scratch or args.out)
    if args.cpu:
        return str(write_model(place / "tiny", positions=4096)), VOCAB
    whole, config = (
        place / "random-8b",
        replace(LLAMA_8B, vocab_size=49152, eos_token_ids=(2,), bos_token_id=1),
    )
    done = whole / "done"
    if not done.exists():
        write_random(config, Tokenizer.load(Path(args.tokenizer)), whole)
        done.touch()
    return str(whole), config.vocab_size
