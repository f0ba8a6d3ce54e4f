// The memory of an exchange between ranks, with the number formats of its values.
#pragma once

#include "zero/engine/slots.h"
#include "zero/plan/compiled_plan.h"

namespace ballast {

struct ExchangeViews {
  View from{};
  View to{};
};

ExchangeViews views_of_gather(const CompiledPlan& plan, const Slots& slots, const Op& op);
ExchangeViews views_of_reduction(const CompiledPlan& plan, const Slots& slots, const Op& op);

}  // namespace ballast
