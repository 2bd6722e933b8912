"""From settings to a certified verifier."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from llm42.cache import BlockPool
from llm42.checkpoint.load import load_for
from llm42.config import Settings
from llm42.fingerprint import fingerprint
from llm42.fingerprint.environment import require_steady_kernels
from llm42.fingerprint.request import request_facts
from llm42.host.device import device_kind, device_lost
from llm42.host.threads import hold_threads, set_threads, torch_threads, usable_threads
from llm42.models.weights import LoadedModel
from llm42.text.tokenizer import Tokenizer
from llm42.verifier import manifest
from llm42.verifier.certify.certificate import (
    Certificate,
    CertificationFailed,
    Progress,
    load_certificate,
    save_certificate,
)
from llm42.verifier.certify.cpu import CPUCertifier
from llm42.verifier.certify.search import Certifier
from llm42.verifier.cpu.operators import canonical_runner, canonical_set
from llm42.verifier.known_answers import golden_answers_now
from llm42.verifier.runner import Runner
from llm42.verifier.scheduler import Verifier
from llm42.verifier.sizes import log_unused
from llm42_kernels.rotary import cos_sin_table_rounded

log = logging.getLogger(__name__)


def certificate_for(
    settings: Settings,
    model: LoadedModel,
    tokenizer: Tokenizer,
    plants: Iterable[str] = (),
    progress: Progress = lambda _: None,
    fresh: bool = False,
) -> Certificate:
    """The kept certificate for exactly these inputs, or a new one. fresh: always a new one. Raises
    CertificationFailed, GoldenFailed, UnsteadyKernels."""
    plants, (settings, model) = tuple(plants), _as_run(settings, model)
    key = manifest.certificate_key(manifest.inputs(model, settings, tokenizer.identity), settings)
    directory = settings.verifier.certificate_dir
    kept = None if plants or fresh else load_certificate(directory, key)
    if kept is not None:
        return kept
    certificate = replace(certify(settings, model, plants, progress), key=key)
    save_certificate(directory, certificate)
    return certificate


def certify(
    settings: Settings, model: LoadedModel, plants: Iterable[str], progress: Progress = lambda _: None
) -> Certificate:
    """A fresh certificate, not kept, by the certifier of the model's device. Raises CertificationFailed,
    CublasEnvironmentError, UnsteadyKernels; ValueError for a plant that the device has not."""
    settings, model = _as_run(settings, model)
    return _certifier(model.device)(model, settings.verifier, plants, progress).run()


def plants_of(device: str) -> tuple[str, ...]:
    """The names of what can be planted where models are on `device`."""
    return tuple(_certifier(device).known_plants)


def _certifier(device: str) -> type[Certifier]:
    if device_kind(device) == "cpu":
        return CPUCertifier
    from llm42.verifier.certify.cuda import CUDACertifier  # needs Triton

    return CUDACertifier


def with_affinity(settings: Settings, model: LoadedModel) -> LoadedModel:
    """The model with the rotary table that `verifier.affinity` asks for; weights are shared."""
    if settings.verifier.affinity == "none":
        return model
    c, positions = model.config, settings.model.max_model_len
    inv_freq = c.rope.inv_freq_float32(c.head_dim, model.device)
    table = cos_sin_table_rounded(inv_freq, positions, c.rope.attention_factor, model.dtype)
    return replace(model, weights=replace(model.weights, cos_sin=table))


def build_verifier(
    settings: Settings,
    model: LoadedModel | None = None,
    tokenizer: Tokenizer | None = None,
    certificate: Certificate | None = None,
    progress: Progress = lambda _: None,
) -> Verifier:
    """A certified verifier, not yet started. A kept certificate whose known answers do not come out again is
    replaced. Raises CertificationFailed, GoldenFailed, UnsteadyKernels."""
    if model is None or tokenizer is None:
        model, tokenizer = load_for(settings)
    settings, model = _as_run(settings, model)
    certificate = certificate or certificate_for(settings, model, tokenizer, progress=progress)
    progress("known answers")
    try:
        verifier = _that_answers_as_known(settings, model, certificate)
    except Exception:
        if not certificate.cached:
            raise
        log.warning("the kept certificate cannot be used", exc_info=True)  # its file may be damaged
        verifier = None
    if verifier is None and certificate.cached:
        log.warning("the known answers kept with the certificate do not come out here: certifying anew")
        certificate = certificate_for(settings, model, tokenizer, progress=progress, fresh=True)
        verifier = _that_answers_as_known(settings, model, certificate)
    if verifier is None:
        sizes = ", ".join(map(str, certificate.buckets))
        raise CertificationFailed("model", [f"steps of {sizes} rows have other known answers than certified"])
    log_unused(settings.verifier.buckets, certificate.buckets, device_kind(model.device))
    known = manifest.inputs(model, settings, tokenizer.identity)
    known["request"] = request_facts(settings, tokenizer)
    verifier.manifest = manifest.complete(known, certificate.providers, certificate.golden.digest)
    verifier.fingerprint = fingerprint(verifier.manifest)
    return verifier


def _as_run(settings: Settings, model: LoadedModel) -> tuple[Settings, LoadedModel]:
    """The settings with the number of threads that run, the model with its rotary table. Raises
    UnsteadyKernels."""
    kind, v = device_kind(model.device), settings.verifier
    require_steady_kernels(kind)
    if kind == "cpu":
        v = v.model_copy(update={"threads": usable_threads(v.threads)})
    return settings.model_copy(update={"verifier": v}), with_affinity(settings, model)


def _that_answers_as_known(
    settings: Settings, model: LoadedModel, certificate: Certificate
) -> Verifier | None:
    """A verifier with a certificate's providers; None if it computes other known answers than the
    certificate has."""
    v, blocks = settings.verifier, _kv_blocks(settings, model, certificate)
    hold = hold_threads if device_kind(model.device) == "cpu" else set_threads
    verifier = Verifier(
        _runner(settings, model, certificate, blocks),
        BlockPool(blocks, v.block_size, root=certificate.key.encode()),
        buckets=certificate.buckets,
        max_len=settings.model.max_model_len,
        vocab_size=model.config.vocab_size,
        fingerprint="",
        max_waiting=v.max_waiting,
        on_thread_start=partial(hold, v.threads),
        device_lost=partial(device_lost, model.device),
    )
    with torch_threads(v.threads):
        found = golden_answers_now(verifier, certificate.golden.tokens)
    return verifier if found == certificate.golden else None


def _kv_blocks(settings: Settings, model: LoadedModel, certificate: Certificate) -> int:
    """As configured, or as many as fit the GPU."""
    v = settings.verifier
    if v.kv_tokens is not None:
        return -(-v.kv_tokens // v.block_size)
    from llm42.verifier.cuda.memory import kv_blocks

    return kv_blocks(model, settings, certificate.buckets[-1])


def _runner(settings: Settings, model: LoadedModel, certificate: Certificate, blocks: int) -> Runner:
    v, providers, buckets = settings.verifier, certificate.providers, certificate.buckets
    if device_kind(model.device) == "cpu":
        parts = canonical_set(providers)
        return canonical_runner(model, parts, buckets, blocks, v.block_size, v.rounds_logits)
    from llm42.verifier.cuda.runner import cuda_runner

    if v.block_size % 64:
        log.warning("verifier.block_size %d: multiples of 64 make attention faster on a GPU", v.block_size)
    return cuda_runner(model, providers, v, buckets, blocks, settings.model.max_model_len)
