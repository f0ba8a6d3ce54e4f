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
    : accounts_(accounts), device_(device), slots_(program.slots), queues_(std::move(queues)) {
  for (const Slot& slot : slots_) {
    buffers_.push_back(reserve(slot));
  }
  tell_queues(program);
}

Slots::~Slots() { forget_queues(); }

Buffer Slots::reserve(const Slot& slot) const {
  const bool on_device = slot.tier == Tier::device;
  BufferRequest request{.bytes = slot.bytes, .owner = slot.name, .gpu = device_.gpu.value_or(0)};
  if (device_.gpu) request.kind = on_device ? MemoryKind::device : MemoryKind::pinned;
  if (on_device) request.allocator = device_.allocator;
  return allocate(accounts_, request);
}

void Slots::change_to(const Program& program) {
  std::vector<Buffer> buffers;
  std::vector<std::pair<std::size_t, std::size_t>> kept;  // from where to where
  for (const Slot& slot : program.slots) {
    const auto same = std::ranges::find(slots_, slot);
    if (same != slots_.end()) kept.emplace_back(same - slots_.begin(), buffers.size());
    buffers.push_back(same != slots_.end() ? Buffer() : reserve(slot));  // may throw: nothing has changed yet
  }
  forget_queues();
  for (const auto& [from, to] : kept) {
    buffers[to] = std::move(buffers_[from]);
  }
  buffers_ = std::move(buffers);
  slots_ = program.slots;
  tell_queues(program);
}

void Slots::tell_queues(const Program& program) {
  for (const std::size_t slot : slots_of_records(program)) {
    for (offload::IoQueue* queue : queues_)
      queue->remember({buffers_[slot].data(), buffers_[slot].bytes()});
    known_to_queues_.push_back(slot);
  }
}

void Slots::forget_queues() {
  for (const std::size_t slot : known_to_queues_) {
    for (offload::IoQueue* queue : queues_)
      queue->forget({buffers_[slot].data(), buffers_[slot].bytes()});
  }
  known_to_queues_.clear();
}

View Slots::view(const Piece& piece, DType dtype) const { return {data(piece), piece.bytes / byte_size(dtype), dtype}; }

}  // namespace ballast
