#include "product.h"

namespace TRINE_ISA {

static inline f8 halves(const uint8_t* p) {
#if defined(__F16C__)
  return reinterpret_cast<f8>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  f8 out;
  for (int i = 0; i < LANES; i++) {
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    out[i] = half(h);
  }
  return out;
#endif
}

#if defined(__AVX2__)
static inline __m256i four(const int8_t* x) {
  int32_t bytes;
  std::memcpy(&bytes, x, 4);
  return _mm256_set1_epi32(bytes);
}

// Adds products of bytes, a without a sign, in fours. Without dot-product instructions pairs are added in 16 bits,
// which holds eight pairs of 15 x 127, and one of 128 x 127.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
static inline __m256i dot(__m256i sum, __m256i a, __m256i b) { return _mm256_dpbusd_epi32(sum, a, b); }
#elif defined(__AVXVNNI__)
static inline __m256i dot(__m256i sum, __m256i a, __m256i b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#else
#define PAIRS
#endif

template <int R>
static void tile4(const uint8_t* w, int groups, const Rows& x, int row, size_t ins, float* y, size_t stride) {
  const __m256i low = _mm256_set1_epi8(15);
  f8 acc[R];
  for (int r = 0; r < R; r++) acc[r] = all(0.0f);
  for (int g = 0; g < groups; g++, w += FOUR) {
    __m256i q[8];
    for (int j = 0; j < 4; j++) {
      __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w) + j);
      q[j] = _mm256_and_si256(both, low);
      q[j + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    f8 d = halves(w + 128), m = halves(w + 144);
    for (int r = 0; r < R; r++) {
      const int8_t* p = x.q + size_t(row + r) * ins + g * GROUP;
      size_t at = size_t(row + r) * groups + g;
#if defined(PAIRS)
      __m256i s = _mm256_maddubs_epi16(q[0], four(p));
      for (int j = 1; j < 8; j++) s = _mm256_add_epi16(s, _mm256_maddubs_epi16(q[j], four(p + 4 * j)));
      s = _mm256_madd_epi16(s, _mm256_set1_epi16(1));
#else
      __m256i s = _mm256_setzero_si256();
      for (int j = 0; j < 8; j++) s = dot(s, q[j], four(p + 4 * j));
#endif
      acc[r] = reinterpret_cast<f8>(_mm256_cvtepi32_ps(s)) * (d * all(x.scale[at])) + acc[r];
      acc[r] = m * all(x.sum[at]) + acc[r];
    }
  }
  for (int r = 0; r < R; r++) store(y + r * stride, acc[r]);
}

template <int R>
static void tile8(const uint8_t* w, int groups, const Rows& x, int row, size_t ins, float* y, size_t stride) {
  f8 acc[R];
  for (int r = 0; r < R; r++) acc[r] = all(0.0f);
  for (int g = 0; g < groups; g++, w += EIGHT) {
    __m256i s[R];
    for (int r = 0; r < R; r++) s[r] = _mm256_setzero_si256();
    for (int j = 0; j < 8; j++) {
      __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w) + j), size = _mm256_abs_epi8(q);
      for (int r = 0; r < R; r++) {
        __m256i b = _mm256_sign_epi8(four(x.q + size_t(row + r) * ins + g * GROUP + 4 * j), q);
#if defined(PAIRS)
        s[r] = _mm256_add_epi32(s[r], _mm256_madd_epi16(_mm256_maddubs_epi16(size, b), _mm256_set1_epi16(1)));
#else
        s[r] = dot(s[r], size, b);
#endif
      }
    }
    f8 d = halves(w + 256);
    for (int r = 0; r < R; r++) {
      size_t at = size_t(row + r) * groups + g;
      acc[r] = reinterpret_cast<f8>(_mm256_cvtepi32_ps(s[r])) * (d * all(x.scale[at])) + acc[r];
    }
  }
  for (int r = 0; r < R; r++) store(y + r * stride, acc[r]);
}
#else
template <int R>
static void tile4(const uint8_t* w, int groups, const Rows& x, int row, size_t ins, float* y, size_t stride) {
  for (int r = 0; r < R; r++) {
    f8 acc = all(0.0f);
    const uint8_t* p = w;
    for (int g = 0; g < groups; g++, p += FOUR) {
      const int8_t* q = x.q + size_t(row + r) * ins + g * GROUP;
      i8 s{};
      for (int j = 0; j < 4; j++)
        for (int lane = 0; lane < LANES; lane++)
          for (int k = 0; k < 4; k++) {
            uint8_t both = p[32 * j + 4 * lane + k];
            s[lane] += (both & 15) * q[4 * j + k] + (both >> 4) * q[4 * (j + 4) + k];
          }
      size_t at = size_t(row + r) * groups + g;
      acc = __builtin_convertvector(s, f8) * (halves(p + 128) * all(x.scale[at])) + acc;
      acc = halves(p + 144) * all(x.sum[at]) + acc;
    }
    store(y + r * stride, acc);
  }
}

