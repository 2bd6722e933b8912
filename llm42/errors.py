"""The errors that a user can act on, and what each becomes over HTTP."""

from __future__ import annotations

from typing import Any


class LLM42Error(Exception):
    """Base of the errors that a user can act on. Whatever their constructors take, they can be pickled: they
    cross processes, and a replica's constructor that raises one is told of by Serve."""

    code = "internal_error"
    status = 500

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (type(self), self.args, self.__dict__.copy())


def _remade(kind: type[LLM42Error], args: tuple[Any, ...], state: dict[str, Any]) -> LLM42Error:
    """A pickled error, with its fields; not by its constructor, which may take something else than `args`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class RequestRejected(LLM42Error):
    """The request itself is wrong (HTTP 400); `param` names the offending field."""

    code, status = "invalid_request_error", 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code or self.code


class VerifierUnavailable(LLM42Error):
    """No verifier answers (HTTP 503 with Retry-After); best-effort traffic is not affected."""

    code, status = "verifier_unavailable", 503


class StepFailed(VerifierUnavailable):
    """The verifier's step that held the window failed. Another try may meet the same end, so it counts as one
    of session.verify_attempts; a verifier that is dead or full is asked for as long as they may take."""


class FingerprintChanged(VerifierUnavailable):
    """The verifiers were replaced while the request ran: no promise covers tokens of both (HTTP 503)."""


class VersionSkew(VerifierUnavailable):
    """Who made the request, or would answer it, has other code, files, versions or settings than the
    verifiers' manifest names (HTTP 503): the fingerprint would promise what nobody computed."""

    code = "version_skew"


class VerificationFailed(LLM42Error):
    """The verifier refused a window for good, for example because the logits hold NaN (HTTP 500)."""

    code = "verification_failed"


class Overloaded(LLM42Error):
    """A bounded queue is full (HTTP 429 with Retry-After)."""

    code, status = "overloaded", 429


class UnsupportedModel(LLM42Error):
    """The model's mathematics is not (fully) implemented; `field` names the configuration field."""

    code = "unsupported_model"

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ModelFileError(LLM42Error):
    """A model file is missing, truncated, or does not hold what its configuration promises."""

    code = "model_file_error"


class LaunchFailed(LLM42Error):
    """The service did not come up; the message says why and where the logs are."""

    code = "launch_failed"


class NoFastPath(LLM42Error):
    """A command is about the fast path, and the configuration has none (engine.kind canonical)."""

    code = "no_fast_path"
