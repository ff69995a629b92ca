// A model as a list of operations over buffers, run in one call on all threads of a pool.
//
// Buffers hold a line for each token, or for each token whose logits are wanted. Whatever follows a norm or a gate is a
// product, so these leave their result in 8 bits too. Parts of an operation are handed out as threads ask for them. The
// next one begins when all parts are done, not when all threads are there: one that has lost its core holds up nobody.
#include <memory>

#include "attention.h"
#include "pool.h"
#include "product.h"

namespace TRINE_ISA {

enum Kind { EMBED = 1, NORM = 2, LINEAR = 3, PLACE = 4, ATTEND = 5, GATED = 6, TAKE = 7 };
enum Flag { QUANTIZE = 1, QUANTIZED = 2, WANTED = 4 };  // leaves bytes; finds bytes; lines are wanted tokens
constexpr int LOGITS = -2;                              // as a result: the step's own
constexpr int BLOCK = 128;                              // rows that one part of a product has, at most

struct Op {
  int32_t kind, in, more, out;  // numbers of buffers; -1: none
  int32_t a, b, c, d;
  float x;
  int32_t flags;
  const void *p, *p2, *p3, *p4;
};

struct Buffer {
  int32_t width, quantized;
};

struct Line {  // a buffer's memory
  std::vector<float> numbers, scale, sum;
  std::vector<int8_t> bytes;
};

class Program {
 public:
  Program(Pool* pool, const Op* ops, int count, const Buffer* buffers, int lines, const Shape* groups, int group_count, int kv_bits)
      : pool(pool), ops(ops, ops + count), widths(buffers, buffers + lines), groups(groups, groups + group_count), kv_bits(kv_bits),
        room(lines), plans(group_count), phases(new Phase[2 * count]), scratch(pool->count) {
    size_t most = 0;
    for (auto& g : this->groups) most = std::max(most, Plan::scratch(g));
    for (auto& s : scratch) s.resize(most);
  }

  void share(int group, std::vector<Shared> runs, int slots) { plans[group].share(std::move(runs), slots); }

  void run(const Step& given) {
    step = &given;
    grow(std::max(step->tokens, step->wanted));
    for (size_t g = 0; g < groups.size(); g++) plans[g].make(*step, int(g), groups[g], pool->count);
    for (size_t i = 0; i < 2 * ops.size(); i++) phases[i].next.store(0, std::memory_order_relaxed), phases[i].done.store(0, std::memory_order_relaxed);
    pool->run([this](int thread) {
      for (size_t i = 0; i < ops.size(); i++) work(ops[i], &phases[2 * i], thread);
    });
  }

 private:
  void grow(int rows) {
    if (rows <= capacity) return;
    capacity = std::max(rows, std::min(2 * capacity, 512));
    for (size_t i = 0; i < room.size(); i++) {
      const size_t size = size_t(capacity) * widths[i].width;
      room[i].numbers.resize(size);
      if (!widths[i].quantized) continue;
      room[i].bytes.resize(size), room[i].scale.resize(size / GROUP), room[i].sum.resize(size / GROUP);
    }
  }

  int lines(const Op& op) const { return op.flags & WANTED ? step->wanted : step->tokens; }
  float* at(int buffer, int row) { return room[buffer].numbers.data() + size_t(row) * widths[buffer].width; }

  void to_bytes(int buffer, int row) {
    Line& b = room[buffer];
    const size_t width = widths[buffer].width, first = size_t(row) * width;
    quantize(b.numbers.data() + first, int(width), b.bytes.data() + first, b.scale.data() + first / GROUP, b.sum.data() + first / GROUP);
  }

  struct alignas(64) Phase {
    std::atomic<int> next{0}, done{0};  // parts that were handed out, and that are done
  };

