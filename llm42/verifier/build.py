"""From settings to a certified verifier."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from llm42 import fingerprint as fp
from llm42.cache import BlockPool
from llm42.checkpoint.load import load_for
from llm42.config import Settings
from llm42.fingerprint.environment import require_steady_kernels
from llm42.host.device import device_kind, device_lost
from llm42.host.threads import hold_threads, set_threads, torch_threads, usable_threads
from llm42.models.weights import LoadedModel
from llm42.text.tokenizer import Tokenizer
from llm42.verifier import manifest
from llm42.verifier.certify.cpu import (
    Certificate,
    CertificationFailed,
    Progress,
    certify_cpu,
    load_certificate,
    save_certificate,
)
from llm42.verifier.certify.plants import PLANTS
from llm42.verifier.cpu.operators import block_pool, canonical_runner, canonical_set
from llm42.verifier.cuda.build import certify_on_cuda, cuda_runner, on_cuda, with_affinity
from llm42.verifier.known_answers import golden_answers_now
from llm42.verifier.runner import Runner
from llm42.verifier.scheduler import Verifier
from llm42.verifier.sizes import log_unused

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
    plants, settings = tuple(plants), _observed(settings, model)
    key = manifest.certificate_key(_known(settings, model, tokenizer), settings)
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
    CublasEnvironmentError; ValueError for a plant that the device has not."""
    if on_cuda(model):
        return certify_on_cuda(settings, model, plants, progress)
    return certify_cpu(model, settings.verifier, plants, progress)


def plants_of(device: str) -> tuple[str, ...]:
    """The names of what can be planted where models are on `device`."""
    if device == "cpu":
        return tuple(PLANTS)
    from llm42.verifier.certify.cuda import PLANTS as CUDA_PLANTS

    return CUDA_PLANTS


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
    settings = _observed(settings, model)
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
    known = _known(settings, model, tokenizer)
    known["request"] = fp.request_facts(settings, tokenizer)
    verifier.manifest = manifest.complete(known, certificate.providers, certificate.golden.digest)
    verifier.fingerprint = fp.fingerprint(verifier.manifest)
    return verifier


def _observed(settings: Settings, model: LoadedModel) -> Settings:
    """The settings with the number of threads that run. Raises UnsteadyKernels."""
    require_steady_kernels(device_kind(model.device))
    if on_cuda(model):
        return settings
    threads = usable_threads(settings.verifier.threads)
    return settings.model_copy(update={"verifier": settings.verifier.model_copy(update={"threads": threads})})


def _known(settings: Settings, model: LoadedModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """What is known before certification, of the model as it will be run."""
    return manifest.inputs(with_affinity(settings, model), settings, tokenizer.identity)


def _that_answers_as_known(
    settings: Settings, model: LoadedModel, certificate: Certificate
) -> Verifier | None:
    """A verifier with a certificate's providers; None if it computes other known answers than the
    certificate has."""
    make_runner = cuda_runner if on_cuda(model) else _cpu_runner
    runner, pool = make_runner(settings, model, certificate, certificate.key)
    verifier = Verifier(
        runner,
        pool,
        buckets=certificate.buckets,
        max_len=settings.model.max_model_len,
        vocab_size=model.config.vocab_size,
        fingerprint="",
        max_waiting=settings.verifier.max_waiting,
        on_thread_start=partial(set_threads if on_cuda(model) else hold_threads, settings.verifier.threads),
        device_lost=partial(device_lost, model.device),
    )
    with torch_threads(settings.verifier.threads):
        found = golden_answers_now(verifier, certificate.golden.tokens)
    return verifier if found == certificate.golden else None


def _cpu_runner(
    settings: Settings, model: LoadedModel, certificate: Certificate, name: str
) -> tuple[Runner, BlockPool]:
    v, parts = settings.verifier, canonical_set(certificate.providers)
    runner = canonical_runner(model, parts, certificate.buckets, v.kv_tokens, v.block_size, v.rounds_logits)
    return runner, block_pool(v.kv_tokens, v.block_size, name)
