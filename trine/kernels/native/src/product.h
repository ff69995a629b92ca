// Products by weights in groups of 32 with their own scale: y[row, out] = sum over groups of
//   d[out, group] * s[row, group] * (sum of q * x)  +  m[out, group] * s[row, group] * (sum of x)
// where q are weights of 4 bits without a sign, or of 8 with one (and m is 0), and x are 8 bits of the row. Sums of a
// group are whole numbers; groups follow one another: a row's result does not depend on the rows beside it.
#pragma once
#include "simd.h"

namespace TRINE_ISA {

constexpr int GROUP = 32;
constexpr int LANES = 8;        // outputs that lie side by side
constexpr int FOUR = 160;       // bytes of a group of LANES outputs in 4 bits: 128 of q, then d and m in float16
constexpr int EIGHT = 272;      // in 8 bits: 256 of q, then d in float16

struct Weights {
  const uint8_t* data;  // [outs / LANES, rounded up, ins / GROUP] groups of FOUR or EIGHT bytes
  int32_t outs, ins;    // ins is a multiple of GROUP
  int32_t bits;         // 4 or 8
};

// A row in 8 bits, with what its groups amount to.
struct Rows {
  const int8_t* q;     // [rows, ins]
  const float* scale;  // [rows, groups]
  const float* sum;    // [rows, groups]: scale * sum of q
};

// Rows first..last times outputs from..to -> y [rows, stride]; `from` is a multiple of LANES, `to` one or the end.
void product(const Weights& w, const Rows& x, int first, int last, int from, int to, float* y, size_t stride, const float* bias);

// A row [size] as a file has it. kind, in ggml's numbers: 0 float32, 1 float16, 30 bfloat16, and in blocks of GROUP
// 2 Q4_0, 3 Q4_1, 8 Q8_0.
void numbers(int kind, const uint8_t* row, int size, float* out);

// One row [size], a multiple of GROUP, to 8 bits.
void quantize(const float* x, int size, int8_t* q, float* scale, float* sum);

}  // namespace TRINE_ISA
