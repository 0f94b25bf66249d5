"""A differential fuzzer: random kernels, run in every way on the CPU and by an independent executor.

=================  ==========================================================================
``program.py``     the small syntax tree that programs are made of, and its Metal text
``generate.py``    random programs with defined results
``statements.py``  their statements
``reference.py``   the independent executor: NumPy, all threads of a grid at once
``harness.py``     programs through ferrule, in each mode, compared element by element
``shrink.py``      a smaller program that still fails
``run.py``         the command line
=================  ==========================================================================
"""
