// Gloo moves bytes between ranks; it does not add. One thread of Gloo reads and writes the sockets of a group.
#include <ballast/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <gloo/context.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <gloo/transport/unbound_buffer.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <ctime>
#include <limits>
#include <mutex>
#include <system_error>
#include <utility>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/machine.h"
#include "kernels/runtime/system_resources.h"
#include "zero/comm/process_transport.h"
#include "zero/comm/transport.h"

namespace ballast {
namespace {

namespace tcp = gloo::transport::tcp;
using gloo::transport::UnboundBuffer;

// Bytes that a rank sent before it left may arrive after the hub's news that it left. Its connections may stay open for
// longer, if its process or a child of it is still running.
constexpr auto time_to_arrive = std::chrono::seconds(3);

// Chunks that a rank sends ahead of those that it has received, so that the link does not wait for this rank: neither for its
// sums nor for the time that a message takes to a peer and back. As many of the next exchange may arrive before it begins here.
constexpr std::size_t sent_ahead = 4;
constexpr std::size_t expected_ahead = 2 * sent_ahead;

// A large chunk costs few wake-ups. A rank receives those of all peers into 16 MiB at most. From 64 peers on chunks become no
// smaller, so it takes 256 KiB for each peer.
std::size_t gloo_chunk_bytes(std::size_t ranks) {
  constexpr std::size_t least = std::size_t{32} << 10;
  constexpr std::size_t most = std::size_t{2} << 20;
  constexpr std::size_t received = std::size_t{16} << 20;
  const std::size_t peers = std::max<std::size_t>(ranks - 1, 1);
  return std::clamp(received / expected_ahead / peers, least, most) / 64 * 64;
}

// Blocks SIGPIPE in the calling thread until the end of this object, and for good in threads started meanwhile. A write to a closed
// connection raises this signal, which ends the process, unless the writer requests an error instead. Gloo does not. The
// process's own signal handler does not change.
class NoSignalOfBrokenPipes {
 public:
  NoSignalOfBrokenPipes() {
    ::sigemptyset(&pipe_);
    ::sigaddset(&pipe_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSignalOfBrokenPipes() {
    const timespec at_once{};
    if (::sigismember(&before_, SIGPIPE) == 0) {
      while (::sigtimedwait(&pipe_, nullptr, &at_once) == SIGPIPE) {
      }
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSignalOfBrokenPipes(const NoSignalOfBrokenPipes&) = delete;
  NoSignalOfBrokenPipes& operator=(const NoSignalOfBrokenPipes&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
};

// The address of Gloo's device, which only says where a process listens, and none does.
constexpr const char* loopback = "127.0.0.1";

// One end of a connection that is there already. Gloo's own way to connect listens at ports of its own, where it admits any
// process, and ends this one if a connection is reset at once.
class Link : public tcp::Pair {
 public:
  Link(tcp::Context* context, tcp::Device* device, int rank, std::chrono::milliseconds timeout, Descriptor socket)
      : tcp::Pair(context, device, rank, timeout) {
    const std::lock_guard lock(m_);
    // The constructor of the base began to listen on loopback, until 2023. Gloo's thread skips news of that socket
    // while the lock is held, and finds nothing to read afterwards.
    const Descriptor listener(std::exchange(fd_, socket.release()));
    ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_NONBLOCK);
    device_->registerDescriptor(fd_, EPOLLIN, this);
    changeState(CONNECTED);
  }

  // Gloo's own close() resets the connection, which loses the bytes that the other end has no room for yet.
  void close() override {
    const std::lock_guard lock(m_);
    if (state_ != CLOSED) changeState(CLOSED);
  }
};

class LinkContext : public tcp::Context {
 public:
  LinkContext(std::shared_ptr<tcp::Device> device, int own, int ranks) : tcp::Context(std::move(device), own, ranks) {}

  void add(int peer, Descriptor socket) {
    pairs_[static_cast<std::size_t>(peer)] =
        std::make_unique<Link>(this, device_.get(), peer, getTimeout(), std::move(socket));
  }
};

class LinkedContext : public gloo::Context {
 public:
  LinkedContext(int own, int ranks, std::shared_ptr<gloo::transport::Device> device,
                std::shared_ptr<gloo::transport::Context> links)
      : gloo::Context(own, ranks) {
    device_ = std::move(device);
    transportContext_ = std::move(links);
  }
};

std::unique_ptr<gloo::Context> linked_context(int own, std::vector<Descriptor> links,
                                              std::chrono::milliseconds timeout) {
  const auto size = static_cast<int>(links.size());
  const auto device = std::static_pointer_cast<tcp::Device>(tcp::CreateDevice(tcp::attr(loopback)));
  const auto context = std::make_shared<LinkContext>(device, own, size);
  context->setTimeout(timeout);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != own) context->add(peer, std::move(links[static_cast<std::size_t>(peer)]));
  }
  return std::make_unique<LinkedContext>(own, size, device, context);
}

// Gloo reports errors only as text. Throws B2401 if it says that the process may open no more descriptors.
void require_descriptors(std::string_view gloo_says) {
  if (gloo_says.find(std::generic_category().message(EMFILE)) == std::string_view::npos) return;
  fail(Code::system_limit, {.what = "Gloo cannot open a descriptor: " + std::generic_category().message(EMFILE),
                            .available = fmt::format("{}; Gloo says: {}", limits_behind(EMFILE), gloo_says)});
}

// Starts Gloo's thread. `links` are connected sockets, by rank. Throws B2301 if Gloo cannot start, and B2401 as above.
std::unique_ptr<gloo::Context> gloo_context(std::size_t rank, std::vector<Descriptor> links,
                                            std::chrono::milliseconds timeout) {
  try {
    return linked_context(static_cast<int>(rank), std::move(links), timeout);
  } catch (const std::system_error& refused) {
    fail_limit("cannot start a thread for Gloo", refused.code().value());
  } catch (const std::exception& failed) {
    require_descriptors(failed.what());
    fail(Code::no_transport, {.what = "cannot start Gloo", .available = failed.what()});
  }
}

// Makes calls of Gloo. Where one fails or waits for too long, the error has the reason that the job knows. One thread calls.
class GlooCalls {
 public:
  explicit GlooCalls(const ProcessGroup& group) : group_(group), error_(group_.job().error()) {
    error_.when_set(this, [this] { abort_wait(); });
  }
  ~GlooCalls() { error_.forget(this); }
  GlooCalls(const GlooCalls&) = delete;
  GlooCalls& operator=(const GlooCalls&) = delete;

  void check() const { error_.check(); }  // throws the job's first error

  // Throws B3301 or B3302 if Gloo fails: it does not tell which rank has died or left.
  template <class Body>
  void guarded(std::size_t peer, Body&& call) {
    const Deadline deadline(error_, group_.job().timeout());
    const NoSignalOfBrokenPipes no_signal;
    try {
      call();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& broken) {
      require_descriptors(broken.what());
      explain(peer, deadline, broken.what());
    }
  }

  void wait_received(std::size_t peer, UnboundBuffer& buffer) {
    wait(peer, buffer, [&](std::chrono::milliseconds limit) { return buffer.waitRecv(limit); });
  }
  void wait_sent(std::size_t peer, UnboundBuffer& buffer) {
    wait(peer, buffer, [&](std::chrono::milliseconds limit) { return buffer.waitSend(limit); });
  }

 private:
  // `wait_for` returns false if the wait was aborted.
  template <class WaitFor>
  void wait(std::size_t peer, UnboundBuffer& buffer, WaitFor&& wait_for) {
    wait_on(&buffer);
    const auto no_more = [this](UnboundBuffer*) { wait_on(nullptr); };
    const std::unique_ptr<UnboundBuffer, decltype(no_more)> waiting(&buffer, no_more);
    const Job::Wait told_to_hub = group_.wait_for(peer);
    bool is_done = false;
    while (!is_done) {  // is_done, or there is news of another rank
      error_.check();
      const std::chrono::milliseconds limit = group_.has_left(peer) ? time_to_arrive : group_.job().timeout();
      guarded(peer, [&] { is_done = wait_for(limit); });
    }
  }

  // A connection breaks before its reason is known: the hub reports which rank died or left.
  [[noreturn]] void explain(std::size_t peer, const Deadline& deadline, const char* gloo_says) {
    if (deadline.is_over()) group_.fail_late(peer);
    group_.wait_for_reason(peer);
    const std::string what = fmt::format("lost the connection to {}", group_.member(peer));
    group_.fail_because_of(peer, what);
    fail(Code::peer_failed, {.what = what, .available = gloo_says});
  }

  // The buffer whose wait the news ends.
  void wait_on(UnboundBuffer* buffer) {
    const std::lock_guard lock(mutex_);
    waiting_ = buffer;
  }

  // Called by the thread that has news: the first error, or a rank that has left.
  void abort_wait() {
    const std::lock_guard lock(mutex_);
    if (waiting_ == nullptr) return;
    waiting_->abortWaitRecv();
    waiting_->abortWaitSend();
  }

  ProcessGroup group_;
  FirstError& error_;
  std::mutex mutex_;  // guards the member below
  UnboundBuffer* waiting_ = nullptr;
};

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
  GlooTransport(const ProcessGroup& members, const TransportSetup& how)
      : ProcessTransport(members, how),
        calls_(group()),
        chunk_bytes_(gloo_chunk_bytes(size())),
        received_(allocate(*setup().accounts, {.bytes = (size() - 1) * expected_ahead * chunk_bytes_,
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
      scratch_ = allocate(*setup().accounts, {.bytes = bytes, .owner = "sums, group " + group().name()});
    }
    return scratch_.data();
  }

  void exchange(const Sent& chunk, const Receive& receive) override {
    guarded_stream([&] {
      begin();
      if (!was_sent_ahead(chunk)) send_first(chunk);
      receive_calls(chunk.call);
      deliver(chunk, receive);
      end();
    });
  }

  void exchange_parts(const Parts& parts) override {
    guarded_stream([&] {
      begin();
      if (!was_sent_ahead({.call = parts.call})) send_calls_of(parts);
      for (std::size_t peer = 0; peer < size(); ++peer)
        send_parts(parts_of(parts.sent, peer), peer);
      each_peer([&](std::size_t peer) { receive_call_of_parts(peer, parts); });
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
    std::vector<Call> calls{};  // one for each peer
    std::vector<Sending> sending{};
  };

  // Gloo's thread would still use memory after a failed exchange, which its owner may free.
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
    each_peer([&](std::size_t peer) {
      calls_.guarded(peer, [&] {
        expect_call(peer, exchanges_ + 1);
        expect_chunks(peer, peers_[peer].received + expected_ahead);
      });
    });
  }

  // What follows belongs to these calls, by peer.
  void send_calls(std::vector<Call> calls) {
    ++sent_calls_;
    std::vector<Call>& sent = outgoing(sent_calls_).calls = std::move(calls);
    each_peer([&](std::size_t peer) { send_to(peer, slot_of_call(sent_calls_), &sent[peer], sizeof(Call)); });
  }

  // Each peer gets the sizes of its parts.
  void send_calls_of(const Parts& parts) {
    std::vector<Call> calls;
    for (std::size_t peer = 0; peer < size(); ++peer)
      calls.push_back(call_of_parts(parts.call, sizes_of(parts_of(parts.sent, peer))));
    send_calls(std::move(calls));
  }

  void send_first(const Sent& chunk) {
    send_calls(std::vector<Call>(size(), chunk.call));
    for (std::size_t number = 0; number < sent_ahead; ++number) {
      send(chunk, number);
    }
  }

  void send_next(const Sent& chunk) {
    if (chunk.next == nullptr || next_) return;
    std::optional<Sent> next = (*chunk.next)();
    if (!next) return;
    calls_.check();  // what has failed may have left other values
    next_ = next;
    send_first(*next_);
  }

  bool was_sent_ahead(const Sent& chunk) {
    const std::optional<Sent> ahead = std::exchange(next_, std::nullopt);
    if (!ahead) return false;
    const bool is_it = ahead->call == chunk.call && ahead->data() == chunk.data() && ahead->bytes() == chunk.bytes();
    require(is_it, Code::internal, [&] {
      return Problem{.what = "cannot begin an exchange: another one has been sent ahead",
                     .needed = text(ahead->call),
                     .available = text(chunk.call)};
    });
    return true;
  }

  void receive_calls(const Call& call) {
    each_peer([&](std::size_t peer) { receive_call(peer, call); });
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

  void deliver(const Sent& chunk, const Receive& receive) {
    std::vector<const std::byte*> by_rank(size());
    const std::size_t most = chunk.piece_bytes(chunk_bytes_);
    const std::size_t chunks = (chunk.bytes() + most - 1) / most;
    for (std::size_t number = 0; number < chunks; ++number) {
      if (number + sent_ahead >= chunks) send_next(chunk);
      const std::size_t first = number * most;
      by_rank[rank()] = chunk.piece(rank()).data() + first;
      each_peer([&](std::size_t peer) {
        if (chunk.sends(peer)) by_rank[peer] = receive_chunk(peer);
      });
      receive(by_rank, std::min(most, chunk.bytes() - first), first);
      const bool sends_more = chunk.sends(rank()) && number + sent_ahead < chunks;
      each_peer([&](std::size_t peer) {
        if (chunk.sends(peer)) release_chunk(peer, sends_more ? expected_ahead : chunks - number - 1);
      });
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
    each_peer([&](std::size_t peer) { make_buffers(peer); });
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
    calls_.guarded(peer, [&] { expect_call(peer, 1); });
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
  void send(const Sent& chunk, std::size_t number) {
    const std::size_t most = chunk.piece_bytes(chunk_bytes_);
    const std::size_t first = number * most;
    if (!chunk.sends(rank()) || first >= chunk.bytes()) return;
    const std::size_t bytes = std::min(most, chunk.bytes() - first);
    chunk.make(first, bytes);
    each_peer([&](std::size_t peer) { send_chunk(peer, chunk.piece(peer).data() + first, bytes); });
  }

  void send_chunk(std::size_t peer, const std::byte* from, std::size_t bytes) {
    send_to(peer, slot_of_chunk(peers_[peer].sent++), from, bytes);
  }

  void send_to(std::size_t peer, std::uint64_t slot, const void* from, std::size_t bytes) {
    auto buffer =
        context_->createUnboundBuffer(const_cast<void*>(from), bytes);  // Gloo has one type for both directions
    UnboundBuffer& sent = *buffer;
    outgoing(sent_calls_).sending.push_back({peer, std::move(buffer)});
    calls_.guarded(peer, [&] { sent.send(static_cast<int>(peer), slot); });
  }

  Outgoing& outgoing(std::uint64_t exchange) { return outgoing_[exchange % outgoing_.size()]; }

  const Call& wait_for_call(std::size_t peer) {
    Peer& from = peers_[peer];
    calls_.wait_received(peer, *from.call_buffers[exchanges_ % 2]);
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
    calls_.wait_received(peer, *from.chunks[from.received % expected_ahead]);
    return memory(peer, from.received);
  }

  // The memory of the chunk may be overwritten from now on. Expects as many chunks after it.
  void release_chunk(std::size_t peer, std::size_t ahead) {
    const std::uint64_t received = ++peers_[peer].received;
    calls_.guarded(peer, [&] { expect_chunks(peer, received + std::min(ahead, expected_ahead)); });
  }

  void end() {
    std::vector<Sending>& sending = outgoing(exchanges_).sending;
    for (const Sending& each : sending) {
      calls_.wait_sent(each.peer, *each.buffer);
    }
    sending.clear();
  }

  GlooCalls calls_;
  std::size_t chunk_bytes_;
  Buffer received_;  // the next chunks of each other rank
  Buffer scratch_{};
  std::uint64_t exchanges_ = 0;   // that have begun
  std::uint64_t sent_calls_ = 0;  // the same, and the one that is sent ahead
  std::unique_ptr<gloo::Context> context_;
  std::vector<Peer> peers_;             // one for each rank
  std::array<Outgoing, 2> outgoing_{};  // this exchange and the next
  std::optional<Sent> next_{};          // whose first bytes are sent
};

}  // namespace

bool has_gloo() { return true; }

std::unique_ptr<Transport> gloo_transport(const ProcessGroup& group, const TransportSetup& setup) {
  return std::make_unique<GlooTransport>(group, setup);
}

}  // namespace ballast
