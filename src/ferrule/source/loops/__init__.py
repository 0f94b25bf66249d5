"""Loops over a threadgroup's threads in place of threads, so that compilers vectorise them.

A body is read (`analysis`, `uniform`), its functions that synchronise are put in place of their
calls (`inline`), and it is written as loops over lanes (`regions`, `operations`, `splitter`).
`split` and `flat` write the whole text: for kernels whose threads wait for each other, or do not.
"""
