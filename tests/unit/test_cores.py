"""How many cores a process may use: those of its affinity mask and its container's limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llm42.config import EngineSettings
from llm42.host import cores
from llm42.host.cores import cpu_quota, usable_cores


def group(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


def test_a_mask_of_one_core_gives_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    assert EngineSettings().thread_count == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert EngineSettings().thread_count == 8
    assert EngineSettings(threads=3).thread_count == 3


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for quota, usable in ((None, 64), (4.0, 4), (2.5, 2), (0.5, 1), (100.0, 64)):
        monkeypatch.setattr(cores, "cpu_quota", lambda quota=quota: quota)
        assert usable_cores() == usable


def test_version_2_is_read_upwards(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("0::/pods/mine\n")
    group(root / "pods" / "mine", cpu__max="max 100000\n")
    assert cpu_quota(own, root) is None
    group(root / "pods", cpu__max="400000 100000\n")
    assert cpu_quota(own, root) == 4.0
    group(root / "pods" / "mine", cpu__max="150000 100000\n")
    assert cpu_quota(own, root) == 1.5


def test_version_1_is_read_too(tmp_path: Path) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text("4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n")
    # inside a container the group's own directory is the root
    group(root / "cpu,cpuacct", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cpu_quota(own, root) is None
    group(root / "cpu,cpuacct", cpu__cfs_quota_us="200000\n")
    assert cpu_quota(own, root) == 2.0


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::/x\n"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, text: str) -> None:
    own = tmp_path / "cgroup"
    own.write_text(text)
    group(tmp_path / "x", cpu__max="not a number\n")
    assert cpu_quota(own, tmp_path) is None
    assert cpu_quota(tmp_path / "missing", tmp_path) is None
