// What a CUDA body of ferrule.cuda_kernel has for shapes, vectors and places in strided arrays: the
// names that MLX documents for mx.fast.cuda_kernel, with the same meaning.
//
// Nothing here needs CUDA: who includes this defines FR_FN, the fixed-width integers and MAX_NDIM.
// FR_STD_ARRAY and FR_STD_TUPLE say that those of cuda::std are there.
#pragma once

namespace mlx { namespace core { namespace cu {

// ---- shapes -----------------------------------------------------------------------------------
// Arrays by value, with the members of cuda::std::array; entries beyond an input's rank are zero.
template <class T> struct PerAxis {
  T values[MAX_NDIM];

  using value_type = T;
  FR_FN T* data() { return values; }
  FR_FN const T* data() const { return values; }
  FR_FN static constexpr size_t size() { return MAX_NDIM; }
  FR_FN T& operator[](size_t i) { return values[i]; }
  FR_FN const T& operator[](size_t i) const { return values[i]; }
  FR_FN const T* begin() const { return values; }
  FR_FN const T* end() const { return values + MAX_NDIM; }
  FR_FN const T& front() const { return values[0]; }
  FR_FN const T& back() const { return values[MAX_NDIM - 1]; }
};
#ifdef FR_STD_ARRAY  // who names the template gets it
using Shape = cuda::std::array<int32_t, MAX_NDIM>;
using Strides = cuda::std::array<int64_t, MAX_NDIM>;
#else
using Shape = PerAxis<int32_t>;
using Strides = PerAxis<int64_t>;
#endif

// ---- vectors of N elements --------------------------------------------------------------------
template <typename T, int N> struct alignas(sizeof(T) * N) AlignedVector {
  T val[N];

  FR_FN T& operator[](int i) { return val[i]; }
  FR_FN T operator[](int i) const { return val[i]; }
};

template <class T> struct Plain { using type = T; };
template <class T> using plain = typename Plain<T>::type;  // takes no part in deduction

template <int N, typename T> FR_FN bool is_aligned(T* x) {
  return reinterpret_cast<uintptr_t>(x) % (N * sizeof(T)) == 0;
}

// The vector number `offset`, whose first element is number N * offset. Where the pointer is not
// aligned, or the vector reaches beyond `size` elements, it is read or written in pieces.
template <int N, typename T>
FR_FN AlignedVector<T, N> unsafe_load_vector(const T* ptr, size_t offset) {
  return reinterpret_cast<const AlignedVector<T, N>*>(ptr)[offset];
}
template <int N, typename T> FR_FN AlignedVector<T, N> load_vector(const T* ptr, size_t offset) {
  if (is_aligned<N>(ptr)) return unsafe_load_vector<N>(ptr, offset);
  AlignedVector<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = ptr[offset * N + i];
  return v;
}
template <int N, typename T, typename SizeT>
FR_FN AlignedVector<T, N> load_vector(const T* ptr, size_t offset, SizeT size, int64_t stride,
                                      plain<T> fallback) {
  const size_t first = offset * N, count = size_t(size);
  if (stride == 1 && first + N <= count && is_aligned<N>(ptr)) {
    return unsafe_load_vector<N>(ptr, offset);
  }
  AlignedVector<T, N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v[i] = first + i < count ? ptr[int64_t(first + i) * stride] : fallback;
  }
  return v;
}
template <int N, typename T, typename SizeT>
FR_FN AlignedVector<T, N> load_vector(const T* ptr, size_t offset, SizeT size, plain<T> fallback) {
  return load_vector<N>(ptr, offset, size, int64_t(1), fallback);
}

template <int N, typename T>
FR_FN void unsafe_store_vector(T* ptr, size_t offset, const AlignedVector<T, N>& vec) {
  reinterpret_cast<AlignedVector<T, N>*>(ptr)[offset] = vec;
}
template <int N, typename T>
FR_FN void store_vector(T* ptr, size_t offset, const AlignedVector<T, N>& vec) {
  if (is_aligned<N>(ptr)) return unsafe_store_vector<N>(ptr, offset, vec);
#pragma unroll
  for (int i = 0; i < N; ++i) ptr[offset * N + i] = vec[i];
}
template <int N, typename T, typename SizeT>
FR_FN void store_vector(T* ptr, size_t offset, const AlignedVector<T, N>& vec, SizeT size,
                        int64_t stride) {
  const size_t first = offset * N, count = size_t(size);
  if (stride == 1 && first + N <= count && is_aligned<N>(ptr)) {
    return unsafe_store_vector<N>(ptr, offset, vec);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first + i < count) ptr[int64_t(first + i) * stride] = vec[i];
  }
}
template <int N, typename T, typename SizeT>
FR_FN void store_vector(T* ptr, size_t offset, const AlignedVector<T, N>& vec, SizeT size) {
  store_vector<N>(ptr, offset, vec, size, int64_t(1));
}

// ---- from the number of an element in row-major order to its place ------------------------------
// In two or three arrays of one shape at once these give a tuple, as `auto [a, b] = …` takes it.
#ifdef FR_STD_TUPLE
template <class T> using Two = cuda::std::tuple<T, T>;
template <class T> using Three = cuda::std::tuple<T, T, T>;
#else
template <class T> struct Two { T a, b; };
template <class T> struct Three { T a, b, c; };
#endif

template <typename IdxT = int64_t>
FR_FN IdxT elem_to_loc(IdxT elem, const int* shape, const int64_t* strides, int ndim) {
  IdxT loc = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    loc += IdxT(elem % shape[i]) * IdxT(strides[i]);
    elem /= shape[i];
  }
  return loc;
}

