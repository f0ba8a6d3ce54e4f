// Which ends of operations a GPU has to mark with an event.
#pragma once

#include "zero/plan/program.h"

namespace ballast {

// By operation: whether another lane waits for its end, in this step or in the next, or it is the last of its lane,
// whose end is the end of all. The list is a whole program's, because steps wait for each other.
std::vector<bool> awaited_in(const std::vector<Op>& list);

}  // namespace ballast
