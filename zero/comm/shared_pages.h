// Memory of a process that others of its machine read in place, and the view that those have of it.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>

#include "kernels/runtime/buffer.h"
#include "zero/comm/shared_memory.h"

namespace ballast {

// The location of bytes, in a form that another process can use.
struct SharedLocation {
  int file = -1;
  std::uint32_t releases = 0;  // of the process so far: after the next one, `file` may name other memory
  std::uint64_t begin = 0;
};

// Any thread may call.
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
  // Returns `bytes` at a location. `any_memory` is any mapped memory of that process. Memory that it has released is unmapped at
  // the next call. Throws B2301 if the location is no such memory.
  const std::byte* at(const SharedLocation& location, std::size_t bytes, const SharedMemory& any_memory);

 private:
  std::map<int, SharedMemory> memories_;
  std::uint32_t releases_ = 0;
};

}  // namespace ballast
