// The rotary embedding on the CPU: threads share the tokens.
#include "cpu/kernels.h"
#include "cpu/tasks.h"
#include "rotary.h"

namespace kf {

namespace {

cpu::HeadStrides strides_of(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

// The positions of tokens, contiguous. Raises if one is not the number of a row of the table.
Tensor checked_positions(const OptionalTensor& given, int64_t rows) {
  if (!present(given)) return {};
  const Tensor positions = given->to(at::kLong).contiguous();
  const auto* p = positions.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < positions.numel(); ++i)
    TORCH_CHECK_INDEX(p[i] >= 0 && p[i] < rows, "kernel_fusion: `positions` must be rows of `cos`, 0 to ", rows - 1, ", got ",
                      p[i]);
  return positions;
}

// The arguments of the kernels of both directions, and the tensors that they point to.
struct PreparedRotary {
  Tensor x[2], dy[2], weight[2], cos, sin, positions;
  cpu::Rotary args{};

  // Backward without a norm gets no query and key, only their gradients.
  template <class Call> PreparedRotary(const Call& c, const Tensor& query) : cos(c.cos.contiguous()), sin(c.sin.contiguous()) {
    positions = checked_positions(c.positions, cos.size(1));
    args.cos = bytes(cos);
    args.sin = bytes(sin);
    args.table_example = cos.size(0) == 1 ? 0 : cos.stride(0);
    args.positions = positions.defined() ? positions.const_data_ptr<int64_t>() : nullptr;
    args.position_example = positions.defined() && positions.size(0) > 1 ? positions.stride(0) : 0;
    args.tokens = query.size(1);
    args.cols = query.size(3);
    args.half = cos.size(2);
    args.eps = c.eps.value_or(0);
    args.has_norm = c.eps.has_value();
    args.interleaved = c.interleaved;
    args.type = cpu_dtype(query.scalar_type());
    args.table_type = cpu_dtype(cos.scalar_type());
    const bool narrow = query.element_size() == 2;
    args.rounds_normalized = narrow && c.rounding == "hf";
    const OptionalTensor* weights[] = {&c.query_weight, &c.key_weight};
    for (int i = 0; i < 2; ++i) {
      auto& of = args.of[i];
      // As `rounds_to` in core/rotary.py.
      of.rounds_product =
          args.rounds_normalized && (!present(*weights[i]) || (*weights[i])->scalar_type() == query.scalar_type());
      of.rounds_rotation = of.rounds_product && cos.scalar_type() == query.scalar_type();
      if (!present(*weights[i])) continue;
      weight[i] = (*weights[i])->to(acc_dtype(query)).contiguous();
      if (c.weight_offset != 0) weight[i] = weight[i].add(c.weight_offset);
      of.weight = weight[i].const_data_ptr();
    }
  }

  void read(int i, const Tensor& given) {
    x[i] = with_dense_columns(given);
    args.of[i].x = bytes(x[i]);
    args.of[i].x_rows = strides_of(x[i]);
    args.of[i].count = x[i].size(2);
  }

  void read_gradient(int i, const Tensor& given, at::ScalarType type) {
    dy[i] = with_dense_columns(given.to(type));
    args.of[i].dy = bytes(dy[i]);
    args.of[i].dy_rows = strides_of(dy[i]);
    args.of[i].count = dy[i].size(2);
  }

  void write(int i, const Tensor& result) {
    if (!result.defined()) return;
    prefer_huge_pages(result);
    args.of[i].result = static_cast<char*>(result.data_ptr());
    args.of[i].result_rows = strides_of(result);
  }

  int64_t elements_of_token() const { return (args.of[0].count + args.of[1].count) * args.cols; }
};

}  // namespace

void rotary_cpu(const RotaryCall& c, Tensor& query, Tensor& key) {
  PreparedRotary p(c, c.query);
  p.read(0, c.query);
  p.write(0, query);
  if (key.defined()) {
    p.read(1, *c.key);
    p.write(1, key);
  }
  count(Counter::kCpuForward);
  share(query.size(0) * query.size(1), p.elements_of_token(),
        [&](int64_t begin, int64_t end) { cpu::kernels().rotary(p.args, begin, end); });
}

void rotary_bwd_cpu(const RotaryBwdCall& c, RotaryGradients& gradients) {
  auto& [dquery, dkey, dquery_weight, dkey_weight] = gradients;
  const Tensor& query = c.eps ? *c.query : c.dy;
  PreparedRotary p(c, query);
  const OptionalTensor dy[] = {c.dy, c.dy_key}, *x[] = {&c.query, &c.key};
  const Tensor* dx[] = {&dquery, &dkey};
  for (int i = 0; i < 2; ++i) {
    if (!present(dy[i])) continue;
    if (c.eps) p.read(i, **x[i]);
    p.read_gradient(i, *dy[i], query.scalar_type());
    p.write(i, *dx[i]);
  }
  count(Counter::kCpuBackward);
  const int64_t tokens = query.size(0) * query.size(1), cols = p.args.cols;
  Tensor* dweights[] = {&dquery_weight, &dkey_weight};
  if (!dquery_weight.defined() && !dkey_weight.defined())
    return share(tokens, p.elements_of_token(),
                 [&](int64_t begin, int64_t end) { cpu::kernels().rotary_bwd(p.args, begin, end, {nullptr, nullptr}); });
  // The sums of blocks of tokens. The number of tokens alone decides the blocks, so no bit depends on the number of threads.
  constexpr int64_t kMostBlocks = 128;
  const int64_t block = ceil_div(tokens, kMostBlocks), blocks = ceil_div(tokens, block);
  const Tensor partials = allocate({2, blocks, cols}, query.options().dtype(at::kDouble)).zero_();
  double* const sums = partials.data_ptr<double>();
  const auto row = [&](int which, int64_t i) {
    return dweights[which]->defined() ? sums + (which * blocks + i) * cols : nullptr;
  };
  share_by(blocks, block * p.elements_of_token(), 1, [&] {
    return [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        cpu::kernels().rotary_bwd(p.args, i * block, std::min(tokens, (i + 1) * block), {row(0, i), row(1, i)});
    };
  });
  for (int which = 0; which < 2; ++which)
    if (dweights[which]->defined())
      sum_rows(1, blocks, cols, 1.0, [&](int64_t) { return RowsToSum{row(which, 0), at::kDouble, *dweights[which]}; });
}

}  // namespace kf
