"""MLX's arrays, and kernels and ops as nodes of its graphs and in its files.

With MLX's arrays a call makes a node of MLX's graph (`runtime/mlx_node.cpp`, from the same tables):
a subclass of MLX's `CustomKernel`, so that files of `mx.export_function` hold MLX's own records. It
keeps the op and its numbers, never a size; shapes and launch are computed from its real inputs
whenever MLX asks. Machine code is found on the thread that evaluates; MLX's stream threads run it
without Python. The nodes are compiled against the headers of the user's MLX (`hosts.mlx.build`), or
come with a wheel, whose setup.py has compiled them for some versions (`hosts.mlx.sources`, which it
reads without ferrule); a file's name says of which sources, MLX and machine it is, and any other is
passed over. A `metal_kernel` call makes such a node, too (`hosts.mlx.kernel_nodes`), for sizes that
are numbers or expressions; the result of its arguments, but for inputs and stream, is remembered by
their values and types, and from then on it is C code.

While `mx.export_function` traces (`exporting` of `runtime/mlx_export.h` finds that out: MLX's own
kernels can be called without Metal then alone), a call makes another node, with all that MLX's
files hold of a kernel (`hosts.mlx.export`): MLX's text, numbers, and the op as a comment behind the
text. `import_function` reads the file itself (`hosts.mlx.file`; C++ says how this MLX lays out the
state of each operation), cuts it at the kernels, writes what lies between two of them as a file
that MLX imports, and makes the kernels again (`hosts.mlx.file_kernels`): ops from their comments,
all others from their text. Where a call is traced, those of MLX's operations that its files say too
little of for derivatives and batches are made anew, too (`fr_mlx_mended`).

`ferrule.mlx` has MLX's names for `ferrule.ops`' products that gather or dequantize
(`hosts.mlx.matmul`). While a function is exported MLX's primitives run them (`hosts.mlx.products`),
so that files have MLX's records; nodes of ferrule stand for them (`runtime/mlx_matmul.cpp`, a
template over MLX's class), which ask Python for derivatives and batches. In a file for every shape
no size is written down (`hosts.mlx.sizes`): matrices are counted by `cumsum`, and broadcasts are
nodes of this kind, too, for MLX batches its own with the sizes of the trace.
"""