  // `count` parts, of which this thread does what it gets; all are done when it returns.
  template <class F>
  static void parts(int count, Phase& phase, F call) {
    for (int part; (part = phase.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      call(part);
      phase.done.fetch_add(1, std::memory_order_acq_rel);
    }
    for (int i = 0; phase.done.load(std::memory_order_acquire) < count; i++) wait(i);
  }

  // Lines, a few at a time.
  template <class F>
  void each(int rows, Phase& phase, F call) {
    const int size = std::max(1, rows / (8 * pool->count));
    parts((rows + size - 1) / size, phase, [&](int part) {
      for (int row = part * size; row < std::min(rows, (part + 1) * size); row++) call(row);
    });
  }

  void work(const Op& op, Phase* phases, int thread) {
    const int rows = lines(op);
    switch (op.kind) {
      case EMBED: return each(rows, *phases, [&](int row) { embed(op, row); });
      case NORM: return each(rows, *phases, [&](int row) { norm(op, row); });
      case LINEAR: return linear(op, phases);
      case PLACE: return each(rows, *phases, [&](int row) { kv_bits == 16 ? place<bf16>(op, row) : place<float>(op, row); });
      case ATTEND: return kv_bits == 16 ? attend<bf16>(op, phases, thread) : attend<float>(op, phases, thread);
      case GATED: return each(rows, *phases, [&](int row) { gated(op, row); });
      case TAKE: return each(step->wanted, *phases, [&](int row) {
        std::memcpy(at(op.out, row), at(op.in, int(step->picked ? step->picked[row] : row)), sizeof(float) * op.a);
      });
    }
  }

  void embed(const Op& op, int row) {  // p: table; a: width; b: kind, see `numbers`; c: bytes of a row
    numbers(op.b, static_cast<const uint8_t*>(op.p) + size_t(step->ids[row]) * op.c, op.a, at(op.out, row));
  }

  void norm(const Op& op, int row) {  // in is added to more, which keeps it; p: weight; x: eps; a: size
    float *r = at(op.more, row), *y = at(op.out, row);
    const float* w = static_cast<const float*>(op.p);
    f8 square = all(0.0f);
    if (op.in >= 0) {
      const float* x = at(op.in, row);
      for (int i = 0; i < op.a; i += 8) store(r + i, load(r + i) + load(x + i));
    }
    for (int i = 0; i < op.a; i += 8) square = load(r + i) * load(r + i) + square;
    const float unit = 1.0f / std::sqrt(sum(square) / float(op.a) + op.x);
    for (int i = 0; i < op.a; i += 8) store(y + i, load(r + i) * all(unit) * load(w + i));
    if (op.flags & QUANTIZE) to_bytes(op.out, row);
  }

  void linear(const Op& op, Phase* phases) {  // p: Weights; p2: bias
    const Weights& w = *static_cast<const Weights*>(op.p);
    const int rows = lines(op);
    if (!(op.flags & QUANTIZED)) each(rows, phases[0], [&](int row) { to_bytes(op.in, row); });
    const Line& b = room[op.in];
    const Rows x{b.bytes.data(), b.scale.data(), b.sum.data()};
    float* y = op.out == LOGITS ? step->logits : at(op.out, 0);
    const size_t stride = op.out == LOGITS ? w.outs : widths[op.out].width;
    const int blocks = (rows + BLOCK - 1) / BLOCK;
    const int share = std::max(LANES, w.outs / (8 * pool->count) / LANES * LANES), chunk = std::min(share, 512);
    const int columns = (w.outs + chunk - 1) / chunk;
    parts(blocks * columns, phases[1], [&](int part) {
      const int first = part % blocks * BLOCK, from = part / blocks * chunk;
      product(w, x, first, std::min(rows, first + BLOCK), from, std::min(w.outs, from + chunk), y, stride, static_cast<const float*>(op.p2));
    });
  }

  template <class T>
  void place(const Op& op, int row) {  // p, p2: keys, values of the layer; p3: turns [positions, 2 dim]; p4: norms; x: eps
    const Shape& g = groups[op.d];
    const int half = g.dim / 2;
    const float* turn = static_cast<const float*>(op.p3) + size_t(step->positions[row]) * 2 * g.dim;
    const float *cos = turn, *sin = turn + g.dim + half;  // the second half of the sines: not negative
    float* x = at(op.in, row);
    for (int head = 0; head < g.heads + g.kv_heads; head++, x += g.dim) {
      if (op.p4) {
        const float* w = static_cast<const float*>(op.p4) + size_t(head) * g.dim;
        f8 square = all(0.0f);
        for (int i = 0; i < g.dim; i += 8) square = load(x + i) * load(x + i) + square;
        const float unit = 1.0f / std::sqrt(sum(square) / float(g.dim) + op.x);
        for (int i = 0; i < g.dim; i += 8) store(x + i, load(x + i) * all(unit) * load(w + i));
      }
      for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
      }
    }
    const int64_t position = step->write[op.d][row], page = position / g.page, offset = position % g.page;
    const size_t size = size_t(g.page) * g.kv_heads * g.dim;
    T* keys = static_cast<T*>(const_cast<void*>(op.p)) + page * size + offset;
    T* values = static_cast<T*>(const_cast<void*>(op.p2)) + page * size + offset * g.dim;
    const float *k = at(op.in, row) + g.heads * g.dim, *v = k + g.kv_heads * g.dim;
    for (int h = 0; h < g.kv_heads; h++)
      for (int i = 0; i < g.dim; i++) {
        put(keys + (size_t(h) * g.dim + i) * g.page, k[h * g.dim + i]);
        put(values + size_t(h) * g.page * g.dim + i, v[h * g.dim + i]);
      }
  }

