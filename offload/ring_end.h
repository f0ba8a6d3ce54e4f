// When the kernel has ended a ring of io_uring that was closed. It does that by itself, some time later, when the last of the
// ring's requests has ended; until then it may write to the memory of those.
#pragma once

#include "kernels/runtime/descriptor.h"
#include "kernels/runtime/log.h"

namespace ballast::offload {

bool is_ring(int descriptor);  // of an io_uring

// A pipe whose write end is registered with the ring, and open nowhere else: the kernel closes it when it ends the ring.
class RingEnd {
 public:
  RingEnd();  // B2401

  int write_end() const { return write_.get(); }  // to be registered
  void registered() { write_ = Descriptor(); }    // which leaves it to the ring alone

  // Says from time to time that it waits: a drive may hang, or a child process that was made without fork() hold the ring.
  void wait(Log* log) const;

 private:
  Descriptor read_;
  Descriptor write_;
};

}  // namespace ballast::offload
