// How a function of a CUDA unit is started on the CPU: with the launch's buffers, which are arrays
// for its pointers, and for its other parameters where their values lie.
#pragma once
#include "cuda_unit.h"

namespace fr {
namespace on_cpu {

template <class T> FR_QUIET FR_FN T unit_argument(void* buffer) {
  if constexpr (fr_unit::pointer<T>::value) return reinterpret_cast<T>(buffer);
  else return *static_cast<metal::remove_cv_t<T>*>(buffer);
}
template <size_t... I> struct places {};
template <size_t N, size_t... I> struct places_up_to : places_up_to<N - 1, N - 1, I...> {};
template <size_t... I> struct places_up_to<0, I...> { using type = places<I...>; };

template <class... A, size_t... I>
void run_unit_with(void (*f)(A...), const launch* l, uint64_t begin_, uint64_t end, worker* w,
    places<I...>) {
  fiber_groups(l, begin_, end, w, [=](const group& g, unsigned i) FR_QUIET {
    on_cpu::begin(l, g, i);
    f(unit_argument<A>(l->buffers[I])...);
  });
}
template <class... A> void run_unit(void (*f)(A...), const launch* l, uint64_t begin_,
    uint64_t end, worker* w) {
  run_unit_with(f, l, begin_, end, w, typename places_up_to<sizeof...(A)>::type());
}

}  // namespace on_cpu
}  // namespace fr
