// The CPU operators: which rows each thread takes, and where partial sums live.
#include <c10/core/CPUAllocator.h>

#include <memory>
#include <new>
#include <vector>

#include "backends.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/quantized_rows.h"
#include "cpu/tasks.h"

namespace kf {
namespace {

// How groups of rows are taken: those of neighbouring rows one after the other, as runs, each by kernels that know one weight;
// others, rows at equal distances, together, by a kernel that knows them all.
struct Runs {
  int64_t count = 1, together = 1;  // runs; groups in each

  template <class Call> Runs(const Call& call, int64_t rows) {
    const Groups groups = groups_of(call);
    (groups.inner > 1 || groups.count == rows ? count : together) = groups.count;
  }
};

// weight, bias or the residual's gate as it is given: of one run side by side.
struct Given {
  Given(const OptionalTensor& t, int64_t num_dims, const Runs& runs, double offset, bool interleaved) {
    if (!present(t)) return;
    const GroupRows rows(t, num_dims, runs.count > 1);
    tensor = rows.tensor;
    size = rows.tensor.numel() / runs.count;
    pitch = rows.pitch * static_cast<int64_t>(tensor.element_size());
    first = {tensor.const_data_ptr(), offset, cpu_dtype(tensor.scalar_type()), interleaved};
  }
  cpu::Parameter of(int64_t run) const {
    cpu::Parameter parameter = first;
    if (parameter.data) parameter.data = static_cast<const char*>(parameter.data) + run * pitch;
    return parameter;
  }
  Tensor tensor;
  int64_t size = 0, pitch = 0;  // in elements; in bytes
  cpu::Parameter first{};       // absent
};

// The parameter of a run as rows take it: as given, made here or, `later`, by the kernels. Every thread makes its own, because
// another core's would have to come from that core's caches. Its memory does not come from PyTorch's allocator of tensors,
// which anyone may replace by one with a lock.
class Prepared {
 public:
  Prepared(const Given& given, at::ScalarType acc, bool later = false)
      : given(given), acc(cpu_dtype(acc)), makes(!later && given.first.data && !given.first.as_is(this->acc)) {
    if (makes) made.reset(::operator new(given.size * c10::elementSize(acc), kLine));
    go_to(0);
  }
  const cpu::Parameter& of(int64_t wanted) {
    if (wanted != run) go_to(wanted);
    return parameter;
  }

 private:
  const Given& given;
  Dtype acc;
  bool makes;
  int64_t run = 0;
  cpu::Parameter parameter;

  void go_to(int64_t wanted) {
    run = wanted;
    parameter = given.of(run);
    if (!makes) return;
    cpu::kernels().prepare(parameter, given.size, made.get());
    parameter = {made.get(), 0.0, acc, false};
  }
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(void* p) const { ::operator delete(p, kLine); }
  };
  std::unique_ptr<void, Free> made;
};

size_t bytes_of(const Tensor& t) { return t.defined() ? t.nbytes() : 0; }
size_t bytes_of(const OptionalTensor& t) { return t ? bytes_of(*t) : 0; }

// The rows of a tensor that may be absent.
struct OptionalRows {
  std::optional<Rows> rows;
  OptionalRows(const OptionalTensor& t, int64_t num_dims) {
    if (present(t)) rows.emplace(*t, num_dims);
  }
  const void* data() const { return rows ? rows->data() : nullptr; }
  RowLayout layout() const { return rows ? rows->layout : RowLayout{}; }
};

using RowsOfStages = StageRows<OptionalRows>;
RowsOfStages rows_of(const StageTensors& stages, int64_t num_dims) {
  return rows_of_stages<OptionalRows>(stages, [&](const OptionalTensor& t) { return OptionalRows(t, num_dims); });
}

// The stages that both directions share; `h` is the type of h, or of x without a residual.
template <class Call> cpu::Stages common(const Call& c, const RowsOfStages& rows, at::ScalarType h) {
  const auto acc = acc_dtype(c.input), normalized = c.is_hf() ? h : acc;
  cpu::Stages stages{c,
                     {},
                     c.dropout ? static_cast<uint64_t>(*c.seed()->template const_data_ptr<int64_t>()) : 0,
                     cpu_dtype(normalized),
                     cpu_dtype(dtype_of(c.weight) == normalized ? normalized : acc)};
  for (size_t i = 0; i < rows.rows.size(); ++i) {
    const OptionalRows& row = rows.rows[i];
    stages.rows[i] = {row.data(), row.layout(), cpu_dtype(row.rows ? row.rows->tensor.scalar_type() : acc)};
  }
  return stages;
}

// The stages of a forward call as pointers, and what they point to.
struct StagedForward {
  OptionalRows residual;
  RowsOfStages rows;
  cpu::ForwardStages args;

