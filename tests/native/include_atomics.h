// Every atomic operation of a type on six cells, as a loop on the CPU and as a kernel on CUDA.
#define OPERATIONS(T, p, v)                                                                 \
  atomic_fetch_sub_explicit(p + 1, v, memory_order_relaxed);                                \
  atomic_fetch_max_explicit(p + 2, v, metal::memory_order_relaxed);                         \
  atomic_fetch_min_explicit(p + 3, v, memory_order_seq_cst);                                \
  T old = atomic_load_explicit(p + 4, memory_order_relaxed);                                \
  while (!atomic_compare_exchange_weak_explicit(p + 4, &old, T(old + T(1)),                 \
                                                memory_order_relaxed, memory_order_relaxed)) { \
  }                                                                                         \
  T there = atomic_exchange_explicit(p + 5, v, memory_order_acquire);                       \
  if (there == v) atomic_store_explicit(p + 5, there, memory_order_release);

#if FR_CUDA
#define CELLS(T)                                                                            \
  extern "C" __global__ void cells_##T(T* cells, const T* values, int n) {                  \
    int i = blockIdx.x * blockDim.x + threadIdx.x;                                          \
    __shared__ atomic<T> local[2];                                                          \
    if (threadIdx.x < 2) atomic_store_explicit(local + threadIdx.x, 0, memory_order_relaxed); \
    __syncthreads();                                                                        \
    volatile atomic<T>* p = (volatile atomic<T>*)cells;                                     \
    if (i < n) {                                                                            \
      atomic_fetch_add_explicit(&local[1], values[i], memory_order_relaxed);                \
      OPERATIONS(T, p, values[i])                                                           \
    }                                                                                       \
    __syncthreads();                                                                        \
    if (threadIdx.x > 0) return;                                                            \
    T sum = atomic_load_explicit(&local[1], memory_order_relaxed);                          \
    atomic_fetch_add_explicit(p, sum, memory_order_relaxed);                                \
  }
#else
#define CELLS(T)                                                                            \
  extern "C" void cells_##T(T* cells, const T* values, int n) {                             \
    volatile atomic<T>* p = (volatile atomic<T>*)cells;                                     \
    for (int i = 0; i < n; ++i) {                                                           \
      atomic_fetch_add_explicit(p, values[i], memory_order_relaxed);                        \
      OPERATIONS(T, p, values[i])                                                           \
    }                                                                                       \
  }
extern "C" void cells_of_bits(uint* p, const uint* v, int n) {
  for (int i = 0; i < n; ++i) {
    atomic_fetch_and_explicit((atomic_uint*)p, v[i], memory_order_relaxed);
    atomic_fetch_or_explicit((atomic_uint*)p + 1, ~v[i], memory_order_relaxed);
    atomic_fetch_xor_explicit((atomic_int*)p + 2, v[i], memory_order_relaxed);
  }
}
#endif
CELLS(int) CELLS(uint) CELLS(int64_t) CELLS(uint64_t) CELLS(float) CELLS(half) CELLS(bfloat)
CELLS(double) CELLS(uchar)

#if FR_CUDA
// Types with a trivial constructor are what __shared__ takes.
extern "C" __global__ void shared_types(float* y) {
  __shared__ half h[4];
  __shared__ bfloat b[4];
  __shared__ float3 v[4];
  __shared__ complex64_t c[4];
  __shared__ float2x2 m[2];
  __shared__ packed_half3 p[2];
  __shared__ metal::array<half4, 2> a;
  int i = threadIdx.x & 1;
  h[i] = y[0];
  b[i] = h[i];
  v[i] = float3(b[i]);
  c[i] = complex64_t(v[i].x, 1.0f);
  m[i] = float2x2(c[i].real);
  p[i] = half3(m[i][0].x);
  a[i] = half4(p[i].x);
  y[1] = a[i].x + Limits<half>::max + Limits<complex64_t>::min.real + INFINITY + M_PI_H;
}
#endif
