// CPU quantisation: codes and scales of rows (backends/eager/quantize.py is the definition, which these match bit for bit).
// Compiled once per instruction set. The loops are plain C++, written so that the compiler turns them into vectors.
#include <algorithm>
#include <bit>
#include <limits>

#include "cpu/chunk.h"
#include "cpu/kernels.h"
#include "cpu/results.h"

namespace kf::cpu::CPU_CAPABILITY {
namespace {

constexpr int64_t kRoom = kChunk<float>;

// |x| as an integer. Such integers have the order of the numbers, with NaN above all.
KF_INLINE uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffff; }

// Each struct makes the codes of one type. code(y) takes a y that is within the largest code, or NaN.
struct Int8 {
  static constexpr float kLargest = 127;
  static KF_INLINE uint8_t code(float y) {
    // Adding 1.5 * 2^23 rounds y to a whole number, whose code is the last byte of the sum. NaN has the code 0.
    const uint32_t bits = std::bit_cast<uint32_t>(y + 12582912.0f);
    return static_cast<uint8_t>(magnitude(y) > 0x7f800000 ? 0 : bits);
  }
};

// Floats of one byte. Normal numbers are rounded as integers, where a carry out of the mantissa correctly raises the exponent.
// Subnormal ones are rounded by adding a number whose last digit has the weight of theirs.
template <int exponent_bits, int mantissa_bits, int largest> struct Float8 {
  static constexpr float kLargest = largest;
  static KF_INLINE uint8_t code(float y) {
    constexpr int kBias = (1 << (exponent_bits - 1)) - 1, kShift = 23 - mantissa_bits;
    constexpr uint32_t kLeastNormal = static_cast<uint32_t>(127 - kBias + 1) << 23;
    constexpr uint32_t kSum = static_cast<uint32_t>(127 - kBias + kShift + 1) << 23;
    constexpr uint32_t kRebias = (static_cast<uint32_t>(kBias - 127) << 23) + (1u << (kShift - 1)) - 1;
    const uint32_t bits = magnitude(y), sign = std::bit_cast<uint32_t>(y) >> 31 << 7;
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + std::bit_cast<float>(kSum)) - kSum;
    const uint32_t normal = (bits + kRebias + (bits >> kShift & 1)) >> kShift;
    const uint32_t code = bits > 0x7f800000 ? 0x7f : bits < kLeastNormal ? small : normal;
    return static_cast<uint8_t>(code | sign);
  }
};

template <class F> void with_codes(CodeType code, F&& f) {
  if (code == CodeType::kInt8) return f(Int8{});
  if (code == CodeType::kFloat8E4m3fn) return f(Float8<4, 3, 448>{});
  f(Float8<5, 2, 57344>{});
}

KF_STAGE uint32_t largest_magnitude(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, magnitude(x[i]));
  return largest;
}

template <class C> KF_STAGE void encode(const float* x, int64_t n, float scale, uint8_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    float y = x[i] / scale;
    y = y < -C::kLargest ? -C::kLargest : y;  // a NaN stays
    y = y > C::kLargest ? C::kLargest : y;
    out[i] = C::code(y);
  }
}

// A stretch of a row as floats: where it lies, or converted into `room`.
const float* floats(Dtype type, const char* v, int64_t start, int64_t n, float* room) {
  const char* p = element(type, v, start);
  if (type == Dtype::kFloat) return reinterpret_cast<const float*>(p);
  load_chunk(type, p, 1, n, room);
  return room;
}

// Writes the codes of columns [begin, end) of a row, and the scale that they share, unless the caller gave one.
template <class C>
void quantize_block(const Quantization& q, const char* v, int64_t begin, int64_t end, float* scale, uint8_t* out) {
  Chunk<float> room;
  const auto each = [&](auto&& f) {
    for (int64_t start = begin; start < end; start += kRoom) {
      const int64_t n = std::min(kRoom, end - start);
      f(start, n, floats(q.type, v, start, n, room));
    }
  };
  if (!q.given) {
    uint32_t largest = 0;
    each([&](int64_t, int64_t n, const float* x) { largest = std::max(largest, largest_magnitude(x, n)); });
    const float s = std::bit_cast<float>(largest) / C::kLargest;
    *scale = s == 0 ? 1 : s;
  }
  const float s = q.given ? *q.given : *scale;
  each([&](int64_t start, int64_t n, const float* x) { encode<C>(x, n, s, out + start); });
}

}  // namespace

void quantize_rows(const Quantization& q, const void* v, const RowLayout& rows, int64_t begin, int64_t end, int64_t first) {
  const int64_t block = q.block ? q.block : q.cols;
  with_codes(q.code, [&](auto codes) {
    for (int64_t row = begin; row < end; ++row) {
      const char* from = element(q.type, static_cast<const char*>(v), row_offset(rows, row - first));
      for (int64_t start = 0; start < q.cols; start += block)
        quantize_block<decltype(codes)>(q, from, start, std::min(q.cols, start + block),
                                        q.scales + start / block * q.rows + row, q.values + row * q.cols);
    }
  });
}

}  // namespace kf::cpu::CPU_CAPABILITY
