"""Loops over a threadgroup's threads in place of threads, so that compilers vectorise them.

A text passes through stages; what each makes is a value that the next ones read and do not change:

=============  ===================================================================================
`inline`       the body with the header's functions that synchronise in place of their calls
`body`         the tree of a body, for one kind of unit of work
`analysis`     its variables: which are uniform (`uniform`), written, linear, read-only; which
               loops lanes go through in step (`strides`)
`plan`         the jumps that some lanes make before others, which need masks
`splitter`     the body as loops over lanes (`lanes`, `operations`, `kept`), by all of these
=============  ===================================================================================

`split` and `flat` write the whole text: for kernels whose threads wait for each other, or do not.
"""
