#include "zero/engine/device_offload.h"

#include <ballast/error.h>

namespace ballast {

void DeviceOffload::offload(bool parameters, const AgreeOnMemory& agree) {
  const Program& program = parts_.running.program();
  parts_.scheduler.finish();
  parts_.slots.offload(program, parts_.arithmetic.copies(), parameters, agree);
  is_offloaded_ = true;
  parts_.off_plan.forget_step();
  parts_.scheduler.restart_step();
  parts_.scheduler.follow_program(program.ops);
}

void DeviceOffload::reload(const AgreeOnMemory& agree) {
  require(is_offloaded_, Code::out_of_order, [] {
    return Problem{.what = "cannot reload: the training is already on its device", .needed = "offload() first"};
  });
  parts_.slots.reload(parts_.arithmetic.copies(), agree);
  is_offloaded_ = false;
  parts_.scheduler.run_entry(parts_.running.program().entry, true);
}

}  // namespace ballast
