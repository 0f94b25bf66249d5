// What a text that stops at lines (source/stops.py) tells check/stops.h: where it is, and where its
// variables lie and what they are. Values are read there, while the thread waits.
#pragma once
#if defined(FR_STOPS)

FR_WATCH bool fr_watch_stop_at(int place);  // whether the current thread stops here
FR_WATCH void fr_watch_show(const char* name, char kind, const volatile void* at, char letter, unsigned size,
                            unsigned lanes, const unsigned* dims, unsigned rank, const volatile void* in,
                            unsigned long bytes);

namespace fr {
namespace stops {

// 'b' bool, 'i' and 'u' integers, 'f' floats, 'g' bfloat, 'c' complex; 's' is what cannot be shown.
template <class T> constexpr char letter() {
  if constexpr (metal::is_same_v<T, bool>) return 'b';
  else if constexpr (metal::is_same_v<T, bfloat>) return 'g';
  else if constexpr (metal::is_same_v<T, half> || metal::is_same_v<T, float> || metal::is_same_v<T, double>) return 'f';
  else if constexpr (metal::is_same_v<T, metal::complex64_t>) return 'c';
  else if constexpr (__is_enum(T)) return 'i';
  else if constexpr (detail::int_v<T>) return T(-1) < T(0) ? 'i' : 'u';
  else return 's';
}

// An element, with the number of its lanes.
template <class T> struct part {
  using type = T;
  static constexpr unsigned lanes = 1;
};
template <class T> struct part<const T> : part<T> {};
template <class T> struct part<volatile T> : part<T> {};
template <class T> struct part<const volatile T> : part<T> {};
template <class T> struct part<atomic<T>> : part<T> {};
template <class T, int N> struct part<vec<T, N>> {
  using type = T;
  static constexpr unsigned lanes = N;
};
template <class T, int N> struct part<packed_vec<T, N>> : part<vec<T, N>> {};

template <class T> struct dims {
  using type = T;
  static constexpr unsigned rank = 0;
  static void fill(unsigned*) {}
};
template <class T, size_t N> struct dims<T[N]> {
  using type = typename dims<T>::type;
  static constexpr unsigned rank = 1 + dims<T>::rank;
  static void fill(unsigned* to) {
    *to = unsigned(N);
    dims<T>::fill(to + 1);
  }
};

// Of functions alone, const changes nothing.
template <class T> inline constexpr bool is_function_v = !metal::is_const_v<const T> && !metal::is_reference_v<T>;

template <class T> constexpr unsigned size_of() {
  if constexpr (metal::is_void_v<T> || is_function_v<T>) return 1;
  else return unsigned(sizeof(T));
}

// Kinds: 'v' a variable, 'p' what a pointer points to, 'r', 'w' and 'm' an element that is read, written
// or both. `in` and `bytes`: the array of the author's in which it must lie; none where that is not known.
template <class T>
inline void show(const char* name, char kind, const volatile void* at, const volatile void* in = nullptr, unsigned long bytes = 0) {
  using E = typename dims<T>::type;
  unsigned sizes[dims<T>::rank + 1];
  dims<T>::fill(sizes);
  using P = part<E>;
  fr_watch_show(name, kind, at, letter<typename P::type>(), size_of<E>(), P::lanes, sizes, dims<T>::rank, in, bytes);
}

template <class T> inline void variable(const char* name, T& v) {
  if constexpr (is_function_v<T>) (void)v, (void)name;
  else if constexpr (metal::is_pointer_v<metal::remove_cv_t<T>>)
    show<metal::remove_pointer_t<metal::remove_cv_t<T>>>(name, 'p', v);
  else show<T>(name, 'v', __builtin_addressof(v));
}

template <class T>
inline void follow(const char* name, char kind, uintptr_t at, const volatile void* in, unsigned long bytes) {
  if constexpr (metal::is_pointer_v<metal::remove_cv_t<T>>) (void)name;  // a row of pointers
  else show<T>(name, kind, reinterpret_cast<const volatile void*>(at), in, bytes);
}
template <class T, class I, class... R>
inline void follow(const char* name, char kind, uintptr_t at, const volatile void* in, unsigned long bytes, I i, R... rest) {
  if constexpr (metal::is_array_v<T>) {
    using E = metal::remove_extent_t<T>;
    follow<E>(name, kind, at + uintptr_t(static_cast<int64_t>(i)) * sizeof(E), in, bytes, rest...);
  }  // else a lane of a vector, which is shown as a whole
}

// The element `base[i]…`, read or written.
template <class B, class I, class... R> inline void element(const char* name, char kind, B&& base, I i, R... rest) {
  using T = metal::remove_reference_t<B>;
  if constexpr (metal::is_array_v<T>) {
    const auto* at = __builtin_addressof(base);
    follow<T>(name, kind, reinterpret_cast<uintptr_t>(at), at, sizeof(T), i, rest...);
  } else if constexpr (metal::is_pointer_v<metal::remove_cv_t<T>>) {
    using E = metal::remove_pointer_t<metal::remove_cv_t<T>>;
    const uintptr_t at = reinterpret_cast<uintptr_t>(base) + uintptr_t(static_cast<int64_t>(i)) * size_of<E>();
    follow<E>(name, kind, at, nullptr, 0ul, rest...);
  }
}

}  // namespace stops
}  // namespace fr

#define FR_STOP_AT(PLACE) ::fr_watch_stop_at(PLACE)
#define FR_STOP_SHOW(NAME) ::fr::stops::variable(#NAME, NAME)
#define FR_STOP_ELEMENT(TEXT, KIND, ...) ::fr::stops::element(TEXT, KIND, __VA_ARGS__)
#define FR_STOP_WAIT() (::fr_watch_waits = true, ::fr::suspend())

#endif