  StagedForward(const ForwardCall& call, Tensor& h)
      : residual(call.residual, call.num_dims), rows(rows_of(call, call.num_dims)) {
    args = {common(call, rows, dtype_of(call.residual).value_or(call.input.scalar_type())), residual.data(),
            h.defined() ? h.data_ptr() : nullptr, residual.layout(), cpu_dtype(dtype_of(call.residual).value_or(at::kFloat))};
  }
};

// The stages of a backward call as pointers, and what they point to. x is the input itself where that is not h.
struct StagedBackward {
  OptionalRows x;
  RowsOfStages rows;
  cpu::BackwardStages args;

  StagedBackward(const BackwardCall& call, const Rows& input, Tensor& dresidual)
      : x(call.x, call.num_dims), rows(rows_of(call, call.num_dims)) {
    args = {common(call, rows, call.input.scalar_type()),
            call.has_residual,
            x.data(),
            nullptr,
            call.wants[3] ? dresidual.data_ptr() : nullptr,
            x.layout(),
            cpu_dtype(call.x_dtype)};
    if (call.has_residual) return;
    args.x = input.data();
    args.x_rows = input.layout;
  }
};

// Whether nothing but a residual and its gate stands around the norm in backward, and x and dy are of one type.
bool is_nearly_bare(const BackwardCall& c) {
  StageOptions none;
  none.grouped = c.grouped;
  return static_cast<const StageOptions&>(c) == none && !present(c.row()) && c.input.scalar_type() == c.dy.scalar_type() &&
         c.x_dtype == c.input.scalar_type();
}

// Whether all of that is what arrives at h and is added to dx: the kernel of the bare norm takes these as they lie.
bool is_bare(const BackwardCall& c) { return is_nearly_bare(c) && !present(c.residual_gate()) && !c.wants[3]; }

// Whether no row shares weight, bias and gate with another, and all is of one type.
bool has_own_parameters(const BackwardCall& c, const Rows& x) {
  const auto type = c.input.scalar_type();
  const auto is_alike = [&](OptionalDtype t) { return t.value_or(type) == type; };
  return c.grouped && groups_of(c).count == x.rows && is_nearly_bare(c) && (present(c.residual_gate()) || !c.wants[3]) &&
         is_alike(dtype_of(c.weight)) && is_alike(dtype_of(c.residual_gate())) && is_alike(c.bias_dtype);
}

// Whether rows are long and so few that threads would wait for a quarter of their time. They then share the stretches, with the
// same results, row after row: so a thread finds in its caches what it read and wrote in the calls around this one.
bool shares_stretches(const Rows& x) {
  const int64_t rounds = ceil_div(x.rows, free_threads());
  return cpu::are_long(x.cols) && rounds <= 2 && 4 * x.rows <= 3 * free_threads() * rounds;
}

void forward_by_stretches(const cpu::Forward& args, int64_t rows) {
  constexpr int64_t kJoined = 16;  // elements that take as long as a stretch that is joined to others
  const int64_t stretches = cpu::stretches_of(args.cols), pieces = rows * stretches;
  std::vector<cpu::StretchMoments> moments(pieces);
  std::vector<cpu::RowStatistics> statistics(rows);
  share(pieces, cpu::kStretch,
        [&](int64_t begin, int64_t end) { cpu::kernels().forward_moments(args, begin, end, moments.data()); });
  share(rows, kJoined * stretches, [&](int64_t begin, int64_t end) {
    cpu::kernels().forward_statistics(args, begin, end, moments.data(), statistics.data());
  });
  share(pieces, cpu::kStretch,
        [&](int64_t begin, int64_t end) { cpu::kernels().forward_stretches(args, begin, end, statistics.data()); });
}

constexpr int64_t kVeryFewRows = 16;  // for which columns are shared out whatever their size

// Whether backward's threads share columns instead of rows, which are few and long: no partial sums pass from core to core
// then. It is decided by the shape. More than very few rows must still be in the L3 cache when dx is computed.
bool goes_by_columns(const Rows& x, size_t bytes) {
  constexpr size_t kNear = size_t{4} << 20;
  return cpu::are_long(x.cols) && x.rows <= (bytes <= kNear ? cpu::kFewRows : kVeryFewRows);
}

void backward_by_columns(const cpu::BackwardByColumns& args) {
  const int64_t rows = args.rows, strips = cpu::strips_of(args.cols), elements = rows * cpu::strip_width(args.cols);
  std::vector<cpu::RowSums> sums(strips * rows);
  share(strips, elements, [&](int64_t begin, int64_t end) { cpu::kernels().backward_sums(args, begin, end, sums.data()); });
  if (!args.dx) return;
  for (int64_t i = rows; i < strips * rows; ++i) {  // the first strip gathers what the others have
    sums[i % rows].g += sums[i].g;
    sums[i % rows].gx += sums[i].gx;
  }
  share(strips, elements, [&](int64_t begin, int64_t end) { cpu::kernels().backward_dx(args, begin, end, sums.data()); });
}

// Rows of a block, which has a partial sum of its own: decided by the shape, not by the number of threads. At most 64 blocks,
// so that partial rows stay a small part of the traffic. Sums that are rounded to fp16 or bf16 allow larger blocks, of as many
// elements as are worth a region of threads: partial rows pass from core to core.
int64_t rows_of_block(int64_t rows, int64_t cols, const std::array<Tensor*, 3>& sums) {
  const auto is_rounded = [](const Tensor* t) { return !t || t->element_size() == 2; };
  const int64_t short_block = std::all_of(sums.begin(), sums.end(), is_rounded) ? 32 : 8;
  const int64_t worth_a_region = ceil_div(rows, std::max<int64_t>(1, rows * cols / kRegion));
  return std::max<int64_t>({8, std::min(worth_a_region, short_block), ceil_div(rows, 64)});
}

// The column sums that are wanted, in order, and which of them dweight, dbias and dgate are.
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

// dx, and the column sums from the partial sums of the blocks.
void backward_by_blocks(const BackwardCall& call, const cpu::Backward& args, const cpu::BackwardStages* staged, const Rows& x,
                        const Runs& runs, const Given& weight, RowNormGradients& to) {
  const auto acc = acc_dtype(call.input);
  const Given bias(staged && follows(call, call) ? call.bias : kAbsent, call.num_dims, runs, 0.0, false);
  const Given gate(call.residual_gate(), call.num_dims, runs, 0.0, false);
  const WantedSums sums(to);
  const int64_t samples = x.rows / (runs.count * runs.together), cols = x.cols * runs.together;  // of a run
  const int64_t block_rows = std::min(samples, rows_of_block(samples, cols, sums.results));
  const int64_t blocks_of_run = ceil_div(samples, block_rows), blocks = runs.count * blocks_of_run;
  const int64_t block_elements = block_rows * cols, gradients = sums.count;
  const int64_t row_bytes = cols * static_cast<int64_t>(c10::elementSize(acc));
  // The sums of one of many runs that is a single block are results at once, or rounded to them from memory of the thread.
  const bool at_once = runs.count > 1 && blocks_of_run == 1;
  const auto is_bf16 = [](const Tensor& t) { return !t.defined() || t.scalar_type() == at::kBFloat16; };
  const bool interleaved = at_once && !staged && is_bf16(call.input) && is_bf16(to.dweight) && is_bf16(to.dbias);
  const at::DataPtr partials = c10::GetCPUAllocator()->allocate(at_once ? 0 : gradients * blocks * row_bytes);
  const auto partial = [&](int64_t gradient, int64_t block) -> void* {
    return static_cast<char*>(partials.get()) + (gradient * blocks + block) * row_bytes;
  };
  const auto result = [&](int64_t gradient) -> Tensor& { return *sums.results[gradient]; };
  const auto result_of = [&](int64_t gradient, int64_t run) -> void* {
    Tensor& t = result(gradient);
    return static_cast<char*>(t.data_ptr()) + run * cols * static_cast<int64_t>(t.element_size());
  };
  share_by(blocks, block_elements, step_of(block_elements), [&] {
    const int64_t totals = block_rows > 64 && gradients ? (call.wants[4] ? 3 : 2) * cols : 0,
                  own = at_once ? gradients * row_bytes : 0;
    return [&, totals, w = Prepared(weight, acc), b = Prepared(bias, acc), g = Prepared(gate, acc),
            room = std::unique_ptr<double[]>(new double[totals]),
            own_partials = std::unique_ptr<char[]>(new char[own])](int64_t begin, int64_t end) mutable {
      cpu::Backward mine = args;
      mine.totals = totals ? room.get() : nullptr;
      mine.restores = !interleaved;
      cpu::BackwardStages stages{};
      if (staged) stages = *staged;
      const auto sums_at = [&](int64_t gradient, int64_t block, int64_t run) {
        if (!at_once) return partial(gradient, block);
        return result(gradient).scalar_type() == acc ? result_of(gradient, run) : own_partials.get() + gradient * row_bytes;
      };
      for (int64_t block = begin; block < end; ++block) {
        const int64_t run = block / blocks_of_run, first = run * samples + block % blocks_of_run * block_rows;
        const int64_t last = std::min((run + 1) * samples, first + block_rows);
        mine.weight = w.of(run).data;
        stages.bias = b.of(run).data;
        stages.residual_gate = g.of(run).data;
        const auto wanted = [&](size_t i) { return sums.place[i] < 0 ? nullptr : sums_at(sums.place[i], block, run); };
        mine.dweight = wanted(0);
        mine.dbias = wanted(1);
        mine.dgate = wanted(2);
        if (staged) cpu::kernels().backward_staged(mine, stages, first, last);
        else cpu::kernels().backward(mine, first, last);
        for (int64_t gradient = 0; at_once && gradient < gradients; ++gradient)
          if (const auto type = result(gradient).scalar_type(); type != acc)
            cpu::kernels().round_row(cpu_dtype(acc), sums_at(gradient, block, run), cols, cpu_dtype(type),
                                     result_of(gradient, run), interleaved);
      }
    };
  });
  if (gradients == 0 || at_once) return;
  sum_rows(gradients * runs.count, blocks_of_run, cols, 1.0, [&](int64_t output) {
    const int64_t gradient = output / runs.count, run = output % runs.count;
    return RowsToSum{partial(gradient, run * blocks_of_run), acc, result(gradient), run * cols};
  });
}

// dx and the gradients of parameters that no rows share.
void backward_by_own_rows(const BackwardCall& call, const cpu::Backward& args, const Rows& x, const Runs& runs,
                          const Given& weight, RowNormGradients& to) {
  const auto memory = [](const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; };
  const Given gate(call.residual_gate(), call.num_dims, runs, 0.0, false);
  const OptionalRows u(call.x, call.num_dims);
  const cpu::OwnParameters own{weight.first.data, gate.first.data,    weight.pitch,
                               gate.pitch,        call.weight_offset, memory(to.dweight),
                               memory(to.dbias),  memory(to.dgate),   call.wants[3] ? memory(to.dresidual) : nullptr,
                               u.data(),          u.layout()};
  share(x.rows, x.cols, [&](int64_t begin, int64_t end) { cpu::kernels().backward_own(args, own, begin, end); });
}

// Rows [begin, end), through the runs that they lie in.
void forward_runs(cpu::Forward args, cpu::ForwardStages stages, bool bare, int64_t of_run, Prepared& weight, Prepared& bias,
                  Prepared& gate, int64_t begin, int64_t end) {
  for (int64_t last; begin < end; begin = last) {
    const int64_t run = begin / of_run;
    last = std::min(end, (run + 1) * of_run);
    args.weight = weight.of(run);
    args.bias = bias.of(run);
    stages.residual_gate = gate.of(run).data;
    if (bare) cpu::kernels().forward(args, begin, last);
    else cpu::kernels().forward_staged(args, stages, begin, last);
  }
}

}  // namespace

