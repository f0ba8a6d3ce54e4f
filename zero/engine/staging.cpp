#include "zero/engine/staging.h"

#include <algorithm>

#include "kernels/runtime/sizes.h"

namespace ballast {
namespace {

constexpr std::size_t most_half_bytes = std::size_t{16} << 20;  // the bus is at its speed; pinned in milliseconds
constexpr std::size_t alignment = 64;                           // alignment of each copy: whole elements of all formats

}  // namespace

Staging::Staging(const LaneArithmetic& arithmetic, std::size_t most_bytes)
    : device_(arithmetic.copies()),
      cpu_(arithmetic.of(Lane::host).context().backend()),
      half_bytes_(std::clamp(round_up(most_bytes / 2, alignment), alignment, most_half_bytes)) {}

void Staging::reserve() {
  if (device_.stream() == nullptr || buffer_.bytes() > 0) return;
  const int gpu = device_.stream()->gpu();
  buffer_ = allocate(accounts_, {.kind = MemoryKind::pinned, .bytes = 2 * half_bytes_, .owner = "staging", .gpu = gpu});
  for (std::size_t i = 0; i < halves_.size(); ++i) {
    halves_[i].memory = buffer_.data() + i * half_bytes_;
    halves_[i].copied.emplace(gpu);
  }
}

void Staging::upload(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (device_.stream() == nullptr) return device_.copy(to, from, bytes);
  upload({to, bytes},
         [&](std::size_t first, std::span<std::byte> part) { copy_on_host(part.data(), from + first, part.size()); });
}

void Staging::upload(std::span<std::byte> to, const Writer& writer) {
  if (device_.stream() == nullptr && !to.empty()) return writer(0, to);
  for (std::size_t first = 0; first < to.size();) {
    const std::span<std::byte> part = room_for(to.size() - first);
    writer(first, part);
    device_.copy(to.data() + first, part.data(), part.size());
    first += part.size();
  }
}

void Staging::download(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (device_.stream() == nullptr) return device_.copy(to, from, bytes);
  for (std::size_t first = 0; first < bytes;) {
    const std::span<std::byte> part = room_for(bytes - first);
    device_.copy(part.data(), from + first, part.size());
    halves_[current_].arrivals.push_back({.to = to + first, .from = part.data(), .bytes = part.size()});
    first += part.size();
  }
}

void Staging::finish() {
  if (buffer_.bytes() == 0) return device_.finish();
  turn();
  turn();
}

// Returns memory of the current half, or of the other one if it is full.
std::span<std::byte> Staging::room_for(std::size_t most) {
  reserve();
  if (halves_[current_].used == half_bytes_) turn();
  Half& half = halves_[current_];
  const std::span<std::byte> room(half.memory + half.used, std::min(most, half_bytes_ - half.used));
  half.used += round_up(room.size(), alignment);
  return room;
}

void Staging::turn() {
  halves_[current_].copied->record(*device_.stream());
  current_ = 1 - current_;
  settle(halves_[current_]);
}

// Waits for the copies of a half, and brings what has arrived in it to its place.
void Staging::settle(Half& half) {
  half.copied->synchronize();
  for (const Arrival& arrival : half.arrivals) {
    copy_on_host(arrival.to, arrival.from, arrival.bytes);
  }
  half.arrivals.clear();
  half.used = 0;
}

void Staging::copy_on_host(std::byte* to, const std::byte* from, std::size_t bytes) {
  cpu_.cast(ConstView(from, bytes, DType::u8), View(to, bytes, DType::u8));
}

}  // namespace ballast
