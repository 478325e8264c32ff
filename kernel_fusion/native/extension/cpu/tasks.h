// How threads share loops without influence on results, how partial rows are summed, and advice about large results.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "cpu/kernels.h"
#include "operators.h"

namespace kf {

// A call of at most this many elements is not worth waking every thread.
constexpr int64_t kRegion = 32768;
inline bool is_small(int64_t elements) { return elements <= kRegion; }

inline int64_t free_threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// The steps that are left of a thread's part of a loop. The thread takes steps from the front; idle threads take them from
// the back, so that two threads seldom fault in the same page. `begin` only grows and `end` only shrinks, so no pair of
// values returns. The end of the parallel region publishes the results.
class alignas(64) Portion {
 public:
  void set(int64_t begin, int64_t end) { steps = packed(static_cast<uint32_t>(begin), static_cast<uint32_t>(end)); }

  // Takes steps [first, last), a quarter of those that are left, because the last portions should be small.
  std::pair<int64_t, int64_t> take(bool from_back) {
    for (uint64_t old = steps.load(std::memory_order_relaxed);;) {
      const auto begin = static_cast<uint32_t>(old), end = static_cast<uint32_t>(old >> 32), some = (end - begin + 3) / 4;
      if (begin == end) return {0, 0};
      const uint64_t rest = from_back ? packed(begin, end - some) : packed(begin + some, end);
      if (!steps.compare_exchange_weak(old, rest, std::memory_order_relaxed)) continue;
      return from_back ? std::pair<int64_t, int64_t>(end - some, end) : std::pair<int64_t, int64_t>(begin, begin + some);
    }
  }

 private:
  static uint64_t packed(uint32_t begin, uint32_t end) { return begin | static_cast<uint64_t>(end) << 32; }
  std::atomic<uint64_t> steps = 0;
};

// at::parallel_for(0, count, grain, f) as a function of PyTorch's library, so that ours needs no OpenMP of its own.
template <class F> void parallel(int64_t count, int64_t grain, const F& f) {
  struct Region {
    const F& f;
    std::atomic_flag has_failed = ATOMIC_FLAG_INIT;
    std::exception_ptr error;  // which PyTorch's function would write to stderr
  } region{f};
  const auto part = [](int64_t begin, int64_t end, void* context) {
    auto& region = *static_cast<Region*>(context);
    try {
      region.f(begin, end);
    } catch (...) {
      if (!region.has_failed.test_and_set()) region.error = std::current_exception();
    }
  };
  const auto failed = torch_parallel_for(0, count, grain, part, &region);
  if (region.error) std::rethrow_exception(region.error);
  TORCH_CHECK(failed == AOTI_TORCH_SUCCESS, "kernel_fusion: PyTorch could not share a loop among its threads");
}

// Shares the indices [0, count), each worth `elements_each` elements, among threads. Every thread calls make() once, and its
// result f(begin, end) for parts of the indices. In a large call, threads take at least `step` indices at a time, and help
// slower threads when their own are done.
template <class Make> void share_by(int64_t count, int64_t elements_each, int64_t step, Make&& make) {
  constexpr int64_t kLeast = 2048, kMuch = 32768;  // elements per thread: at least, and from which on threads help
  const int64_t least = std::max<int64_t>(1, kLeast / std::max<int64_t>(1, elements_each));
  const int64_t threads = std::min(free_threads(), (count + least - 1) / least), steps = (count + step - 1) / step;
  const int64_t elements = count * elements_each;
  const bool helps = steps >= 2 * threads && elements >= kMuch * threads && steps <= std::numeric_limits<int32_t>::max();
  if (is_small(elements) || threads <= 1 || !helps)
    return parallel(count, is_small(elements) ? count : least, [&](int64_t begin, int64_t end) { make()(begin, end); });
  std::vector<Portion> portions(threads);
  for (int64_t t = 0; t < threads; ++t) portions[t].set(t * steps / threads, (t + 1) * steps / threads);
  parallel(threads, 1, [&](int64_t begin, int64_t end) {
    auto&& f = make();
    for (int64_t mine = begin; mine < end; ++mine)
      for (int64_t ahead = 0; ahead < threads; ++ahead)
        for (;;) {
          const auto [first, last] = portions[(mine + ahead) % threads].take(/*from_back=*/ahead > 0);
          if (first == last) break;
          f(first * step, std::min(count, last * step));
        }
  });
}

inline int64_t step_of(int64_t elements_each) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, elements_each)); }

template <class F> void share(int64_t count, int64_t elements_each, F&& f) {
  share_by(count, elements_each, step_of(elements_each), [&]() -> F& { return f; });
}

// ---- Rows ------------------------------------------------------------------------------------------------------------------

