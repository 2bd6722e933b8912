"""What the terminal of `llm42 serve` says when a verifier dies, and when its successor is ready."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from llm42_serve.verifiers.actor import State, VerifierStatus
from llm42_serve.verifiers.membership import MemberInfo
from llm42_serve.verifiers.news import VerifierNews
from tests.service.serve_process import READY_S, serve_process
from tests.support import wait_until


class Members:
    """Who is there, as a supervisor says it."""

    def __init__(self) -> None:
        self.found: list[MemberInfo] = []
        self.error: Exception | None = None

    def __call__(self) -> Sequence[MemberInfo]:
        if self.error is not None:
            raise self.error
        return self.found

    def say(self, name: str, pid: int = 0, state: State = "ready") -> None:
        """pid: 0: it does not answer."""
        status = VerifierStatus(state, "a", pid=pid) if pid else None
        self.found = [i for i in self.found if i.name != name] + [MemberInfo(name, "id", status)]


def ended() -> int:
    """The number of a process that is over."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def said(caplog: pytest.LogCaptureFixture, news: VerifierNews) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "llm42_serve"):
        news.look()
    return [record.getMessage() for record in caplog.records]


def test_a_death_and_its_end_are_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    members, dead = Members(), ended()
    news = VerifierNews(members)
    members.say("v-0", dead)
    assert said(caplog, news) == [f"v-0 is ready (process {dead})"]
    assert said(caplog, news) == [], "the control: nothing has happened"
    members.say("v-0")
    (line,) = said(caplog, news)
    assert line.startswith(f"v-0 (process {dead}) has died; its successor is being started.")
    members.say("v-0", 7, "starting")
    assert said(caplog, news) == []
    members.say("v-0", 7)
    assert said(caplog, news) == ["v-0 is ready again (process 7)"]


def test_a_successor_that_is_ready_by_the_next_look(caplog: pytest.LogCaptureFixture) -> None:
    members, dead = Members(), ended()
    news = VerifierNews(members)
    members.say("v-0", dead)
    news.look()
    members.say("v-0", 7)
    died, ready = said(caplog, news)
    assert "has died" in died
    assert ready == "v-0 is ready again (process 7)"


def test_who_only_does_not_answer_is_not_called_dead(caplog: pytest.LogCaptureFixture) -> None:
    members = Members()
    news = VerifierNews(members)
    members.say("v-0", os.getpid())
    news.look()
    members.say("v-0")
    (line,) = said(caplog, news)
    assert "does not answer" in line
    assert "died" not in line


def test_who_is_given_up_or_not_heard_of_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """Scaling gives verifiers up; and the supervisor may be away."""
    members = Members()
    news = VerifierNews(members)
    for number in range(2):
        members.say(f"v-{number}", ended())
    assert len(said(caplog, news)) == 2
    members.found = members.found[:1]
    assert said(caplog, news) == []
    for error in (ValueError("no such actor"), TimeoutError()):
        members.error = error
        assert said(caplog, news) == []
    members.error = None
    assert said(caplog, news) == []


@pytest.mark.service
@pytest.mark.slow
def test_the_terminal_says_which_verifier_died_and_when_it_is_back(tmp_path: Path) -> None:
    """With the process that it named: the first hour's section 5 on one machine."""

    def found(pattern: str) -> list[str]:
        return [match[1] for line in running.lines if (match := re.search(pattern, line))]

    with serve_process(tmp_path) as running:
        assert running.wait_ready(), "".join(running.lines)
        assert wait_until(lambda: bool(found(r"verifier-\S+ is ready \(process (\d+)\)")), READY_S)
        (pid,) = found(r"verifier-\S+ is ready \(process (\d+)\)")
        os.kill(int(pid), signal.SIGKILL)
        assert wait_until(lambda: bool(found(r"is ready again \(process (\d+)\)")), READY_S), running.lines
        assert found(r"\(process (\d+)\) has died; its successor is being started") == [pid]
        assert found(r"is ready again \(process (\d+)\)") != [pid]
