// The interface of transports, and the exchange of any number of values through one. A transport exchanges chunks of limited size:
// in each exchange every rank sends bytes to every other rank. All collectives consist of such exchanges (collectives.cpp), so a
// new transport is one small class.
#pragma once

#include <ballast/comm.h>
#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zero/comm/call.h"

namespace ballast {

class Allocator;

// The memory of a chunk: that of the backend, which may be a GPU's, or always host memory.
enum class ChunkMemory : bool { backend, host };

inline constexpr std::size_t all_ranks = SIZE_MAX;

struct Sent;

// Returns what this rank sends in the exchange after this one, if its bytes can be sent. Otherwise the transport may call again.
using NextChunk = std::function<std::optional<Sent>()>;

// Makes the bytes of all pieces of a chunk from the byte `first` on.
using Prepare = std::function<void(std::size_t first, std::size_t bytes)>;

// The values that a rank sends: `values` to each rank; those for rank p begin p * stride bytes later. With a stride of 0 all
// ranks get the same bytes. A collective sends any number of values, in exchanges of chunks.
struct Sent {
  Call call{};  // the collective that the exchange belongs to
  ConstView values{};
  std::size_t stride = 0;
  std::size_t sender = all_ranks;  // the only rank that sends
  ChunkMemory where = ChunkMemory::backend;
  const Prepare* prepare = nullptr;  // is called for all bytes, in order, each time before they are sent; or null
  std::size_t block_bytes = 1;       // chunks, and their pieces, begin at multiples of this
  const NextChunk* next = nullptr;   // a transport may send the first bytes of that chunk in this exchange; or null

  // The chunk of one exchange, which is a part of the values.
  Sent chunk(const ConstView& part) const {
    Sent sent = *this;
    sent.values = part;
    if (part.data() + part.bytes() != data() + bytes()) sent.next = nullptr;
    return sent;
  }
  void make(std::size_t first, std::size_t count) const {
    if (prepare != nullptr) (*prepare)(first, count);
  }
  const std::byte* data() const { return values.data(); }
  std::size_t bytes() const { return values.bytes(); }
  std::size_t piece_bytes(std::size_t most) const { return most - most % block_bytes; }  // bytes of the largest piece
  std::span<const std::byte> piece(std::size_t rank) const { return {data() + rank * stride, bytes()}; }
  std::span<const std::byte> all(std::size_t ranks) const { return {data(), (ranks - 1) * stride + bytes()}; }
  bool sends(std::size_t rank) const { return sender == all_ranks || sender == rank; }
};

// The bytes of integers, or of what threads tell each other.
template <class T>
ConstView byte_view(std::span<T> values) {
  const auto bytes = std::as_bytes(values);
  return {bytes.data(), bytes.size(), DType::u8};
}

// Receives a stretch of the bytes of all ranks together: `bytes` from each, which begin at the byte `first` of what it sends;
// those of a rank that does not send are not to be read. Stretches come in order, and stay valid until the call returns.
using Receive = std::function<void(std::span<const std::byte* const> by_rank, std::size_t bytes, std::size_t first)>;

// The parts that a rank sends to others and receives from them: see Communicator::exchange(). None are for the rank itself.
struct Parts {
  Call call{};
  std::span<const SentPart> sent{};
  std::span<const ReceivedPart> received{};
};

// One thread at a time calls all but abort(), leave() and set_activity(); any thread may call those.
class Transport {
 public:
  // `hosts` names the host of each rank.
  Transport(std::size_t rank, std::span<const std::string> hosts);
  virtual ~Transport() = default;
  std::size_t rank() const { return rank_; }
  std::size_t size() const { return is_here_.size(); }

  // How many neighbouring ranks are on one host, which are added before hosts are; 1: ranks are added in rank order.
  std::size_t ranks_per_host() const { return ranks_per_host_; }
  // Whether hosts are joined by links, so that collectives of several hosts with several ranks have two levels.
  virtual bool has_links() const { return false; }

  // Reads the chunk of Sent::next no more, because its exchange does not come. If a part of it was sent, this aborts the group:
  // peers would wait for the rest.
  virtual void drop_sent_ahead() {}

