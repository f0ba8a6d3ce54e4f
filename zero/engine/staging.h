// Copies between a GPU and any host memory, through a pair of pinned buffers.
#pragma once

#include <functional>

#include "zero/engine/arithmetic.h"

namespace ballast {

// The host fills or empties one buffer while the other one is on its way. Copies share a buffer, so the host waits
// once for 16 MiB, however many copies they are. Copies are done in order. The buffers live as long as this object,
// which lives for one call of the engine, and are not in the training's accounts. If the driver refuses to pin them, the
// copies are right, but slow. Without a GPU there are no buffers.
//
// Used by the trainer's thread between steps, when nothing is under way.
class Staging {
 public:
  // `most_bytes` are those of all copies together. The arithmetic outlives this.
  Staging(const LaneArithmetic& arithmetic, std::size_t most_bytes);
  Staging(Staging&&) = delete;

  void reserve();  // throws B2001 if there is too little memory; else the first copy does

  // Writes the bytes from the given one on, which are not clear.
  using Writer = std::function<void(std::size_t first, std::span<std::byte> bytes)>;

  void upload(std::byte* to, const std::byte* from, std::size_t bytes);    // `from` may be changed when this returns
  void upload(std::span<std::byte> to, const Writer& writer);              // calls `writer` once or more, in order
  void download(std::byte* to, const std::byte* from, std::size_t bytes);  // `to` is written when finish() returns
  void zero(std::byte* memory, std::size_t bytes) { device_.zero(memory, bytes); }
  void finish();  // waits for all copies

 private:
  struct Arrival {
    std::byte* to;
    const std::byte* from;  // a place in the buffer
    std::size_t bytes;
  };
  struct Half {
    std::byte* memory = nullptr;
    std::size_t used = 0;
    std::optional<Event> copied{};  // recorded after its last copy
    std::vector<Arrival> arrivals{};
  };

  std::span<std::byte> room_for(std::size_t most);
  void turn();
  void settle(Half& half);
  void copy_on_host(std::byte* to, const std::byte* from, std::size_t bytes);

  ExecContext device_;
  kernels::Backend& cpu_;
  std::size_t half_bytes_;
  MemoryAccounts accounts_{};
  Buffer buffer_{};
  std::array<Half, 2> halves_{};
  std::size_t current_ = 0;  // half
};

}  // namespace ballast
