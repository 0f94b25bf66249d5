"""CUDA of products of 17 to 512 rows of x with quantized matrices, for compute capability 9.0.

A warp group multiplies 64 rows of ``w``, whose numbers it makes in registers, with all rows of x
(tokens) by ``wgmma``, which reads x from shared memory. As in `quantized_cuda_texts`, each lane has
16 contiguous bytes of a row of ``w``: so `ORDERED` puts x in the order in which lanes have k, in
tiles of 64 k as tensor cores read them (128 bytes a token, swizzled), which one warp of a block
copies to shared memory. The other warps copy what they decode themselves.
"""

from __future__ import annotations

from .quantized_decode_cuda import with_steps

ORDERED = """
// Word i of a lane t has elements of k from t * OWN + i * PER_WORD on, and step p of it multiplies
// pairs 2p and 2p + 1: the k of `wgmma` with t / 2 = 0, .. 3 are pair 2p of each t, then those of
// pair 2p + 1. A thread puts 8 elements there.
extern "C" __global__ void __launch_bounds__(256)
ordered(const T* x, T* out, int64_t K, int count) {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  constexpr int OF_BLOCK = BLOCK / 8;
  const uint32_t blocks = (uint32_t(K) + BLOCK - 1) / BLOCK;
  const uint32_t thread = blockIdx.x * 256 + threadIdx.x;
  const int token = thread / (blocks * OF_BLOCK), piece = thread % (blocks * OF_BLOCK);
  if (token >= count) return;
  const int t = piece % 4, q = piece / 4 % (OWN / 8), block = piece / OF_BLOCK;
  const int k = block * BLOCK + t * OWN + q * 8;
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(x) + token * K + k;
  uint32_t v[4] = {};
  if ((size_t(x) | K * sizeof(T)) % 16 == 0) {
    if (k < K) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (k + i < K) v[i / 2] |= uint32_t(from[i]) << 16 * (i % 2);
  }
  const int tokens = (count + 7) / 8 * 8;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int low = BITS == 4 ? n / 2 : n / 2 * 2, high = BITS == 4 ? low + 2 : low + 1;
    const int chunk = q * 4 + n;
    const int64_t tile = int64_t(block) * (BLOCK / 64) + chunk / 8;
    const int64_t at = (tile * tokens + token) * 32 + (chunk % 8 ^ token % 8) * 4 + t;
    reinterpret_cast<uint32_t*>(out)[at] = permute(v[low], v[high], n % 2 ? 0x7632 : 0x5410);
  }
}
"""

# What the hardware does, each in one instruction or a few.
_MACHINE = """
__device__ inline void start_barrier(uint32_t at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ inline void started_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void arrive(uint32_t at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ inline void expect(uint32_t at, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(at), "r"(bytes) : "memory");
}
__device__ inline void wait_for(uint32_t at, uint32_t parity) {
  for (uint32_t done = 0; !done;)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(at), "r"(parity) : "memory");
}
__device__ inline void copy_many(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
// What was written the usual way may be read by copies of many bytes.
__device__ inline void fence_of_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ inline float4 read_4_of(int block, const float* p) {
  uint32_t from;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(from) : "r"(shared_address(p)), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
  return v;
}

// Between what writes registers and products that read them.
__device__ inline void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT> __device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
__device__ inline void keep(float& v) { asm volatile("" : "+f"(v)); }
"""

# Adds the products of 16 k with so many tokens. `at` is where in shared memory their part of x
# begins, in 16 bytes: rows of 128 bytes, swizzled, and 1024 for 8 rows.
_PRODUCT = """
template <int S>
__device__ inline void product_16(Number<TOKENS>, float (&c)[S], uint32_t a0, uint32_t a1,
                                  uint32_t a2, uint32_t a3, uint32_t at) {
  const uint64_t b = uint64_t(0x40000040) << 32 | (1 << 16 | at);
  if constexpr (BF16) PRODUCT_BF16
  else PRODUCT_F16
}
"""

