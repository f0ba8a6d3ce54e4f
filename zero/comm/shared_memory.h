// Memory that processes of one machine share. It has no name: it is gone with the last process that has it, however that
// ends, and does not count against the size of /dev/shm, which containers keep small.
#pragma once

#include <string>

#include "kernels/runtime/accounts.h"
#include "kernels/runtime/host_pages.h"
#include "zero/comm/descriptor.h"

namespace ballast {

class SharedMemory {
 public:
  // Zeroed and resident. Throws B2001 where there is not enough.
  static SharedMemory make(MemoryAccounts& accounts, std::size_t bytes, const std::string& owner);

  // Another process's, from what it says of it. Throws B2301 where that cannot be reached: on another machine, in another
  // container, of another user.
  static SharedMemory open(const std::string& invitation);

  std::byte* data() const { return memory_.get(); }

  std::string invitation() const;              // what other processes open it by
  void close_door() { file_ = Descriptor(); }  // nobody else is to come

 private:
  SharedMemory(Descriptor file, std::size_t bytes);

  Reservation booked_;  // of the one who made it
  Descriptor file_;
  HostPages memory_;
};

}  // namespace ballast
