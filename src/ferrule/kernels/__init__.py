"""Level 0: kernels without a declaration, whose calls give shapes and launch: `metal_kernel`.

The second time that a kernel is called with NumPy or torch arrays of some dtypes and ranks, what
the call came to is remembered (`repeated`). From then on `runtime/kernel_calls.h` makes such calls,
with whatever sizes, by the engine that ops have: it makes the outputs and launches, without Python
code (1 to 3 µs instead of 13, and 15 to 37 instead of 80 to 100 where large arrays have emptied the
caches). Whatever it does not know, or finds unusual, it leaves to Python, which words all errors;
`tools.fastcall.bypassed()` sends every call there.
"""
