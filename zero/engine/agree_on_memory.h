// How the ranks of a training decide together whether each has memory for a move.
#pragma once

#include <exception>
#include <functional>

namespace ballast {

// Called on each rank, with the error where memory is lacking, else with null. Throws on all ranks if it is lacking on any.
using AgreeOnMemory = std::function<void(const std::exception_ptr& failure)>;

// For a single rank.
inline void throw_own(const std::exception_ptr& failure) {
  if (failure) std::rethrow_exception(failure);
}

}  // namespace ballast