  // Counts what this rank sends to each other rank, or to one.
  void count_sent(std::size_t bytes) {
    inside_ += (ranks_here_ - 1) * bytes;
    across_ += (size() - ranks_here_) * bytes;
  }
  void count_sent_to(std::size_t peer, std::size_t bytes) { (is_here_[peer] ? inside_ : across_) += bytes; }
  SentBytes sent() const { return {inside_, across_}; }  // any thread may call

  // The largest chunk for each rank, if it lies in such memory.
  virtual std::size_t max_chunk_bytes(ChunkMemory where, std::span<const std::byte> bytes) const = 0;

  // The bytes of all ranks are within reach at once, so that one kernel can read them. Throws B3301 or B3302 if a peer fails or
  // does not arrive. The caller may change the sent bytes when it returns.
  virtual void exchange(const Sent& chunk, const Receive& receive) = 0;

  // Gathers the bytes of all ranks straight into `all`, in rank order, whatever their number; the rank's own may be
  // there already. Returns false, having done nothing, if the transport has no such operation: on all ranks or on none.
  virtual bool all_gather(const Sent&, std::span<std::byte>) { return false; }

  // Throws as exchange() does. All sent parts may change when it returns, and all received ones are there: on a GPU, in the
  // order of the stream.
  virtual void exchange_parts(const Parts& parts) = 0;

  // Memory for sums on their way, in which the backend works. It keeps its bytes until the next call.
  virtual std::byte* scratch(std::size_t bytes);

  // See Communicator.
  virtual void use_memory(const View& /*received*/, const View& /*sums*/) {}

