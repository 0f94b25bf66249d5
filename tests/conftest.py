"""What all tests need."""

from __future__ import annotations

import signal

# A shell ignores Ctrl-C on behalf of what it runs in the background, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
