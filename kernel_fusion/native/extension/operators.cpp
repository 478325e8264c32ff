// What the operators of all families share: checks, the geometry of rows, and counters of kernels.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <bit>

#include "operators.h"

namespace kf {

void check_memory(const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return;
  int64_t elements = t.numel();
  if (!t.is_contiguous()) {
    elements = 1;
    for (int64_t d = 0; d < t.dim(); ++d) elements += (t.size(d) - 1) * t.stride(d);
  }
  const size_t needed = static_cast<size_t>(t.storage_offset() + elements) * t.element_size(), held = t.storage().nbytes();
  if (needed <= held) [[likely]]
    return;
  // PyTorch's words for missing and for too small memory.
  TORCH_CHECK(held != 0, "The tensor has a non-zero number of elements, but its data is not allocated yet.");
  TORCH_CHECK(false, "sizes ", t.sizes(), ", strides ", t.strides(), ", storage offset ", t.storage_offset(), ", and itemsize ",
              t.element_size(), " requiring a storage size of ", needed, " are out of bounds for storage of size ", held);
}

bool readable(const Tensor& t) {
  return supported(t.scalar_type()) && t.layout() == at::kStrided && (!t.is_cuda() || cuda_enabled(t.device().index()));
}

bool is_seed(const OptionalTensor& t, const Tensor& input) {
  return present(t) && t->scalar_type() == at::kLong && t->dim() == 1 && t->sym_size(0) == 1 && t->device() == input.device();
}

Dropout dropout_of(double p, const OptionalTensor& seed) {
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, "kernel_fusion: `dropout_p` must be a probability between 0 and 1, got ", p);
  return present(seed) ? Dropout::of(p) : Dropout{};
}

Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }

Tensor allocate_like(const Tensor& t, std::optional<at::MemoryFormat> format) { return at::empty_like(t, {}, format); }

std::vector<int64_t> broadcast_shape(at::IntArrayRef a, at::IntArrayRef b) { return at::infer_size(a, b); }

std::vector<int64_t> dense_strides(const Tensor& t) { return at::infer_dense_strides(t.sizes(), t.strides()); }

int alignment_of(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p) | 16;
  return 1 << std::countr_zero(address);
}

namespace {

std::atomic<int64_t> counts[static_cast<int>(Counter::kCudaLaunch) + 1];

bool inner_contiguous(const Tensor& t, int64_t num_dims) {
  int64_t expected = 1;
  for (int64_t i = t.dim() - 1; i >= t.dim() - num_dims; --i) {
    if (t.size(i) != 1 && t.stride(i) != expected) return false;
    expected *= t.size(i);
  }
  return true;
}

// Merges the leading dimensions into at most three levels of size and stride, innermost first. Returns the number of levels, or
// -1 if three are not enough.
int collapse(const Tensor& t, int64_t leading, int64_t (&size)[3], int64_t (&stride)[3]) {
  int levels = 0;
  for (int64_t i = leading - 1; i >= 0; --i) {
    if (t.size(i) == 1) continue;
    if (levels > 0 && t.stride(i) == size[levels - 1] * stride[levels - 1]) {
      size[levels - 1] *= t.size(i);
    } else if (levels < 3) {
      size[levels] = t.size(i);
      stride[levels++] = t.stride(i);
    } else {
      return -1;
    }
  }
  return levels;
}

}  // namespace

Rows::Rows(const Tensor& t, int64_t num_dims) : tensor(t) {
  const int64_t leading = t.dim() - num_dims;
  cols = 1;
  for (int64_t i = leading; i < t.dim(); ++i) cols *= t.size(i);
  rows = cols ? t.numel() / cols : 0;
  layout = {1, std::max<int64_t>(rows, 1), {0, 0, cols}};
  strided = false;
  if (!t.is_contiguous()) {
    int64_t size[3] = {1, 1, 1}, stride[3] = {cols, 0, 0};
    const int levels = inner_contiguous(t, num_dims) ? collapse(t, leading, size, stride) : -1;
    if (levels < 0) {
      tensor = t.contiguous();
    } else {
      layout = {size[1], size[0], {stride[2], stride[1], stride[0]}};
      strided = levels > 1;
    }
  }
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  uintptr_t bits = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  // The strides count for a single row too, which must not need a kernel of its own.
  for (const auto s : layout.stride) bits |= static_cast<uintptr_t>(s * bytes);
  alignment = alignment_of(reinterpret_cast<const void*>(bits));
}

void count(Counter counter) { counts[static_cast<int>(counter)].fetch_add(1, std::memory_order_relaxed); }

}  // namespace kf

// How often kernels of a kind ran. Python calls this through ctypes.
extern "C" __attribute__((visibility("default"))) int64_t kf_count(int counter) { return kf::counts[counter].load(); }
