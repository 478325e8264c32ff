// Measures the float functions of native/extension/cpu/math.h against double, over one in a thousand of all floats in the range
// of each function's contract, NaN and infinities besides, and the gelu of RoughMath over all bf16. Prints lines "name error
// argument", the argument of the largest error, in ulp of the result, for erf in ulp of 1, for gelu as RoughMath states it.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "cpu/math.h"

namespace {

using kf::cpu::CPU_CAPABILITY::Math;
using kf::cpu::CPU_CAPABILITY::RoughMath;
using V = Math<float>::V;

float ulp(double v) {
  const auto size = std::fabs(static_cast<float>(v));
  return std::nextafter(size, INFINITY) - size;
}

constexpr uint32_t kLowerHalf = 0xffff;

// As cpu/simd.h takes it for granted where it rounds to bf16.
bool is_nan_of_bf16(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return std::isnan(v) && (bits & kLowerHalf) == 0;
}

// A NaN, an infinity or an overflow must be the same in both; of arguments that are no NaN, or that of a bf16.
double error_of(float got, double want, bool absolute) {
  const auto rounded = static_cast<float>(want);
  if (got == 0 && std::fabs(want) < 0x1p-126) return 0;
  if (std::isfinite(rounded)) return std::fabs(got - want) / ulp(absolute ? 1.0 : want);
  return std::isnan(rounded) ? (is_nan_of_bf16(got) ? 0 : INFINITY) : (got == rounded ? 0 : INFINITY);
}

void measure(const char* name, float low, float high, auto&& function, auto&& exact) {
  const bool absolute = std::strncmp(name, "erf", 3) == 0;
  double most = 0;
  float worst = 0, in[V::size()], out[V::size()];
  const auto run = [&] {
    function(V::loadu(in)).store(out);
    for (int i = 0; i < V::size(); ++i) {
      const double error = error_of(out[i], exact(static_cast<double>(in[i])), absolute);
      if (error > most) most = error, worst = in[i];
    }
  };
  int filled = 0;
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 997) {
    auto narrow = static_cast<uint32_t>(bits);
    float x;
    std::memcpy(&x, &narrow, sizeof x);
    if (std::isnan(x)) {
      narrow &= ~kLowerHalf;
      std::memcpy(&x, &narrow, sizeof x);
    }
    if (!(std::isnan(x) || (x >= low && x <= high))) continue;
    in[filled++] = x;
    if (filled == V::size()) run(), filled = 0;
  }
  for (const float x : {low, high, 0.0f, -0.0f, INFINITY, -INFINITY, NAN}) {
    if (!(std::isnan(x) || (x >= low && x <= high))) continue;
    for (float& element : in) element = x;
    run();
  }
  std::printf("%s %g %a\n", name, most, worst);
}

void measure_rough_gelu() {
  double most = 0;
  float worst = 0, in[V::size()], out[V::size()];
  for (uint32_t upper = 0; upper <= 0xffff; upper += V::size()) {
    for (uint32_t i = 0; i < V::size(); ++i) {
      const uint32_t bits = (upper + i) << 16;
      std::memcpy(&in[i], &bits, sizeof bits);
    }
    kf::act::gelu::value<RoughMath>(V::loadu(in)).store(out);
    for (int i = 0; i < V::size(); ++i) {
      const double x = in[i], want = x * std::erfc(-x * std::sqrt(0.5)) / 2;
      const double scale = std::fmax(std::fabs(want), std::fmin(std::fabs(x), 1) / 64) * 0x1p-9;
      const double error = std::isfinite(want) && x != 0 ? std::fabs(out[i] - want) / scale : error_of(out[i], want, false);
      if (error > most) most = error, worst = in[i];
    }
  }
  std::printf("gelu_to_bf16 %g %a\ngelu_is_rough %d 0\n", most, worst, !std::is_same_v<RoughMath, Math<float>>);
}

}  // namespace

int main() {
#define KF_MEASURE(name, low, high) \
  measure(#name, low, high, [](V x) { return Math<float>::name(x); }, [](double x) { return std::name(x); });
  KF_MEASURE(exp, -INFINITY, INFINITY)
  KF_MEASURE(expm1, -INFINITY, 88)
  KF_MEASURE(log1p, 0, INFINITY)
  KF_MEASURE(tanh, -INFINITY, INFINITY)
  KF_MEASURE(erf, -INFINITY, INFINITY)
  const auto erf_and_power = [](V x) {
    V power;
    return Math<float>::erf(x, power);
  };
  measure("erf_and_power", -INFINITY, INFINITY, erf_and_power, [](double x) { return std::erf(x); });
  measure_rough_gelu();
}
