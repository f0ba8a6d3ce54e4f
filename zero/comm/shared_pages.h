// A process's memory that others of its machine read in place, and the view that those have of it.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>

#include "kernels/runtime/buffer.h"
#include "zero/comm/shared_memory.h"

namespace ballast {

// Where bytes lie, as it is told to another process.
struct SharedPlace {
  int file = -1;
  std::uint32_t releases = 0;  // that the process has made: after the next one `file` may be the number of other memory
  std::uint64_t begin = 0;
};

class SharedPages : public Allocator {
 public:
  std::byte* allocate(std::size_t bytes) override;
  void release(std::byte* memory, std::size_t bytes) noexcept override;  // whoever still reads there finds zeros

  std::optional<SharedPlace> find(std::span<const std::byte> bytes) const;  // of those that lie here

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, SharedMemory> memories_;
  std::uint32_t releases_ = 0;
};

// Of one other process. Used by one thread at a time.
class PeerPages {
 public:
  // `door` is any memory of that process. What it has released, empty since then, is unmapped when it next shows something.
  const std::byte* at(const SharedPlace& place, const SharedMemory& door);

 private:
  std::map<int, SharedMemory> memories_;
  std::uint32_t releases_ = 0;
};

}  // namespace ballast
