// Key and arguments of kernels that make codes.
#pragma once

#include "cuda/launcher.h"
#include "quantize.h"
#include "shared/row_norm_args.h"

namespace kf {

// For rows of `cols` columns. One block is a row.
Codes codes_of(const Quantize& quantize, int64_t cols);
CodeArgs code_args(const Quantize& quantize, int64_t rows, Quantized& to);

}  // namespace kf
