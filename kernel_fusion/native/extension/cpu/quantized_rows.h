// Rows that one thread computes and quantises before they leave its caches.
#pragma once

#include <memory>

#include "cpu/kernels.h"
#include "cpu/tasks.h"
#include "extension/quantize.h"

namespace kf {

cpu::Quantization quantization(const Quantize& quantize, at::ScalarType type, int64_t rows, int64_t cols, Quantized& to);

// Quantises rows that compute(out, begin, end), made by make() in every thread, writes to y if that is kept, else to
// memory that is used again.
template <class Make> void quantize_rows_of(const cpu::Quantization& q, Tensor* y, Make&& make) {
  constexpr int64_t kNear = 65536;  // bytes: of the L2 cache
  const int64_t size = q.type == Dtype::kDouble ? 8 : q.type == Dtype::kFloat ? 4 : 2, row_bytes = q.cols * size;
  const int64_t together = std::max<int64_t>(1, kNear / row_bytes);
  const RowLayout layout{1, q.rows, {0, 0, q.cols}};
  count(Counter::kCpuForward);
  share_by(q.rows, q.cols, std::max(together, step_of(q.cols)), [&] {
    return [&, compute = make(), room = std::unique_ptr<char[]>(new char[y ? 0 : together * row_bytes])](int64_t begin,
                                                                                                         int64_t end) mutable {
      for (int64_t first = begin; first < end; first += together) {
        const int64_t last = std::min(end, first + together);
        char* out = y ? static_cast<char*>(y->mutable_data_ptr()) + first * row_bytes : room.get();
        compute(out, first, last);
        cpu::kernels().quantize_rows(q, out, layout, first, last, first);
      }
    };
  });
}

}  // namespace kf
