// What each kernel is compiled for: the fields of a KernelRequest. The names and their order are mirrored in
// backends/cuda/requests.py, and a test compares them. Dtypes are codes, -1 where a tensor is absent; alignments are in bytes,
// at most 16.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "cpu/dtype.h"

namespace kf {

// The position in core/spec.py's DTYPES, which has the order of cpu::Dtype, or -1.
inline int32_t dtype_code(const std::optional<at::ScalarType>& type) {
  return type ? static_cast<int32_t>(cpu_dtype(*type)) : -1;
}

struct RowNormFields {
  int32_t cols;
  int32_t rms;
  int32_t x, y, weight, bias;  // y is dy in backward
  int32_t flags;               // Flag below
  int32_t align_x, align_y, align_weight, align_dx;
  int32_t residual = -1;
  int32_t pre_activation, activation;  // positions in KF_ACTIVATIONS
  int32_t align_residual = 16;         // in backward that of dh
  int32_t align_pre_x = 16;

  enum Flag : int32_t {
    kStats = 1, kOffset = 2, kDX = 4, kDWeight = 8, kDBias = 16, kStridedX = 32, kStridedY = 64,
    kDropout = 128, kDH = 256, kDResidual = 512, kStridedResidual = 1024, kStridedPreX = 2048
  };
};

struct SumPartialsFields {
  int32_t cols;
  int32_t acc;
  int32_t first, second;  // dtypes of the sums
};

// Both directions of pointwise. The five operands are y (or da), db, dy, a, b.
struct PointwiseFields {
  int32_t combine, activation;
  int32_t dropout;  // Dropout of kernels/pointwise_chain.cuh
  int32_t dims;     // of operands that are addressed by coordinates
  int32_t vec;      // elements per vector
  int32_t lanes;    // threads along the columns, where db is summed over rows; else 0
  int32_t type[5], mode[5], align[5];  // modes are those of kernels/operands.cuh

  static constexpr int32_t kBits = 4;  // the type of bits: of the second operand in forward, of a in backward
};

struct ReduceFields {
  int32_t map;
  int32_t in, out, acc;
  int32_t lanes;     // threads along the columns, where columns are summed; 0 where rows are
  int32_t threads;   // of a block, where columns are summed
  int32_t capacity;  // of rows: vectors per chunk, rounded up to a power of two
  int32_t vec;       // elements per vector
  int32_t contiguous;
  int32_t chunked;   // rows have several chunks
  int32_t nested;    // rows are addressed by two coordinates
  int32_t align, align_out;
};

struct SoftmaxFields {
  int32_t x, mask;   // kBooleanMask: a boolean mask
  int32_t causal;
  int32_t vec;       // elements per vector
  int32_t capacity;  // vectors per row, rounded up to 2^k or 3 * 2^k
  int32_t mask_repeats;  // one element of the mask for a whole row
  int32_t strided_x, strided_mask;
  int32_t align_x, align_mask;

  static constexpr int32_t kBooleanMask = 4;
};

struct SoftmaxBwdFields {
  int32_t dy, y, dx;
  int32_t leaves_out;     // dx is 0 where y is
  int32_t vec, capacity;  // as above
  int32_t strided_dy, strided_y;
  int32_t align_dy, align_y;
};

}  // namespace kf
