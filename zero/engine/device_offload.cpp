#include "zero/engine/engine.h"

#include <ballast/error.h>

#include "zero/engine/staging.h"

namespace ballast {

std::size_t DeviceOffload::device_bytes() const {
  std::size_t bytes = 0;
  for (const Slot& slot : parts_.running.program().slots) {
    bytes += slot.tier == Tier::device ? slot.bytes : 0;
  }
  return bytes;
}

void DeviceOffload::offload(bool parameters, const AgreeOnMemory& agree) {
  const Program& program = parts_.running.program();
  parts_.scheduler.finish();
  Staging staging(parts_.arithmetic, device_bytes());
  parts_.slots.offload(program, staging, parameters, agree);
  is_offloaded_ = true;
  parts_.off_plan.restart_step();
}

void DeviceOffload::reload(const AgreeOnMemory& agree) {
  require(is_offloaded_, Code::out_of_order, [] {
    return Problem{.what = "cannot reload: the training is already on its device", .needed = "offload() first"};
  });
  {
    Staging staging(parts_.arithmetic, device_bytes());
    parts_.slots.reload(staging, agree);
  }
  is_offloaded_ = false;
  parts_.scheduler.run_entry(parts_.running.program().entry, true);
}

}  // namespace ballast
