// The collective calls of the library: their description, which ranks compare, and what its own callers give them besides
// values. <ballast/comm.h> declares these types for communicators.
#pragma once

#include <ballast/comm.h>
#include <ballast/view.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kernels/quantize.h"
#include "kernels/update.h"

namespace ballast {

namespace kernels {
class Backend;
}

// The purpose of a sum of integers. Ranks that add for different purposes make different calls, whatever the lengths.
enum class Purpose : std::uint8_t {
  values,     // the caller's values
  agreement,  // the decision of a step
  off_plan,   // that all ranks take the same off-plan use
};

enum class Collective : std::uint8_t {
  all_gather,
  reduce_scatter,
  all_reduce,
  sum,
  broadcast,
  barrier,
  split,
  exchange
};

// All ranks of a group make the same call.
struct Call {
  Collective kind = Collective::barrier;
  DType dtype = DType::u8;
  std::uint32_t root = 0;
  std::uint64_t count = 0;  // PartSizes::bytes of an exchange of parts, for one peer
  Purpose purpose = Purpose::values;
  DType sum = DType::fp32;  // the format of a sum
  bool is_encoded = false;
  kernels::CodeBits values = kernels::CodeBits::eight;  // if it is encoded
  kernels::CodeBits sums = kernels::CodeBits::eight;
  std::uint64_t sizes = 0;  // PartSizes::checksum of an exchange of parts
  bool operator==(const Call&) const = default;
};

std::string text(const Call& call);  // "reduce_scatter of 100 bf16 in fp32"

// Throws B1001 that names the peer if the calls differ.
void require_same(const Call& ours, const Call& theirs, std::string_view peer);

// The arguments of a call of all_gather() or reduce_scatter() that a sender needs.
struct NextCollective {
  Collective kind = Collective::all_gather;
  ConstView sent{};
  std::size_t count = 0;    // elements of this rank's part of a reduction
  DType sum = DType::fp32;  // the format of the sum of a reduction
};

// The next collective of a communicator, as its caller knows it before it calls.
class LookAhead {
 public:
  virtual ~LookAhead() = default;
  // Called by the thread that calls the communicator, in the middle of a collective. Returns the collective that this thread calls
  // next of this communicator, if the values that it sends are final. They stay as they are until the end of that call, or, if a
  // failure prevents it, until Communicator::use_look_ahead() is called. No other call comes in between.
  virtual std::optional<NextCollective> next() = 0;
};

// Makes collectives encoded: ranks send blocks of codes (kernels/quantize.h) instead of values. A gather rounds to nearest, a
// reduction stochastically, by bits that depend on its stream, on the rank or host that rounds, and on the element.
struct Encoding {
  kernels::CodeBits values = kernels::CodeBits::eight;  // each rank's values
  // Sums of several ranks: those of a host on their way to other hosts, and the result of an all_reduce on its way to
  // all ranks.
  kernels::CodeBits sums = kernels::CodeBits::eight;
  std::uint64_t stream = 0;  // stream of random bits; equal on all ranks, and new for each reduction
  // The tensors of a reduction's elements, in order; each of them begins at a group, and padding belongs to the one before it. The
  // random bits of an element are those of its tensor and its index there, as in kernels::Backend::accumulate_stochastic(), so
  // that they do not depend on how tensors are put together. Without any, all elements are of tensor 0.
  std::span<const kernels::Run> tensors{};
  std::uint64_t first_index = 0;  // RoundingPlace::first_index of the tensors
  // u8, which the backend reaches: at least kernels::encoded_parts_bytes() in a gather and a reduce_scatter, and
  // encoded_all_reduce_bytes() in an all_reduce. Its contents are lost. Where peers read in place, it lies in memory of
  // Communicator::shared_memory() on all ranks or on none.
  View memory;
};

struct GpuStream {
  StreamHandle stream = nullptr;
  int gpu = 0;
  // No rank sends a part to one other. NCCL then connects fewer ranks with each other, which takes gigabytes less memory.
  bool only_gathers = false;
  // Gathers copy what the ranks keep in host memory, on one machine: see Communicator::shares_memory(). They return when all ranks
  // have copied.
  bool from_host = false;
};

// The stream of a group, and the backend that adds on it. Both outlive the group. Calls of a group with a channel return
// when their work is issued into the stream. Processes then use NCCL, whatever transport the parent group has (B2301
// without NCCL), and threads copy on the GPU.
struct Channel {
  GpuStream stream{};
  kernels::Backend* backend = nullptr;
};

}  // namespace ballast