  template <class T>
  void attend(const Op& op, Phase* phases, int thread) {  // p, p2: keys, values
    Plan& plan = plans[op.d];
    const Layer<T> layer{static_cast<T*>(const_cast<void*>(op.p)), static_cast<T*>(const_cast<void*>(op.p2))};
    const float* q = at(op.in, 0);
    const size_t stride = widths[op.in].width;
    float* mine = scratch[thread].data();
    parts(plan.shared_parts(), phases[0], [&](int part) { plan.shared_part(part, layer, q, stride, mine); });
    parts(plan.own_parts(), phases[1], [&](int part) { plan.own_part(part, layer, q, stride, at(op.out, 0), mine); });
  }

  void gated(const Op& op, int row) {  // a: size; b: 0 silu, 1 gelu with tanh
    const float* x = at(op.in, row);
    float* y = at(op.out, row);
    for (int i = 0; i < op.a; i += 8) {
      const f8 g = load(x + i), u = op.b ? g * all(1.5957691216057308f) * (all(1.0f) + all(0.044715f) * g * g) : g;
      store(y + i, g / (all(1.0f) + exponential(-u)) * load(x + op.a + i));
    }
    if (op.flags & QUANTIZE) to_bytes(op.out, row);
  }

  Pool* pool;
  std::vector<Op> ops;
  std::vector<Buffer> widths;
  std::vector<Shape> groups;  // of KV
  int kv_bits;
  std::vector<Line> room;
  std::vector<Plan> plans;
  std::unique_ptr<Phase[]> phases;  // of each operation two
  std::vector<std::vector<float>> scratch;   // by thread
  const Step* step = nullptr;
  int capacity = 0;
};

}  // namespace TRINE_ISA

using namespace TRINE_ISA;

extern "C" {

void* EXPORT(trine_pool)(int threads) { return new Pool(threads); }
void EXPORT(trine_pool_end)(void* pool) { delete static_cast<Pool*>(pool); }

void* EXPORT(trine_program)(void* pool, const Op* ops, int count, const Buffer* buffers, int lines, const Shape* groups, int group_count, int kv_bits) {
  return new Program(static_cast<Pool*>(pool), ops, count, buffers, lines, groups, group_count, kv_bits);
}
void EXPORT(trine_program_end)(void* program) { delete static_cast<Program*>(program); }

// `ends` [runs]: where each run's slots end in `slots`. Positions first..end are multiples of 256.
void EXPORT(trine_share)(void* program, int group, int runs, const int64_t* first, const int64_t* end, const int32_t* ends, const int32_t* slots, int all_slots) {
  std::vector<Shared> found;
  for (int i = 0, at = 0; i < runs; at = ends[i++]) found.push_back({first[i], end[i], std::vector<int32_t>(slots + at, slots + ends[i])});
  static_cast<Program*>(program)->share(group, std::move(found), all_slots);
}

void EXPORT(trine_step)(void* program, const Step* step) { static_cast<Program*>(program)->run(*step); }
}
