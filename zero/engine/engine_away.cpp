// While something else needs the device.
#include <algorithm>

#include "zero/engine/engine.h"

namespace ballast {

void Engine::throw_own(const std::exception_ptr& failure) {
  if (failure) std::rethrow_exception(failure);
}

bool Engine::has_gradients() const {
  return std::ranges::any_of(visited_, [](const Visit& visit) { return visit.phase == Phase::backward; });
}

void Engine::require_between_steps() const {
  require(open_uses_.empty() && !has_gradients() && !prepared_, Code::out_of_order, [] {
    return Problem{.what = "a training was to leave its device in the middle of a step",
                   .needed = "step() after each backward pass, and the end of all leases"};
  });
}

// What forward passes have left of a program to follow counts for nothing: the next round begins anew.
void Engine::leave_device(bool parameters, const Slots::Agree& agree) {
  require_alive();
  require_between_steps();
  finish();
  slots_.leave_device(program(), arithmetic(Lane::upload).context(), parameters, agree);
  away_ = true;
  departed_ = false;
  next_ = 0;
  so_far_ = {};
  visited_.clear();
  begin_program();
}

void Engine::return_to_device(const Slots::Agree& agree) {
  require(away_, Code::out_of_order, [] {
    return Problem{.what = "a training was to return to its device, and is there", .needed = "leave_device() before"};
  });
  slots_.return_to_device(arithmetic(Lane::upload).context(), agree);
  away_ = false;
  run_entry(true);
}

}  // namespace ballast
