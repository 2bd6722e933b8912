"""Which figures stand on top of the page, and in which words."""

from __future__ import annotations

PEERS, DIRECT, HTTP, MODES = "h200-peers", "h200-direct", "h200-direct-http", "h200-verify-mode"

HEADLINES: tuple[tuple[str, str, str], ...] = (
    ("2 % deterministic, vLLM with verifiers in `auto`: rate kept of plain vLLM's", PEERS, "kept_2"),
    ("10 % deterministic, the same", PEERS, "kept_10"),
    ("50 % deterministic, the same", PEERS, "kept_50"),
    ("All deterministic, canonical: rate kept, mean of the loads", PEERS, "kept_100"),
    ("The same, the worst load", PEERS, "worst_100"),
    ("10 % deterministic, `auto`, over HTTP: rate kept", PEERS, "http_kept_10"),
    ("All deterministic, canonical, over HTTP: rate kept", PEERS, "http_kept_100"),
    ("First token, p99, over vLLM's at 60 % of saturation", PEERS, "ttft_p99_ratio_100"),
    (
        "Best effort beside 10 % deterministic: time per token, p50, over vLLM's",
        PEERS,
        "best_effort_p50_ratio_10",
    ),
    ("10,000 equal deterministic requests: different outputs", PEERS, "distinct_outputs_10000"),
    ("All deterministic, canonical, no HTTP: rate kept, mean of three loads", DIRECT, "kept_100"),
    ("The same, the worst load", DIRECT, "worst_100"),
    (
        "The same over vLLM with VLLM_BATCH_INVARIANT=1, the least of three loads",
        DIRECT,
        "over_batch_invariant",
    ),
    ("First token, p99, over vLLM's at 60 % of saturation, no HTTP", DIRECT, "ttft_p99_over_vllm"),
    ("All deterministic, canonical, over HTTP: whole replies", HTTP, "kept_whole"),
    ("The same, streams", HTTP, "kept_stream"),
    ("`verify`, 2 % deterministic: rate kept, the worst load", MODES, "kept_2"),
    ("`verify`, 10 % deterministic", MODES, "kept_10"),
    ("`verify`, 50 % deterministic", MODES, "kept_50"),
    ("`auto`, 2 % deterministic: rate kept, the worst load", MODES, "auto_kept_2"),
    ("`auto`, 10 % deterministic", MODES, "auto_kept_10"),
    ("`auto`, 50 % deterministic", MODES, "auto_kept_50"),
    ("`auto`, all deterministic", MODES, "auto_kept_100"),
    (
        "Best effort with `affinity: vllm`: time per token over vLLM's, the worst cell",
        MODES,
        "best_effort_step_max",
    ),
    ("Rows of whole models compared bit for bit that differ", "h200-verifier", "differing_rows"),
    ("Deterministic answers that differ in an hour of kills", "cpu-soak", "wrong_answers"),
)
"""(what a reader is told, result, figure). A result that is not there yet is named as not measured."""
FIRST = tuple(dict.fromkeys(result for _, result, _ in HEADLINES))
"""Results in the order of the page; the others follow by name."""

SUMMARY = """\
What determinism costs, measured. Every number here comes from a file of
[benchmarks/results](../benchmarks/results). A script writes this page from all of those files, so nothing
is left out. Targets that were missed are here too: [where we lose](#where-we-lose) lists them. What the
numbers mean, what was tried and what was dropped is in [measurements](measurements/README.md)."""

METHOD = """\
- Systems that are compared run on the same machine, in turns, unless the page of the measurement says
  otherwise. A ratio is taken within one round. Where there are several rounds it is the median over them.
- A prediction is what was written down before the run. A figure without a target is only reported.
- *8B shape* is the shape of Llama 3 8B with random weights. Speed does not depend on the values of weights,
  but how often two engines agree does. SmolLM2 is SmolLM2-135M-Instruct. `256/256` is 256 tokens of prompt
  and 256 of output.
- *Plain vLLM* is vLLM as it comes. *Canonical* is every request decoded by verifiers. *kept* is a system's
  output rate over plain vLLM's under the same load. A figure that is named `X_over_Y` is X divided by Y.
- A command is the one of its time. Modules may have moved since, and `DIR` stands for a folder.
- Results with `cpu` in their name are of small machines, which other programs may have used too. They tell
  what our own code costs.
- To run them again: [measurements/README.md](measurements/README.md#how-to-run-them). To write this page
  again: `python -m benchmarks.report`."""
