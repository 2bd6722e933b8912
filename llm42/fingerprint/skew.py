"""Whether all who contribute to an answer are of one release: code, files, versions and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm42.errors import VersionSkew
from llm42.fingerprint import differing_fields

Facts = Mapping[str, Any]
MAX_VALUE_CHARS = 40


def require_agreement(verifiers: Facts | None, sides: Mapping[str, Facts | None]) -> None:
    """Raises VersionSkew, with the fields, unless each of the sides (name -> its facts) makes of a request
    what the verifiers' manifest says (llm42/fingerprint/request.py).

    verifiers: the manifest's section `request`. None: of a release that does not know these facts.
    """
    for name, facts in sides.items():
        if facts is not None and facts == verifiers:
            continue
        if not isinstance(facts, Mapping) or verifiers is None:
            what = "is of another release than the verifiers"
        else:
            fields = differing_fields(facts, verifiers).items()
            told = (f"{field} ({_short(its)}, verifiers {_short(theirs)})" for field, (its, theirs) in fields)
            what = f"differs from the verifiers' manifest in {', '.join(told)}"
        raise VersionSkew(
            f"No deterministic answer: the {name} {what}. While a new release is rolled out, try again;"
            " otherwise deploy all parts from the same image, model files and settings."
        )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."
