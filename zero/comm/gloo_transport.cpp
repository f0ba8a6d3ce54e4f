// Gloo moves bytes between ranks; it does not add. One thread of Gloo reads and writes the sockets of a group.
#include "zero/comm/gloo_transport.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/time_slices.h"
#include "zero/comm/broken_pipes.h"
#include "zero/comm/gloo_calls.h"
#include "zero/comm/gloo_chunks.h"
#include "zero/comm/gloo_context.h"
#include "zero/comm/links.h"
#include "zero/comm/parts.h"

namespace ballast {
namespace {

using gloo::transport::UnboundBuffer;

// Describes an exchange of parts to one peer.
Call call_of_parts(Call call, const PartSizes& sizes) {
  call.count = sizes.bytes;
  call.sizes = sizes.checksum;
  return call;
}

// Streams the chunks of an exchange: while this rank adds one, the next ones arrive, and its own are sent. Receives are pending
// for the next call of each peer and for its next chunks, so a peer sends them without asking. Each exchange begins with a
// message that describes the call. It travels ahead of the first chunk and costs no time of its own. When all chunks of an exchange
// are on their way, the first ones of the next may follow before it begins, so that the link does not wait for the end of this one.
//
// A rank may close its connections as soon as it has received all of its last exchange. So no message to a peer follows the last
// one that the peer waits for: the closed connection would answer with a reset, and bytes that this rank has not read were lost.
class GlooTransport : public ProcessTransport {
 public:
  GlooTransport(const ProcessGroup& members, MemoryAccounts& accounts, MakeTransport make)
      : ProcessTransport(members, std::move(make)),
        calls_(group()),
        accounts_(accounts),
        chunk_bytes_(gloo_chunk_bytes(size())),
        received_(allocate(accounts, {.bytes = (size() - 1) * expected_ahead * chunk_bytes_,
                                      .owner = "gloo, group " + group().name(),
                                      .resident = Resident::when_written})) {
    connect();
  }
  // Peers may still be sending into the memory of receives that are pending.
  ~GlooTransport() override { detach(); }

  std::size_t max_chunk_bytes(ChunkMemory, std::span<const std::byte>) const override {
    return std::numeric_limits<std::size_t>::max();
  }

  bool has_links() const override { return true; }

  void drop_sent_ahead() override {
    if (!next_) return;
    abort("it ended before an exchange whose first bytes it had sent");
    detach();
  }

  std::byte* scratch(std::size_t bytes) override {
    if (scratch_.bytes() < bytes) {
      scratch_ = {};
      scratch_ = allocate(accounts_, {.bytes = bytes, .owner = "sums, group " + group().name()});
    }
    return scratch_.data();
  }

  void exchange(const SentChunk& chunk, const Receive& receive) override {
    stream(chunk, [&](std::span<const std::byte* const> by_rank, std::size_t bytes, std::size_t first) {
      for (std::size_t peer = 0; peer < size(); ++peer) {
        if (chunk.sends(peer)) receive(peer, {by_rank[peer], bytes}, first);
      }
    });
  }

  void exchange_together(const SentChunk& chunk, const ReceiveTogether& receive) override { stream(chunk, receive); }

  void exchange_parts(const Parts& parts) override {
    guarded_stream([&] {
      begin();
      if (!was_sent_ahead({.call = parts.call})) send_calls_of(parts);
      for (std::size_t peer = 0; peer < size(); ++peer)
        send_parts(parts_of(parts.sent, peer), peer);
      for (std::size_t peer = 0; peer < size(); ++peer)
        if (peer != rank()) receive_call_of_parts(peer, parts);
      for (std::size_t peer = 0; peer < size(); ++peer)
        receive_parts(parts_of(parts.received, peer), peer);
      end();
    });
  }

