// How bytes get from rank to rank: in rounds, in each of which every rank gives every other one some. All collectives are
// made of rounds (collectives.h), so a new way to carry bytes is one small class.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "zero/comm/call.h"
#include "zero/comm/farewell.h"
#include "zero/comm/gpu_place.h"

namespace ballast {

class Allocator;

// Where the bytes of a round lie: where the backend works, which may be a GPU, or in host memory all the same.
enum class Where : bool { backend, host };

inline constexpr std::size_t everybody = SIZE_MAX;

// What a rank gives in one round: `bytes` to each, of which those for rank p begin at data + p * stride. With a stride of
// 0 all get the same.
struct Round {
  Call call{};  // that the round belongs to
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t stride = 0;
  std::size_t giver = everybody;  // the only one who gives
  Where where = Where::backend;

  std::span<const std::byte> piece(std::size_t rank) const { return {data + rank * stride, bytes}; }
  std::span<const std::byte> all(std::size_t ranks) const { return {data, (ranks - 1) * stride + bytes}; }
  bool gives(std::size_t rank) const { return giver == everybody || giver == rank; }
};

// Called for what each rank that gives has given, this rank's own included: all of it, or piece after piece, of which each
// begins at the byte `first`. Every byte is taken of one rank after the other, in rank order. They stay until it returns.
using Take = std::function<void(std::size_t peer, std::span<const std::byte> bytes, std::size_t first)>;

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::size_t rank() const = 0;
  virtual std::size_t size() const = 0;

  // The most that a round may give to each, of what lies there.
  virtual std::size_t round_bytes(Where where, std::span<const std::byte> bytes) const = 0;

  // Throws B3301 or B3302 when a peer fails or does not come. What was given may be changed when it returns.
  virtual void round(const Round& given, const Take& take) = 0;

  // Host memory that peers read in place, if there is such. On each rank a round's bytes lie in it, or on none.
  virtual Allocator* shared_memory() { return nullptr; }
  virtual bool is_shared(std::span<const std::byte>) const { return false; }

  // The group that `ranks` of this one form, this rank among them; for memory of a GPU, if a place there is given. All ranks
  // call at the same time.
  virtual std::unique_ptr<Transport> split(std::span<const std::size_t> ranks,
                                           const std::optional<GpuPlace>& place) = 0;

  // Any thread may call. What they mean, Communicator says.
  virtual void abort(std::string_view reason) = 0;
  virtual void leave(const Farewell& farewell) = 0;
  virtual void set_activity(std::string_view activity) = 0;
};

}  // namespace ballast
