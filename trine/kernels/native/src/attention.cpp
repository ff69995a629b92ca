#include "attention.h"

namespace TRINE_ISA {

static const float NEVER = -1e30f;
constexpr int MANY = 5;  // queries from which on keys and values are made float32 once for all of them

void Plan::share(std::vector<Shared> given, int slots) {
  runs = std::move(given);
  shared_to.assign(slots, 0);
  row_of.assign(slots, -1);
  for (auto& run : runs)
    for (int slot : run.slots) shared_to[slot] = std::max(shared_to[slot], run.end);
}

void Plan::make(const Step& step, int group, const Shape& asked, int threads) {
  shape = asked;
  pages = step.pages[group];
  width = step.widths[group];
  rows.clear(), common.clear(), own.clear(), members.clear();
  owner.resize(step.tokens);
  size_t parts = 0;
  const int heads_each = shape.heads / shape.kv_heads, tile = std::max(1, TILE / heads_each);
  for (int r = 0; r < step.rows; r++) {
    Row row{int32_t(step.slots[r]), int32_t(step.starts[r]), int32_t(step.starts[r + 1] - step.starts[r]), step.lengths[r], 0, parts};
    if (size_t(row.slot) < shared_to.size() && !shape.window && shared_to[row.slot] <= row.length - row.count) row.own = shared_to[row.slot];
    if (row.own) row_of[row.slot] = r;
    parts += size_t(row.count) * (row.own / RUN);
    for (int i = 0; i < row.count; i++) owner[row.begin + i] = r;
    rows.push_back(row);
    for (int t = 0; t < row.count; t += tile) own.push_back({r, t, std::min(tile, row.count - t)});
  }
  if (kept.size() < parts * shape.heads * (shape.dim + 2)) kept.resize(parts * shape.heads * (shape.dim + 2));
  for (auto& run : runs) {
    const int at = int(members.size());
    int guide = -1;
    for (int slot : run.slots) {
      const int r = row_of[slot];
      if (r < 0 || rows[r].own < run.end) continue;
      guide = slot;
      for (int i = 0; i < rows[r].count; i++) members.push_back(rows[r].begin + i);
    }
    const int count = int(members.size()) - at;
    for (int64_t first = run.first; guide >= 0 && first < run.end; first += RUN)
      for (int i = 0; i < count; i += tile) common.push_back({guide, at + i, std::min(tile, count - i), first});
  }
  for (auto& row : rows)
    if (row.own) row_of[row.slot] = -1;
  // The longest first: small ones then fill the gaps at the end. Where there are few, heads are parts too.
  std::stable_sort(own.begin(), own.end(), [&](const Own& a, const Own& b) {
    auto work = [&](const Own& o) { return (rows[o.row].length - rows[o.row].own) * o.count; };
    return work(a) > work(b);
  });
  split1 = shape.kv_heads;
  split2 = int(own.size()) * shape.kv_heads < 4 * threads ? shape.heads : shape.kv_heads;
}

// ---- arithmetic: the same for a query whatever its neighbours are ---------------------------------------

// Scores of Q queries at 16 positions. keys: [dim], `step` apart, each 16 positions.
template <int Q, class T>
static inline void scores(const float* const* q, const T* keys, int dim, int step, float scale, float* out) {
  f8 s[Q][2];
  for (int i = 0; i < Q; i++) s[i][0] = s[i][1] = all(0.0f);
  for (int d = 0; d < dim; d++, keys += step) {
    const f8 a = load(keys), b = load(keys + 8);
    for (int i = 0; i < Q; i++) {
      const f8 x = all(q[i][d]);
      s[i][0] = a * x + s[i][0];
      s[i][1] = b * x + s[i][1];
    }
  }
  for (int i = 0; i < Q; i++) {
    store(out + i * RUN, s[i][0] * all(scale));
    store(out + i * RUN + 8, s[i][1] * all(scale));
  }
}

template <class T>
static inline void scores_of(int n, const float* const* q, const T* keys, int dim, int step, float scale, float* out) {
  for (; n >= 5; n -= 5, q += 5, out += 5 * RUN) scores<5>(q, keys, dim, step, scale, out);
  switch (n) {
    case 4: return scores<4>(q, keys, dim, step, scale, out);
    case 3: return scores<3>(q, keys, dim, step, scale, out);
    case 2: return scores<2>(q, keys, dim, step, scale, out);
    case 1: return scores<1>(q, keys, dim, step, scale, out);
  }
}

// Adds W * 8 numbers of the values at `count` positions, weighted, to Q sums.
template <int Q, int W, class T>
static inline void mix(const float* w, const T* values, int dim, int count, float* acc) {
  f8 a[Q][W];
  for (int i = 0; i < Q; i++)
    for (int c = 0; c < W; c++) a[i][c] = load(acc + i * dim + 8 * c);
  for (int t = 0; t < count; t++, values += dim) {
    f8 v[W];
    for (int c = 0; c < W; c++) v[c] = load(values + 8 * c);
    for (int i = 0; i < Q; i++) {
      const f8 x = all(w[i * RUN + t]);
      for (int c = 0; c < W; c++) a[i][c] = v[c] * x + a[i][c];
    }
  }
  for (int i = 0; i < Q; i++)
    for (int c = 0; c < W; c++) store(acc + i * dim + 8 * c, a[i][c]);
}

template <int Q, class T>
static inline void mix_all(const float* w, const T* values, int dim, int count, float* acc) {
  int d = 0;
  for (; d + 32 <= dim; d += 32) mix<Q, 4>(w, values + d, dim, count, acc + d);
  for (; d < dim; d += 8) mix<Q, 1>(w, values + d, dim, count, acc + d);
}

template <class T>
static inline void mix_of(int n, const float* w, const T* values, int dim, int count, float* acc) {
  for (; n >= 3; n -= 3, w += 3 * RUN, acc += 3 * dim) mix_all<3>(w, values, dim, count, acc);
  if (n == 2) mix_all<2>(w, values, dim, count, acc);
  if (n == 1) mix_all<1>(w, values, dim, count, acc);
}

struct Work {  // n queries over one run of positions
  const float** q;
  const int64_t *low, *edge;  // each sees low..edge
  int n;
  float *score, *acc, *high, *weight;  // [n, RUN], [n, dim], [n], [n]
  float* block;                        // 16 positions of keys or values
};

// Results of the run that begins at `first`: unnormalized, with their maximum and sum.
template <class T>
static void attend(const Work& w, const Shape& s, const Layer<T>& layer, const int32_t* pages, int head, int64_t first) {
  const size_t page_size = size_t(s.page) * s.kv_heads * s.dim, inside = size_t(head) * s.dim * s.page;
  int64_t end = 0, low = first + RUN;
  for (int i = 0; i < w.n; i++) end = std::max(end, w.edge[i]), low = std::min(low, w.low[i]);
  end = std::min(end, first + RUN);
  const int64_t begin = std::max(first, low / 16 * 16);
  const int from = int(begin - first), to = int((end - first + 15) / 16 * 16);
  for (int at = from; at < to; at += 16) {
    const int64_t p = first + at;
    const T* keys = layer.keys + size_t(pages[p / s.page]) * page_size + inside + p % s.page;
    if (w.n > MANY) {
      for (int d = 0; d < s.dim; d++) {
        store(w.block + 16 * d, load(keys + size_t(d) * s.page));
        store(w.block + 16 * d + 8, load(keys + size_t(d) * s.page + 8));
      }
      scores_of(w.n, w.q, w.block, s.dim, 16, s.scale, w.score + at);
    } else {
      scores_of(w.n, w.q, keys, s.dim, s.page, s.scale, w.score + at);
    }
  }
  for (int i = 0; i < w.n; i++) {
    float* x = w.score + i * RUN;
    const int seen = int(std::clamp<int64_t>(w.edge[i] - first, from, to));
    for (int at = from; at < std::min<int64_t>(to, w.low[i] - first); at++) x[at] = -INFINITY;
    for (int at = seen; at < to; at++) x[at] = -INFINITY;
    f8 top = all(NEVER), total = all(0.0f);
    for (int at = from; at < to; at += 8) top = larger(load(x + at), top);
    const float high = most(top);
    for (int at = from; at < to; at += 8) {
      f8 e = exponential(load(x + at) - all(high));
      store(x + at, e);
      total += e;
    }
    w.high[i] = high, w.weight[i] = sum(total);
    std::memset(w.acc + size_t(i) * s.dim, 0, sizeof(float) * s.dim);
  }
  for (int at = from; at < to; at += 16) {
    const int64_t p = first + at;
    const int count = int(std::min<int64_t>(16, end - p));
    const T* values = layer.values + size_t(pages[p / s.page]) * page_size + inside + size_t(p % s.page) * s.dim;
    if (w.n > MANY) {
      for (int i = 0; i < count * s.dim; i += 8) store(w.block + i, load(values + i));
      mix_of(w.n, w.score + at, w.block, s.dim, count, w.acc);
    } else {
      mix_of(w.n, w.score + at, values, s.dim, count, w.acc);
    }
  }
}

// The second behind the first.
static void fold(float& high, float& weight, float* acc, float high2, float weight2, const float* acc2, int dim) {
  const float higher = std::max(high, high2);
  const f8 fades = exponential(f8{high - higher, high2 - higher, 0, 0, 0, 0, 0, 0});
  const float fade = fades[0], fade2 = fades[1];
  weight = weight * fade + weight2 * fade2;
  high = higher;
  for (int d = 0; d < dim; d += 8) store(acc + d, load(acc + d) * all(fade) + load(acc2 + d) * all(fade2));
}

template <class T>
void Plan::shared_part(int part, const Layer<T>& layer, const float* q, size_t stride, float* scratch) {
  const Common& c = common[part / split1];
  const int head = part % split1, each = shape.heads / shape.kv_heads;
  const float* queries[TILE * 2];
  int64_t low[TILE * 2], edge[TILE * 2];
  int n = 0;
  for (int i = 0; i < c.count; i++)
    for (int g = 0; g < each; g++, n++) {
      queries[n] = q + size_t(members[c.at + i]) * stride + size_t(head * each + g) * shape.dim;
      low[n] = c.first, edge[n] = c.first + RUN;
    }
  float *acc = scratch + size_t(n) * RUN, *high = acc + size_t(n) * shape.dim, *weight = high + n;
  attend(Work{queries, low, edge, n, scratch, acc, high, weight, weight + n}, shape, layer, pages + int64_t(c.slot) * width, head, c.first);
  for (int i = 0; i < n; i++) {
    const int token = members[c.at + i / each];
    const Row& row = rows[owner[token]];
    float* to = line(row.parts + size_t(token - row.begin) * (row.own / RUN) + c.first / RUN, head * each + i % each);
    to[0] = high[i], to[1] = weight[i];
    std::memcpy(to + 2, acc + size_t(i) * shape.dim, sizeof(float) * shape.dim);
  }
}

template <class T>
void Plan::own_part(int part, const Layer<T>& layer, const float* q, size_t stride, float* out, float* scratch) {
  const Own& o = own[part / split2];
  const Row& row = rows[o.row];
  const int all_each = shape.heads / shape.kv_heads, each = split2 == shape.heads ? 1 : all_each;
  const int first_head = part % split2 * each, head = first_head / all_each, dim = shape.dim;
  const float* queries[TILE * 2];
  int64_t low[TILE * 2], edge[TILE * 2];
  int n = 0;
  for (int i = 0; i < o.count; i++)
    for (int g = 0; g < each; g++, n++) {
      queries[n] = q + size_t(row.begin + o.token + i) * stride + size_t(first_head + g) * dim;
      edge[n] = row.length - row.count + o.token + i + 1;
      low[n] = std::max(row.own, shape.window ? edge[n] - shape.window : 0);
    }
  float *acc = scratch + size_t(n) * RUN, *high = acc + size_t(n) * dim, *weight = high + n;
  float *sums = weight + n, *highs = sums + size_t(n) * dim, *weights = highs + n;
  for (int i = 0; i < n; i++) highs[i] = NEVER, weights[i] = 0;
  std::memset(sums, 0, sizeof(float) * n * dim);
  for (int64_t run = 0; run < row.own / RUN; run++)
    for (int i = 0; i < n; i++) {
      const float* kept = line(row.parts + size_t(o.token + i / each) * (row.own / RUN) + run, first_head + i % each);
      fold(highs[i], weights[i], sums + size_t(i) * dim, kept[0], kept[1], kept + 2, dim);
    }
  const Work work{queries, low, edge, n, scratch, acc, high, weight, weights + n};
  for (int64_t first = low[0] / RUN * RUN; first < edge[n - 1]; first += RUN) {
    attend(work, shape, layer, pages + int64_t(row.slot) * width, head, first);
    for (int i = 0; i < n; i++) fold(highs[i], weights[i], sums + size_t(i) * dim, high[i], weight[i], acc + size_t(i) * dim, dim);
  }
  for (int i = 0; i < n; i++) {
    const f8 unit = all(weights[i] > 0 ? 1.0f / weights[i] : (weights[i] == weights[i] ? 0.0f : weights[i]));
    float* to = out + size_t(row.begin + o.token + i / each) * shape.heads * dim + size_t(first_head + i % each) * dim;
    for (int d = 0; d < dim; d += 8) store(to + d, load(sums + size_t(i) * dim + d) * unit);
  }
}

template void Plan::shared_part<float>(int, const Layer<float>&, const float*, size_t, float*);
template void Plan::shared_part<bf16>(int, const Layer<bf16>&, const float*, size_t, float*);
template void Plan::own_part<float>(int, const Layer<float>&, const float*, size_t, float*, float*);
template void Plan::own_part<bf16>(int, const Layer<bf16>&, const float*, size_t, float*, float*);

}  // namespace TRINE_ISA