void forward_cpu(const ForwardCall& call, Tensor& y, Tensor& stats, Tensor& h) {
  const Rows x(call.input, call.num_dims);
  const auto acc = acc_dtype(call.input);
  const auto x_type = cpu_dtype(call.input.scalar_type()), y_type = cpu_dtype(call.y_dtype());
  const Runs runs(call, x.rows);
  const bool bare = !call.has_stages() && !call.is_hf() && x_type == y_type && runs.together == 1;
  const bool interleaved = bare && x_type == Dtype::kBFloat16;
  const Given weight(call.weight, call.num_dims, runs, call.weight_offset, interleaved),
      bias(call.bias, call.num_dims, runs, 0.0, interleaved), gate(call.residual_gate(), call.num_dims, runs, 0.0, false);
  char* mean = nullptr;
  char* rstd = nullptr;
  if (call.wants_stats) {
    mean = static_cast<char*>(stats.data_ptr());
    rstd = call.rms ? mean : mean + x.rows * stats.element_size();
    if (call.rms) mean = nullptr;
  }
  const cpu::Forward args{x.data(),
                          weight.first,
                          bias.first,
                          y.data_ptr(),
                          mean,
                          rstd,
                          x.cols,
                          x.layout,
                          call.eps,
                          call.rms,
                          x_type,
                          y_type,
                          past_caches(call.input.nbytes() + y.nbytes(), free_threads()),
                          runs.together};
  count(Counter::kCpuForward);
  prefer_huge_pages(y);
  prefer_huge_pages(h);
  if (bare && runs.count == 1 && shares_stretches(x)) return forward_by_stretches(args, x.rows);
  const StagedForward staged(call, h);
  const bool by_stretches = bare && cpu::are_long(x.cols);
  const int64_t of_run = x.rows / runs.count;
  const int64_t rows = std::min(of_run, ceil_div(x.rows, is_small(x.rows * x.cols) ? 1 : free_threads()));  // of a thread
  const bool later = bare && rows <= (by_stretches ? cpu::kLongRowsTogether : cpu::kShortRowsUnprepared);
  // The kernel prepares parameters anew in each part, so a thread has one part then.
  share_by(x.rows, x.cols,
           later          ? rows
           : by_stretches ? cpu::kLongRowsTogether
                          : step_of(x.cols),
           [&] {
             return [&, w = Prepared(weight, acc, later), b = Prepared(bias, acc, later), g = Prepared(gate, acc)](
                        int64_t begin, int64_t end) mutable {
               forward_runs(args, staged.args, bare, of_run, w, b, g, begin, end);
             };
           });
}

