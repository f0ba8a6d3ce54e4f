#include "offload/staging_pool.h"

#include <fmt/format.h>

#include <utility>

#include "kernels/runtime/error.h"
#include "kernels/runtime/round_up.h"

namespace ballast::offload {
namespace {

StagingPool::Shape in_blocks(StagingPool::Shape shape) {
  require(shape.slots > 0 && shape.slot_bytes > 0, Code::bad_argument, [&] {
    return Problem{
        .what = fmt::format("a staging pool of {} slots with {} bytes was asked for", shape.slots, shape.slot_bytes)};
  });
  return {shape.slots, round_up(shape.slot_bytes, block_bytes)};
}

}  // namespace

Staging::Staging(StagingPool& pool, std::size_t slot, std::span<std::byte> bytes, std::string owner)
    : pool_(&pool), slot_(slot), bytes_(bytes), owner_(std::move(owner)) {}

Staging::Staging(Staging&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      slot_(other.slot_),
      bytes_(other.bytes_),
      owner_(std::move(other.owner_)) {}

Staging::~Staging() {
  if (pool_ != nullptr) pool_->give_back(slot_, owner_);
}

StagingPool::StagingPool(MemoryAccounts& accounts, const std::string& owner, Shape shape, std::vector<IoQueue*> queues,
                         int gpu)
    : shape_(in_blocks(shape)),
      memory_(allocate(
          accounts,
          {.kind = MemoryKind::pinned, .bytes = shape_.slots * shape_.slot_bytes, .owner = owner, .gpu = gpu})),
      queues_(std::move(queues)) {
  for (std::size_t slot = shape_.slots; slot > 0; --slot) {
    free_.push_back(slot - 1);
  }
  for (IoQueue* queue : queues_) {
    queue->remember({memory_.data(), memory_.bytes()});
  }
}

StagingPool::~StagingPool() {
  for (IoQueue* queue : queues_) {
    queue->forget({memory_.data(), memory_.bytes()});
  }
}

Staging StagingPool::take_locked(std::string owner) {
  const std::size_t slot = free_.back();
  free_.pop_back();
  ++usage_[owner];
  return {*this, slot, {memory_.data() + slot * shape_.slot_bytes, shape_.slot_bytes}, std::move(owner)};
}

Staging StagingPool::take(std::string owner) {
  std::unique_lock lock(mutex_);
  given_back_.wait(lock, [&] { return !free_.empty(); });
  return take_locked(std::move(owner));
}

std::optional<Staging> StagingPool::try_take(std::string owner) {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return {};
  return take_locked(std::move(owner));
}

// The slot that was used last is taken next: it may still be in the caches.
void StagingPool::give_back(std::size_t slot, const std::string& owner) noexcept {
  const std::lock_guard lock(mutex_);
  free_.push_back(slot);  // never grows: there was room for all slots
  if (const auto used = usage_.find(owner); --used->second == 0) usage_.erase(used);
  given_back_.notify_one();
}

std::size_t StagingPool::free_slots() const {
  const std::lock_guard lock(mutex_);
  return free_.size();
}

std::map<std::string, std::size_t> StagingPool::usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

}  // namespace ballast::offload
