// Owning memory of exactly the size asked for, on the GPU or on the host, booked under its owner's name.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "kernels/runtime/accounts.h"
#include "kernels/runtime/host_pages.h"
#include "kernels/runtime/view.h"

namespace ballast {

// Somebody else's memory to live in: torch's caching allocator, say. Any thread may call. Nothing is at work in what is
// given back.
class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual std::byte* allocate(std::size_t bytes) = 0;  // aligned to 256 bytes; not necessarily zeroed
  virtual void release(std::byte* memory, std::size_t bytes) noexcept = 0;
};

struct BufferRequest {
  MemoryKind kind = MemoryKind::pageable;
  std::size_t bytes = 0;
  std::string owner;                      // "optimizer state of h.7"
  int gpu = 0;                            // of device memory, and of the copies to and from pinned memory
  std::vector<int> nodes{};               // NUMA nodes of host memory; none: those of the calling thread's cores
  Resident resident = Resident::at_once;  // our own pageable memory
  Allocator* allocator = nullptr;         // of this kind of memory, instead of our own; outlives the buffer
};

// Gives memory back to where it came from. The booking is part of it, so that it always ends after the memory does.
struct FreeMemory {
  Reservation booked{};
  std::size_t mapped_bytes = 0;
  int gpu = 0;
  bool pinned = false;
  std::string unpinned_because{};
  Allocator* allocator = nullptr;
  void operator()(std::byte* memory) const noexcept;
};

// Move-only; used by one thread at a time, but what it points to is the user's to share. Like a unique_ptr, a const
// Buffer still gives writable memory. Freeing device or pinned memory first waits for the GPU's work on it.
class Buffer {
 public:
  Buffer() = default;

  std::byte* data() const { return memory_.get(); }  // null if there are no bytes
  std::size_t bytes() const { return booked().bytes(); }
  MemoryKind kind() const { return booked().kind(); }
  const std::string& owner() const { return booked().owner(); }

  View view(DType dtype) const;  // all of it; the bytes must be whole elements

  // A pinned buffer that could not be pinned works all the same, as pageable memory, and says why.
  bool pinned() const { return memory_ && memory_.get_deleter().pinned; }
  const std::string& unpinned_because() const { return memory_.get_deleter().unpinned_because; }

 private:
  friend Buffer allocate(MemoryAccounts& accounts, const BufferRequest& request);

  static Buffer get(const BufferRequest& request, FreeMemory& free);  // takes `free` over if it succeeds
  const Reservation& booked() const { return memory_.get_deleter().booked; }

  std::unique_ptr<std::byte[], FreeMemory> memory_;
};

// Our own host memory is zeroed, and resident as it was asked for; device memory and a caller's are neither. Too little
// memory is an error (B2001, B2003, B2004) that says how much is needed, available, and who set the limit. Any thread may call.
Buffer allocate(MemoryAccounts& accounts, const BufferRequest& request);

}  // namespace ballast
