// Vectors of eight floats, in the compiler's own words: the same source serves every instruction set.
// What only some have (products of bytes) is in product.cpp. Compiled once for each set: see build.py.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define EXPORT(name) name
#define TRINE_ISA trine

namespace TRINE_ISA {

typedef float f8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t u8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t h8 __attribute__((vector_size(16), aligned(2), may_alias));

static inline f8 load(const float* p) { return *reinterpret_cast<const f8*>(p); }
static inline void store(float* p, f8 v) { *reinterpret_cast<f8*>(p) = v; }
static inline f8 all(float v) { return f8{v, v, v, v, v, v, v, v}; }
static inline f8 pick(i8 mask, f8 yes, f8 no) { return mask ? yes : no; }
// The larger one; `b` where `a` is no number.
static inline f8 larger(f8 a, f8 b) { return pick(a > b, a, b); }

// Of a store in 16 bits: the upper half of a float32.
struct bf16 {
  uint16_t bits;
};
static inline f8 load(const bf16* p) {
  u8 wide = __builtin_convertvector(*reinterpret_cast<const h8*>(p), u8);
  return reinterpret_cast<f8>(wide << 16);
}
static inline float number(bf16 v) {
  uint32_t wide = uint32_t(v.bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}
static inline void put(float* p, float v) { *p = v; }
static inline void put(bf16* p, float v) {
  uint32_t wide;
  std::memcpy(&wide, &v, 4);
  bool nan = (wide & 0x7fffffff) > 0x7f800000;
  p->bits = nan ? uint16_t((wide >> 16) | 64) : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

static inline float sum(f8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }
static inline float most(f8 v) {
  v = larger(f8{v[4], v[5], v[6], v[7], v[0], v[1], v[2], v[3]}, v);
  v = larger(f8{v[2], v[3], v[0], v[1], v[6], v[7], v[4], v[5]}, v);
  return std::max(v[0], v[1]);
}

// Of a float16.
static inline float half(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = uint32_t(h & 0x8000) << 16, power = (h >> 10) & 31, rest = h & 1023, out;
  if (power == 0) {
    float small = std::ldexp(float(rest), -24);
    return sign ? -small : small;
  }
  out = sign | (power == 31 ? 0x7f800000 : (power + 112) << 23) | (rest << 13);
  float value;
  std::memcpy(&value, &out, 4);
  return value;
#endif
}

// e^x within 2 units of the last place; 0 below -87, and what overflows is held at e^88.
static inline f8 exponential(f8 x) {
  i8 small = x < all(-87.0f);
  x = pick(x > all(88.0f), all(88.0f), pick(small, all(-87.0f), x));
  const float half = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  f8 n = x * all(1.44269504f) + all(half) - all(half);
  f8 r = x - n * all(0.693359375f) - n * all(-2.12194440e-4f);
  f8 p = all(1.9875691500e-4f);
  p = p * r + all(1.3981999507e-3f);
  p = p * r + all(8.3334519073e-3f);
  p = p * r + all(4.1665795894e-2f);
  p = p * r + all(1.6666665459e-1f);
  p = p * r + all(5.0000001201e-1f);
  p = p * r * r + r + all(1.0f);
  i8 power = (__builtin_convertvector(n, i8) + 127) << 23;
  return pick(small, all(0.0f), p * reinterpret_cast<f8>(power));
}

}  // namespace TRINE_ISA
