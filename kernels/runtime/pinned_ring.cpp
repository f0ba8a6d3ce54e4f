#include "kernels/runtime/pinned_ring.h"

#include <utility>

#include "kernels/runtime/host_limits.h"
#include "kernels/runtime/sizes.h"

namespace ballast {
namespace {

void require_pinned(const Buffer& buffer) {
  require(buffer.pinned() || buffer.bytes() == 0 || !device::absence().empty(), Code::pinned_memory, [&] {
    const auto memlock = read_host_limits().memlock_bytes;
    return Problem{.what = buffer.unpinned_because(),
                   .where = buffer.owner(),
                   .needed = human_bytes(buffer.bytes()),
                   .available = memlock ? human_bytes(*memlock) + " (memlock limit)" : "no memlock limit",
                   .remedy = "Raise the memlock limit (`ulimit -l`), or make the ring smaller."};
  });
}

}  // namespace

PinnedRing::PinnedRing(MemoryAccounts& accounts, std::string owner, Shape shape, int gpu)
    : shape_(shape), gpu_(gpu), last_use_(shape.slots), current_(shape.slots - 1) {
  require(
      shape.slots > 0 && shape.slot_bytes > 0 && shape.slot_bytes <= SIZE_MAX / shape.slots, Code::bad_argument, [&] {
        return Problem{.what = "a pinned ring cannot have this shape",
                       .where = owner,
                       .needed = "at least one slot of one byte, and no more bytes in all than memory has addresses",
                       .available = fmt::format("{} slots of {}", shape.slots, human_bytes(shape.slot_bytes))};
      });
  buffer_ = allocate(
      accounts,
      {.kind = MemoryKind::pinned, .bytes = shape.slots * shape.slot_bytes, .owner = std::move(owner), .gpu = gpu});
  require_pinned(buffer_);
}

std::span<std::byte> PinnedRing::next() {
  current_ = (current_ + 1) % shape_.slots;
  if (last_use_[current_]) {
    last_use_[current_]->synchronize();
  }
  return {buffer_.data() + current_ * shape_.slot_bytes, shape_.slot_bytes};
}

void PinnedRing::in_use_by(const Stream& stream) {
  std::optional<Event>& use = last_use_[current_];
  if (!use) {
    use.emplace(gpu_);
  }
  use->record(stream);
}

}  // namespace ballast
