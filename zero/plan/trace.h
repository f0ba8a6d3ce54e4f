// The order in which a trainer uses units.
#pragma once

#include <ballast/schedule.h>

#include "zero/plan/program.h"

namespace ballast {

// The visits of one use of a unit: the units whose tensors it has tied, held, and then the unit itself.
Trace visits_of(const Model& model, std::size_t unit, Phase phase, bool exact = false);

// Forward in the order of declaration, backward in the opposite one.
Trace declared_order(const Model& model);

// Answers questions about a trace. Positions count visits; those of the next step continue those of this one.
class Uses {
 public:
  Uses(Trace trace, std::size_t units);
  const Trace& trace() const { return trace_; }

  std::size_t next(std::size_t unit, std::size_t from) const;  // position of its next visit at `from` or later; or none
  std::size_t last_backward(std::size_t unit) const { return last_backward_[unit]; }  // none: it has no backward visit
  std::size_t backward_visits(std::size_t unit) const { return backward_[unit]; }
  bool is_last_backward(std::size_t position) const { return last_backward_[trace_[position].unit] == position; }
  std::size_t end_of_chain(std::size_t position) const;  // one past the visit that ends what is held at `position`
  // One past the visits of the unit at `position` and of the `further` units after it, and at most `end`. A trainer may visit a unit
  // several times in a row: in backward first for its parameters, and then with its gradients. A unit counts again when the trainer
  // comes back to it.
  std::size_t end_of_units(std::size_t position, std::size_t further, std::size_t end) const;
  std::vector<std::size_t> by_first_visit() const;  // all units, those never visited last
  bool has_forward() const { return has_forward_; }

 private:
  Trace trace_;
  std::vector<std::vector<std::size_t>> positions_;  // one for each unit
  std::vector<std::size_t> backward_;                // one for each unit
  std::vector<std::size_t> last_backward_;           // one for each unit
  bool has_forward_ = false;
};

}  // namespace ballast
