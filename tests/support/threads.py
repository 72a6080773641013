"""Calls in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


def run_at_once(calls: Iterable[Callable[[], object]]) -> None:
    """Every call in a new thread; AssertionError with what they raised, if anything."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == [], errors
