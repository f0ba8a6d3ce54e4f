#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "zero/engine/leased_unit.h"

namespace ballast {

Lease::Lease(std::vector<LeasedUnit> units, std::weak_ptr<const void> training, std::function<void()> on_end)
    : units_(std::move(units)), training_(std::move(training)), on_end_(std::move(on_end)) {}

Lease::Lease(Lease&& other) noexcept
    : units_(std::move(other.units_)),
      training_(std::move(other.training_)),
      on_end_(std::exchange(other.on_end_, nullptr)) {}

Lease::~Lease() {
  try {
    end();
  } catch (...) {  // the training's next call throws it again
  }
}

void Lease::end() {
  const auto on_end = std::exchange(on_end_, nullptr);
  if (on_end && !training_.expired()) on_end();
}

const std::vector<LeasedUnit>& Lease::units() const {
  require(on_end_ != nullptr, Code::out_of_order, [] {
    return Problem{.what = "cannot use the memory of a lease: the lease has ended",
                   .needed = "a lease that has neither ended nor been moved from"};
  });
  require(!training_.expired(), Code::out_of_order, [] {
    return Problem{.what = "cannot use the memory of a lease: its training has ended",
                   .needed = "a training that outlives its leases"};
  });
  return units_;
}

const LeasedUnit& Lease::owner(TensorId tensor) const {
  const auto found = std::ranges::find(units(), tensor.unit, &LeasedUnit::number);
  const Unit& leased = *units_.back().unit;
  require(found != units_.end(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot use a tensor of unit {} in this lease", tensor.unit),
                   .where = fmt::format("unit {}", leased.name),
                   .needed = fmt::format("a tensor of unit {}, or one that is tied to it", units_.back().number)};
  });
  require(tensor.tensor < found->unit->tensors.size(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("there is no tensor {}", tensor.tensor),
                   .where = fmt::format("unit {}", found->unit->name),
                   .needed = fmt::format("a number below {}", found->unit->tensors.size())};
  });
  return *found;
}

ConstView Lease::parameters() const { return units().back().parameters; }
View Lease::gradients() const { return units().back().gradients; }
ConstView Lease::operator[](std::size_t tensor) const { return (*this)[TensorId{units().back().number, tensor}]; }
View Lease::gradient(std::size_t tensor) const { return gradient(TensorId{units().back().number, tensor}); }

ConstView Lease::operator[](TensorId tensor) const {
  const LeasedUnit& of = owner(tensor);
  return of.parameters.part(of.layout->tensor_begin[tensor.tensor], of.unit->tensors[tensor.tensor].elements());
}

View Lease::gradient(TensorId tensor) const {
  const LeasedUnit& of = owner(tensor);
  const Tensor& wanted = of.unit->tensors[tensor.tensor];
  require(!wanted.frozen && of.backward, Code::bad_argument, [&] {
    return Problem{.what = "the tensor has no gradient",
                   .where = fmt::format("unit {}, tensor {}", of.unit->name, wanted.name),
                   .needed = "a tensor that is trained, in backward"};
  });
  if (wanted.elements() == 0) return {};  // its unit may have no gradients at all
  return of.gradients.part(of.layout->tensor_begin[tensor.tensor], wanted.elements());
}

}  // namespace ballast
