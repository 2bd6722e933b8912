"""What the calls of replicas ask of a verifier: windows, credit, releases; the answers wait in a box for each
replica."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol

from llm42.errors import LLM42Error
from llm42.protocol import Commit, Failure, Window
from llm42.session.interfaces import Sink
from llm42.session.verify_call import SEND_IN_FULL
from llm42.step_times import Neighbour, VerifierLoad
from llm42_serve.verifiers.outbox import Outbox, typed
from llm42_serve.wire import Down, Up, owner_of

log = logging.getLogger(__name__)


class Asked(Protocol):
    """What is asked of the verifier: see llm42/session/interfaces.py and llm42/verifier/front.py."""

    def submit(self, window: Window) -> Future[Commit | Failure]:
        """As of llm42/verifier/front.py."""
        ...

    def follow(self, window: Window, sink: Sink) -> None:
        """As of llm42/verifier/front.py."""
        ...

    def renew(self, request_id: str, until: int, told: Callable[[bool], None]) -> None:
        """As of llm42/verifier/front.py."""
        ...

    def release(self, request_id: str) -> None:
        """As of llm42/verifier/front.py."""
        ...

    def stop(self, request_id: str) -> None:
        """As of llm42/verifier/front.py."""
        ...

    def progressed_s(self, request_id: str) -> float:
        """As of llm42/session/interfaces.py; seconds."""
        ...

    @property
    def worked_s(self) -> float:
        """As of llm42/session/interfaces.py; seconds."""
        ...

    def beside(self, worked_s: Callable[[], float]) -> None:
        """As of llm42/session/interfaces.py."""
        ...

    def load(self, request: None) -> VerifierLoad | None:
        """As of llm42/session/interfaces.py."""
        ...


class Outboxes:
    """Those of all replicas, and what their calls ask of the verifier. Belongs to an event loop."""

    def __init__(self, verifier: Asked) -> None:
        self._verifier = verifier
        self._boxes: dict[str, Outbox] = {}
        self._neighbours: dict[str, Neighbour] = {}

    async def exchange(self, up: Up) -> Down:
        """One call of a replica."""
        box = self._boxes.get(up.replica)
        if box is None:
            box = self._boxes[up.replica] = Outbox()
        if up.worked_s >= 0.0:
            self._beside(up)
        if box.hears(up.number):
            self._hear(box, up)
        down = await box.take(up)
        down = replace(down, progressed_s=self._verifier.progressed_s(""))
        if (load := self._verifier.load(None)) is None:
            return down
        return replace(
            down,
            direct=load.direct,
            kv_free=load.kv_free,
            waited_s=load.waited_s,
            worked_s=self._verifier.worked_s,
            replicas=max(1, len({owner_of(name) for name in self._boxes})),
        )

    def _beside(self, up: Up) -> None:
        """An engine on this device says how long it has computed."""
        neighbour = self._neighbours.get(up.replica)
        if neighbour is None:
            neighbour = self._neighbours[up.replica] = Neighbour()
            neighbours = tuple(self._neighbours.values())
            self._verifier.beside(lambda: sum(n.seconds for n in neighbours))
        neighbour.tell(up.worked_s)

    def _hear(self, box: Outbox, up: Up) -> None:
        for name in up.releases:
            if box.forget(name, up.number):
                self._verifier.release(name)
        for name, of_mark in up.stops:
            if 0 < box.mark_of(name) <= of_mark:  # or of one before: this one never came
                self._verifier.stop(name)
        for mark, window in zip(up.marks, up.windows, strict=True):
            if box.begin(window.request_id, mark, up.number):
                self._ask(box, window, mark)
        for name, until in up.renewals:
            self._verifier.renew(name, until, partial(_told, box, name, box.mark_of(name)))

    def _ask(self, box: Outbox, window: Window, mark: int) -> None:
        """What is wrong with one window is said of it alone."""
        name = window.request_id
        sink = box.sink(window, mark)
        try:
            if window.credit:
                self._verifier.follow(window, sink)
            else:
                box.await_answer(name, mark, self._verifier.submit(window))
        except LLM42Error as refusal:  # of this one, perhaps: too many wait
            sink(refusal)
        except Exception as error:
            log.exception("a window of %s cannot be asked for", name)
            sink(typed(error))

    def forget_silent(self, age_s: float) -> None:
        """Drops the boxes of replicas that have not called for `age_s` seconds and have no call open."""
        limit = time.monotonic() - age_s
        self._boxes = {name: b for name, b in self._boxes.items() if b.is_open or b.called >= limit}
        self._neighbours = {name: n for name, n in self._neighbours.items() if name in self._boxes}


def _told(box: Outbox, request_id: str, mark: int, known: bool) -> None:
    if not known:
        text = "the verifier does not hold the request any more"
        box.put(request_id, Failure(request_id, SEND_IN_FULL, text), urgent=True, mark=mark)
