#include "offload/piece_buffers.h"

#include <algorithm>

namespace ballast::offload {
namespace {

constexpr std::size_t least_buffers = 16;  // of a slab; large ones are slow to pin, and many are slower
constexpr std::size_t growth = 4;          // a slab adds at least this part of what is there

}  // namespace

bool PieceBuffer::is_idle() const {
  return std::ranges::all_of(uses, [](const Completion& use) { return use.is_done(); });
}

void PieceBuffer::settle() const {
  InFlight all;
  for (const Completion& use : uses) {
    all.add(use);
  }
}

PieceBuffers::~PieceBuffers() {
  for (const PieceBuffer& buffer : buffers_) {
    buffer.settle();
  }
  if (options_.queue == nullptr) return;
  for (const Buffer& slab : slabs_) {
    options_.queue->forget({slab.data(), slab.bytes()});
  }
}

// The buffer that was given back last is the likeliest one to be in the caches.
PieceBuffer* PieceBuffers::take() {
  auto found = std::find_if(free_.rbegin(), free_.rend(), [](const PieceBuffer* buffer) { return buffer->is_idle(); });
  if (found == free_.rend()) {
    if (buffers_.size() >= options_.most) return nullptr;
    add_slab();
    found = free_.rbegin();
  }
  PieceBuffer* const taken = *found;
  free_.erase(std::next(found).base());
  taken->uses.clear();
  return taken;
}

PieceBuffer* PieceBuffers::take_used() {
  if (free_.empty()) return nullptr;
  PieceBuffer* const taken = free_.front();
  free_.pop_front();
  return taken;
}

void PieceBuffers::add_slab() {
  const std::size_t wanted = std::max(least_buffers, buffers_.size() / growth);
  const std::size_t count = std::min(wanted, options_.most - buffers_.size());
  const bool pinned = options_.gpu.has_value();
  slabs_.push_back(allocate(accounts_, {.kind = pinned ? MemoryKind::pinned : MemoryKind::pageable,
                                        .bytes = count * options_.buffer_bytes,
                                        .owner = "offloaded activations",
                                        .gpu = options_.gpu.value_or(0),
                                        .threads = 0}));
  const std::span<std::byte> memory{slabs_.back().data(), slabs_.back().bytes()};
  if (options_.queue != nullptr) options_.queue->remember(memory);
  for (std::size_t i = 0; i < count; ++i) {
    free_.push_back(&buffers_.emplace_back(
        PieceBuffer{.memory = memory.subspan(i * options_.buffer_bytes, options_.buffer_bytes)}));
  }
}

}  // namespace ballast::offload
