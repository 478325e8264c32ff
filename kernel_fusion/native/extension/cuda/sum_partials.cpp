#include "cuda/sum_partials.h"

#include <ATen/ops/empty.h>

#include "shared/row_norm_args.h"

namespace kf {

PartialRows::PartialRows(const at::Tensor& like, int64_t count, int64_t cols, int64_t sums)
    : count(count), cols(cols), pitch(ceil_div(cols, kPartialCols) * kPartialCols),
      tensor(at::empty({sums, count, pitch},
                       like.options().dtype(like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat))) {}

void sum_partials(const PartialRows& partials, at::Tensor* first, at::Tensor* second, driver::Stream stream, bool any,
                  int from) {
  const auto type = [](const at::Tensor* t) { return t ? cpu_dtype(t->scalar_type()) : Dtype::kAbsent; };
  const SumPartialsSpec spec{any ? 0 : static_cast<int>(partials.cols), cpu_dtype(partials.tensor.scalar_type()), type(first),
                             type(second)};
  const auto& kernel = find_kernel({partials.tensor.device(), spec, Access{}}, stream);
  const SumPartialsArgs args{{partials.data(from), second ? partials.data(from + 1) : nullptr},
                             {first ? first->data_ptr() : nullptr, second ? second->data_ptr() : nullptr},
                             partials.count,
                             partials.pitch,
                             partials.cols};
  launch(kernel, kernel.grid(partials.cols), 2, stream, &args);
}

}  // namespace kf
