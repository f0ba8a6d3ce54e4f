// Programs with something missing.
#pragma once

#include "zero/plan/program.h"

namespace ballast::testing {

// Removes an operation. Operations that waited for it wait for what it waited for.
inline Program without(const Program& program, std::size_t removed) {
  Program rest = program;
  rest.ops.erase(rest.ops.begin() + static_cast<std::ptrdiff_t>(removed));
  for (Op& op : rest.ops) {
    std::vector<Wait> after;
    for (const Wait& wait : op.after) {
      if (wait.op != removed) {
        after.push_back({wait.op - (wait.op > removed ? 1u : 0u), wait.is_last_steps});
      } else if (!wait.is_last_steps) {
        for (const Wait& inherited : program.ops[removed].after) {
          if (inherited.op != removed)
            after.push_back({inherited.op - (inherited.op > removed ? 1u : 0u), inherited.is_last_steps});
        }
      }
    }
    op.after = std::move(after);
  }
  return rest;
}

}  // namespace ballast::testing
