// What the operators of all families share: checks of tensors, the geometry of rows, allocation, and counters of kernels.
// Files with kernels include no headers of the dispatcher or of ATen's operators, because those take seconds to compile.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string_view>
#include <vector>

#include "stages.h"
#include "shared/names.h"
#include "shared/row_norm_args.h"

namespace kf {

struct Backend;  // backends.h

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;

inline at::ScalarType acc_dtype(const Tensor& input) { return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// The element types that kernels know.
inline bool supported(at::ScalarType t) { return t == at::kHalf || t == at::kBFloat16 || t == at::kFloat || t == at::kDouble; }

// Whether tensors of these two types may be mixed: fp64 with fp64, the other three types with each other.
inline bool mixes(at::ScalarType a, at::ScalarType b) { return supported(b) && (a == at::kDouble) == (b == at::kDouble); }

inline Dtype cpu_dtype(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return Dtype::kHalf;
    case at::kBFloat16: return Dtype::kBFloat16;
    case at::kFloat: return Dtype::kFloat;
    case at::kDouble: return Dtype::kDouble;
    default: TORCH_CHECK_TYPE(false, "kernel_fusion: kernels know float16, bfloat16, float32 and float64, not ", type);
  }
}
inline Dtype dtype_or_absent(const OptionalDtype& type) { return type ? cpu_dtype(*type) : Dtype::kAbsent; }

inline const OptionalTensor kAbsent;
inline bool present(const OptionalTensor& t) { return t.has_value() && t->defined(); }
template <class T> T if_present(const OptionalTensor& t, T value) { return present(t) ? value : T{}; }
inline OptionalDtype dtype_of(const OptionalTensor& t) { return present(t) ? OptionalDtype(t->scalar_type()) : std::nullopt; }

// Decisions on sizes, some of which are symbols while a program is traced. A symbol may stand for a number that follows from
// data, and then nobody knows yet whether the condition holds: what takes a way of its own asks `known`. What refuses a call
// asks `possible`, and the operators below autograd check real sizes again.
inline bool known(const c10::SymBool& condition) { return TORCH_GUARD_OR_FALSE(condition); }
inline bool possible(const c10::SymBool& condition) { return TORCH_GUARD_OR_TRUE(condition); }
inline bool one(const c10::SymInt& size) { return known(size.sym_eq(1)); }
inline bool one(int64_t size) { return size == 1; }
inline bool alike(const c10::SymInt& a, const c10::SymInt& b) { return possible(a.sym_eq(b)); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline const void* data_or_null(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }
inline void* memory_or_null(const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }

// Raises unless the storage of `t` is as large as its sizes and strides say. Libraries free and refill the storage of
// parameters and activations, so this must be called before a kernel or a copy reads a caller's tensor.
void check_memory(const Tensor& t);
inline void check_memory(const OptionalTensor& t) {
  if (t) check_memory(*t);
}
inline constexpr auto check_all_memory = [](const auto&... tensors) { (check_memory(tensors), ...); };

// Whether the CUDA kernels serve a device (cuda/launcher.cpp).
bool cuda_enabled(int device);

// Whether this is a rehearsal, in which CPU tensors stand for tensors on a GPU. Calls then also look for the CUDA kernels that
// they would launch there.
bool rehearsing();
inline bool as_on_cuda(const Tensor& t) { return t.is_cuda() || rehearsing(); }

// Whether `t` is a floating-point tensor that the kernels of its device can read.
bool readable(const Tensor& t);

// Whether `t` can be the seed for dropout of `input`: one int64 on its device.
bool is_seed(const OptionalTensor& t, const Tensor& input);

// The code of `name`, its position among `names`. Raises an error about `what` if there is no such name.
template <class T, size_t n> T named(const std::string_view (&names)[n], std::string_view name, std::string_view what) {
  const int32_t code = code_in(names, name);
  TORCH_CHECK_VALUE(code >= 0, "kernel_fusion: no ", what, " is called '", name, "'");
  return static_cast<T>(code);
}
inline int32_t code_of(std::string_view activation) { return named<int32_t>(kActivationNames, activation, "activation"); }

// The dropout that an operator's arguments ask for; there is none without a seed. Raises unless p is a probability.
Dropout dropout_of(double p, const OptionalTensor& seed);

// A tensor as rows of contiguous elements. `tensor` is the caller's, or a copy if the normalised dimensions are not contiguous
// or the leading ones need more than three strides.
struct Rows {
  Tensor tensor;
  int64_t rows, cols;
  RowLayout layout;
  bool strided;   // the rows have more than one stride
  int alignment;  // the alignment of every row in bytes, at most 16

  Rows(const Tensor& t, int64_t num_dims);
  const void* data() const { return tensor.const_data_ptr(); }
};

// The largest power of two, at most 16, that divides the address.
int alignment_of(const void* p);

// The same as at::empty and at::empty_like.
Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options);
Tensor allocate_like(const Tensor& t, std::optional<at::MemoryFormat> format = std::nullopt);

// The same as at::infer_size, and the strides that at::empty_like(t) would have.
std::vector<int64_t> broadcast_shape(at::IntArrayRef a, at::IntArrayRef b);
std::vector<int64_t> dense_strides(const Tensor& t);

// A list of types.
template <class... T> struct Types {
  static constexpr size_t kCount = sizeof...(T);
};

// How often each kind of kernel ran in this process; tests compare it, so that none passes through a fallback.
void count(Counter counter);

}  // namespace kf
