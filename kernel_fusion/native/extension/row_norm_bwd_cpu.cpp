// Backward row norms on the CPU: which rows or columns each thread takes, and where partial sums are.
#include <c10/core/CPUAllocator.h>

#include <memory>
#include <vector>

#include "cpu/norm_call.h"

namespace kf {
namespace {

// The stages of a backward call as the kernels take them, and the tensors that they point to. x is the input, if it is not h.
struct StagedBackward {
  OptionalRows x;
  RowsOfStages rows;
  cpu::BackwardStages args;

  StagedBackward(const BackwardCall& call, const Rows& input, Tensor& dresidual)
      : x(call.x, call.num_dims), rows(rows_of(call, call.num_dims)) {
    const auto stages = common(call, rows, call.input.scalar_type());
    void* to = call.wants[3] ? dresidual.data_ptr() : nullptr;
    args = {stages, call.has_residual, x.data(), nullptr, to, x.layout(), cpu_dtype(call.x_dtype)};
    if (call.has_residual) return;
    args.x = input.data();
    args.x_rows = input.layout;
  }
};

// Whether backward has no stages except a residual and its gate, and x and dy have one type.
bool is_nearly_bare(const BackwardCall& c) {
  StageOptions none;
  none.grouped = c.grouped;
  return static_cast<const StageOptions&>(c) == none && !present(c.row()) && c.input.scalar_type() == c.dy.scalar_type() &&
         c.x_dtype == c.input.scalar_type();
}

// Whether the kernel without stages serves the call: a residual then only means that the gradient at h is added to dx.
bool is_bare(const BackwardCall& c) { return is_nearly_bare(c) && !present(c.residual_gate()) && !c.wants[3]; }

// Whether every row has a weight, bias and gate of its own, and all tensors have one type.
bool has_own_parameters(const BackwardCall& c, const Rows& x) {
  const auto type = c.input.scalar_type();
  const auto is_alike = [&](OptionalDtype t) { return t.value_or(type) == type; };
  return c.grouped && groups_of(c).count == x.rows && is_nearly_bare(c) && (present(c.residual_gate()) || !c.wants[3]) &&
         is_alike(dtype_of(c.weight)) && is_alike(dtype_of(c.residual_gate())) && is_alike(c.bias_dtype);
}

constexpr int64_t kVeryFewRows = 16;  // at most this many rows are always shared by columns

// Whether threads share the columns instead of the rows, because rows are few and long. No partial sums then pass from core to
// core. The shape decides it. Unless rows are very few, they must still be in the L3 cache when dx is computed.
bool goes_by_columns(const Rows& x, size_t bytes) {
  constexpr size_t kNear = size_t{4} << 20;
  return cpu::are_long(x.cols) && x.rows <= (bytes <= kNear ? cpu::kFewRows : kVeryFewRows);
}

void backward_by_columns(const cpu::BackwardByColumns& args) {
  const int64_t rows = args.rows, strips = cpu::strips_of(args.cols), elements = rows * cpu::strip_width(args.cols);
  std::vector<cpu::RowSums> sums(strips * rows);
  share(strips, elements, [&](int64_t begin, int64_t end) { cpu::kernels().backward_sums(args, begin, end, sums.data()); });
  if (!args.dx) return;
  for (int64_t i = rows; i < strips * rows; ++i) {  // the first strip's sums become those of the rows
    sums[i % rows].g += sums[i].g;
    sums[i % rows].gx += sums[i].gx;
  }
  share(strips, elements, [&](int64_t begin, int64_t end) { cpu::kernels().backward_dx(args, begin, end, sums.data()); });
}

// The number of rows in a block, which has partial sums of its own. The shape decides it, not the number of threads. There are
// at most 64 blocks, so that partial rows stay a small part of the memory traffic. Sums that will be rounded to fp16 or bf16
// allow larger blocks, of as many elements as are worth waking threads for, because partial rows pass from core to core.
int64_t rows_of_block(int64_t rows, int64_t cols, const std::array<Tensor*, 3>& sums) {
  const auto is_rounded = [](const Tensor* t) { return !t || t->element_size() == 2; };
  const int64_t short_block = std::all_of(sums.begin(), sums.end(), is_rounded) ? 32 : 8;
  const int64_t worth_a_region = ceil_div(rows, std::max<int64_t>(1, rows * cols / kRegion));
  return std::max<int64_t>({8, std::min(worth_a_region, short_block), ceil_div(rows, 64)});
}

// The column sums that are wanted, in order, and the places of dweight, dbias and dgate among them.
struct WantedSums {
  std::array<Tensor*, 3> results{};
  std::array<int64_t, 3> place{-1, -1, -1};
  int64_t count = 0;