template <int R>
static void tile8(const uint8_t* w, int groups, const Rows& x, int row, size_t ins, float* y, size_t stride) {
  for (int r = 0; r < R; r++) {
    f8 acc = all(0.0f);
    const uint8_t* p = w;
    for (int g = 0; g < groups; g++, p += EIGHT) {
      const int8_t* q = x.q + size_t(row + r) * ins + g * GROUP;
      i8 s{};
      for (int j = 0; j < 8; j++)
        for (int lane = 0; lane < LANES; lane++)
          for (int k = 0; k < 4; k++) s[lane] += int8_t(p[32 * j + 4 * lane + k]) * q[4 * j + k];
      acc = __builtin_convertvector(s, f8) * (halves(p + 256) * all(x.scale[size_t(row + r) * groups + g])) + acc;
    }
    store(y + r * stride, acc);
  }
}
#endif

void product(const Weights& w, const Rows& x, int first, int last, int from, int to, float* y, size_t stride, const float* bias) {
  const int groups = w.ins / GROUP;
  const size_t size = size_t(groups) * (w.bits == 4 ? FOUR : EIGHT);
  float room[4 * LANES];
  for (int out = from; out < to; out += LANES) {
    const uint8_t* p = w.data + size_t(out / LANES) * size;
    const bool whole = out + LANES <= w.outs;
    for (int row = first; row < last;) {
      const int rows = last - row >= 4 ? 4 : 1;
      float* to_here = whole ? y + size_t(row) * stride + out : room;
      const size_t step = whole ? stride : LANES;
      if (rows == 4)
        w.bits == 4 ? tile4<4>(p, groups, x, row, w.ins, to_here, step) : tile8<4>(p, groups, x, row, w.ins, to_here, step);
      else
        w.bits == 4 ? tile4<1>(p, groups, x, row, w.ins, to_here, step) : tile8<1>(p, groups, x, row, w.ins, to_here, step);
      for (int r = 0; r < rows; r++) {
        float* line = y + size_t(row + r) * stride + out;
        if (!whole) std::memcpy(line, room + r * LANES, sizeof(float) * (w.outs - out));
        if (bias)
          for (int i = 0; i < LANES && out + i < w.outs; i++) line[i] += bias[out + i];
      }
      row += rows;
    }
  }
}

void quantize(const float* x, int size, int8_t* q, float* scale, float* sum) {
  const float round = 12582912.0f;  // 1.5 * 2^23
  for (int g = 0; g < size / GROUP; g++, x += GROUP, q += GROUP) {
    f8 v[4], high = all(0.0f), odd = all(0.0f);
    for (int i = 0; i < 4; i++) {
      v[i] = load(x + 8 * i);
      high = larger(larger(v[i], -v[i]), high);
      odd += v[i] - v[i];  // 0, or no number
    }
    const float top = most(high), wrong = TRINE_ISA::sum(odd);
    float unit = top > 0 ? 127.0f / top : 0.0f;
    if (!(unit < 1e38f) || wrong != wrong) unit = 0.0f;  // so small that it is nothing
    i8 total{};
    for (int i = 0; i < 4; i++) {
      i8 n = __builtin_convertvector(v[i] * all(unit) + all(round) - all(round), i8);
      total += n;
      for (int k = 0; k < 8; k++) q[8 * i + k] = int8_t(n[k]);
    }
    int count = 0;
    for (int k = 0; k < 8; k++) count += total[k];
    scale[g] = unit > 0 ? top / 127.0f : wrong;
    sum[g] = scale[g] * float(count);
  }
}

// ---- as files have it. Blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (MIT) ------------