 private:
  // A peer's calls and chunks arrive in turn in these buffers. Chunk n arrives in the buffer n % expected_ahead.
  struct Peer {
    std::array<Call, 2> calls{};  // one is read while the next one may arrive
    std::array<std::unique_ptr<UnboundBuffer>, 2> call_buffers{};
    std::array<std::unique_ptr<UnboundBuffer>, expected_ahead> chunks{};
    std::uint64_t received = 0;  // chunks
    std::uint64_t expected = 0;  // the same, and those whose receives are pending
    std::uint64_t sent = 0;      // chunks, to the peer
  };

  struct Sending {
    std::size_t peer;
    std::unique_ptr<UnboundBuffer> buffer;
  };

  // What a rank sends in an exchange.
  struct Outgoing {
    std::vector<Call> calls{};  // one for all peers, or one for each
    std::vector<Sending> sending{};
  };

  void stream(const SentChunk& chunk, const ReceiveTogether& receive) {
    guarded_stream([&] {
      begin();
      if (!was_sent_ahead(chunk)) send_first(chunk);
      receive_calls(chunk.call);
      deliver(chunk, receive);
      end();
    });
  }

  // After a failed exchange Gloo's thread would still use memory that its owner may free.
  template <class Body>
  void guarded_stream(Body&& body) {
    try {
      calls_.check();
      body();
    } catch (...) {
      detach();
      throw;
    }
  }

  void begin() {
    ++exchanges_;
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      guarded(peer, [&] {
        expect_call(peer, exchanges_ + 1);
        expect_chunks(peer, peers_[peer].received + expected_ahead);
      });
    }
  }

