// Choosing a token for a row of logits: what a row asks for, and the work on one row, which any thread may do.
#pragma once
#include "simd.h"

namespace TRINE_ISA {

// What a row asks for: 17 words of 64 bits, made by kernels/sampling/native.py.
struct Wish {
  double temperature, top_p, min_p, repetition, presence, frequency;
  int64_t top_k, seed, min_tokens, slot, draws, penalties;
  const int64_t* stops;  // ids that end it
  int64_t stop_count;
  const int64_t* biased;
  const float* bias;
  int64_t bias_count;
};

// Of all rows of a step, as long as the same rows go on.
struct Choosing {
  const Wish* wishes;      // [rows]
  const int32_t* records;  // of the table, by slot: RECORD words
  const int32_t* tokens;   // [slots, positions]
  int64_t rows, positions;
};

// Ids that a row may choose; a count below zero: all.
struct Allowed {
  const int64_t* ids;
  int64_t count;
};

struct Chosen {
  int32_t token, error;  // error: kernels.sampling.base.ERRORS
};

Chosen choose_row(const Choosing& of, const float* logits, int64_t vocab, Allowed allowed, int64_t row);

}  // namespace TRINE_ISA