void quantized_row_norm_cpu(const ForwardCall& call, const Quantize& quantize, Tensor& y, Tensor& h, Quantized& to) {
  const Rows x(call.input, call.num_dims);
  const Runs runs(call, x.rows);
  const auto acc = acc_dtype(call.input);
  const auto x_type = cpu_dtype(call.input.scalar_type()), y_type = cpu_dtype(call.y_dtype());
  const bool bare = !call.has_stages() && !call.is_hf() && x_type == y_type && runs.together == 1;
  const bool interleaved = bare && x_type == Dtype::kBFloat16;
  const Given weight(call.weight, call.num_dims, runs, call.weight_offset, interleaved),
      bias(call.bias, call.num_dims, runs, 0.0, interleaved), gate(call.residual_gate(), call.num_dims, runs, 0.0, false);
  const cpu::Forward args{x.data(), weight.first, bias.first, nullptr, nullptr, nullptr, x.cols,
                          x.layout, call.eps,     call.rms,   x_type,  y_type,  false,   runs.together};
  const StagedForward staged(call, h);
  const int64_t of_run = x.rows / runs.count;
  const int64_t row_bytes = x.cols * static_cast<int64_t>(c10::elementSize(call.y_dtype()));
  prefer_huge_pages(h);
  quantize_rows_of(quantization(quantize, call.y_dtype(), x.rows, x.cols, to), quantize.keeps ? &y : nullptr, [&] {
    return [&, w = Prepared(weight, acc), b = Prepared(bias, acc), g = Prepared(gate, acc)](char* out, int64_t begin,
                                                                                            int64_t end) mutable {
      cpu::Forward mine = args;
      // The place of row 0, had it one.
      mine.y = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(out) - static_cast<uintptr_t>(begin * row_bytes));
      forward_runs(mine, staged.args, bare, of_run, w, b, g, begin, end);
    };
  });
}

