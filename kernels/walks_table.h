// Fills the table of walks for lanes S. Included by the source of each instruction set, and compiled for it.
#pragma once

#include "kernels/update_walk.h"
#include "kernels/walks.h"

namespace ballast::kernels {

template <class S>
constexpr Walks walks_of() {
  return {.update = &update_run<S>};
}

}  // namespace ballast::kernels
