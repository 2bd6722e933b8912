"""The garbage collector of processes that serve."""

from __future__ import annotations

import gc

from llm42.host.garbage import keep_what_is_there


def test_what_is_there_is_looked_at_no_more() -> None:
    before = gc.get_freeze_count()
    there = [[number] for number in range(1000)]
    try:
        keep_what_is_there()
        assert gc.get_freeze_count() - before >= len(there)
        assert not any(each is there for each in gc.get_objects())
        later = [[]]
        assert any(each is later for each in gc.get_objects()), "what comes later is collected as ever"
    finally:
        gc.unfreeze()
