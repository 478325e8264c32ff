// Quantised results: codes, and scales of rows or of blocks of columns (backends/eager/quantize.py). No gradient passes.
#pragma once

#include "row_norm.h"

namespace kf {

// The arguments of an operator.
struct Quantize {
  at::ScalarType dtype;
  const OptionalTensor& scale;  // none: each row has one, or
  int64_t block;                // each of its blocks of columns, if it is not 0
  bool keeps = true;            // the result in its own dtype, too

  CodeType code() const {
    if (dtype == at::kChar) return CodeType::kInt8;
    return dtype == at::kFloat8_e4m3fn ? CodeType::kFloat8E4m3fn : CodeType::kFloat8E5m2;
  }
};

// The results: contiguous codes, and scales, that of block b of row r at b * rows + r; without elements where one is given.
struct Quantized {
  Tensor values, scales;
  Quantized(const Quantize& quantize, const Tensor& like);
};

// On each device: those of the rows of v, its last dimension, and those of a norm's y, which is defined where it is kept, with
// h as in `ForwardKernel`.
void quantize_cuda(const Tensor& v, const Quantize& quantize, Quantized& to);
void quantized_row_norm_cpu(const ForwardCall& call, const Quantize& quantize, Tensor& y, Tensor& h, Quantized& to);
void quantized_row_norm_cuda(const ForwardCall& call, const Quantize& quantize, Tensor& y, Tensor& h, Quantized& to);

// On CUDA: key and arguments of kernels that make codes, for rows of `cols` columns. One block is a row.
struct Codes codes_of(const Quantize& quantize, int64_t cols);
CodeArgs code_args(const Quantize& quantize, int64_t rows, Quantized& to);

}  // namespace kf
