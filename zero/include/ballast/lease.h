// An acquired view of a unit's memory, which the trainer may use until the lease ends.
#pragma once

#include <ballast/model.h>
#include <ballast/view.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace ballast {

struct UnitLayout;  // the library's own

// Move-only. Ends when it is destroyed, or earlier by end(), on the thread that calls the training. A lease that has ended, or
// whose training has, refuses to show memory (B1007).
class Lease {
 public:
  // The memory of one unit.
  struct Memory {
    const Unit* unit = nullptr;
    const UnitLayout* layout = nullptr;
    ConstView parameters{};  // all of it, as it is laid out
    bool backward = false;
    View gradients{};  // gradients of its trained tensors in backward, zeroed, to be added to
  };

  // The last one is the requested unit; those before it own tensors that are tied to it. `training` expires with the training.
  Lease(std::vector<Memory> memory, std::weak_ptr<const void> training, std::function<void()> on_end)
      : memory_(std::move(memory)), training_(std::move(training)), on_end_(std::move(on_end)) {}
  Lease(Lease&& other) noexcept
      : memory_(std::move(other.memory_)),
        training_(std::move(other.training_)),
        on_end_(std::exchange(other.on_end_, nullptr)) {}
  Lease& operator=(Lease&&) = delete;
  ~Lease() {
    try {
      end();
    } catch (...) {  // the training's next call throws it again
    }
  }

  ConstView parameters() const { return memory().back().parameters; }
  View gradients() const { return memory().back().gradients; }

  // Takes the tensor's number in the unit. Frozen tensors and forward leases have no gradients (B1001).
  ConstView tensor(std::size_t number) const { return part(memory().back(), number); }
  View gradient(std::size_t number) const { return gradient_part(memory().back(), number); }
  ConstView tied(std::size_t number) const;
  View tied_gradient(std::size_t number) const;

  void end() {
    const auto on_end = std::exchange(on_end_, nullptr);
    if (on_end && !training_.expired()) on_end();
  }

 private:
  const std::vector<Memory>& memory() const;
  static ConstView part(const Memory& memory, std::size_t tensor);
  static View gradient_part(const Memory& memory, std::size_t tensor);
  const Memory& owner(std::size_t tie) const;

  std::vector<Memory> memory_;
  std::weak_ptr<const void> training_;
  std::function<void()> on_end_;
};

// Shows a part of a tensor's summed gradients, in the order of its elements, and may change it.
using GradientVisitor = std::function<void(std::size_t unit, std::size_t tensor, const View& gradients, bool on_gpu)>;

}  // namespace ballast
