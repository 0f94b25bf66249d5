"""Level 1: operators that declare their shapes, launch and derivatives: `op`, `adopt`, and
`family` of those that differ in constants.

`operators.declaration.op` reads the rule and the launch expressions once; they are trees of tuples.
A call binds the rule's dims to the sizes of its inputs, evaluates outputs, grid, threadgroup and
template from them, and launches; it keeps nothing but the loaded programs. To a kernel, dims that
its body names are further inputs (0-d int32), arrays that are written in place are outputs, and an
absent array is a null pointer beside the template parameter `has_<input>`: so level 0 knows nothing
of ops, and Metal's text stays one that MLX would write.

A Python function that runs an op (`operators.runners.Runner`) is called as torch calls a
kernel in C++: with eager tensors, below autograd and autocast, not seen by Dynamo. What it returns
is new to the graph: an output that anyone else still refers to, by Python's and torch's own counts,
is copied. State that is no tensor is made per device, dtypes and constants, never in a capture.
Detours are counted in `Op.counts`.

`operators.file` writes ops as JSON under the names that graphs have for them; reading checks the
digests in these names. What is no data, Python functions, stays behind as a digest, so that the op
is still the same one; calling it raises, until `Op.complete` gets it from the same op, defined in
the process.

A package of AOTInductor runs without ferrule. So it has a library (`operators.package` writes its
tables, `packaged/ops.h` carries them out) with the rule's bytecode, the runtime, and kernels for
all that a graph can ask of them: dtypes and ranks are fixed in a graph, sizes are not, so
`Device.packaged` compiles a form that is right for every launch, and before it the one of the
example. Each code says what must hold of a launch (`FR_ONE_ROW`, `FR_FULL` …), and the first that
fits is taken. Kernels on the CPU are the same shared libraries that the cache holds, loaded from
memory. A CUDA unit is one code for every launch, and its steps are a table, too:
`packaged/cuda_steps.h` works them out for a call, checks them all, and starts them, as
`operators.unit_steps`, `operators.unit_call` and `devices.cuda.unit` do in Python. Both hand matrix
products to the cuBLAS that the process has by the same C, `runtime/cublas.h`.
"""
