// Operations on the table: kernels/table/base.py says what they do, and how the words lie.
//
// Numbers that would lead out of the table stop the call: it returns the place of the row, or of the run, from 1.
#include "simd.h"
#include "record.h"

namespace TRINE_ISA {
namespace {

constexpr int RUN = 4;  // words that describe a run

// Where the table lies; made once by kernels/table/native.py.
struct Places {
  int32_t *arena, *records, *tokens;
  const int32_t* pages;
  int64_t words, slots, positions, groups, width, page;
};

// What is at `count` positions of a slot, from `position` on, to place `at` of results that are `total` long.
inline void look(const Places& t, int64_t slot, int64_t position, int64_t count, int64_t at, int64_t total, int64_t* ids, int64_t* positions, int64_t* write) {
  for (int64_t i = 0; i < count; i++) {
    ids[at + i] = slot ? t.tokens[slot * t.positions + position + i] : 0;
    positions[at + i] = position + i;
  }
  for (int64_t group = 0; group < t.groups; group++) {
    const int32_t* pages = t.pages + (group * t.slots + slot) * t.width;
    int64_t place = position / t.page, offset = position % t.page;
    for (int64_t i = 0; i < count; i++) {
      write[group * total + at + i] = (slot ? pages[place] * t.page : 0) + offset;
      if (++offset == t.page) offset = 0, place++;
    }
  }
}

inline bool fits(const Places& t, int64_t slot, int64_t position, int64_t count) {
  if (slot < 0 || slot >= t.slots) return false;
  return !slot || (position >= 0 && count >= 0 && position + count <= std::min(t.positions, t.width * t.page));
}

}  // namespace
}  // namespace TRINE_ISA

using namespace TRINE_ISA;

extern "C" int64_t EXPORT(trine_table_apply)(const Places* t, const int32_t* words, int64_t count, int64_t runs) {
  const int32_t* run = words + count - runs * RUN;
  for (int64_t i = 0; i < runs; i++, run += RUN) {
    int64_t target = run[0];
    const int64_t start = run[1], size = run[2], slot = run[3];
    if (slot >= t->slots) return i + 1;
    int32_t* known = slot < 0 ? nullptr : t->records + slot * RECORD + KNOWN;
    if (known) target += *known;
    if (start < 0 || size < 0 || start + size > count || target < 0 || target + size > t->words) return i + 1;
    if (known) *known += int32_t(size);
    std::memcpy(t->arena + target, words + start, size * sizeof(int32_t));
  }
  return 0;
}

// out: [3 + groups, rows]: lengths, ids, positions, then where to write by group.
extern "C" int64_t EXPORT(trine_table_singles)(const Places* t, const int64_t* slots, int64_t rows, int64_t* out) {
  for (int64_t row = 0; row < rows; row++) {
    const int64_t slot = slots[row];
    if (slot < 0 || slot >= t->slots) return row + 1;
    int32_t* computed = t->records + slot * RECORD + COMPUTED;
    const int64_t position = slot ? *computed : 0;
    if (!fits(*t, slot, position, 1)) return row + 1;
    look(*t, slot, position, 1, row, rows, out + rows, out + 2 * rows, out + 3 * rows);
    out[row] = position + (slot > 0);
    if (slot) ++*computed;
  }
  return 0;
}

// out: lengths [rows], then [2 + groups, total]: ids, positions, where to write by group.
extern "C" int64_t EXPORT(trine_table_ragged)(const Places* t, const int64_t* slots, int64_t rows, const int64_t* starts, int64_t total, int64_t* out) {
  for (int64_t row = 0; row < rows; row++) {
    const int64_t slot = slots[row], start = starts[row], count = starts[row + 1] - start;
    if (slot < 0 || slot >= t->slots || start < 0 || count < 0 || start + count > total) return row + 1;
    int32_t* computed = t->records + slot * RECORD + COMPUTED;
    const int64_t position = slot ? *computed : 0;
    if (!fits(*t, slot, position, count)) return row + 1;
    look(*t, slot, position, count, start, total, out + rows, out + rows + total, out + rows + 2 * total);
    out[row] = position + count;
    if (slot) *computed = int32_t(position + count);
  }
  return 0;
}

// tokens: of 4 or 8 bytes, `bytes` apart, whose lower half is the id.
extern "C" int64_t EXPORT(trine_table_append)(const Places* t, const int64_t* slots, const char* tokens, int64_t bytes, int64_t rows) {
  for (int64_t row = 0; row < rows; row++) {
    const int64_t slot = slots[row];
    if (slot < 0 || slot >= t->slots) return row + 1;
    int32_t* known = t->records + slot * RECORD + KNOWN;
    if (!slot) continue;
    if (*known < 0 || *known >= t->positions) return row + 1;
    std::memcpy(t->tokens + slot * t->positions + (*known)++, tokens + row * bytes, sizeof(int32_t));
  }
  return 0;
}
