// A program's memory: every slot, reserved at once, so that nothing grows later. What the first state is written to becomes
// resident when it is: whoever gives the state can make room meanwhile.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <set>
#include <vector>

#include "kernels/runtime/buffer.h"
#include "offload/io_queue.h"
#include "zero/engine/exec_context.h"
#include "zero/plan/program.h"

namespace ballast {

// What the memory of the device tier is.
struct DeviceMemory {
  std::optional<int> gpu{};        // none: the host's
  Allocator* allocator = nullptr;  // the caller's, instead of our own; outlives the slots
  Allocator* shared = nullptr;     // instead of our own on the host: what ranks read of each other, unit after unit
};

class Slots {
 public:
  // Records pass through host slots: the drives' queues are told of those. Beside a GPU the host's memory is pinned.
  Slots(const Program& program, MemoryAccounts& accounts, const DeviceMemory& device,
        std::vector<offload::IoQueue*> queues);
  Slots(Slots&&) = delete;
  ~Slots();

  // Slots of the same name and size keep their memory and what is in it; others go, or come. While nothing uses them.
  void change_to(const Program& program);

  // While nothing uses them: the device tier's memory goes back to where it came from, parameters too or not. What trainings
  // begin with is copied to the host; all else comes back as it began. `agree` is called once there is memory for it, or with
  // the error if there is not; nothing has changed if it throws.
  using Agree = std::function<void(const std::exception_ptr& failure)>;
  void leave_device(const Program& program, const ExecContext& context, bool parameters, const Agree& agree);
  void return_to_device(const ExecContext& context, const Agree& agree);

  // Of the host's memory, which becomes resident when the first state is written there: pinned memory is already.
  std::size_t unwritten_bytes(const Piece& piece) const;

  std::string unpinned_because() const;  // of the host's memory beside a GPU; empty if all of it is pinned

  View view(const Piece& piece, DType dtype) const;
  std::byte* data(const Piece& piece) const {  // null of what has no memory, as the state of a rule that keeps nothing
    return piece.exists() ? buffers_[piece.slot].data() + piece.begin : nullptr;
  }
  std::span<std::byte> bytes(const Piece& piece) const { return {data(piece), piece.bytes}; }
  bool on_gpu(const Piece& piece) const { return piece.exists() && buffers_[piece.slot].kind() == MemoryKind::device; }

 private:
  Buffer reserve(const Slot& slot, Resident resident, bool is_exchanged) const;
  bool on_host(const Slot& slot) const;
  void tell_queues(const Program& program);
  void forget_queues();

  MemoryAccounts& accounts_;
  DeviceMemory device_;
  std::vector<Slot> slots_;
  std::vector<Buffer> buffers_;
  std::set<std::size_t> exchanged_;  // slots
  std::vector<offload::IoQueue*> queues_;
  std::vector<std::size_t> known_to_queues_;  // slots
  std::vector<std::size_t> away_;             // slots that have left the device
};

}  // namespace ballast
