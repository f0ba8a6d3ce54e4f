// The interface of transports. A transport exchanges chunks: in each exchange every rank sends bytes to every other
// rank. All collectives consist of such exchanges (collectives.h), so a new transport is one small class.
#pragma once

#include <ballast/comm.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "zero/comm/call.h"
#include "zero/comm/channel.h"

namespace ballast {

class Allocator;

// The memory of a chunk: that of the backend, which may be a GPU's, or always host memory.
enum class ChunkMemory : bool { backend, host };

inline constexpr std::size_t all_ranks = SIZE_MAX;

struct SentChunk;

// Returns the chunk of the exchange after this one, if its bytes can be sent. Otherwise the transport may call again.
using NextChunk = std::function<std::optional<SentChunk>()>;

// Makes the bytes of all pieces of a chunk from the byte `first` on.
using Prepare = std::function<void(std::size_t first, std::size_t bytes)>;

// The data that a rank sends in one exchange: `bytes` to each rank; those for rank p begin at data + p * stride. With a
// stride of 0 all ranks get the same bytes.
struct SentChunk {
  Call call{};  // the collective that the exchange belongs to
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::size_t stride = 0;
  std::size_t sender = all_ranks;  // the only rank that sends
  ChunkMemory where = ChunkMemory::backend;
  const Prepare* prepare = nullptr;  // is called for all bytes, in order, each time before they are sent; or null
  std::size_t block_bytes = 1;       // pieces of the chunk begin at multiples of this
  const NextChunk* next = nullptr;   // a transport may send the first bytes of that chunk in this exchange; or null

  void make(std::size_t first, std::size_t count) const {
    if (prepare != nullptr) (*prepare)(first, count);
  }
  std::size_t piece_bytes(std::size_t most) const { return most - most % block_bytes; }  // of the largest piece
  std::span<const std::byte> piece(std::size_t rank) const { return {data + rank * stride, bytes}; }
  std::span<const std::byte> all(std::size_t ranks) const { return {data, (ranks - 1) * stride + bytes}; }
  bool sends(std::size_t rank) const { return sender == all_ranks || sender == rank; }
};

// Receives the bytes of each sending rank, this rank's own included: all at once, or in pieces that begin at the byte
// `first`. Each byte is received from one rank after the other, in rank order. The bytes stay valid until the call
// returns.
using Receive = std::function<void(std::size_t peer, std::span<const std::byte> bytes, std::size_t first)>;

// Receives a stretch of the bytes of all ranks together: `bytes` from each, which begin at the byte `first` of what it
// sends. Stretches come in order, and stay valid until the call returns.
using ReceiveTogether =
    std::function<void(std::span<const std::byte* const> by_rank, std::size_t bytes, std::size_t first)>;

// The parts that a rank sends to others and receives from them: see Communicator::exchange(). None are for the rank itself.
struct Parts {
  Call call{};
  std::span<const SentPart> sent{};
  std::span<const ReceivedPart> received{};
};

// One thread at a time calls all but abort(), leave() and set_activity(); any thread may call those.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::size_t rank() const = 0;
  virtual std::size_t size() const = 0;

  // How many neighbouring ranks are on one host, which are added before hosts are; 1: ranks are added in rank order.
  virtual std::size_t ranks_per_host() const { return 1; }
  // Whether hosts are joined by links, so that collectives of several hosts with several ranks have two levels.
  virtual bool has_links() const { return false; }

  // Reads the chunk of SentChunk::next no more, because its exchange does not come. If a part of it was sent, this aborts the group:
  // peers would wait for the rest.
  virtual void drop_sent_ahead() {}

  // How many ranks are on this rank's host, itself included.
  virtual std::size_t ranks_here() const { return size(); }

  // Whether another rank is on this rank's host.
  virtual bool is_here(std::size_t) const { return true; }

  // Counts what this rank sends to each other rank, or to one.
  void count_sent(std::size_t bytes) {
    inside_ += (ranks_here() - 1) * bytes;
    across_ += (size() - ranks_here()) * bytes;
  }
  void count_sent_to(std::size_t peer, std::size_t bytes) { (is_here(peer) ? inside_ : across_) += bytes; }
  SentBytes sent() const { return {inside_, across_}; }  // any thread may call

  // The largest chunk for each rank, if it lies in such memory.
  virtual std::size_t max_chunk_bytes(ChunkMemory where, std::span<const std::byte> bytes) const = 0;

  // Throws B3301 or B3302 if a peer fails or does not arrive. The caller may change the sent bytes when it returns.
  virtual void exchange(const SentChunk& chunk, const Receive& receive) = 0;

  // An exchange like the other, in which every rank sends. The bytes of all ranks are within reach at once, so that one
  // kernel can read them.
  virtual void exchange_together(const SentChunk& chunk, const ReceiveTogether& receive) = 0;

  // Gathers the bytes of all ranks straight into `all`, in rank order, whatever their number; the rank's own may be
  // there already. Returns false, having done nothing, if the transport has no such operation: on all ranks or on none.
  virtual bool all_gather(const SentChunk&, std::span<std::byte>) { return false; }

  // Throws as exchange() does. All sent parts may change when it returns, and all received ones are there: on a GPU, in the
  // order of the stream.
  virtual void exchange_parts(const Parts& parts) = 0;

  // Memory for sums on their way, in which the backend works. It keeps its bytes until the next call.
  virtual std::byte* scratch(std::size_t bytes) {
    scratch_.resize(std::max(scratch_.size(), bytes / sizeof(float)));
    return reinterpret_cast<std::byte*>(scratch_.data());
  }

  // See Communicator.
  virtual void use_memory(const View& /*received*/, const View& /*sums*/) {}

  // An allocator of host memory that peers read in place, or null. The chunks of one exchange lie in it on all ranks or
  // on none.
  virtual Allocator* shared_memory() { return nullptr; }
  virtual bool is_shared(std::span<const std::byte>) const { return false; }

  // Returns the transport of a group of `ranks`, this rank among them; with a stream, for GPU memory. All ranks call at
  // the same time.
  virtual std::unique_ptr<Transport> split(std::span<const std::size_t> ranks,
                                           const std::optional<GpuStream>& stream) = 0;

  // See Communicator.
  virtual void abort(std::string_view reason) = 0;
  virtual void leave(const LeaveReason& leave_reason) = 0;
  virtual void set_activity(std::string_view activity) = 0;
  virtual std::vector<std::size_t> failed_ranks() const = 0;

 private:
  std::vector<float> scratch_;
  std::atomic<std::size_t> inside_ = 0;  // bytes sent to ranks of this host
  std::atomic<std::size_t> across_ = 0;  // to other hosts
};

}  // namespace ballast