_WIDE = with_steps("""
constexpr int WARPS = WM;                    // and one that copies x
constexpr int THREADS = WARPS * 32 + 32;
constexpr int ROWS = WARPS * R * 16;         // of w, of a block
constexpr int PITCH = ROWS + 4;              // of sums in shared memory
constexpr int NT = TOK / 8;
constexpr int TILES = BLOCK / 64;            // of x, in a block of k
constexpr int X_STAGE = TILES * TOK * 128, W_STAGE = R * 1024, S_STAGE = R * 16 * SCALES * ARRAYS;
constexpr int PARTS = STAGES <= AT_ONCE + 1 ? 2 : 4;  // of scales, that are there at a time
static_assert(STAGES >= 2 && STAGES <= 3 * AT_ONCE + 1 && TOK % 8 == 0 && X_STAGES <= 8);

template <int BLOCKS, class Ends>
__device__ inline void add_parts(const float* sums, int count, T* y, int64_t n0, int64_t N,
                                 const Ends& end) {
  constexpr int QUADS = ROWS / 4, AT_A_TIME = BLOCKS <= 4 ? 2 : 1;
  const bool aligned = N % 4 == 0 && size_t(y) % 8 == 0;
  const int quads = count * QUADS;
  for (int first = (BLOCKS == 1 ? 0 : blockIdx.y * THREADS) + threadIdx.x; first < quads;
       first += BLOCKS * AT_A_TIME * THREADS) {
    float4 part[AT_A_TIME][BLOCKS];
#pragma unroll
    for (int u = 0; u < AT_A_TIME; ++u) {
      const int i = min(first + u * BLOCKS * THREADS, quads - 1);
      const float* const from = sums + i / QUADS * PITCH + i % QUADS * 4;
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        if constexpr (BLOCKS == 1) part[u][block] = *reinterpret_cast<const float4*>(from);
        else part[u][block] = read_4_of(block, from);
      }
    }
#pragma unroll
    for (int u = 0; u < AT_A_TIME; ++u) {
      const int i = first + u * BLOCKS * THREADS;
      float4 all = part[u][0];
#pragma unroll
      for (int block = 1; block < BLOCKS; ++block) {
        const float4 v = part[u][block];
        all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
      }
      const int row = i % QUADS * 4;
      const int64_t column = n0 + row;
      T* const to = y + i / QUADS * N + column;
      const float four[4] = {all.x * LAST, all.y * LAST, all.z * LAST, all.w * LAST};
      if (i >= quads || column >= N) continue;
      if (aligned) {
        alignas(8) T of[4] = {end(four[0], row), end(four[1], row + 1), end(four[2], row + 2),
                              end(four[3], row + 3)};
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(of);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (column + j < N) to[j] = end(four[j], row + j);
      }
    }
  }
}

// Without launch bounds: ptxas counts whole warp groups, and would leave registers for three more
// warps. `--maxrregcount` says how many a thread may have.
extern "C" __global__ void
wide(const T* x, const uint32_t* w, const void* scales, BIASES biases, WHOLE global_scale,
     int64_t global_scales, OFFSET offset, T* y, int64_t N, int64_t K, int count) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t n0 = blockIdx.z * int64_t(ROWS);
  const int token = blockIdx.x * TOK, here = min(count - token, TOK);
  const uint32_t start = (shared_address(shared) + 1023) / 1024 * 1024;
  const uint32_t full = start, empty = start + X_STAGES * 8;  // barriers
  const uint32_t begin_x = start + 1024;
  const uint32_t begin = first_of_part(0, K), end = first_of_part(1, K);
  if (warp < WARPS) ask_ahead(w, scales, n0, N, K);
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; ++i)
      start_barrier(full + i * 8, 1), start_barrier(empty + i * 8, WARPS);
    started_barriers();
  }
  __syncthreads();
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  float* const sums = reinterpret_cast<float*>(shared + (begin_x - shared_address(shared)));
  const auto end_of = ends<ROWS, WARPS * 32>(global_scale, global_scales, offset, n0, N);

  if (warp == WARPS) {
    if (lane == 0) {
      fence_of_copies();
      const uint32_t bytes = (here + 7) / 8 * 1024, pitch = (count + 7) / 8 * 1024;  // of a tile
      const char* from =
          reinterpret_cast<const char*>(x) + int64_t(begin) * TILES * pitch + token * 128;
      uint32_t slot = 0, parity = 1;
#pragma unroll 1
      for (uint32_t block = begin; block < end; ++block) {
        wait_for(empty + slot * 8, parity);
        expect(full + slot * 8, TILES * bytes);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile, from += pitch)
          copy_many(begin_x + slot * X_STAGE + tile * TOK * 128, from, bytes, full + slot * 8);
        if (++slot == X_STAGES) slot = 0, parity ^= 1;
      }
    }
  } else {
    const char* const s_all = static_cast<const char*>(scales);
    const char* const b_all = bytes_of(biases);
    const int row_bytes = int(K) / (32 / BITS) * 4, scale_bytes = int(K) / GROUP * SCALE;
    const int64_t first = min(n0 + warp * R * 16, N - 1);  // row of this warp
    const int rows = int(min(N - first, int64_t(R * 16)));
    auto row_of = [&](int row) { return min(row, rows - 1); };
    const char* const w_from = reinterpret_cast<const char*>(w) + first * row_bytes;
    const char* const s_from = s_all + first * scale_bytes;
    const char* const b_from = ARRAYS == 2 ? b_all + first * scale_bytes : nullptr;
    const uint32_t begin_w =
        begin_x + X_STAGES * X_STAGE + warp * STAGES * W_STAGE + lane * 16;
    const uint32_t begin_s = begin_x + X_STAGES * X_STAGE + WARPS * STAGES * W_STAGE +
                             warp * PARTS * S_STAGE;

    // 16 bytes at once, where all begins at multiples of that.
    int aligned, s_alignment;
    ALIGNMENT
    keep(aligned), keep(s_alignment);
    int off[R][2];
    ROW_OFFSETS

    // Where the next block comes from and goes to: of what lies behind a row, nothing is read.
    const char* w_next = w_from + t * 16 + int64_t(begin) * 64;
    int w_left = row_bytes - t * 16 - int(begin * 64);
    uint32_t next = begin, to_slot = 0;
    auto issue = [&] {
      if (next < end) {
        const uint32_t w_slot = begin_w + to_slot * W_STAGE;
        COPY_ROWS
        COPY_SCALES
        w_next += 64, w_left -= 64;
        ++next;
        to_slot = to_slot + 1 == STAGES ? 0 : to_slot + 1;
      }
      commit();
    };

    const uint32_t s_read = begin_s + g * SCALES + (BLOCK % GROUP ? 0 : t * OWN / GROUP * SCALE);
    float sum[R][TOK / 2] = {};
    uint32_t nan[R] = {}, nan_of_row[R][2] = {};
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) issue();
    uint32_t slot = 0, x_slot = 0, x_before = 0, parity = 0;
#pragma unroll 1
    for (uint32_t block = begin; block < end; ++block) {
      wait<STAGES - 2>();
      __syncwarp();
      issue();

      uint32_t words[R][2][4], bytes[R][ARRAYS][2];
      READ_BLOCK
      Scales of[R];
      SET_SCALES
      const uint32_t x_at = (begin_x + x_slot * X_STAGE) / 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          DECODE_PAIRS
          if (i == 0 && r == 0) wait_for(full + x_slot * 8, parity);
          begin_products();
#pragma unroll
          for (int j = 0; j < PAIRS; j += 2) {
            const int step = (i * PAIRS + j) / 2;
            product_16(Number<TOK>(), sum[r], pair[0][j], pair[1][j], pair[0][j + 1],
                       pair[1][j + 1], x_at + (step / 4 * (TOK * 128) + step % 4 * 32) / 16);
          }
          end_products();
          wait_products<1>();  // those before these
          if (i == 0 && r == 0 && block > begin && lane == 0) arrive(empty + x_before * 8);
        }
      }
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      x_before = x_slot;
      if (++x_slot == X_STAGES) x_slot = 0, parity ^= 1;
    }
    wait_products<0>();
    END_SUMS

    wait<0>();
    barrier<WARPS * 32>(1);  // what is in shared memory has been read
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = n * 8 + t * 2 + i % 2, row = warp * R * 16 + r * 16 + i / 2 * 8 + g;
          sums[token * PITCH + row] = sum[r][n * 4 + i];
        }
      }
    }
  }

  // Sums of blocks, in their order.
  __syncthreads();
  T* const to = y + token * N;
  if (gridDim.y == 1) {
    add_parts<1>(sums, here, to, n0, N, end_of);
  } else {
    cluster_barrier();
    if (gridDim.y == 2) add_parts<2>(sums, here, to, n0, N, end_of);
    else if (gridDim.y == 4) add_parts<4>(sums, here, to, n0, N, end_of);
    else add_parts<8>(sums, here, to, n0, N, end_of);
    cluster_barrier();  // none ends while another reads its sums
  }
}
""")

