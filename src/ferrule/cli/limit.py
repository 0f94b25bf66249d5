"""A time limit for programs of the user's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

GRACE = 3.0  # seconds that a program has to end when it is asked to


class TimeLimit:
    """Ends a program after some seconds: as Ctrl-C does and, where it goes on, with its process.

    Attributes:
        over: whether the time was over before the program had ended.
    """

    def __init__(self, seconds: float | None, give_up: Callable[[], object]) -> None:
        """Begin to count.

        Args:
            seconds: how many there are; None: no end of them.
            give_up: called in another thread where the program does not end; ends the process.
        """
        self.over = False
        self._give_up = give_up
        self._lock = threading.Lock()
        self._ended = threading.Event()
        if seconds is not None:
            timer = threading.Timer(seconds, self._expire)
            timer.daemon = True
            timer.start()

    def _expire(self) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self.over = True
            asked = callable(signal.getsignal(signal.SIGINT))
            if asked:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if asked and self._ended.wait(GRACE):
            return
        with self._lock:
            if not self._ended.is_set():
                self._give_up()

    def end(self) -> None:
        """Count no more: the program has ended."""
        while not self._ended.is_set():
            try:
                with self._lock:
                    self._ended.set()
            except KeyboardInterrupt:  # that of the limit, and the program has ended already
                if not self.over:
                    raise
