// Attention over paged KV on a CPU: the same idea as on a GPU. What many rows share is read once, their queries side
// by side; what is a row's own comes after it.
//
// Positions are taken in runs of RUN, from multiples of it on. Each run has its own softmax, and runs are folded in
// the order of positions: so a row's result does not depend, in any bit, on what it shares and with whom.
#pragma once
#include <vector>

#include "simd.h"

namespace TRINE_ISA {

constexpr int RUN = 256;   // positions
constexpr int TILE = 32;   // queries that are worked on together: tokens times query heads of a KV head

// What a step is: pointers to what the table gathered. Indices are those of trine/kernels/attention/base.py.
struct Step {
  int32_t tokens, rows, wanted;  // wanted: of how many tokens logits are asked for
  const int64_t *ids, *positions, *starts, *lengths, *slots, *picked;
  const int64_t* const* write;   // by group
  const int32_t* const* pages;   // by group: [slots, width]
  const int64_t* widths;         // by group
  float* logits;                 // [wanted, vocab]
};

struct Shape {  // of a KV group
  int32_t heads, kv_heads, dim, page;
  int32_t window;  // 0: none
  float scale;
};

// A layer's store. Keys of a page: [kv_heads, dim, page]; values: [kv_heads, page, dim].
template <class T>
struct Layer {
  T *keys, *values;
};

struct Shared {  // a run of pages below the same slots; both ends are multiples of RUN
  int64_t first, end;
  std::vector<int32_t> slots;
};

// Of one KV group: what is shared, and the plan of one step.
class Plan {
 public:
  void share(std::vector<Shared> runs, int slots);
  void make(const Step& step, int group, const Shape& shape, int threads);

  // Parts of work in two phases; between them all must have met.
  int shared_parts() const { return int(common.size()) * split1; }
  int own_parts() const { return int(own.size()) * split2; }
  template <class T>
  void shared_part(int part, const Layer<T>& layer, const float* q, size_t stride, float* scratch);
  template <class T>
  void own_part(int part, const Layer<T>& layer, const float* q, size_t stride, float* out, float* scratch);

  static size_t scratch(const Shape& shape) { return size_t(2 * TILE) * (RUN + 2 * shape.dim + 4) + 16 * shape.dim + 64; }

 private:
  struct Row {
    int32_t slot, begin, count;
    int64_t length, own;  // positions; where its own begin
    size_t parts;         // where the results of what it shares lie, a line for each token and run
  };
  struct Common {
    int32_t slot, at, count;  // whose pages; tokens members[at..at + count]
    int64_t first;            // position
  };
  struct Own {
    int32_t row, token, count;
  };

  float* line(size_t part, int head) { return kept.data() + (part * shape.heads + head) * (shape.dim + 2); }

  std::vector<Shared> runs;
  std::vector<int64_t> shared_to;  // by slot
  std::vector<int32_t> row_of;     // by slot
  std::vector<Row> rows;
  std::vector<Common> common;
  std::vector<Own> own;
  std::vector<int32_t> members, owner;  // tokens of rows that share; each token's row
  std::vector<float> kept;
  Shape shape{};
  const int32_t* pages = nullptr;
  int64_t width = 0;
  int split1 = 1, split2 = 1;
};

}  // namespace TRINE_ISA