# What packages for other GPUs have, which never start it.
_ELSEWHERE = """
extern "C" __global__ void wide(const T*, const uint32_t*, const void*, BIASES, WHOLE, int64_t,
                                OFFSET, T*, int64_t, int64_t, int) {}
"""


def _product(tokens: int, dtype: str) -> str:
    """``wgmma`` for so many columns: its registers have names one by one."""
    count = tokens // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    kept = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    return (
        '{\n    asm volatile("{ .reg .pred p; setp.ne.b32 p, '
        f"%{count + 5}, 0; wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{dtype}.{dtype} "
        f"{{{sums}}}, {{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}, "
        f'p, 1, 1, 0; }}"\n    : {kept}\n'
        '    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(1));\n  }'
    )


def machine(*tokens: int) -> str:
    """What the hardware does, and products with so many tokens."""
    text = _MACHINE
    for count in tokens:
        product = _PRODUCT.replace("TOKENS", str(count))
        product = product.replace("PRODUCT_BF16", _product(count, "bf16"))
        text += product.replace("PRODUCT_F16", _product(count, "f16"))
    return text


def wide(tokens: int) -> str:
    """The functions for so many tokens, at most."""
    text = f"{machine(tokens)}{_WIDE}"
    return f"{ORDERED}\n#ifdef __CUDA_ARCH_FEAT_SM90_ALL{text}#else{_ELSEWHERE}#endif\n"
