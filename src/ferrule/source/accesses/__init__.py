"""What a body reads and writes, and when: each access with its index, its conditions, its place
between barriers. Proofs (`check.proofs`) and robust mode on CUDA (`source.cuda.bounds`) ask it.

A body runs here once, for any thread, on terms in place of numbers (`terms`). What is not
understood becomes an `Unsupported` with its line; nothing is left out silently. Whatever has no
exact value (what memory holds, floats, what a loop carries along) is an unknown, which may be
anything that its type holds: what is proved of all unknowns holds for those that occur.

===============  =================================================================================
`kinds`          the integer types, and how C++ converts them
`terms`          integers and conditions as terms, exact, with the least and largest they can be;
                 `evaluation`: their values
`model`          accesses, loops, obligations, what was not understood
`values`         what variables hold: numbers, vectors, pointers, what is opaque
`attributes`     what is given for each thread
`machine`        the state of a run: variables, path, barriers passed
`arithmetic`     operators, as C++ computes them
`expressions`    expressions; `calls`: casts, functions of the library and of the header
`functions`      what the author's functions are declared with
`statements`     declarations, branches, jumps; `loops`: loops
`hidden`         what hides from a reader that a variable is written
`read`           a kernel's body, from its text to its accesses
`limits`         what conditions at a place say of terms: how large they are
===============  =================================================================================
"""
