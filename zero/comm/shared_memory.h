// Memory that processes of one machine share. It has no name: it is gone with the last process that has it, however that
// ends, and does not count against the size of /dev/shm, which containers keep small.
#pragma once

#include <sys/types.h>

#include <string>

#include "kernels/runtime/descriptor.h"
#include "kernels/runtime/host_pages.h"

namespace ballast {

class SharedMemory {
 public:
  // Zeroed and resident. Throws B2001 where there is not enough.
  static SharedMemory make(std::size_t bytes, const std::string& owner);

  // Another process's, from what it says of it. Throws B2301 where that cannot be reached: on another machine, in another
  // container, of another user.
  static SharedMemory open(const std::string& invitation);

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return memory_.get_deleter().bytes; }

  int file() const { return file_.get(); }  // its number in the process that made it
  std::string invitation() const;           // what other processes open it by
  // More of the process that made this one, which was opened; to be read only. A page is resident here, too, from when it is
  // first looked at.
  SharedMemory open_beside(int file) const;
  void close_door() { file_ = Descriptor(); }  // nobody else is to come
  void empty();                                // gives back the pages, whoever has them

 private:
  SharedMemory(pid_t maker, Descriptor file, HostPages memory);
  static SharedMemory open(pid_t maker, int file, int protection);

  pid_t maker_;
  Descriptor file_;
  HostPages memory_;
};

}  // namespace ballast
