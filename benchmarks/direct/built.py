"""A verifier as a verifier's actor builds it, but in process: what actor.py compares with.

python -m benchmarks.direct.built SETTINGS REPLY_FD      (SETTINGS: a JSON file of the settings tree)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.direct.engines import Ours
from benchmarks.direct.side import Side
from benchmarks.lib.sides import serve
from llm42.config import Settings
from llm42.verifier.build import build_verifier


class Built(Ours):
    """With the settings' model and certificate. `loop_s` counts the waits for the device too."""

    def __init__(self, settings: Settings) -> None:
        verifier = build_verifier(settings)
        self.vocab = verifier.vocab_size
        self._begin(verifier, lambda: 0.0)


def main() -> None:
    """Answers until stdin ends."""
    settings, pipe = Settings.load(json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2])
    serve(lambda: Side(lambda: Built(settings)), pipe)


if __name__ == "__main__":
    main()
