// Choosing tokens on a CPU, a row at a time; kernels/sampling/reference.py says what has to come out.
//
// A row is scanned once for the largest logit of each block of 64. Nearly all later work needs only the few blocks
// whose largest one matters: the k-th largest block is a bound of the k-th largest logit, a nucleus lies near the
// top, and in the race of exponentials a block is left out that would lose even with the best luck there is. What
// decides is computed exactly, by the formulas of the reference; bounds only say where not to look.
#include "sampling.h"

#include "record.h"

#include <functional>
#include <vector>

namespace TRINE_ISA {
namespace {

constexpr int BLOCK = 64, WIDE = 1024;  // logits
constexpr float NEVER = -INFINITY;
constexpr float WIDTHS[] = {-2.0f, -4.0f, -6.0f, -9.0f, -13.0f, -20.0f, NEVER};  // nats: how far top_p looks, in turn
constexpr float FAR = -87.0f;                       // nats: what is deeper has no chance
constexpr float LUCK = 32.0f;                       // powers of two: 1 / (the smallest exponential) is below them
constexpr float SLACK = 1e-3f;                      // powers of two, for roundings of a bound
constexpr float LARGEST = 3.40282347e38f;           // what an edited logit grows to at most, upwards and downwards
constexpr double COLDEST = 1e-30;

struct Near {
  float deep, chance;  // logarithm and chance relative to the likeliest
};
struct Ranked {
  float logit;
  int32_t id;
};

// Memory of a thread; it keeps its size.
struct Work {
  std::vector<float> row, tops, values;
  std::vector<int32_t> counts;  // zero between calls
  std::vector<Near> near;
  std::vector<Ranked> ranked;
};
thread_local Work work;

inline bool finite(float x) { return std::fabs(x) < INFINITY; }

inline bool any(i8 mask) {
#if defined(__AVX__)
  return __builtin_ia32_movmskps256(reinterpret_cast<f8>(mask)) != 0;
#else
  typedef int64_t l4 __attribute__((vector_size(32), aligned(4), may_alias));
  l4 m = reinterpret_cast<l4>(mask);
  return ((m[0] | m[1]) | (m[2] | m[3])) != 0;
#endif
}

inline int64_t blocks(int64_t n, int size) { return (n + size - 1) / size; }

// Block `b` of a row of n, whole: the last one in `spare`, with NEVER behind its end.
template <int SIZE>
inline const float* block(const float* x, int64_t n, int64_t b, float* spare) {
  const int64_t left = n - b * SIZE;
  if (left >= SIZE) return x + b * SIZE;
  std::fill(std::copy(x + b * SIZE, x + n, spare), spare + SIZE, NEVER);
  return spare;
}

// The largest number of each lane.
template <int SIZE>
inline f8 tallest(const float* p) {
  f8 m0 = all(NEVER), m1 = m0, m2 = m0, m3 = m0;
  for (int i = 0; i < SIZE; i += 32) {
    m0 = larger(load(p + i), m0);
    m1 = larger(load(p + i + 8), m1);
    m2 = larger(load(p + i + 16), m2);
    m3 = larger(load(p + i + 24), m3);
  }
  return larger(larger(m0, m1), larger(m2, m3));
}

// The largest number of each block, and of all.
template <int SIZE>
float maxima(const float* x, int64_t n, std::vector<float>& tops) {
  const int64_t count = blocks(n, SIZE);
  if (int64_t(tops.size()) < count) tops.resize(count);
  float top = NEVER, spare[SIZE];
  for (int64_t b = 0; b < count; b++) {
    tops[b] = most(tallest<SIZE>(block<SIZE>(x, n, b, spare)));
    top = std::max(top, tops[b]);
  }
  return top;
}

// The first id whose logit is `top`.
template <int SIZE>
int64_t first(const float* x, int64_t n, const float* tops, float top) {
  int64_t b = 0;
  while (tops[b] != top) b++;
  float spare[SIZE];
  const float* p = block<SIZE>(x, n, b, spare);
  int i = 0;
  while (!any(load(p + i) == all(top))) i += 8;
  while (p[i] != top) i++;
  return b * SIZE + i;
}

// A copy in which what is not finite is NEVER.
const float* finites(const float* x, int64_t n) {
  std::vector<float>& row = work.row;
  if (x != row.data()) row.assign(x, x + n);
  for (float& v : row)
    if (!finite(v)) v = NEVER;
  return row.data();
}

// Whether the largest of a row, by the rules of IEEE 754, is a finite number.
bool sound(const float* x, int64_t n) {
  bool some = false;
  for (int64_t i = 0; i < n; i++) {
    if (x[i] != x[i] || x[i] == INFINITY) return false;
    some |= x[i] > NEVER;
  }
  return some;
}

inline uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Numbers in (0, 1) for ids: a hash of (seed, position, id).
struct Noise {
  uint32_t low, high;