  // An allocator of host memory that peers read in place, or null. The chunks of one exchange lie in it on all ranks or
  // on none.
  virtual Allocator* shared_memory() { return nullptr; }
  virtual bool shares_memory() const { return false; }  // see Communicator
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
  std::size_t rank_;
  std::size_t ranks_per_host_;
  std::vector<bool> is_here_;  // whether each rank is on this rank's host
  std::size_t ranks_here_;     // this one included
  std::vector<float> scratch_;
  std::atomic<std::size_t> inside_ = 0;  // bytes sent to ranks of this host
  std::atomic<std::size_t> across_ = 0;  // bytes sent to other hosts
};

// Sends in chunks; at least one, because peers expect it. Calls body(part, first); the part begins at the element `first`.
template <class Body>
void each_chunk(Transport& transport, const Sent& sent, Body&& body) {
  const ConstView& values = sent.values;
  const std::size_t most =
      sent.piece_bytes(transport.max_chunk_bytes(sent.where, sent.all(transport.size()))) / byte_size(values.dtype());
  std::size_t first = 0;
  do {
    const ConstView mine = values.part(first, std::min(most, values.count() - first));
    if (sent.sends(transport.rank())) transport.count_sent(mine.bytes());
    body(mine, first);
    first += mine.count();
  } while (first < values.count());
}

// Calls take(peer, piece, first) for each rank that sends, in rank order; the piece begins at the element `first` of what it
// sends.
template <class TakePiece>
void exchange(Transport& transport, const Sent& sent, TakePiece&& take) {
  const std::size_t width = byte_size(sent.values.dtype());
  each_chunk(transport, sent, [&](const ConstView& mine, std::size_t first) {
    const Sent chunk = sent.chunk(mine);
    transport.exchange(chunk, [&](std::span<const std::byte* const> by_rank, std::size_t bytes, std::size_t at) {
      for (std::size_t peer = 0; peer < by_rank.size(); ++peer) {
        if (chunk.sends(peer)) take(peer, ConstView(by_rank[peer], bytes / width, mine.dtype()), first + at / width);
      }
    });
  });
}

// Calls take(by_rank, first) with as many values of each rank, which begin at the element `first` of what it sends. Before this
// rank's own values are sent, make(first, count) is called for them, in order.
template <class Make, class TakeTogether>
void exchange_together(Transport& transport, const Sent& sent, Make&& make, TakeTogether&& take) {
  const std::size_t width = byte_size(sent.values.dtype());
  std::vector<ConstView> by_rank(transport.size());
  each_chunk(transport, sent, [&](const ConstView& mine, std::size_t begin) {
    const Prepare prepare = [&](std::size_t first, std::size_t bytes) { make(begin + first / width, bytes / width); };
    Sent chunk = sent.chunk(mine);
    chunk.prepare = &prepare;
    transport.exchange(chunk, [&](std::span<const std::byte* const> theirs, std::size_t bytes, std::size_t first) {
      std::ranges::transform(theirs, by_rank.begin(),
                             [&](const std::byte* values) { return ConstView(values, bytes / width, mine.dtype()); });
      take(std::span<const ConstView>(by_rank), begin + first / width);
    });
  });
}

template <class TakeTogether>
void exchange_together(Transport& transport, const Sent& sent, TakeTogether&& take) {
  exchange_together(
      transport, sent, [](std::size_t, std::size_t) {}, take);
}

// The communicator over any transport. The backend adds in rank order, so the bits do not depend on the
// transport. The backend outlives the communicator and all groups that are split from it, which keep `owned` alive. It is
// called by the thread that calls the communicator.
std::unique_ptr<Communicator> make_collectives(std::unique_ptr<Transport> transport, kernels::Backend& backend,
                                               std::shared_ptr<void> owned = {});

// Transports match the parts of an exchange: the n-th that a rank sends to another with the n-th that this receives. Returns the
// parts that go to one rank, or come from it, in order.
template <class Part>
auto parts_of(std::span<const Part> parts, std::size_t peer) {
  std::vector<decltype(Part::values)> found;
  for (const Part& part : parts) {
    if (part.rank == peer && part.values.bytes() > 0) found.push_back(part.values);
  }
  return found;
}

template <class Views>
std::size_t bytes_in(const Views& views) {
  std::size_t bytes = 0;
  for (const auto& view : views)
    bytes += view.bytes();
  return bytes;
}

// The sizes of the parts that pass from one rank to another, as both can compare them.
struct PartSizes {
  std::uint64_t bytes = 0;     // bytes of all parts
  std::uint64_t checksum = 0;  // differs if the size of one of them does
};

template <class Views>
PartSizes sizes_of(const Views& views) {
  constexpr std::uint64_t basis = 14695981039346656037U, prime = 1099511628211;  // the constants of the FNV hash
  PartSizes sizes{.bytes = bytes_in(views), .checksum = basis};
  for (const auto& view : views)
    sizes.checksum = (sizes.checksum ^ view.bytes()) * prime;
  return sizes;
}

// `peer` is the sender's rank in the job.
inline void require_same_parts(const PartSizes& received, const PartSizes& sent, std::size_t peer) {
  require(received.bytes == sent.bytes && received.checksum == sent.checksum, Code::wrong_size, [&] {
    return Problem{.what = fmt::format("rank {} sends parts of other sizes than this rank receives", peer),
                   .needed = fmt::format("{} bytes in all", received.bytes),
                   .available = fmt::format("{} bytes in all", sent.bytes),
                   .remedy = "Exchange the same parts on both ranks, in the same order."};
  });
}

// Calls body(data, bytes) for pieces of at most so many bytes, each of one view.
template <class Views, class Body>
void each_piece(const Views& views, std::size_t most, Body&& body) {
  for (const auto& view : views) {
    for (std::size_t first = 0; first < view.bytes(); first += most) {
      body(view.data() + first, std::min(most, view.bytes() - first));
    }
  }
}

// Calls body(data, bytes) for the pieces of views that have the bytes from `first` on, of all their bytes one after the other.
template <class Views, class Body>
void each_stretch(const Views& views, std::size_t first, std::size_t bytes, Body&& body) {
  for (const auto& view : views) {
    if (bytes == 0) return;
    if (first >= view.bytes()) {
      first -= view.bytes();
      continue;
    }
    const std::size_t count = std::min(bytes, view.bytes() - first);
    body(view.data() + first, count);
    bytes -= count;
    first = 0;
  }
}

}  // namespace ballast
