// The memory that a program needs in each tier: the sum of its slots. The engine reserves exactly these bytes.
#pragma once

#include <ballast/planner.h>

#include "zero/plan/block.h"
#include "zero/plan/program.h"

namespace ballast {

Ledger ledger_of(const Program& program, const RecordSizes& records);
Ledger together(Ledger one, const Ledger& other);  // adds up two trainings

}  // namespace ballast
