"""NVIDIA's GPUs: forms of launches, their machine code, kernels and units.

`source.cuda.text` writes one CUDA text per form of a launch (`source.cuda.launch`: how blocks hold
threads, whether there are more threadgroups than CUDA's y and z can count, and what is said above),
NVRTC compiles it to a cubin, and the disk cache keeps that. `tools/driver.py` calls libcuda: one
library per kernel and GPU, one primary context per GPU, which it shares with the array library and
leaves as it found it. `devices/cuda/program.py` packs a launch into one block of memory and starts
it on the stream that is current in the array library; nothing waits. Repeated calls do the same in
C, with the memset of outputs that are to be zero. A GPU newer than NVRTC gets PTX. After a fault,
CUDA refuses all that follows, so the error names the kernels that were launched last.

`ferrule.cuda_unit` is a whole translation unit. Its author writes the functions; ferrule writes
none, but appends assertions that each step gives its function what that takes, for nothing else
would see an int where a pointer is expected. NVRTC's name expressions say what `gemm<BLOCK, T>` is
called in the cubin. `operators.unit_steps.CudaUnit.launch_for` evaluates all steps of a call before
anything is allocated; `operators.unit_call` has the array library allocate the outputs and, in one
piece, the scratch, and gives `devices.cuda.unit` steps with addresses: run, fill, copy (`unit`).
That one checks them all against the GPU, then starts them on the current stream. Scratch goes back
to the library's pool when the call returns, which is right because what gets it next runs later on
the same stream, in CUDA graphs, too.
"""
