"""CUDA texts: what stands around a body, launches, masks of simdgroups, accesses kept inside.

One GPU thread per thread: a threadgroup is a block, a simdgroup a warp, and the body stays as it is
(`source.cuda.text`, `include/cuda.h`). What it needs beyond that are the lanes of its simd
operations. CUDA wants to be told which lanes take part, and waits for all of them; so
`source.cuda.masks` writes into the body who is there: votes where lanes go different ways, nothing
where `source.loops.uniform` says that they all go one way. Where the form of the launch says that
every simdgroup is whole, the set is a constant, and an operation costs what it costs in CUDA
written by hand. Where it says that every threadgroup is whole, no thread asks whether it is in the
grid: that branch would stand around the body, and keep the compiler from loading early.
`tests/warps.py` runs such texts on the CPU and fails where a lane is named that does not
come.

A thread that loads one element waits for memory most of its life. Where the threads of a short body
do not meet, and there are many, a block runs several threadgroups, and their loads are under
way together (`Form.each`; `source.cuda.text.needs_of` says which bodies those are). A body that
names no more than its place in the grid cannot tell how threads are grouped, so its blocks have 256
threads, whatever its threadgroups have (`"any"`). Where arrays begin at multiples of 16 bytes, the
text says so, and the compiler reads and writes neighbouring elements together
(`Form.aligned_arrays`).

Products of `simdgroup_matrix` run on tensor cores where the elements are `half` or `bfloat`. A body
that never says `thread_elements` cannot see which lane holds what; its matrices lie as tensor cores
want them (`FR_TILES`), so that nothing is moved between lanes.

An access outside of memory ends the whole process's CUDA. So subscripts of buffers become checked
ones (`source.cuda.bounds`, `include/cuda_bounds.h`), and a launch passes each array's extent,
computed from its shape and strides wherever kernels are launched: in Python, in C, and in
packages. Loads outside give zero; stores and atomics are dropped. Where the largest index is an
expression of what is the same for all threads (`source.cuda.largest`: places in the grid, sizes,
the ends of loops, of what `source.accesses` finds), the body is there twice: one
comparison before it, of uniform values, chooses the one whose accesses are plain, so that the
compiler still joins and moves them. Where it divides, one thread of a block evaluates it. A
buffer's name counts as unmoved where all its uses certainly read it (`source.cuda.reads`). Others
are predicated one by one, or in branches read from a zero, for another branch would keep loads from
being under way together. What is reached by another pointer than the parameter is not checked
(docs/dialect.md says how much that is). On the CPU such reads come to zeros by faults, which cost
nothing until they happen; its loops are not checked, for that would keep them from being
vectorised.

Threadgroup memory beyond 48 KB is CUDA's dynamic shared memory: `source.cuda.shared` asks the
compiler how large each variable is, gives each its place, and `Binary.shared` says what a launch
must ask for.

`ferrule.cuda_kernel` makes a `Kernel` whose `language` is `"cuda"`. The checks, hosts and calls are
those of a Metal body. Nothing of its text is rewritten: `source.cuda.body` writes the signature
around it, and which of CUDA's headers `include/cuda_kernel.h` includes, for reading all of them
would take NVRTC 1.6 s (docs/cuda_kernel.md). `source.cuda.launch.kernel_parameters` says what a
launch passes, in order.

In an op's body, numbers and dims are values (`Kernel.values`), and an op may have several bodies,
each with its launch and a condition (`operators.unit_parts`); the first whose condition holds for a
call's sizes is taken.

For checking, CUDA bodies and units run on the CPU, too: `source.cuda.on_cpu` writes texts with the
entry of `source.fibers`, in which each thread of a block is a fiber (`include/cuda_on_cpu.h`). The
author's text stays but for shared memory (`cpu_shared`), includes and inline PTX, whose common
instructions become calls (`cpu_ptx`). The CPU counts as a GPU of compute capability 8.0, so what is
in branches for newer ones is left out; what else is not known (clusters, bulk copies, tensor maps,
textures, libraries) is found by a scan first and listed by line (`cpu_scan`). An operation of a
warp waits for the lanes that it names (`include/cuda_cpu_lanes.h`).
"""
