// Memory that processes of one machine share. It has no name: the kernel frees it with the last process that maps it,
// however that process ends. It does not count against the size of /dev/shm, which containers keep small.
#pragma once

#include <sys/types.h>

#include <string>

#include "kernels/runtime/descriptor.h"
#include "kernels/runtime/host_pages.h"

namespace ballast {

class SharedMemory {
 public:
  // Returns zeroed, resident memory. Throws B2001 if too little is available.
  static SharedMemory make(std::size_t bytes, const std::string& owner);

  // Maps the memory of another process, of at least `bytes`, by its invitation. Throws B2301 if the process is on another machine,
  // in another container, or of another user, or if the invitation names something else than such memory.
  static SharedMemory open(const std::string& invitation, std::size_t bytes);

  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return memory_.get_deleter().bytes; }

  int file() const { return file_.get(); }             // the descriptor in the process that made it
  std::string invitation() const;                      // for open() in other processes
  static bool is_gone(const std::string& invitation);  // the process has closed the memory, or ended
  // Maps another file of the process that made this memory, read-only. A page counts as resident here, too, after the
  // first read.
  SharedMemory open_file_of_same_process(int file, std::size_t bytes) const;
  void close_file() { file_ = Descriptor(); }  // after that, no other process can open it
  void empty();                                // frees the pages in all processes; they read zeros then

 private:
  SharedMemory(pid_t maker, Descriptor file, HostPages memory);
  static SharedMemory open(pid_t maker, int file, std::size_t bytes, int protection);

  pid_t maker_;
  Descriptor file_;
  HostPages memory_;
};

}  // namespace ballast
