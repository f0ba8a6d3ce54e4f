// Host memory in buffers of one size, for bytes on their way between memory, a GPU and a drive.
#pragma once

#include <ballast/memory.h>

#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "kernels/runtime/buffer.h"
#include "offload/completion.h"
#include "offload/io_queue.h"

namespace ballast::offload {

struct PieceBuffer {
  std::span<std::byte> memory{};
  std::vector<Completion> uses{};  // transfers that may still read or write the memory

  bool is_idle() const;  // all uses have ended
  void settle() const;   // waits until they have, and ignores failures
};

// Memory is added in slabs, when it is needed. The destructor waits for the uses of all buffers. Used by one thread at a
// time.
class PieceBuffers {
 public:
  struct Options {
    std::size_t buffer_bytes = 0;  // a multiple of block_bytes
    std::size_t most = SIZE_MAX;   // buffers
    std::optional<int> gpu{};      // whose copies use the memory: it is pinned then
    IoQueue* queue = nullptr;      // that reads and writes the memory; outlives this object
  };

  explicit PieceBuffers(const Options& options) : options_(options) {}
  PieceBuffers(PieceBuffers&&) = delete;
  ~PieceBuffers();

  // Takes a buffer that nothing uses. Returns null if there is none, and there may not be more.
  PieceBuffer* take();

  // Takes the buffer that was given back first, whose uses may not have ended. Returns null if none was given back.
  PieceBuffer* take_used();

  void give_back(PieceBuffer& buffer) { free_.push_back(&buffer); }

  std::size_t bytes() const { return buffers_.size() * options_.buffer_bytes; }

 private:
  void add_slab();

  Options options_;
  MemoryAccounts accounts_;
  std::vector<Buffer> slabs_;
  std::deque<PieceBuffer> buffers_;  // a deque keeps their addresses
  std::deque<PieceBuffer*> free_;
};

}  // namespace ballast::offload