template <typename IdxT = int64_t>
FR_FN Two<IdxT> elem_to_loc(IdxT elem, const int* shape, const int64_t* a_strides,
                            const int64_t* b_strides, int ndim) {
  IdxT a = 0, b = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    const IdxT at = IdxT(elem % shape[i]);
    a += at * IdxT(a_strides[i]);
    b += at * IdxT(b_strides[i]);
    elem /= shape[i];
  }
  return {a, b};
}

template <typename IdxT = int64_t>
FR_FN Three<IdxT> elem_to_loc(IdxT elem, const int* shape, const int64_t* a_strides,
                              const int64_t* b_strides, const int64_t* c_strides, int ndim) {
  IdxT a = 0, b = 0, c = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    const IdxT at = IdxT(elem % shape[i]);
    a += at * IdxT(a_strides[i]);
    b += at * IdxT(b_strides[i]);
    c += at * IdxT(c_strides[i]);
    elem /= shape[i];
  }
  return {a, b, c};
}

// The same for a rank that is known when the body is compiled: no loop is left.
template <int NDIM, typename IdxT = int64_t>
FR_FN IdxT elem_to_loc_nd(IdxT elem, const int* shape, const int64_t* strides) {
  IdxT loc = 0;
#pragma unroll
  for (int i = NDIM - 1; i >= 0; --i) {
    loc += IdxT(elem % shape[i]) * IdxT(strides[i]);
    elem /= shape[i];
  }
  return loc;
}

template <int NDIM, typename IdxT = int64_t>
FR_FN Two<IdxT> elem_to_loc_nd(IdxT elem, const int* shape, const int64_t* a_strides,
                               const int64_t* b_strides) {
  IdxT a = 0, b = 0;
#pragma unroll
  for (int i = NDIM - 1; i >= 0; --i) {
    const IdxT at = IdxT(elem % shape[i]);
    a += at * IdxT(a_strides[i]);
    b += at * IdxT(b_strides[i]);
    elem /= shape[i];
  }
  return {a, b};
}

template <int NDIM, typename IdxT = int64_t>
FR_FN Three<IdxT> elem_to_loc_nd(IdxT elem, const int* shape, const int64_t* a_strides,
                                 const int64_t* b_strides, const int64_t* c_strides) {
  IdxT a = 0, b = 0, c = 0;
#pragma unroll
  for (int i = NDIM - 1; i >= 0; --i) {
    const IdxT at = IdxT(elem % shape[i]);
    a += at * IdxT(a_strides[i]);
    b += at * IdxT(b_strides[i]);
    c += at * IdxT(c_strides[i]);
    elem /= shape[i];
  }
  return {a, b, c};
}

// ---- walking a strided array in order ----------------------------------------------------------
// The last DIM axes are stepped by adding; the axes before them, which only a General walk may have,
// by division.
template <int DIM, bool General = true, typename OffsetT = size_t> struct LoopedElemToLoc {
  int dim;
  LoopedElemToLoc<DIM - 1, General, OffsetT> outer;
  OffsetT offset{0};
  int index{0};

  FR_FN LoopedElemToLoc(int ndim) : dim(ndim), outer(ndim - 1) {}
  FR_FN void next(const int* shape, const int64_t* strides) { next(1, shape, strides); }
  FR_FN void next(int n, const int* shape, const int64_t* strides) {
    if (dim == 0) return;
    const int size = shape[dim - 1];
    index += n;
    if (index < size) {
      offset += OffsetT(n) * OffsetT(strides[dim - 1]);
      return;
    }
    outer.next(index < 2 * size ? 1 : index / size, shape, strides);
    index = index < 2 * size ? index - size : index % size;
    offset = outer.offset + OffsetT(index) * OffsetT(strides[dim - 1]);
  }
  FR_FN OffsetT location() const { return offset; }
};

template <typename OffsetT> struct LoopedElemToLoc<1, true, OffsetT> {
  int dim;
  OffsetT offset{0};
  int index{0};

  FR_FN LoopedElemToLoc(int ndim) : dim(ndim) {}
  FR_FN void next(const int* shape, const int64_t* strides) { next(1, shape, strides); }
  FR_FN void next(int n, const int* shape, const int64_t* strides) {
    index += n;
    offset = dim > 1 ? elem_to_loc<OffsetT>(OffsetT(index), shape, strides, dim)
                     : OffsetT(index) * OffsetT(strides[0]);
  }
  FR_FN OffsetT location() const { return offset; }
};

template <typename OffsetT> struct LoopedElemToLoc<1, false, OffsetT> {
  OffsetT offset{0};

  FR_FN LoopedElemToLoc(int) {}
  FR_FN void next(const int* shape, const int64_t* strides) { next(1, shape, strides); }
  FR_FN void next(int n, const int*, const int64_t* strides) {
    offset += OffsetT(n) * OffsetT(strides[0]);
  }
  FR_FN OffsetT location() const { return offset; }
};

} } }  // namespace mlx::core::cu
