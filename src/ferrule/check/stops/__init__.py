"""Stops at lines of a body: where, what is shown, and the prompt of a terminal."""
