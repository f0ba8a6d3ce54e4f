#include "zero/engine/step_run.h"

#include <ballast/error.h>

#include <atomic>

namespace ballast {

bool OpStatus::has_succeeded() const {
  if (!begun.is_done() || (read && !read->completion().is_done()) || !written.is_done()) return false;
  try {
    wait_on_host();  // it has ended
  } catch (...) {
    return false;
  }
  return true;
}

void OpStatus::wait() const {
  begun.wait();
  if (on_gpu) on_gpu->end.synchronize();
  wait_on_host();
}

void OpStatus::wait_on_host() const {
  begun.wait();
  if (read) read->completion().wait();
  written.wait();
}

// A rule of whole matrices changes the record between its two updates.
void OpStatus::check_record() const {
  std::atomic_ref<bool> checked(is_checked);
  if (!read || checked) return;
  read->check();
  checked = true;
}

void OpStatus::accept_record() {
  check_record();
  read.reset();
}

// No stream ever waits for a drive: the thread does.
void OpStatus::wait_in(const ExecContext& context) const {
  begun.wait();
  require(on_gpu || !in_stream, Code::internal,
          [] { return Problem{.what = "cannot wait for an operation: its end in a stream is not marked"}; });
  if (context.stream() == nullptr || !on_gpu) return wait();
  context.stream()->wait_for(on_gpu->end);
}

}  // namespace ballast
