// The memory through which state passes on its way between drives, host and GPU: one pinned stretch, cut into slots of one
// size. Whoever needs a slot when there is none waits: the pool never grows.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernels/runtime/buffer.h"
#include "offload/io_queue.h"

namespace ballast::offload {

class StagingPool;

// A slot while it is in use. Given back by its owner's end, from any thread.
class Staging {
 public:
  Staging(Staging&& other) noexcept;
  Staging& operator=(Staging&&) = delete;
  ~Staging();

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  friend class StagingPool;
  Staging(StagingPool& pool, std::size_t slot, std::span<std::byte> bytes, std::string owner);

  StagingPool* pool_;
  std::size_t slot_;
  std::span<std::byte> bytes_;
  std::string owner_;
};

// Any thread may call. Outlives its slots, and the queues that know its memory outlive it.
class StagingPool {
 public:
  struct Shape {
    std::size_t slots = 0;
    std::size_t slot_bytes = 0;  // rounded up to whole blocks, so that every slot is fit for direct I/O
  };

  // The memory is booked as `owner`, and made known to CUDA and to each of the queues once, here.
  StagingPool(MemoryAccounts& accounts, const std::string& owner, Shape shape, std::vector<IoQueue*> queues = {},
              int gpu = 0);
  ~StagingPool();

  Staging take(std::string owner);                     // waits until there is one
  std::optional<Staging> try_take(std::string owner);  // none if there is none now

  std::size_t slot_bytes() const { return shape_.slot_bytes; }
  std::size_t free_slots() const;
  std::map<std::string, std::size_t> usage() const;  // slots of each owner that has any
  const Buffer& memory() const { return memory_; }

 private:
  friend class Staging;
  Staging take_locked(std::string owner);
  void give_back(std::size_t slot, const std::string& owner) noexcept;

  Shape shape_;
  Buffer memory_;
  std::vector<IoQueue*> queues_;
  mutable std::mutex mutex_;  // of what follows
  std::condition_variable given_back_;
  std::vector<std::size_t> free_;
  std::map<std::string, std::size_t> usage_;
};

}  // namespace ballast::offload
