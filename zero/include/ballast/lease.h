// An acquired view of a unit's memory, which the trainer may use until the lease ends.
#pragma once

#include <ballast/model.h>
#include <ballast/view.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace ballast {

struct LeasedUnit;  // the library's own: the memory of a unit

// Move-only. Ends when it is destroyed, or earlier by end(), on the thread that calls the training. A lease that has ended, or
// whose training has, refuses to show memory (B1007).
class Lease {
 public:
  // The last one is the requested unit; those before it own tensors that are tied to it. `training` expires with the training.
  Lease(std::vector<LeasedUnit> units, std::weak_ptr<const void> training, std::function<void()> on_end);
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&&) = delete;
  ~Lease();

  ConstView parameters() const;  // all of the unit's, as they are laid out
  View gradients() const;

  // A tensor of the unit by its number there or its id, or by the id of its owner one that is tied to it. Gradients are to be added
  // to; frozen tensors and forward leases have none (B1001).
  ConstView operator[](std::size_t tensor) const;
  ConstView operator[](TensorId tensor) const;
  View gradient(std::size_t tensor) const;
  View gradient(TensorId tensor) const;

  void end();

 private:
  const std::vector<LeasedUnit>& units() const;
  const LeasedUnit& owner(TensorId tensor) const;

  std::vector<LeasedUnit> units_;
  std::weak_ptr<const void> training_;
  std::function<void()> on_end_;
};

// Shows a part of a tensor's summed gradients, in the order of its elements, and may change it.
using GradientVisitor = std::function<void(std::size_t unit, std::size_t tensor, const View& gradients, bool on_gpu)>;

}  // namespace ballast
