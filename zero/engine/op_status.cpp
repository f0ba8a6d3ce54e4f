#include "zero/engine/op_status.h"

namespace ballast {

void OpProgress::wait() const {
  begun.wait();
  if (on_gpu) on_gpu->end.synchronize();
  if (read) read->completion().wait();
  written.wait();
}

// No stream ever waits for a disk: the thread does.
void OpProgress::order(const Workplace& place) const {
  begun.wait();
  if (place.stream() == nullptr || !on_gpu) return wait();
  place.stream()->wait_for(on_gpu->end);
}

}  // namespace ballast