// Whether rows are long, and so few that threads would wait for a quarter of their time. Threads then share the pieces of rows,
// with the same results. They take row after row, so that a thread finds in its caches what it read and wrote in the calls
// before.
inline bool shares_pieces(int64_t rows, const cpu::RowShape& shape) {
  const int64_t rounds = (rows + free_threads() - 1) / free_threads();
  return cpu::are_long(shape.cols) && shape.pieces() > 1 && rounds <= 2 && 4 * rows <= 3 * free_threads() * rounds;
}

// Runs a kernel of rows (cpu/rows.h) whose pieces threads share.
template <class Args> void run_pieces(cpu::RowKernel<Args>* kernel, const Args& args, int64_t rows) {
  constexpr int64_t kJoined = 16;  // joining a piece to others takes as long as this many elements
  const cpu::RowShape shape = args.shape();
  const int64_t pieces = shape.pieces();
  std::vector<typename Args::Carry> carries(rows * pieces);
  std::vector<typename Args::Total> totals(rows);
  const std::unique_ptr<char[]> room(new char[rows * shape.room]);
  const auto step = [&](cpu::RowStep step, int64_t count, int64_t elements_each) {
    share(count, elements_each,
          [&](int64_t begin, int64_t end) { kernel(args, {step, begin, end, carries.data(), totals.data(), room.get()}); });
  };
  step(cpu::RowStep::kReduce, rows * pieces, shape.width);
  step(cpu::RowStep::kFinish, rows, kJoined * pieces);
  if constexpr (Args::kWrites) step(cpu::RowStep::kWrite, rows * pieces, shape.width);
}

// Runs a kernel of rows: threads share the rows, or their pieces.
template <class Args> void run_rows(cpu::RowKernel<Args>* kernel, const Args& args, int64_t rows) {
  if (shares_pieces(rows, args.shape())) return run_pieces(kernel, args, rows);
  share(rows, args.shape().cols, [&](int64_t begin, int64_t end) { kernel(args, {cpu::RowStep::kRows, begin, end}); });
}

// ---- Sums over partial rows ------------------------------------------------------------------------------------------------

inline void store_sums(const double* sums, int64_t n, double divisor, at::Tensor& out, int64_t first) {
  auto* p = static_cast<char*>(out.data_ptr()) + first * static_cast<int64_t>(out.element_size());
  cpu::kernels().store_sums(sums, n, divisor, cpu_dtype(out.scalar_type()), p);
}

// Partial rows of float or double. Their sum is stored to `out` from element `first` on.
struct RowsToSum {
  const void* rows;
  at::ScalarType type;
  at::Tensor& out;
  int64_t first = 0;
};

// out[first + i] = (sum over r of rows[r * cols + i]) / divisor, over `count` rows, in double. One parallel region does so for
// rows_to_sum(0), rows_to_sum(1), ..., `outputs` of them.
template <class F> void sum_rows(int64_t outputs, int64_t count, int64_t cols, double divisor, F&& rows_to_sum) {
  constexpr int64_t kLeast = 64,
                    kElements = 4096;  // columns and elements of a tile, which is small so that many threads get one
  const int64_t width = std::clamp(kElements / count / kLeast * kLeast, kLeast, cpu::kMaxColumns),
                tiles = (cols + width - 1) / width;
  share(outputs * tiles, width * count, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t start = tile % tiles * width, n = std::min(width, cols - start);
      const RowsToSum of = rows_to_sum(tile / tiles);
      const auto* rows = static_cast<const char*>(of.rows) + start * static_cast<int64_t>(c10::elementSize(of.type));
      double sums[cpu::kMaxColumns];
      cpu::kernels().add_rows(cpu_dtype(of.type), rows, count, cols, n, sums);
      store_sums(sums, n, divisor, of.out, of.first + start);
    }
  });
}

inline const char* bytes(const at::Tensor& t) { return static_cast<const char*>(t.defined() ? t.const_data_ptr() : nullptr); }

// Asks for huge pages for a large result. The C library returns such memory to the system, so the next result faults in every
// page, which takes several times as long as the work. Memory of less than 4 MB is reused.
inline void prefer_huge_pages([[maybe_unused]] const at::Tensor& result) {
#ifdef __linux__
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20, kLeast = 2 * kHugePage;
  if (!result.defined() || result.nbytes() < kLeast) return;
  const auto begin = reinterpret_cast<uintptr_t>(result.data_ptr()), end = begin + result.nbytes();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage, last = end / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Whether to stream results past the caches. A call that moves this many bytes leaves nothing useful in the caches, and
// streamed lines need not be read before they are written. Several threads have the caches of all their cores.
inline bool past_caches(size_t bytes, int64_t threads = 1) {
  constexpr size_t kCache = size_t{32} << 20;  // bytes that one busy core can use; sysconf gives those of a socket
  constexpr size_t kOwn = size_t{7} << 19;     // bytes for each core when all are busy
  return bytes >= std::max(kCache, static_cast<size_t>(threads) * kOwn);
}

inline bool nearly_past_caches(size_t bytes) { return past_caches(2 * bytes); }

}  // namespace kf