  Noise(int64_t seed, int64_t position) {
    const uint64_t key = mixed(mixed(uint64_t(seed)) + 0x9E3779B97F4A7C15u * uint64_t(position + 1));
    low = uint32_t(key), high = uint32_t(key >> 32);
  }
  template <class T>
  T bits(T x) const {
    x ^= low;
    x ^= x >> 16;
    x = x * 0x7FEB352Du + high;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x & 0x7FFFFFFFu;
  }
  f8 uniform(u8 ids) const {
    f8 x = __builtin_convertvector(reinterpret_cast<i8>(bits(ids)), f8);
    return (x + 0.5f) * UNIT;
  }
  // -log of 1 minus that number
  double exponential(uint32_t id) const {
    float x = float(int32_t(bits(id))) + 0.5f;
    return -std::log1p(-double(x * UNIT));
  }
  static constexpr float UNIT = 0x1p-31f * (1.0f - 0x1p-23f);
};

// A row of logits that has been looked at.
struct Row {
  const float* x;
  int64_t n;
  const float* tops;  // by block
  float top, temperature;

  int64_t count() const { return blocks(n, BLOCK); }
  float deep(float v) const { return (v - top) / temperature; }
  f8 deep(f8 v) const { return (v - top) / temperature; }
};

// The k-th largest of a row, k <= n. It is no less than the k-th largest of any parts' largest ones.
float nth(const Row& row, int64_t k) {
  std::vector<float>& found = work.values;
  float bound = NEVER, spare[BLOCK];
  auto select = [&] {
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<float>());
    return found[k - 1];
  };
  found.clear();
  if (k <= row.count()) {
    found.assign(row.tops, row.tops + row.count());
  } else if (k <= 8 * row.count()) {
    found.resize(8 * row.count());
    for (int64_t b = 0; b < row.count(); b++)
      store(&found[8 * b], tallest<BLOCK>(block<BLOCK>(row.x, row.n, b, spare)));
  }
  if (!found.empty()) bound = select();
  found.clear();
  for (int64_t b = 0; b < row.count(); b++) {
    if (row.tops[b] < bound) continue;
    const float* p = block<BLOCK>(row.x, row.n, b, spare);
    for (int i = 0; i < BLOCK; i++)
      if (!(p[i] < bound)) found.push_back(p[i] >= bound ? p[i] : NEVER);
  }
  return select();
}

// The sum of the chances of all that is at least `cut` deep.
double total(const Row& row, float cut) {
  typedef double d8 __attribute__((vector_size(64)));
  d8 sum{};
  float spare[BLOCK];
  const f8 least = all(std::max(cut, FAR));
  for (int64_t b = 0; b < row.count(); b++) {
    if (!(row.deep(row.tops[b]) >= least[0])) continue;
    const float* p = block<BLOCK>(row.x, row.n, b, spare);
    for (int i = 0; i < BLOCK; i += 8) {
      const f8 deep = row.deep(load(p + i));
      sum += __builtin_convertvector(pick(deep >= least, exponential(deep), all(0.0f)), d8);
    }
  }
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

// What is at least `low` deep and below `high`; the sum of its chances.
double collect(const Row& row, float low, float high, std::vector<Near>& found) {
  float spare[BLOCK];
  found.clear();
  for (int64_t b = 0; b < row.count(); b++) {
    if (!(row.deep(row.tops[b]) >= low)) continue;
    const float* p = block<BLOCK>(row.x, row.n, b, spare);
    for (int i = 0; i < BLOCK; i += 8) {
      const f8 deep = row.deep(load(p + i));
      const i8 inside = (deep >= all(low)) & (deep < all(high));
      if (!any(inside)) continue;
      const f8 chance = pick(deep >= all(FAR), exponential(deep), all(0.0f));
      for (int j = 0; j < 8; j++)
        if (inside[j]) found.push_back({deep[j], chance[j]});
    }
  }
  double sum = 0.0;
  for (const Near& near : found) sum += near.chance;
  return sum;
}

// How deep one has to go until chances are `need`, where they are `before` above. Only the part where that is gets
// divided further.
float reach(std::vector<Near>& of, double before, double need) {
  auto deeper = [](const Near& a, const Near& b) { return a.deep > b.deep; };
  Near *begin = of.data(), *end = begin + of.size();
  while (end - begin > 32) {
    const float a = begin->deep, b = begin[(end - begin) / 2].deep, c = end[-1].deep;
    const float middle = std::max(std::min(a, b), std::min(std::max(a, b), c));
    Near* same = std::partition(begin, end, [=](const Near& v) { return v.deep > middle; });
    Near* below = std::partition(same, end, [=](const Near& v) { return v.deep == middle; });
    double sum = before;
    for (Near* v = begin; v < same; v++) sum += v->chance;
    if (sum >= need) {
      end = same;
      continue;
    }
    for (Near* v = same; v < below; v++) sum += v->chance;
    if (sum >= need || below == end) return middle;
    before = sum, begin = below;
  }
  std::sort(begin, end, deeper);
  for (Near* v = begin; v < end; v++)
    if ((before += v->chance) >= need) return v->deep;
  return end[-1].deep;
}

// The smallest depth that stays.
float cut_of(const Row& row, const Wish& wish) {
  float cut = wish.min_p > 0.0 ? float(std::log(wish.min_p)) : NEVER;
  if (wish.top_k > 0 && wish.top_k < row.n) cut = std::max(cut, row.deep(nth(row, wish.top_k)));
  if (!(wish.top_p < 1.0)) return cut;
  const double need = wish.top_p * total(row, cut);
  double before = 0.0;
  float high = INFINITY;
  for (float width : WIDTHS) {
    const float low = std::max(cut, width);
    const double inside = collect(row, low, high, work.near);
    if (before + inside >= need) return reach(work.near, before, need);
    before += inside, high = low;
  }
  return cut;  // the sums differ in their last bits: everything is needed
}

// The race of exponentials among what is not below `cut`; `best` is the likeliest id.
int64_t race(const Row& row, float cut, const Noise& noise, int64_t best) {
  const float slope = 1.44269504f / row.temperature;
  auto arrival = [&](float deep, int64_t id) { return std::exp(double(deep)) / noise.exponential(uint32_t(id)); };
  double leader = arrival(0.0f, best);
  float beat = float(std::log2(leader)) - SLACK, spare[BLOCK];
  const u8 eight = {0, 1, 2, 3, 4, 5, 6, 7};
  for (int64_t b = 0; b < row.count(); b++) {
    if ((row.tops[b] - row.top) * slope + LUCK < beat || row.deep(row.tops[b]) < cut) continue;
    const float* p = block<BLOCK>(row.x, row.n, b, spare);
    for (int i = 0; i < BLOCK; i += 8) {
      const f8 x = load(p + i);
      const f8 luck = noise.uniform(eight + uint32_t(b * BLOCK + i));
      // the bits of a float, as a number, are its logarithm, or a little less
      const f8 power = __builtin_convertvector(reinterpret_cast<i8>(luck), f8) * 0x1p-23f - 127.0f;
      const i8 may = (x - row.top) * slope - power >= all(beat);
      if (!any(may)) continue;
      for (int j = 0; j < 8; j++) {
        if (!may[j] || !(row.deep(x[j]) >= cut)) continue;
        const int64_t id = b * BLOCK + i + j;
        const double mine = arrival(row.deep(x[j]), id);
        if (mine < leader || (mine == leader && id >= best)) continue;
        leader = mine, best = id, beat = float(std::log2(leader)) - SLACK;
      }
    }
  }
  return best;
}

// An edited logit, finite; what has no chance gets none.
inline float bounded(float now, float old) { return finite(old) ? std::max(-LARGEST, std::min(LARGEST, now)) : old; }

// What tokens there are already cost or give. Products are made in double: rounded once, whoever compiles this.
void penalize(float* x, int64_t n, const Wish& wish, const int32_t* tokens, int64_t known, int64_t prompt) {
  std::vector<int32_t>& counts = work.counts;
  if (int64_t(counts.size()) < n) counts.resize(n);
  auto inside = [=](int32_t id) { return id >= 0 && id < n; };
  if (wish.repetition != 1.0) {
    const float by = float(wish.repetition);
    for (int64_t i = 0; i < known; i++) {
      const int32_t id = tokens[i];
      if (!inside(id) || counts[id]++) continue;
      x[id] = bounded(x[id] > 0 ? x[id] / by : float(double(x[id]) * by), x[id]);
    }
    for (int64_t i = 0; i < known; i++)
      if (inside(tokens[i])) counts[tokens[i]] = 0;
  }
  if (wish.presence == 0.0 && wish.frequency == 0.0) return;
  for (int64_t i = prompt; i < known; i++)
    if (inside(tokens[i])) counts[tokens[i]]++;
  for (int64_t i = prompt; i < known; i++) {
    const int32_t id = tokens[i];
    if (!inside(id) || !counts[id]) continue;
    const float cost = float(double(float(counts[id])) * double(float(wish.frequency))) + float(wish.presence);
    x[id] = bounded(x[id] - cost, x[id]);
    counts[id] = 0;
  }
}

// A copy of the row with everything done to it that comes before temperature.
const float* edited(const float* x, int64_t n, const Wish& wish, Allowed allowed, const int32_t* tokens, const int32_t* record) {
  std::vector<float>& row = work.row;
  auto inside = [=](int64_t id) { return id >= 0 && id < n; };
  if (allowed.count >= 0) {
    row.assign(n, NEVER);
    for (int64_t i = 0; i < allowed.count; i++)
      if (inside(allowed.ids[i])) row[allowed.ids[i]] = x[allowed.ids[i]];
  } else {
    row.assign(x, x + n);
  }
  if (record[KNOWN] - record[PROMPT] < wish.min_tokens)
    for (int64_t i = 0; i < wish.stop_count; i++)
      if (inside(wish.stops[i])) row[wish.stops[i]] = NEVER;
  for (int64_t i = 0; i < wish.bias_count; i++)
    if (const int64_t id = wish.biased[i]; inside(id)) row[id] = bounded(row[id] + wish.bias[i], row[id]);
  if (wish.penalties) penalize(row.data(), n, wish, tokens, record[KNOWN], record[PROMPT]);
  return row.data();
}

// A row of a model as a distribution: NEVER for what is not finite.
template <int SIZE>
float look(const float*& x, int64_t n) {
  const float top = maxima<SIZE>(x, n, work.tops);
  if (top < INFINITY) return top;
  x = finites(x, n);
  return maxima<SIZE>(x, n, work.tops);
}

// How many are likelier than `own`, which is the logit of `token`; of equals those with a lower id are.
int64_t before(const Row& row, float own, int64_t token) {
  int32_t count = 0;
  for (int64_t i = 0; i < row.n; i++) count += row.x[i] > own;
  if (own > NEVER)
    for (int64_t i = 0; i < token; i++) count += row.x[i] == own;
  else
    for (int64_t i = 0; i < token; i++) count += !(row.x[i] > NEVER);
  return count;
}

// How the model saw `token`, and its `most` likeliest: 1 + most chances, and ids, the first being a rank from 1.
void see_row(const float* x, int64_t n, int32_t token, int64_t most, float* chances, int32_t* ids) {
  Row row{x, n, nullptr, 0.0f, 1.0f};
  row.top = look<BLOCK>(row.x, n);
  row.tops = work.tops.data();
  const float size = float(std::log(total(row, NEVER)));
  const float own = finite(row.x[token]) ? row.x[token] : NEVER;
  chances[0] = own - row.top - size, ids[0] = int32_t(1 + before(row, own, token));
  if (most == 0) return;
  const float bound = nth(row, most);
  std::vector<Ranked>& found = work.ranked;
  found.clear();
  for (int64_t b = 0; b < row.count(); b++) {
    if (row.tops[b] < bound) continue;
    for (int64_t i = b * BLOCK; i < std::min(n, (b + 1) * BLOCK); i++) {
      const float v = row.x[i] >= NEVER ? row.x[i] : NEVER;
      if (v >= bound) found.push_back({v, int32_t(i)});
    }
  }
  auto first = [](const Ranked& a, const Ranked& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); };
  std::partial_sort(found.begin(), found.begin() + most, found.end(), first);
  for (int64_t i = 0; i < most; i++) chances[1 + i] = found[i].logit - row.top - size, ids[1 + i] = found[i].id;
}

}  // namespace

