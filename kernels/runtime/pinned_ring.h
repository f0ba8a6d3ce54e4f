// A few slots of pinned memory through which data passes that lies in memory which could not be pinned.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/stream.h"

namespace ballast {

// Used by one thread at a time. Destroying it waits for the GPU's work on it.
class PinnedRing {
 public:
  struct Shape {
    std::size_t slots;
    std::size_t slot_bytes;
  };

  // Where there is a GPU whose driver will not pin even this, an error (B2002). Without a GPU it is plain memory.
  PinnedRing(MemoryAccounts& accounts, std::string owner, Shape shape, int gpu = 0);

  // The next slot in turn; waits until the work of its last use is done.
  std::span<std::byte> next();

  // The slot that next() gave last is in use until all that was issued into the stream so far is done.
  void in_use_by(const Stream& stream);

  const Buffer& buffer() const { return buffer_; }

 private:
  Shape shape_;
  int gpu_;
  Buffer buffer_;
  std::vector<std::optional<Event>> last_use_;  // of each slot; made when first needed, so never without a GPU
  std::size_t current_;
};

}  // namespace ballast
