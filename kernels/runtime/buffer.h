// Owned memory of exactly the requested size, on the GPU or on the host, booked under its owner's name.
#pragma once

#include <ballast/memory.h>
#include <ballast/view.h>

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/runtime/host_pages.h"

namespace ballast {

struct BufferRequest {
  MemoryKind kind = MemoryKind::pageable;
  std::size_t bytes = 0;
  std::string owner;                      // "optimizer state of h.7"
  int gpu = 0;                            // the GPU of device memory, and of copies to and from pinned memory
  Resident resident = Resident::at_once;  // applies to own pageable memory; pinned memory is resident at once
  int threads = 1;                        // threads that make own host memory resident; 0: one for each usable core
  Allocator* allocator = nullptr;         // replaces the own allocator of this kind; outlives the buffer
};

// Returns memory to its allocator. It owns the booking, so that the booking ends after the memory.
struct FreeMemory {
  Reservation booked{};
  std::size_t mapped_bytes = 0;
  int gpu = 0;
  bool pinned = false;
  std::string unpinned_because{};
  Allocator* allocator = nullptr;
  void operator()(std::byte* memory) const noexcept;
};

// Move-only. One thread at a time uses the object; the caller may share the memory between threads. Like a unique_ptr,
// a const Buffer gives writable memory. The destructor of device or pinned memory waits for the GPU's work on it.
class Buffer {
 public:
  Buffer() = default;

  std::byte* data() const { return memory_.get(); }  // null for an empty buffer
  std::size_t bytes() const { return booked().bytes(); }
  MemoryKind kind() const { return booked().kind(); }
  const std::string& owner() const { return booked().owner(); }

  View view(DType dtype) const;  // a view of the whole buffer, which must hold whole elements

  // Why a pinned buffer is not pinned: it then works as pageable memory. Empty if it is pinned.
  bool pinned() const { return memory_ && memory_.get_deleter().pinned; }
  const std::string& unpinned_because() const { return memory_.get_deleter().unpinned_because; }

 private:
  friend Buffer allocate(MemoryAccounts& accounts, const BufferRequest& request);

  static Buffer get(const BufferRequest& request, FreeMemory& free);  // takes over `free` on success
  const Reservation& booked() const { return memory_.get_deleter().booked; }

  std::unique_ptr<std::byte[], FreeMemory> memory_;
};

// Allocates memory. Own host memory is zeroed, and resident as requested; device memory and that of an external
// allocator are neither. Throws B2001, B2003 or B2004 for too little memory, with the needed and available bytes and
// the limit. Any thread may call.
Buffer allocate(MemoryAccounts& accounts, const BufferRequest& request);

}  // namespace ballast
