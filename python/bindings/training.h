// A training as Python has it: memory by its address, and callbacks for numbers that torch holds.
#pragma once

#include <optional>

#include "kernels/state_access.h"
#include "python/bindings/group.h"
#include "zero/training.h"

namespace ballast::python {

// A stretch of memory of the training, which lives as long as this is looked at.
struct Memory {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::optional<int> gpu{};
  py::object owner{};
};

// source(unit, tensor): the address of the tensor's first parameters on the host, in the unit's format.
using AddressOf = std::function<std::uintptr_t(std::size_t unit, std::size_t tensor)>;

// One moment of a tensor's elements: those that this rank keeps.
struct MomentPlace {
  std::size_t unit = 0;
  std::size_t tensor = 0;
  kernels::Moment moment = kernels::Moment::momentum;
};
// Elements of the tensor, [first, first + count).
using Parts = std::vector<std::pair<std::size_t, std::size_t>>;

Parts parts_of(Training& training, std::size_t unit, std::size_t tensor);
void read_moment(Training& training, const MomentPlace& place, float* into);  // where its elements belong in the tensor
// address(unit, tensor, moment): numbers of the whole tensor, or 0: it stays as it is.
using MomentAddress = std::function<std::uintptr_t(const MomentPlace& place)>;
void write_moments(Training& training, const MomentAddress& address);
void take_whole_parameters(Training& training);  // into the state, after their owner has written to them

}  // namespace ballast::python
