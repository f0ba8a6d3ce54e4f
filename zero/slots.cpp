#include "zero/slots.h"

#include <algorithm>
#include <set>

#include "kernels/runtime/host_limits.h"

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

std::set<std::size_t> slots_of_first_state(const Program& program) {
  std::set<std::size_t> slots;
  for (const Home& home : program.homes) {
    if (home.parameters.exists()) slots.insert(home.parameters.slot);
    if (home.state.exists()) slots.insert(home.state.slot);
  }
  return slots;
}

// Of all together: what is not resident yet is still available for the next one.
void require_memory_of_host(const Program& program, const DeviceMemory& device) {
  std::size_t bytes = 0;
  for (const Slot& slot : program.slots) {
    const bool elsewhere = slot.tier == Tier::device && (device.gpu || device.allocator != nullptr);
    if (!elsewhere) bytes += slot.bytes;
  }
  require_host_memory(bytes, "all that this rank keeps", read_host_limits());
}

}  // namespace

Slots::Slots(const Program& program, MemoryAccounts& accounts, const DeviceMemory& device,
             std::vector<offload::IoQueue*> queues)
    : accounts_(accounts), device_(device), slots_(program.slots), queues_(std::move(queues)) {
  require_memory_of_host(program, device);
  const std::set<std::size_t> first_state = slots_of_first_state(program);
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    buffers_.push_back(reserve(slots_[slot], first_state.contains(slot) ? Resident::when_written : Resident::at_once));
  }
  tell_queues(program);
}

Slots::~Slots() { forget_queues(); }

Buffer Slots::reserve(const Slot& slot, Resident resident) const {
  const bool on_device = slot.tier == Tier::device;
  BufferRequest request{.bytes = slot.bytes, .owner = slot.name, .gpu = device_.gpu.value_or(0), .resident = resident};
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
    buffers.push_back(same != slots_.end() ? Buffer()
                                           : reserve(slot, Resident::at_once));  // may throw: nothing has changed yet
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
