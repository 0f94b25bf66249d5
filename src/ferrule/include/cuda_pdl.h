// What nvcc knows without an #include, and NVRTC does not know, of launches that begin before the one
// ahead has ended (`pdl`). Without effect before compute capability 9.0, which has none.
#pragma once

__device__ __forceinline__ void cudaGridDependencySynchronize() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void cudaTriggerProgrammaticLaunchCompletion() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" :::);
#endif
}
