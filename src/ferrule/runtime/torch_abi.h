/* What of torch's stable C ABI is used, restated: the headers that torch ships are C++.
 *
 * torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h declare it; a test includes
 * them beside this file, and a function of C has one type.
 */
#ifndef FERRULE_TORCH_ABI_H
#define FERRULE_TORCH_ABI_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An argument or result in 8 bytes: a tensor's handle, an int64, the bits of a double, a bool in the
 * lowest byte; of what is optional, NULL or the address of such a word. */
typedef uint64_t SIV;
typedef struct AtenTensorOpaque* TH;
typedef struct TorchLibraryOpaque* LH;
typedef int32_t (*fr_dtype_code)(void);

/* All but those that return a code return 0, or something else after an error. */
int32_t aoti_torch_library_init_fragment(const char* ns, const char* file, uint32_t line, LH* ret);
int32_t aoti_torch_library_init_impl(const char* ns, const char* key, const char* file,
                                     uint32_t line, LH* ret);
int32_t aoti_torch_library_def(LH library, const char* schema);
int32_t aoti_torch_library_impl(LH library, const char* name,
                                void (*call)(SIV*, uint64_t inputs, uint64_t outputs));
int32_t aoti_torch_is_defined(TH tensor, bool* ret);
int32_t aoti_torch_get_sizes(TH tensor, int64_t** ret);
int32_t aoti_torch_get_strides(TH tensor, int64_t** ret);
int32_t aoti_torch_get_dim(TH tensor, int64_t* ret);
int32_t aoti_torch_get_dtype(TH tensor, int32_t* ret);
int32_t aoti_torch_get_data_ptr(TH tensor, void** ret);
int32_t aoti_torch_get_device_type(TH tensor, int32_t* ret);
int32_t aoti_torch_get_device_index(TH tensor, int32_t* ret);
int32_t aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                 int32_t dtype, int32_t device_type, int32_t device, TH* ret);
int32_t aoti_torch_copy_(TH self, TH source, int32_t non_blocking);
int32_t aoti_torch_delete_tensor_object(TH tensor);
int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_device_type_cuda(void);
int32_t aoti_torch_dtype_bool(void), aoti_torch_dtype_uint8(void), aoti_torch_dtype_uint16(void);
int32_t aoti_torch_dtype_uint32(void), aoti_torch_dtype_uint64(void), aoti_torch_dtype_int8(void);
int32_t aoti_torch_dtype_int16(void), aoti_torch_dtype_int32(void), aoti_torch_dtype_int64(void);
int32_t aoti_torch_dtype_float16(void), aoti_torch_dtype_bfloat16(void);
int32_t aoti_torch_dtype_float32(void), aoti_torch_dtype_float64(void);
int32_t aoti_torch_dtype_complex64(void), aoti_torch_dtype_float8_e4m3fn(void);
int32_t aoti_torch_dtype_float8_e5m2(void), aoti_torch_dtype_float8_e8m0fnu(void);
void aoti_torch_check(bool condition, const char* function, const char* file, uint32_t line,
                      const char* message); /* throws a c10::Error where it is false */

void _ZdlPv(void* memory); /* C++'s operator delete */

#ifdef __cplusplus
}
#endif

/* The functions that calls of ops need, by their names without what they have in common. A library that is linked
 * with torch has their addresses, another one looks them up. */
#define TORCH_FUNCTIONS(F)                                                                            \
  F(library_init_impl) F(library_impl) F(is_defined) F(get_sizes) F(get_strides) F(get_dim) F(get_dtype) \
  F(get_data_ptr) F(get_device_type) F(get_device_index) F(empty_strided) F(copy_) F(delete_tensor_object) F(check)
#define TORCH_MEMBER(NAME) __typeof__(aoti_torch_##NAME)* NAME;
typedef struct {
  TORCH_FUNCTIONS(TORCH_MEMBER)
  void (*free_word)(void* memory); /* _ZdlPv */
} torch_functions;
#undef TORCH_MEMBER

#endif
