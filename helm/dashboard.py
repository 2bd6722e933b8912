"""The Grafana dashboard: what it shows, and the JSON that the chart installs.

python helm/dashboard.py            writes helm/llm42/dashboards/llm42.json
python helm/dashboard.py --check    exit status 1 when that file is out of date
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import VisibilityMode
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

FILE = Path(__file__).parent / "llm42" / "dashboards" / "llm42.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
RELEASE = 'cluster=~"$cluster",namespace=~"$namespace",release=~"$release"'
"""Which services: several may send to one Prometheus."""
EACH = "cluster, namespace, release"
"""What must not be counted together."""
APP = f'{{{RELEASE},application=~"$application",model=~"$model"}}'
"""Series of ingresses and replicas."""
MODEL = f'{{{RELEASE},model=~"$model"}}'
"""Series of verifiers and their supervisor, which several applications may share."""
RANGE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """`queries` are (expression, legend); `warn` is where the colour of a single value changes."""

    title: str
    help: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    single: bool = False
    warn: float | None = None


def rate(name: str, by: str, where: str = APP) -> str:
    """Increase per second of a counter, summed."""
    return f"sum by ({by}) (rate(ray_llm42_{name}_total{where}{RANGE}))"


def gauge(name: str, by: str, where: str = APP) -> str:
    """A gauge, summed."""
    return f"sum by ({by}) (ray_llm42_{name}{where})"


def quantile(q: float, name: str, by: str, where: str = APP) -> str:
    """A quantile of a histogram."""
    buckets = f"rate(ray_llm42_{name}_bucket{where}{RANGE})"
    return f"histogram_quantile({q}, sum by (le, {by}) ({buckets}))"


def latency(title: str, help: str, name: str) -> Panel:
    """Median and 99th percentile by class."""
    queries = tuple((quantile(q, name, "mode"), f"{{{{mode}}}} p{q * 100:g}") for q in (0.5, 0.99))
    return Panel(title, help, "s", queries)


def ratio(above: str, below: str) -> str:
    """A quotient; nothing is drawn while there is no traffic."""
    return f"{above} / {below}"


DEVICES = f"({gauge('fastpath_devices', 'model', MODEL)} + {gauge('verifier_devices', 'model', MODEL)})"
COST = ratio(rate("verifier_device_seconds", "model", MODEL), DEVICES)
BUSY = rate("verifier_busy_seconds", "verifier", MODEL)
PADDED = ratio(
    rate("verifier_padding_rows", "model", MODEL),
    f"({rate('verifier_rows', 'model', MODEL)} + {rate('verifier_padding_rows', 'model', MODEL)})",
)
FROM_CACHE = ratio(
    rate("verifier_cached_rows", "model", MODEL),
    f"({rate('verifier_rows', 'model', MODEL)} + {rate('verifier_cached_rows', 'model', MODEL)})",
)


VERIFIED = APP.replace("}", ',way!="direct"}')
"""Where the fast path had proposed candidates. Written so that series without the label count: those of an
older release."""


def rollback_rate(by: str) -> str:
    """Share of verified tokens at which the fast path had proposed another one."""
    return ratio(rate("rollbacks", by), rate("committed_tokens", by, VERIFIED))


DETERMINISM = (
    Panel("Rollback rate", "Rollbacks for each verified token: how often the fast path proposed another"
          " token than the verifier.", "percentunit",
          ((rollback_rate("application, model"), "{{application}} {{model}}"),), True, 0.05),
    Panel("Verifiers ready", "Certified verifiers; without one, deterministic requests get a 503.", "short",
          ((f"sum by (model) (ray_llm42_verifiers{MODEL[:-1]},state=\"ready\"}})", "{{model}}"),), True),
    Panel("Audit mismatches", "In the last hour. Anything but 0: a verifier computes wrongly.", "short",
          ((f"sum by (model) (increase(ray_llm42_audit_mismatches_total{APP}[1h]))", "{{model}}"),),
          True, 1e-9),
    Panel("Fingerprints", "Different fingerprints among the verifiers of a model: 1, but during an upgrade.",
          "short",
          ((f"max by (model) (count by ({EACH}, model) (count by ({EACH}, model, fingerprint)"
            f" (ray_llm42_fingerprint_info{MODEL})))", "{{model}}"),), True, 2),
    Panel("Rollback rate by model", "Rollbacks for each verified token.", "percentunit",
          ((rollback_rate("application, model"), "{{application}} {{model}}"),)),
    Panel("Rollback rate by replica", "One replica that stands out has other kernels, or a bad device.",
          "percentunit", ((rollback_rate("application, replica"), "{{application}} {{replica}}"),)),
    Panel("Tokens kept and wasted", "Committed tokens by their way (verified, or decoded directly by a"
          " verifier), and candidates that were thrown away.", "short",
          ((rate("committed_tokens", "model, way"), "{{model}} committed/s {{way}}"),
           (rate("rolled_back_tokens", "model"), "{{model}} rolled back/s"))),
    Panel("Ways, measured and expected", "Committed tokens of all ways, and what the model of session.mode"
          " auto expects of each if all deterministic requests took it.", "short",
          ((rate("committed_tokens", "model"), "{{model}} committed/s"),
           (f"sum by (model, way) (ray_llm42_way_expected_tokens_per_second{APP})",
            "{{model}} expected/s {{way}}"),
           (rate("way_changes", "model, way"), "{{model}} changes/s to {{way}}"),
           (rate("moved_tokens", "model"), "{{model}} moved/s"))),
    Panel("Wasted share of candidates", "Candidates thrown away, of all that the fast path proposed.",
          "percentunit",
          ((ratio(rate("rolled_back_tokens", "model"), rate("candidate_tokens", "model")), "{{model}}"),)),
    Panel("Cost of determinism", "Device time spent on verification, of all devices that replicas and"
          " verifiers hold.", "percentunit", ((COST, "{{model}}"),)),
    Panel("Length of windows", "Candidates in a window, and how many of them were accepted (medians).",
          "short", ((quantile(0.5, "window_length_tokens", "model"), "{{model}} sent"),
                    (quantile(0.5, "accepted_length_tokens", "model"), "{{model}} accepted"))),
    Panel("Audits", "Windows computed a second time, and those with another answer, in an hour.", "short",
          ((f"sum by (model) (increase(ray_llm42_audits_total{APP}[1h]))", "{{model}} audited"),
           (f"sum by (model) (increase(ray_llm42_audit_mismatches_total{APP}[1h]))", "{{model}} differ"))),
)  # fmt: skip

LATENCY = (
    latency("Time to first token", "From arrival; to the first committed token when deterministic.",
            "first_token_seconds"),
    latency("Gap between pieces of output", "Of streams; between two commits when deterministic.",
            "commit_gap_seconds"),
    latency("Whole request", "Requests that finished, whatever their length.", "request_seconds"),
    Panel("Verify calls", "From a window's sending to its commit, and its wait in the verifier.", "s",
          ((quantile(0.5, "verify_seconds", "model"), "round trip p50"),
           (quantile(0.99, "verify_seconds", "model"), "round trip p99"),
           (quantile(0.99, "verify_queue_seconds", "model"), "queue p99"))),
)  # fmt: skip

VERIFIERS = (
    Panel("Saturation", "Share of its time that a verifier spends in steps. Near 1, windows wait.",
          "percentunit", ((BUSY, "{{verifier}}"),)),
    Panel("Windows in the verifiers", "Computing and waiting; and requests that are decoded directly.",
          "short",
          ((gauge("verifier_active", "verifier", MODEL), "{{verifier}} active"),
           (gauge("verifier_waiting", "verifier", MODEL), "{{verifier}} waiting"),
           (gauge("verifier_direct_requests", "verifier", MODEL), "{{verifier}} direct"))),
    Panel("Tokens of the verifiers", "Tokens committed, by their way; directly decoded requests that were"
          " preempted.", "short",
          ((rate("verifier_tokens", "model, way", MODEL), "{{model}} {{way}}/s"),
           (rate("verifier_preemptions", "model", MODEL), "{{model}} preempted/s"))),
    Panel("Step time", "One canonical step.", "s",
          tuple((quantile(q, "verifier_step_seconds", "verifier", MODEL), f"{{{{verifier}}}} p{q * 100:g}")
                for q in (0.5, 0.99))),
    Panel("Rows", "Rows computed, and those that only filled a step's size.", "short",
          ((rate("verifier_rows", "model", MODEL), "{{model}} used/s"),
           (rate("verifier_padding_rows", "model", MODEL), "{{model}} padding/s"))),
    Panel("Padding and cache", "Padding of all rows computed; rows found in the cache of all needed.",
          "percentunit", ((PADDED, "{{model}} padding"), (FROM_CACHE, "{{model}} from the cache"))),
    Panel("Cache blocks", "KV blocks found by their content, and blocks that had to make room.", "short",
          ((rate("verifier_cache_hits", "model", MODEL), "{{model}} hits/s"),
           (rate("verifier_cache_evictions", "model", MODEL), "{{model}} evictions/s"))),
    Panel("KV memory", "Blocks of live requests and blocks kept for reuse, of all.", "percentunit",
          tuple((ratio(gauge(f"verifier_kv_{kind}_blocks", "verifier", MODEL),
                       gauge("verifier_kv_total_blocks", "verifier", MODEL)), f"{{{{verifier}}}} {kind}")
                for kind in ("held", "cached"))),
    Panel("Verifiers by state", "As their supervisor sees them.", "short",
          ((gauge("verifiers", "state", MODEL), "{{state}}"),
           (gauge("verifiers_wanted", "model", MODEL), "{{model}} wanted"))),
)  # fmt: skip

LOAD_AND_ERRORS = (
    Panel("Output tokens", "Tokens sent to clients, by class.", "short",
          ((rate("output_tokens", "mode"), "{{mode}}/s"),)),
    latency("Wait for a place", "From a request's arrival at its replica to its start.", "queue_seconds"),
    Panel("Replicas", "Fast-path replicas that report, and how many there should be (where they scale, at"
          " least).", "short",
          ((f"count by (application, model) (ray_llm42_fastpath_devices{APP})", "{{application}} {{model}}"),
           (f"max by (application, model) (ray_llm42_replicas_wanted{APP})",
            "{{application}} {{model}} wanted"))),
    Panel("Requests in progress", "Running, and waiting to be admitted.", "short",
          ((gauge("requests_running", "mode"), "{{mode}} running"),
           (gauge("requests_queued", "mode"), "{{mode}} queued"),
           (gauge("deterministic_limit", "model"), "deterministic admitted at most"))),
    Panel("KV memory of the fast path", "KV cache in use by live requests, of all.", "percentunit",
          ((ratio(gauge("fastpath_kv_used_tokens", "replica"), gauge("fastpath_kv_total_tokens", "replica")),
            "{{replica}}"),)),
    Panel("Engine queue", "Admitted requests that wait for the engine, and those it had to preempt.", "short",
          ((gauge("fastpath_waiting", "replica"), "{{replica}} waiting"),
           (rate("preemptions", "replica"), "{{replica}} preempted/s"))),
    Panel("Requests by outcome", "Finished ones and all others.", "reqps",
          ((rate("requests", "mode, outcome") + " > 0", "{{mode}} {{outcome}}"),)),
    Panel("Error replies", "HTTP replies with an error status, by code.", "reqps",
          ((rate("rejects", "reason") + " > 0", "{{reason}}"),)),
    Panel("Repairs", "Failovers of streams, repeated verify calls, verifiers that died or were condemned.",
          "short", ((rate("failovers", "mode"), "{{mode}} failovers/s"),
                    (rate("verify_retries", "model"), "{{model}} verify retries/s"),
                    (rate("verifier_deaths", "model", MODEL), "{{model}} verifiers died/s"),
                    (rate("verifiers_condemned", "model", MODEL), "{{model}} condemned/s"))),
)  # fmt: skip

ROWS: dict[str, tuple[Panel, ...]] = {
    "Determinism": DETERMINISM,
    "Latency": LATENCY,
    "Verifiers": VERIFIERS,
    "Load and errors": LOAD_AND_ERRORS,
}


def panel(spec: Panel) -> Any:
    """The builder of one panel."""
    made: Any = stat.Panel() if spec.single else timeseries.Panel()
    made = made.title(spec.title).description(spec.help).unit(spec.unit).datasource(SOURCE).min(0)
    made = made.span(6 if spec.single else 12).height(4 if spec.single else 8)
    if not spec.single:
        made = made.show_points(VisibilityMode.NEVER).fill_opacity(5)
    elif spec.warn is not None:
        steps = [Threshold(None, "green"), Threshold(spec.warn, "red")]
        made = made.thresholds(build.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    for index, (expression, legend) in enumerate(spec.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend)
        made = made.with_target(query.ref_id(chr(ord("A") + index)).datasource(SOURCE))
    return made


def variable(name: str, label: str, query: str) -> Any:
    """A choice of several label values, all of them at first."""
    made = build.QueryVariable(name).label(label).datasource(SOURCE).query(query)
    return made.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True).all_value(".*")


def document() -> str:
    """The dashboard's JSON."""
    made = build.Dashboard("LLM-42").uid("llm42").tags(["llm42"]).refresh("30s").time("now-1h", "now")
    made = made.with_variable(build.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    chosen: list[str] = []
    for name in ("cluster", "namespace", "release", "application", "model"):
        query = f"label_values(ray_llm42_verifiers_ready{{{','.join(chosen)}}}, {name})"
        made = made.with_variable(variable(name, name.title(), query))
        chosen.append(f'{name}=~"${name}"')  # the next one offers what is there of these
    for title, panels in ROWS.items():
        made = made.with_row(build.Row(title))
        for spec in panels:
            made = made.with_panel(panel(spec))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def main() -> int:
    """Command line."""
    options = argparse.ArgumentParser(description="Writes the Grafana dashboard's JSON.")
    options.add_argument("--check", action="store_true", help="write nothing")
    asked = options.parse_args()
    text = document()
    stale = not FILE.exists() or FILE.read_text() != text
    if stale and not asked.check:
        FILE.write_text(text)
    if stale:
        print(f"{'out of date' if asked.check else 'written'}: {FILE.name}")
    return 1 if stale and asked.check else 0


if __name__ == "__main__":
    sys.exit(main())
