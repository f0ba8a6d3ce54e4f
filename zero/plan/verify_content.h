// The contents that the bytes of a right program must have: the verifier's own knowledge, apart from the compiler's.
#pragma once

#include "zero/plan/compile_input.h"
#include "zero/plan/contents.h"

namespace ballast {

class ExpectedContent {
 public:
  ExpectedContent(const CompileInput& input, const Uses& uses) : in_(input), uses_(uses) {}

  std::size_t width(std::size_t unit) const { return byte_size(in_.model.units[unit].dtype); }
  std::size_t width_of_sums(std::size_t unit) const { return byte_size(in_.dtype_of_sums(unit)); }
  const UnitLayout& layout(std::size_t unit) const { return in_.layout.units[unit]; }

  Content parameters(std::size_t unit, std::size_t first_element, std::size_t version) const {
    const bool frozen = first_element >= layout(unit).trained.count();
    return {Meaning::parameters, unit, first_element * width(unit), frozen ? 0 : version};
  }
  Content state(std::size_t unit, std::size_t tile, std::size_t version) const {
    const std::size_t before = tile == 0 ? 0 : in_.blocks.state_bytes_on_device(unit);
    return {Meaning::state, unit, before + tile * in_.blocks.of(unit).state, version};
  }
  Range of_tile(std::size_t unit, std::size_t tile) const {
    return layout(unit).of_rank(in_.rank_in_shard_group, tile);
  }
  // This rank's sum of all that a step's backward uses give.
  Content all_gradients(std::size_t unit, std::size_t from_element) const {
    return {Meaning::sum, unit, from_element * width_of_sums(unit), uses_.backward_visits(unit) * in_.micro_steps};
  }
  std::size_t direction_bytes(std::size_t unit) const { return layout(unit).trained.shard * byte_size(DType::bf16); }
  bool has_gradients(std::size_t unit) const {
    return uses_.backward_visits(unit) > 0 && layout(unit).trained.count() > 0;
  }

 private:
  const CompileInput& in_;
  const Uses& uses_;
};

}  // namespace ballast