Chosen choose_row(const Choosing& of, const float* logits, int64_t vocab, Allowed allowed, int64_t place) {
  const Wish& wish = of.wishes[place];
  const int32_t* record = of.records + wish.slot * RECORD;
  const bool early = wish.stop_count && record[KNOWN] - record[PROMPT] < wish.min_tokens;
  const float* x = logits;
  if (allowed.count >= 0 || early || wish.bias_count || wish.penalties)
    x = edited(x, vocab, wish, allowed, of.tokens + wish.slot * of.positions, record);
  const float top = wish.draws ? look<BLOCK>(x, vocab) : look<WIDE>(x, vocab);
  const float* tops = work.tops.data();
  if (top == NEVER) return {0, sound(logits, vocab) ? 1 : 2};
  if (!wish.draws) return {int32_t(first<WIDE>(x, vocab, tops, top)), 0};
  const Row row{x, vocab, tops, top, float(std::max(wish.temperature, COLDEST))};
  const int64_t likeliest = first<BLOCK>(x, vocab, tops, top);
  return {int32_t(race(row, cut_of(row, wish), Noise(wish.seed, record[KNOWN]), likeliest)), 0};
}

}  // namespace TRINE_ISA

using namespace TRINE_ISA;

// said: [2, rows]: tokens, errors. `allowed` is by row, or nothing.
extern "C" void EXPORT(trine_choose)(const Choosing* of, const float* logits, int64_t stride, int64_t vocab, const Allowed* allowed, int32_t* said) {
  for (int64_t row = 0; row < of->rows; row++) {
    const Allowed ids = allowed ? allowed[row] : Allowed{nullptr, -1};
    const Chosen chosen = choose_row(*of, logits + row * stride, vocab, ids, row);
    said[row] = chosen.token, said[of->rows + row] = chosen.error;
  }
}

// Of rows which[count]: chances and ids [count, 1 + most].
extern "C" void EXPORT(trine_see)(const float* logits, int64_t stride, int64_t vocab, const int64_t* which, int64_t count, const int32_t* tokens, int64_t most, float* chances, int32_t* ids) {
  for (int64_t i = 0; i < count; i++)
    see_row(logits + which[i] * stride, vocab, tokens[which[i]], most, chances + i * (1 + most), ids + i * (1 + most));
}