  explicit WantedSums(RowNormGradients& to) {
    const std::array<Tensor*, 3> all{&to.dweight, &to.dbias, &to.dgate};
    for (size_t i = 0; i < all.size(); ++i) {
      if (!all[i]->defined()) continue;
      place[i] = count;
      results[count++] = all[i];
    }
  }
};

// Where blocks of rows put their column sums. Usually these are partial rows, which are added up later. If there are many runs
// and each is a single block, the sums are made in a thread's own memory and rounded to the results at once.
struct BlockSums {
  const WantedSums& wanted;
  const at::ScalarType acc;
  const int64_t blocks, cols;
  const bool at_once;
  const int64_t row_bytes = cols * static_cast<int64_t>(c10::elementSize(acc));
  const at::DataPtr partials = c10::GetCPUAllocator()->allocate(at_once ? 0 : wanted.count * blocks * row_bytes);

  void* partial(int64_t gradient, int64_t block) const {
    return static_cast<char*>(partials.get()) + (gradient * blocks + block) * row_bytes;
  }
  Tensor& result(int64_t gradient) const { return *wanted.results[gradient]; }
  void* result_of(int64_t gradient, int64_t run) const {
    Tensor& t = result(gradient);
    return static_cast<char*>(t.data_ptr()) + run * cols * static_cast<int64_t>(t.element_size());
  }
  void* of(int64_t gradient, int64_t block, int64_t run, char* own) const {
    if (!at_once) return partial(gradient, block);
    return result(gradient).scalar_type() == acc ? result_of(gradient, run) : own + gradient * row_bytes;
  }
  void round(int64_t run, const char* own, bool interleaved) const {
    for (int64_t gradient = 0; gradient < wanted.count; ++gradient)
      if (const auto type = result(gradient).scalar_type(); type != acc)
        cpu::kernels().round_row(cpu_dtype(acc), own + gradient * row_bytes, cols, cpu_dtype(type), result_of(gradient, run),
                                 interleaved);
  }
  void add_up(int64_t runs) const {
    const int64_t of_run = blocks / runs;
    sum_rows(wanted.count * runs, of_run, cols, 1.0, [&](int64_t output) {
      const int64_t gradient = output / runs, run = output % runs;
      return RowsToSum{partial(gradient, run * of_run), acc, result(gradient), run * cols};
    });
  }
};

// Computes dx, and the column sums from the partial sums of blocks.
void backward_by_blocks(const BackwardCall& call, const cpu::Backward& args, const cpu::BackwardStages* staged, const Rows& x,
                        const Runs& runs, const Given& weight, RowNormGradients& to) {
  const auto acc = acc_dtype(call.input);
  const Given bias(staged && follows(call, call) ? call.bias : kAbsent, call.num_dims, runs, 0.0, false);
  const Given gate(call.residual_gate(), call.num_dims, runs, 0.0, false);
  const WantedSums wanted(to);
  const int64_t samples = x.rows / (runs.count * runs.together),
                cols = x.cols * runs.together;  // the samples of a run, and their columns
  const int64_t block_rows = std::min(samples, rows_of_block(samples, cols, wanted.results));
  const int64_t blocks_of_run = ceil_div(samples, block_rows), blocks = runs.count * blocks_of_run;
  const int64_t block_elements = block_rows * cols;
  const BlockSums sums{wanted, acc, blocks, cols, runs.count > 1 && blocks_of_run == 1};
  const auto is_bf16 = [](const Tensor& t) { return !t.defined() || t.scalar_type() == at::kBFloat16; };
  const bool interleaved = sums.at_once && !staged && is_bf16(call.input) && is_bf16(to.dweight) && is_bf16(to.dbias);
  share_by(blocks, block_elements, step_of(block_elements), [&] {
    const int64_t totals = block_rows > 64 && wanted.count ? (call.wants[4] ? 3 : 2) * cols : 0,
                  own = sums.at_once ? wanted.count * sums.row_bytes : 0;
    return [&, totals, w = Prepared(weight, acc), b = Prepared(bias, acc), g = Prepared(gate, acc),
            room = std::unique_ptr<double[]>(new double[totals]),
            own_sums = std::unique_ptr<char[]>(new char[own])](int64_t begin, int64_t end) mutable {
      cpu::Backward mine = args;
      mine.totals = totals ? room.get() : nullptr;
      mine.restores = !interleaved;
      cpu::BackwardStages stages{};
      if (staged) stages = *staged;
      for (int64_t block = begin; block < end; ++block) {
        const int64_t run = block / blocks_of_run, first = run * samples + block % blocks_of_run * block_rows;
        const int64_t last = std::min((run + 1) * samples, first + block_rows);
        mine.weight = w.of(run).data;
        stages.bias = b.of(run).data;
        stages.residual_gate = g.of(run).data;
        const auto to_sum = [&](size_t i) {
          return wanted.place[i] < 0 ? nullptr : sums.of(wanted.place[i], block, run, own_sums.get());
        };
        mine.dweight = to_sum(0);
        mine.dbias = to_sum(1);
        mine.dgate = to_sum(2);
        if (staged) cpu::kernels().backward_staged(mine, stages, first, last);
        else cpu::kernels().backward(mine, first, last);
        if (sums.at_once) sums.round(run, own_sums.get(), interleaved);
      }
    };
  });
  if (wanted.count > 0 && !sums.at_once) sums.add_up(runs.count);
}

// Computes dx, and the gradients of parameters that no rows share.
void backward_by_own_rows(const BackwardCall& call, const cpu::Backward& args, const Rows& x, const Runs& runs,
                          const Given& weight, RowNormGradients& to) {
  const Given gate(call.residual_gate(), call.num_dims, runs, 0.0, false);
  const OptionalRows u(call.x, call.num_dims);
  const cpu::OwnParameters own{weight.first.data,
                               gate.first.data,
                               weight.pitch,
                               gate.pitch,
                               call.weight_offset,
                               memory_or_null(to.dweight),
                               memory_or_null(to.dbias),
                               memory_or_null(to.dgate),
                               call.wants[3] ? memory_or_null(to.dresidual) : nullptr,
                               u.data(),
                               u.layout()};
  share(x.rows, x.cols, [&](int64_t begin, int64_t end) { cpu::kernels().backward_own(args, own, begin, end); });
}

}  // namespace

void backward_cpu(const BackwardCall& call, RowNormGradients& to) {
  const Rows x(call.input, call.num_dims), dy(call.dy, call.num_dims);
  const auto x_type = cpu_dtype(call.input.scalar_type()), dy_type = cpu_dtype(call.dy.scalar_type());
  const Runs runs(call, x.rows);
  const bool bare = is_bare(call) && runs.together == 1;
  const bool by_columns = bare && runs.count == 1 && goes_by_columns(x, call.input.nbytes());
  const OptionalRows dh(call.dh, call.num_dims);
  const Given weight(call.weight, call.num_dims, runs, call.weight_offset, bare && x_type == Dtype::kBFloat16);
  const Tensor stats = call.stats.contiguous();
  const Stats s(stats, x.rows, call.rms);
  const size_t moved = bytes_of(call.input) + bytes_of(call.dy) + bytes_of(to.dx) + bytes_of(to.dresidual) + bytes_of(call.dh) +
                       bytes_of(call.x) + bytes_of(call.row());
  // This is judged by the caches of one thread; judging by those of all threads was slower.
  const bool streams = past_caches(moved), is_far = !by_columns && nearly_past_caches(moved);
  cpu::Backward args{dy.data(),   x.data(), s.mean, s.rstd,    nullptr,  call.wants[0] ? to.dx.data_ptr() : nullptr,
                     nullptr,     nullptr,  x.cols, dh.data(), x.layout, dy.layout,
                     dh.layout(), call.rms, x_type, dy_type,   streams,  is_far};
  std::optional<StagedBackward> staged;
  args.groups = runs.together;
  count(Counter::kCpuBackward);
  for (const Tensor* result : to.all()) prefer_huge_pages(*result);
  if (has_own_parameters(call, x)) return backward_by_own_rows(call, args, x, runs, weight, to);
  if (!bare) staged.emplace(call, x, to.dresidual);
  if (by_columns) {
    args.dweight = call.wants[1] ? to.dweight.data_ptr() : nullptr;
    args.dbias = call.wants[2] ? to.dbias.data_ptr() : nullptr;
    const auto type = [](const Tensor& t) { return t.defined() ? cpu_dtype(t.scalar_type()) : Dtype::kFloat; };
    return backward_by_columns({args, x.rows, weight.first, type(to.dweight), type(to.dbias)});
  }
  backward_by_blocks(call, args, staged ? &staged->args : nullptr, x, runs, weight, to);
}

}  // namespace kf
