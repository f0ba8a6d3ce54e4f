// Emits the operations on gradients: these clear memory for them, sum them over the ranks and uses, and add their
// squares to the norm.
#pragma once

#include <map>

#include "zero/plan/compile_context.h"
#include "zero/plan/rank_waits.h"

namespace ballast {

class GradientSums {
 public:
  GradientSums(const CompileContext& context, RankWaits& waits) : context_(context), waits_(waits) { begin_step(); }

  void begin_step();

  // Clears memory for the gradients of the use at `position`, and in backward of the next use that has gradients, so that no use
  // waits for it.
  void prepare(std::size_t position);
  Piece of_use(std::size_t position) const;  // where a backward use adds its gradients; nowhere if it has none

  void add_use(std::size_t position, bool complete);  // sums them after the use; complete: they are all of the step's
  // Returns whether the sum is in the norm already; otherwise norm() adds it when it is complete.
  bool sum(std::size_t unit, const Piece& gradients, bool complete = false);
  void norm(std::size_t unit);
  void clear_norms();

  const Piece& summed(std::size_t unit) const { return summed_[unit]; }
  void take_over(std::size_t unit);  // a backward use of this step that other operations have summed

 private:
  bool has_gradients(std::size_t position) const;
  void prepare_use(std::size_t position);
  void clear(std::size_t unit, const Piece& gradients);
  void reduce(std::size_t unit, std::size_t number, const Piece& gradients, const Piece& to);
  void add_norm(std::size_t unit, const Piece& sum, Tier tier);
  bool is_boundary() const { return context_.input.placement.reduction == Reduction::boundary; }
  std::size_t bytes_of(std::size_t unit) const { return context_.layout(unit).trained.count() * context_.width(unit); }

  const CompileContext& context_;
  RankWaits& waits_;
  std::map<std::size_t, Piece> uses_;   // by position: cleared for a backward use to come
  std::vector<std::size_t> sums_done_;  // by unit
  std::vector<Piece> summed_;           // by unit
};

}  // namespace ballast
