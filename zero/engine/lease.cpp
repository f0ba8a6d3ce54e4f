#include <ballast/lease.h>

#include <fmt/format.h>

#include <algorithm>

#include "zero/plan/layout.h"

namespace ballast {
namespace {

template <class Thing>
const Thing& numbered(const std::vector<Thing>& things, std::size_t number, std::string_view what, const Unit& unit) {
  require(number < things.size(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("there is no {} {}", what, number),
                   .where = fmt::format("unit {}", unit.name),
                   .needed = fmt::format("a number below {}", things.size())};
  });
  return things[number];
}

}  // namespace

const std::vector<Lease::Memory>& Lease::memory() const {
  require(on_end_ != nullptr, Code::out_of_order, [] {
    return Problem{.what = "cannot use the memory of a lease: the lease has ended",
                   .needed = "a lease that has neither ended nor been moved from"};
  });
  require(!training_.expired(), Code::out_of_order, [] {
    return Problem{.what = "cannot use the memory of a lease: its training has ended",
                   .needed = "a training that outlives its leases"};
  });
  return memory_;
}

ConstView Lease::part(const Memory& memory, std::size_t tensor) {
  const std::size_t count = numbered(memory.unit->tensors, tensor, "tensor", *memory.unit).elements();
  return memory.parameters.part(memory.layout->tensor_begin[tensor], count);
}

View Lease::gradient_part(const Memory& memory, std::size_t tensor) {
  const Tensor& wanted = numbered(memory.unit->tensors, tensor, "tensor", *memory.unit);
  require(!wanted.frozen && memory.backward, Code::bad_argument, [&] {
    return Problem{.what = "the tensor has no gradient",
                   .where = fmt::format("unit {}, tensor {}", memory.unit->name, wanted.name),
                   .needed = "a tensor that is trained, in backward"};
  });
  if (wanted.elements() == 0) return {};  // its unit may have no gradients at all
  return memory.gradients.part(memory.layout->tensor_begin[tensor], wanted.elements());
}

// Owners come in the order in which the unit's ties first name them.
const Lease::Memory& Lease::owner(std::size_t tie) const {
  const Unit& leased = *memory().back().unit;
  const std::vector<Tie>& ties = leased.ties;
  const std::size_t unit = numbered(ties, tie, "tied tensor", leased).unit;
  std::vector<std::size_t> owners;
  for (const Tie& each : ties) {
    if (std::ranges::find(owners, each.unit) == owners.end()) owners.push_back(each.unit);
  }
  return memory_[static_cast<std::size_t>(std::ranges::find(owners, unit) - owners.begin())];
}

ConstView Lease::tied(std::size_t number) const {
  const Memory& memory = owner(number);
  return part(memory, memory_.back().unit->ties[number].tensor);
}

View Lease::tied_gradient(std::size_t number) const {
  const Memory& memory = owner(number);
  return gradient_part(memory, memory_.back().unit->ties[number].tensor);
}

}  // namespace ballast
