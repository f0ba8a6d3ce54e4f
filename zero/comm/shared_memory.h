// Memory that processes of one machine share: segments, those of a process that others read in place, and the view that the others
// have of them.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/host_pages.h"
#include "kernels/runtime/system_resources.h"

namespace ballast {

// A segment. It has no name: the kernel frees it with the last process that maps it, however that process ends. It does not count
// against the size of /dev/shm, which containers keep small.
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
  std::string invitation() const;                      // text that open() takes in other processes
  static bool is_gone(const std::string& invitation);  // the process has closed the memory, or ended
  // Maps another file of the process that made this memory, read-only. A page counts as resident here, too, after the
  // first read.
  SharedMemory open_file_of_same_process(int file, std::size_t bytes) const;
  void close_file() { file_ = Descriptor(); }  // no other process can open it after that
  void empty();                                // frees the pages in all processes; they read zeros then

 private:
  SharedMemory(pid_t maker, Descriptor file, HostPages memory);
  static SharedMemory open(pid_t maker, int file, std::size_t bytes, int protection);

  pid_t maker_;
  Descriptor file_;
  HostPages memory_;
};

// The location of bytes, in a form that another process can use.
struct SharedLocation {
  int file = -1;
  std::uint32_t releases = 0;  // releases of the process so far: after the next one, `file` may name other memory
  std::uint64_t begin = 0;
};

// Memory of a process that others of its machine read in place. Any thread may call.
class SharedPages : public Allocator {
 public:
  std::byte* allocate(std::size_t bytes) override;
  void release(std::byte* memory, std::size_t bytes) noexcept override;  // a peer that still reads there finds zeros

  std::optional<SharedLocation> find(std::span<const std::byte> bytes) const;  // empty for other memory

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, SharedMemory> memories_;
  std::uint32_t releases_ = 0;
};

// The pages of one other process. Used by one thread at a time.
class PeerPages {
 public:
  explicit PeerPages(std::optional<int> gpu = {})
      : gpu_(gpu) {}  // what is read first of a memory is pinned for this GPU
  PeerPages(PeerPages&&) = default;
  ~PeerPages() { forget(); }

  // Returns `bytes` at a location. `any_memory` is any mapped memory of that process. Memory that it has released is unmapped at
  // the next call. Throws B2301 if the location is no such memory.
  const std::byte* at(const SharedLocation& location, std::size_t bytes, const SharedMemory& any_memory);

 private:
  void pin(const SharedMemory& memory, std::size_t begin, std::size_t bytes);
  void forget();

  std::optional<int> gpu_;
  std::map<int, SharedMemory> memories_;
  std::vector<std::byte*> pinned_{};
  std::uint32_t releases_ = 0;
};

}  // namespace ballast
