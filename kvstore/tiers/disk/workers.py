"""Threads that move the runs of a batch at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


class Workers:
    """``count`` threads, all of them there from the start."""

    def __init__(self, count: int) -> None:
        """Have all threads now: one that cannot be had in a batch would leave calls behind it.

        Raises:
            ConfigError: so many threads cannot be had; none is left.
        """
        self.count = count
        self._executor = ThreadPoolExecutor(count, "kvstore-disk")
        together = threading.Barrier(count)
        try:
            for _ in range(count):
                self._executor.submit(together.wait)
        except RuntimeError as error:
            together.abort()
            self.close()
            raise ConfigError(f"threads={count}: {error}") from error

    def run(
        self, job: Callable[[list[int]], OSError | None], runs: list[list[int]]
    ) -> OSError | None:
        """Do ``job`` for every run; return when all have ended, whatever happens, with an error if any."""
        if len(runs) < 2:
            errors = [job(run) for run in runs]
        else:
            futures = [self._executor.submit(job, run) for run in runs]
            wait(futures)
            errors = [future.result() for future in futures]
        return next(filter(None, errors), None)

    def close(self) -> None:
        """Wait for the threads to end."""
        self._executor.shutdown()
