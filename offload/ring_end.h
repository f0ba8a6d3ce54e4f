// Detects the end of an io_uring that has been closed. The kernel ends a ring some time later, after its last request.
// Until then it may write to the memory of the requests.
#pragma once

#include <ballast/log.h>

#include "kernels/runtime/descriptor.h"

namespace ballast::offload {

bool is_ring(int descriptor);  // whether the descriptor is one of an io_uring

// A pipe whose write end only the ring has open: the kernel closes it when it ends the ring. Used by the ring's thread.
class RingEnd {
 public:
  RingEnd();  // throws B2401

  int write_end() const { return write_.get(); }  // register it with the ring
  void registered() { write_ = Descriptor(); }    // closes this process's copy

  // Waits for the end, and warns in the log from time to time: a drive may hang, or a child process that was made
  // without fork() may hold the ring.
  void wait(Log* log) const;

 private:
  Descriptor read_;
  Descriptor write_;
};

}  // namespace ballast::offload
