// Arguments of group norms.
#pragma once

namespace kf {

// The norm of extension/group_norm.cpp, whose tensors are dense. Null: absent, or a gradient that nobody wants. [...] is the
// shape of a scratch tensor.
struct GroupNormArgs {
  const void* x;
  const void* dy;
  const void* weight;
  const void* bias;
  const void* add;
  const void* scale;
  const void* shift;
  void* y;      // backward: dx
  void* stats;  // mean and rstd, [2][samples][groups]
  void* parts;  // of pieces: mean, its rest, sum of squares; backward: the sums below
  void* sums;   // backward: of g, of g * deviation and perhaps of deviations, [2 or 3][samples][channels]
  void* means;  // backward: of v * g and v * g * xhat over a group, [2][samples][groups]
  void* dadd;
  void* dscale;
  void* dshift;
  void* dweight;  // of each sample, [samples][pitch]
  void* dbias;
  long long samples, channels, positions;
  long long depth;   // channels of a group
  long long piece;   // positions of a piece
  long long pieces;  // of a channel's positions
  long long pitch;
  double eps;
  double scale_offset;
};

}  // namespace kf