  // What follows belongs to this call.
  void send_call(const Call& call) {
    ++sent_calls_;
    std::vector<Call>& calls = outgoing(sent_calls_).calls;
    calls.assign(1, call);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) send_to(peer, slot_of_call(sent_calls_), calls.data(), sizeof(Call));
    }
  }

  // Each peer gets the sizes of its parts.
  void send_calls_of(const Parts& parts) {
    ++sent_calls_;
    std::vector<Call>& calls = outgoing(sent_calls_).calls;
    calls.clear();
    for (std::size_t peer = 0; peer < size(); ++peer)
      calls.push_back(call_of_parts(parts.call, sizes_of(parts_of(parts.sent, peer))));
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) send_to(peer, slot_of_call(sent_calls_), &calls[peer], sizeof(Call));
    }
  }

  void send_first(const SentChunk& chunk) {
    send_call(chunk.call);
    for (std::size_t number = 0; number < sent_ahead; ++number) {
      send(chunk, number);
    }
  }

  void send_next(const SentChunk& chunk) {
    if (chunk.next == nullptr || next_) return;
    std::optional<SentChunk> next = (*chunk.next)();
    if (!next) return;
    calls_.check();  // what has failed may have left other values
    next_ = next;
    send_first(*next_);
  }

  bool was_sent_ahead(const SentChunk& chunk) {
    const std::optional<SentChunk> ahead = std::exchange(next_, std::nullopt);
    if (!ahead) return false;
    const bool is_it = ahead->call == chunk.call && ahead->data == chunk.data && ahead->bytes == chunk.bytes;
    require(is_it, Code::internal, [&] {
      return Problem{.what = "cannot begin an exchange: another one has been sent ahead",
                     .needed = text(ahead->call),
                     .available = text(chunk.call)};
    });
    return true;
  }

  void receive_calls(const Call& call) {
    for (std::size_t peer = 0; peer < size(); ++peer)
      if (peer != rank()) receive_call(peer, call);
  }

  // All at once: a peer takes them when it comes to them.
  void send_parts(const std::vector<ConstView>& parts, std::size_t peer) {
    each_piece(parts, chunk_bytes_, [&](const std::byte* data, std::size_t bytes) { send_chunk(peer, data, bytes); });
  }

  void receive_parts(const std::vector<View>& parts, std::size_t peer) {
    std::size_t left = 0;
    each_piece(parts, chunk_bytes_, [&](std::byte*, std::size_t) { ++left; });
    each_piece(parts, chunk_bytes_, [&](std::byte* data, std::size_t bytes) {
      std::memcpy(data, receive_chunk(peer), bytes);
      release_chunk(peer, --left);
    });
  }

  void deliver(const SentChunk& chunk, const ReceiveTogether& receive) {
    std::vector<const std::byte*> by_rank(size());
    const std::size_t most = chunk.piece_bytes(chunk_bytes_);
    const std::size_t chunks = (chunk.bytes + most - 1) / most;
    for (std::size_t number = 0; number < chunks; ++number) {
      if (number + sent_ahead >= chunks) send_next(chunk);
      const std::size_t first = number * most;
      for (std::size_t peer = 0; peer < size(); ++peer) {
        if (peer == rank()) by_rank[peer] = chunk.piece(peer).data() + first;
        if (peer != rank() && chunk.sends(peer)) by_rank[peer] = receive_chunk(peer);
      }
      receive(by_rank, std::min(most, chunk.bytes - first), first);
      const bool sends_more = chunk.sends(rank()) && number + sent_ahead < chunks;
      for (std::size_t peer = 0; peer < size(); ++peer) {
        if (peer != rank() && chunk.sends(peer)) release_chunk(peer, sends_more ? expected_ahead : chunks - number - 1);
      }
      send(chunk, number + sent_ahead);
    }
  }

  void detach() noexcept {
    try {
      if (context_) context_->closeConnections();
    } catch (const std::exception&) {
      // The other end has closed it.
    }
    for (Outgoing& outgoing : outgoing_) {
      outgoing.sending.clear();
    }
    next_.reset();
  }

  void connect() {
    const NoSignalOfBrokenPipes no_signal;  // these two because Gloo's thread inherits them
    const ShortTimeSlices short_slices;
    context_ = gloo_context(rank(), connect_links(group()), group().job().timeout());
    peers_.resize(size());
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) make_buffers(peer);
    }
    // Others must not try to connect to a rank that has failed, nor leave before all receives of their calls are pending.
    group().exchange_strings("connected", "");
  }

  static std::uint64_t slot_of_call(std::uint64_t exchange) { return 2 * exchange; }
  static std::uint64_t slot_of_chunk(std::uint64_t number) { return 2 * number + 1; }

  std::byte* memory(std::size_t peer, std::uint64_t number) const {
    const std::size_t place = peer < rank() ? peer : peer - 1;
    return received_.data() + (place * expected_ahead + number % expected_ahead) * chunk_bytes_;
  }

  void make_buffers(std::size_t peer) {
    Peer& from = peers_[peer];
    for (std::size_t i = 0; i < from.calls.size(); ++i) {
      from.call_buffers[i] = context_->createUnboundBuffer(&from.calls[i], sizeof(Call));
    }
    for (std::size_t i = 0; i < from.chunks.size(); ++i) {
      from.chunks[i] = context_->createUnboundBuffer(memory(peer, i), chunk_bytes_);
    }
    guarded(peer, [&] { expect_call(peer, 1); });
  }

  void expect_call(std::size_t peer, std::uint64_t exchange) {
    peers_[peer].call_buffers[exchange % 2]->recv(static_cast<int>(peer), slot_of_call(exchange));
  }
  void expect_chunks(std::size_t peer, std::uint64_t end) {
    Peer& from = peers_[peer];
    for (; from.expected < end; ++from.expected) {
      from.chunks[from.expected % expected_ahead]->recv(static_cast<int>(peer), slot_of_chunk(from.expected));
    }
  }

  // Sends chunk `number` of this exchange to all peers, if it has as many.
  void send(const SentChunk& chunk, std::size_t number) {
    const std::size_t most = chunk.piece_bytes(chunk_bytes_);
    const std::size_t first = number * most;
    if (!chunk.sends(rank()) || first >= chunk.bytes) return;
    const std::size_t bytes = std::min(most, chunk.bytes - first);
    chunk.make(first, bytes);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      send_chunk(peer, chunk.piece(peer).data() + first, bytes);
    }
  }

  void send_chunk(std::size_t peer, const std::byte* from, std::size_t bytes) {
    send_to(peer, slot_of_chunk(peers_[peer].sent++), from, bytes);
  }

  void send_to(std::size_t peer, std::uint64_t slot, const void* from, std::size_t bytes) {
    auto buffer =
        context_->createUnboundBuffer(const_cast<void*>(from), bytes);  // Gloo has one type for both directions
    UnboundBuffer& sent = *buffer;
    outgoing(sent_calls_).sending.push_back({peer, std::move(buffer)});
    guarded(peer, [&] { sent.send(static_cast<int>(peer), slot); });
  }

  Outgoing& outgoing(std::uint64_t exchange) { return outgoing_[exchange % outgoing_.size()]; }

  const Call& wait_for_call(std::size_t peer) {
    Peer& from = peers_[peer];
    wait_received(peer, *from.call_buffers[exchanges_ % 2]);
    return from.calls[exchanges_ % 2];
  }

  void receive_call(std::size_t peer, const Call& call) {
    require_same(call, wait_for_call(peer), group().member(peer));
  }

  void receive_call_of_parts(std::size_t peer, const Parts& parts) {
    const Call& sent = wait_for_call(peer);
    const PartSizes received = sizes_of(parts_of(parts.received, peer));
    if (sent.kind != Collective::exchange) require_same(parts.call, sent, group().member(peer));
    require_same_parts(received, {sent.count, sent.sizes}, group().rank_in_job(peer));
  }

  const std::byte* receive_chunk(std::size_t peer) {
    Peer& from = peers_[peer];
    wait_received(peer, *from.chunks[from.received % expected_ahead]);
    return memory(peer, from.received);
  }

  // The memory of the chunk may be overwritten from now on. Expects as many chunks after it.
  void release_chunk(std::size_t peer, std::size_t ahead) {
    const std::uint64_t received = ++peers_[peer].received;
    guarded(peer, [&] { expect_chunks(peer, received + std::min(ahead, expected_ahead)); });
  }

  void end() {
    std::vector<Sending>& sending = outgoing(exchanges_).sending;
    for (const Sending& each : sending) {
      wait_sent(each.peer, *each.buffer);
    }
    sending.clear();
  }

  void wait_received(std::size_t peer, UnboundBuffer& buffer) {
    calls_.wait(peer, buffer, [&](std::chrono::milliseconds limit) { return buffer.waitRecv(limit); });
  }
  void wait_sent(std::size_t peer, UnboundBuffer& buffer) {
    calls_.wait(peer, buffer, [&](std::chrono::milliseconds limit) { return buffer.waitSend(limit); });
  }

  template <class Body>
  void guarded(std::size_t peer, Body&& body) {
    calls_.guarded(peer, body);
  }

  GlooCalls calls_;
  MemoryAccounts& accounts_;
  std::size_t chunk_bytes_;
  Buffer received_;  // the next chunks of each other rank
  Buffer scratch_{};
  std::uint64_t exchanges_ = 0;   // that have begun
  std::uint64_t sent_calls_ = 0;  // the same, and the one that is sent ahead
  std::unique_ptr<gloo::Context> context_;
  std::vector<Peer> peers_;             // by rank
  std::array<Outgoing, 2> outgoing_{};  // of this exchange and the next
  std::optional<SentChunk> next_{};     // whose first bytes are sent
};

}  // namespace

bool has_gloo() { return true; }

std::unique_ptr<Transport> gloo_transport(const ProcessGroup& group, MemoryAccounts& accounts,
                                          const MakeTransport& make) {
  return std::make_unique<GlooTransport>(group, accounts, make);
}

}  // namespace ballast
