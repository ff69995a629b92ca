// Words of a slot's record in the table: kernels/table/base.py.
#pragma once

namespace TRINE_ISA {

constexpr int KNOWN = 0, COMPUTED = 1, PROMPT = 2, RECORD = 24;

}  // namespace TRINE_ISA
