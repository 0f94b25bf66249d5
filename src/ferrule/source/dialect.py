"""The words of the Metal dialect that the rewriter and the splitter must know."""

from __future__ import annotations

from . import words

# Address spaces: they say where a pointer points, which the CPU and CUDA texts need not know.
ADDRESS_SPACES = words("device thread threadgroup constant ray_data")

# Words that stand around an address space in a declaration.
SPECIFIERS = ADDRESS_SPACES | words("const constexpr static inline extern volatile")

THREADGROUP_BARRIERS = frozenset({"threadgroup_barrier"})
SIMD_BARRIERS = frozenset({"simdgroup_barrier", "quadgroup_barrier"})

# Integer types: of 32 bits, so that sums wrap as the processor's do; those and wider ones; all.
LINEAR_TYPES = words("int uint unsigned int32_t uint32_t")
WIDE_INTEGERS = LINEAR_TYPES | words("size_t long ulong int64_t uint64_t ptrdiff_t")
INTEGERS = WIDE_INTEGERS | words("short ushort char uchar int8_t uint8_t int16_t uint16_t")

_REDUCTIONS = words("sum product max min and or xor")
_SCANS = words(
    "prefix_inclusive_sum prefix_exclusive_sum prefix_inclusive_product prefix_exclusive_product"
)
_MOVES = words(
    "broadcast broadcast_first shuffle shuffle_up shuffle_down shuffle_xor shuffle_rotate_up "
    "shuffle_rotate_down shuffle_and_fill_up shuffle_and_fill_down"
)
_VOTES = words("all any ballot active_threads_mask is_first")

# Operations that the active lanes of a simdgroup (or quadgroup) run together.
SIMD_OPS = frozenset(
    f"{width}_{op}"
    for width in ("simd", "quad")
    for op in (*_REDUCTIONS, *_SCANS, *_MOVES, *_VOTES)
)
# Of those, the ones whose result is the same in every lane that takes part.
UNIFORM_RESULTS = frozenset(
    f"simd_{op}" for op in (*_REDUCTIONS, "broadcast_first", "all", "any", "ballot")
) | {"simd_active_threads_mask"}

MATRIX_OPS = words(
    "simdgroup_load simdgroup_store simdgroup_multiply simdgroup_multiply_accumulate"
)

COLLECTIVES = SIMD_OPS | MATRIX_OPS | SIMD_BARRIERS
SYNC = COLLECTIVES | THREADGROUP_BARRIERS

# What is refused, by the word that gives it away: what it is, and what to write instead.
REFUSED: dict[str, tuple[str, str]] = {
    "mpp": (
        "Metal performance primitives (mpp::)",
        "write the product with simdgroup_matrix or plain loops",
    ),
    "asm": ("inline assembly", "write the operation in Metal"),
    "__asm": ("inline assembly", "write the operation in Metal"),
    "__asm__": ("inline assembly", "write the operation in Metal"),
    "sampler": ("a texture sampler", "pass the data as an array and interpolate in the body"),
    "function_constant": ("a function constant", "pass the value in `template=`"),
    "visible_function_table": ("a function table", "call the function directly"),
    "intersection_function_table": ("a function table", "call the function directly"),
    "acceleration_structure": ("ray tracing", "only compute kernels run here"),
    "raytracing": ("ray tracing", "only compute kernels run here"),
    "dextents": ("a Metal tensor", "pass the data as an array"),
    "cooperative_tensor": ("a Metal tensor", "write the product with simdgroup_matrix"),
    "imageblock": ("an image block", "pass the data as an array"),
}
for _kind in ("texture", "depth"):
    for _shape in words("1d 1d_array 2d 2d_array 2d_ms 2d_ms_array 3d cube cube_array _buffer"):
        REFUSED[_kind + _shape] = ("a texture", "pass the data as an array")
REFUSED_PREFIXES: dict[str, tuple[str, str]] = {
    "__metal_": ("a builtin of Apple's compiler (__metal_*)", "use the documented Metal function"),
    "__builtin_": ("a builtin of one compiler (__builtin_*)", "use the documented Metal function"),
    "simdgroup_async_": ("an undocumented asynchronous copy", "copy in a loop, then a barrier"),
}

# CUDA's words, which NVRTC knows in every text, and the Metal functions' names for them.
CUDA_WORDS: dict[str, str] = {
    "threadIdx": "thread_position_in_threadgroup",
    "blockIdx": "threadgroup_position_in_grid",
    "blockDim": "threads_per_threadgroup",
    "gridDim": "threadgroups_per_grid",
    "warpSize": "threads_per_simdgroup",
    "__syncthreads": "threadgroup_barrier(mem_flags::mem_threadgroup)",
    "__syncwarp": "simdgroup_barrier(mem_flags::mem_threadgroup)",
    "__shared__": "threadgroup",
    "__device__": "no word before a function",
    "__global__": "a body without a signature",
    "__ldg": "the element itself",
    "__shfl_sync": "simd_shuffle",
    "__shfl_xor_sync": "simd_shuffle_xor",
    "__shfl_up_sync": "simd_shuffle_up",
    "__shfl_down_sync": "simd_shuffle_down",
    "__ballot_sync": "simd_ballot",
    "__all_sync": "simd_all",
    "__any_sync": "simd_any",
}
# Names in C library headers are not the dialect's business; these Metal headers are built in.
METAL_HEADERS = ("metal", "simd/")

# Words of the text that is generated around an author's: their macros must not have these names.
GENERATED = words("""
    fr metal user detail core lanes split fiber launch group worker buffers shapes strides ndims
    grid threadgroup groups block origin position n move_to simdgroups quadgroups threadgroups
    dispatch_simdgroups dispatch_quadgroups alone at index value type get set bytes named storage_t
    value_t lanes_t reference divisor_of divided left_of row_length plain any all both each end copy
    in_row atomic_add locked_add locked_fetch_add runs element_t shared_memory uint3 uint
    fiber_groups place_mark pick tile_load tile_store tile_multiply tile_multiply_accumulate
    tile_arrays lane_tiles tally tallied owned_t fetch_ahead taken_t
""")
