"""A differential fuzzer: random kernels, run in every way and by an independent executor.

===================  ========================================================================
``tree.py``          types, variables and expressions, with their Metal text
``program.py``       statements and whole programs
``choices.py``       random choices, names in scope, arithmetic that stays within bounds
``expressions.py``   random expressions
``declarations.py``  random declarations
``memory.py``        random exchanges through threadgroup memory
``walks.py``         random loops in which threads walk over an array together
``statements.py``    random statements
``generate.py``      whole random programs: ``Generator(seed).program()``
``reference.py``     the independent executor: NumPy, all threads of a grid at once
``machine.py``       what it runs on: positions of threads, memory that notices races
``operations.py``    its arithmetic, library and operations of simdgroups
``harness.py``       programs through ferrule, in each mode, compared element by element
``shrink.py``        a smaller program that still fails
``run.py``           the command line
===================  ========================================================================
"""