static inline uint16_t sixteen(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

void numbers(int kind, const uint8_t* row, int size, float* out) {
  if (kind == 0) std::memcpy(out, row, sizeof(float) * size);
  if (kind == 1)
    for (int i = 0; i < size; i++) out[i] = half(sixteen(row + 2 * i));
  if (kind == 30)
    for (int i = 0; i < size; i++) out[i] = number(bf16{sixteen(row + 2 * i)});
  if (kind == 8)
    for (int i = 0; i < size; i++) {
      const uint8_t* block = row + i / GROUP * 34;
      out[i] = half(sixteen(block)) * float(int8_t(block[2 + i % GROUP]));
    }
  if (kind == 2 || kind == 3)
    for (int i = 0; i < size; i++) {
      const uint8_t* block = row + i / GROUP * (kind == 2 ? 18 : 20);
      const int at = i % GROUP, both = block[(kind == 2 ? 2 : 4) + at % 16], q = at < 16 ? both & 15 : both >> 4;
      const float d = half(sixteen(block));
      out[i] = d * float(q) + (kind == 2 ? -8.0f * d : half(sixteen(block + 2)));
    }
}

// ---- packing -----------------------------------------------------------------------------------------

static void place4(uint8_t* group, int lane, int at, int value) {  // element `at` of a group of one output
  const int j = at / 4, k = at % 4;
  uint8_t& byte = group[32 * (j % 4) + 4 * lane + k];
  byte = j < 4 ? uint8_t((byte & 0xf0) | value) : uint8_t((byte & 15) | (value << 4));
}

static uint16_t to_half(float value) {
#if defined(__F16C__)
  return _cvtss_sh(value, 0);
#else
  uint32_t x;
  std::memcpy(&x, &value, 4);
  uint32_t sign = (x >> 16) & 0x8000, rest = x & 0x7fffffff;
  if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (rest < 0x38800000) return uint16_t(sign | uint32_t(std::nearbyint(std::ldexp(std::fabs(value), 24))));
  rest += 0xc8000fff + ((rest >> 13) & 1);
  return uint16_t(sign | (rest >> 13));
#endif
}

static void scale_at(uint8_t* group, int offset, int lane, uint16_t value) { std::memcpy(group + offset + 2 * lane, &value, 2); }

// A row to its lane of the groups of LANES outputs. kind, see `numbers`: 2, 3 and 8 as they are, 0 rounded to 8 bits.
static void pack_row(int kind, const uint8_t* row, uint8_t* out, int64_t output, int groups, int bits) {
  const int size = bits == 4 ? FOUR : EIGHT, lane = int(output % LANES);
  uint8_t* group = out + size_t(output / LANES) * groups * size;
  for (int g = 0; g < groups; g++, group += size) {
    if (kind == 2 || kind == 3) {
      const uint8_t* block = row + size_t(g) * (kind == 2 ? 18 : 20);
      const uint16_t d = sixteen(block), m = kind == 3 ? sixteen(block + 2) : to_half(-8.0f * half(d));
      const uint8_t* q = block + (kind == 2 ? 2 : 4);
      for (int i = 0; i < 16; i++) {
        place4(group, lane, i, q[i] & 15);
        place4(group, lane, i + 16, q[i] >> 4);
      }
      scale_at(group, 128, lane, d);
      scale_at(group, 144, lane, m);
      continue;
    }
    int8_t q[GROUP];
    uint16_t d;
    if (kind == 8) {
      const uint8_t* block = row + size_t(g) * 34;
      d = sixteen(block);
      std::memcpy(q, block + 2, GROUP);
    } else {
      const float* x = reinterpret_cast<const float*>(row) + size_t(g) * GROUP;
      float top = 0;
      for (int i = 0; i < GROUP; i++) top = std::max(top, std::fabs(x[i]));
      d = to_half(top / 127.0f);
      float unit = half(d) > 0 ? 1.0f / half(d) : 0.0f;
      for (int i = 0; i < GROUP; i++) q[i] = int8_t(std::max(-127.0f, std::min(127.0f, std::nearbyint(x[i] * unit))));
    }
    for (int i = 0; i < GROUP; i++) group[32 * (i / 4) + 4 * lane + i % 4] = uint8_t(q[i]);
    scale_at(group, 256, lane, d);
  }
}

}  // namespace TRINE_ISA

using namespace TRINE_ISA;

extern "C" void EXPORT(trine_pack)(int kind, const uint8_t* rows, size_t row_bytes, int64_t count, uint8_t* out, int64_t start, int ins, int bits) {
  for (int64_t i = 0; i < count; i++) pack_row(kind, rows + i * row_bytes, out, start + i, ins / GROUP, bits);
}

// The numbers again: [outs, ins] float32.
extern "C" void EXPORT(trine_unpack)(const Weights* w, float* out) {
  const int groups = w->ins / GROUP, size = w->bits == 4 ? FOUR : EIGHT;
  for (int64_t o = 0; o < w->outs; o++)
    for (int g = 0; g < groups; g++) {
      const uint8_t* group = w->data + (size_t(o / LANES) * groups + g) * size;
      const int lane = int(o % LANES);
      const f8 d = halves(group + (w->bits == 4 ? 128 : 256)), m = w->bits == 4 ? halves(group + 144) : all(0.0f);
      for (int i = 0; i < GROUP; i++) {
        const int j = i / 4;
        int q = w->bits == 4 ? (j < 4 ? group[32 * j + 4 * lane + i % 4] & 15 : group[32 * (j - 4) + 4 * lane + i % 4] >> 4)
                             : int(int8_t(group[32 * j + 4 * lane + i % 4]));
        out[o * w->ins + g * GROUP + i] = d[lane] * float(q) + m[lane];
      }
    }
}

extern "C" int64_t EXPORT(trine_bytes)(int outs, int ins, int bits) {
  return int64_t((outs + LANES - 1) / LANES) * (ins / GROUP) * (bits == 4 ? FOUR : EIGHT);
}
