// A program's memory: every slot, reserved at once, so that nothing grows later.
#pragma once

#include <vector>

#include "kernels/runtime/buffer.h"
#include "offload/io_queue.h"
#include "zero/plan/program.h"

namespace ballast {

class Slots {
 public:
  // Records pass through host slots: the drives' queues are told of those.
  Slots(const Program& program, MemoryAccounts& accounts, std::vector<offload::IoQueue*> queues);
  Slots(Slots&&) = delete;
  ~Slots();

  View view(const Piece& piece, DType dtype) const;
  std::byte* data(const Piece& piece) const { return buffers_[piece.slot].data() + piece.begin; }
  std::span<std::byte> bytes(const Piece& piece) const { return {data(piece), piece.bytes}; }

 private:
  std::vector<Buffer> buffers_;
  std::vector<offload::IoQueue*> queues_;
  std::vector<std::size_t> known_to_queues_;  // slots
};

}  // namespace ballast
