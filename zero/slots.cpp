#include "zero/slots.h"

#include <algorithm>
#include <set>

namespace ballast {
namespace {

std::set<std::size_t> slots_of_records(const Program& program) {
  std::set<std::size_t> slots;
  for (const std::vector<Op>* ops : {&program.entry, &program.ops}) {
    for (const Op& op : *ops) {
      if (op.kind == OpKind::read || op.kind == OpKind::read_first) slots.insert(op.to.slot);
    }
  }
  return slots;
}

}  // namespace

Slots::Slots(const Program& program, MemoryAccounts& accounts, const DeviceMemory& device,
             std::vector<offload::IoQueue*> queues)
    : queues_(std::move(queues)) {
  for (const Slot& slot : program.slots) {
    const bool on_device = slot.tier == Tier::device;
    BufferRequest request{.bytes = slot.bytes, .owner = slot.name, .gpu = device.gpu.value_or(0)};
    if (device.gpu) request.kind = on_device ? MemoryKind::device : MemoryKind::pinned;
    if (on_device) request.allocator = device.allocator;
    buffers_.push_back(allocate(accounts, request));
  }
  for (const std::size_t slot : slots_of_records(program)) {
    const auto memory = bytes({slot, 0, program.slots[slot].bytes});
    for (offload::IoQueue* queue : queues_)
      queue->remember(memory);
    known_to_queues_.push_back(slot);
  }
}

Slots::~Slots() {
  for (const std::size_t slot : known_to_queues_) {
    for (offload::IoQueue* queue : queues_)
      queue->forget({buffers_[slot].data(), buffers_[slot].bytes()});
  }
}

View Slots::view(const Piece& piece, DType dtype) const { return {data(piece), piece.bytes / byte_size(dtype), dtype}; }

}  // namespace ballast