void backward_cpu(const BackwardCall& call, RowNormGradients& to) {
  const Rows x(call.input, call.num_dims), dy(call.dy, call.num_dims);
  const auto x_type = cpu_dtype(call.input.scalar_type()), dy_type = cpu_dtype(call.dy.scalar_type());
  const Runs runs(call, x.rows);
  const bool bare = is_bare(call) && runs.together == 1;
  const bool by_columns = bare && runs.count == 1 && goes_by_columns(x, call.input.nbytes());
  const OptionalRows dh(call.dh, call.num_dims);
  const Given weight(call.weight, call.num_dims, runs, call.weight_offset, bare && x_type == Dtype::kBFloat16);
  const Tensor stats = call.stats.contiguous();
  const char* mean = static_cast<const char*>(stats.const_data_ptr());
  const char* rstd = call.rms ? mean : mean + x.rows * stats.element_size();
  const size_t moved = bytes_of(call.input) + bytes_of(call.dy) + bytes_of(to.dx) + bytes_of(to.dresidual) + bytes_of(call.dh) +
                       bytes_of(call.x) + bytes_of(call.row());
  // Judged by one thread's caches, because all threads' would be slower.
  const bool streams = past_caches(moved), is_far = !by_columns && nearly_past_caches(moved);
  cpu::Backward args{dy.data(),   x.data(), mean,   rstd,      nullptr,  call.wants[0] ? to.dx.data_ptr() : nullptr,
                     nullptr,     nullptr,  x.cols, dh.data(), x.layout, dy.layout,
                     dh.layout(), call.rms, x_type, dy_type,   streams,  is_far};
  std::optional<StagedBackward> staged;
  args.groups = runs.together;
  count(Counter::kCpuBackward);
  for (const Tensor& result : {to.dx, to.dweight, to.dbias, to.dresidual, to.dgate}) prefer_huge_pages(result);
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
