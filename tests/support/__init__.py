"""What tests share: models, the parts of a service around them, the oracle, and the comparison that every
guarantee is judged by."""

from tests.support.clients import AcceptsEverything, Wrapped, collect, together, verified
from tests.support.engines import (
    ENGINES,
    Client,
    RandomWays,
    VllmPool,
    all_ways,
    bare,
    both_engines,
    both_ways,
    check_blocks,
    check_pool,
    pinned_ways,
    switching_ways,
    vllm_missing,
    vllm_settings,
)
from tests.support.followers import Followed, Follower
from tests.support.lab import Lab, canonical
from tests.support.oracle import Answer, answer_of, decode_alone, differences
from tests.support.patience import PATIENCE_S, Awake, Clock, until, wait_until
from tests.support.requests import GREEDY, PENALISED, SAMPLED, prompt_of, request_of, window_of
from tests.support.share import sweep
from tests.support.smollm2 import certified_smollm2, smollm2_file, smollm2_settings
from tests.support.tiny_model import CHAT_TEMPLATE, CONFIG, END, SPECIAL, VOCAB, tiny_tokenizer, write_model

__all__ = [
    "CHAT_TEMPLATE",
    "CONFIG",
    "END",
    "ENGINES",
    "GREEDY",
    "PATIENCE_S",
    "PENALISED",
    "SAMPLED",
    "SPECIAL",
    "VOCAB",
    "AcceptsEverything",
    "Answer",
    "Awake",
    "Client",
    "Clock",
    "Followed",
    "Follower",
    "Lab",
    "RandomWays",
    "VllmPool",
    "Wrapped",
    "all_ways",
    "answer_of",
    "bare",
    "both_engines",
    "both_ways",
    "canonical",
    "certified_smollm2",
    "check_blocks",
    "check_pool",
    "collect",
    "decode_alone",
    "differences",
    "pinned_ways",
    "prompt_of",
    "request_of",
    "smollm2_file",
    "smollm2_settings",
    "sweep",
    "switching_ways",
    "tiny_tokenizer",
    "together",
    "until",
    "verified",
    "vllm_missing",
    "vllm_settings",
    "wait_until",
    "window_of",
    "write_model",
]
