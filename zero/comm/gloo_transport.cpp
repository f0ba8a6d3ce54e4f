// Gloo moves bytes between ranks; it does not add. One thread of Gloo reads and writes the sockets of a group.
#include "zero/comm/gloo_transport.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <gloo/rendezvous/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/system_limits.h"
#include "zero/comm/broken_pipes.h"

namespace ballast {
namespace {

// A chunk fits the caches, and the bytes received in one exchange are bounded.
constexpr std::size_t min_chunk_size = std::size_t{64} << 10;
constexpr std::size_t max_chunk_size = std::size_t{1} << 20;
constexpr std::size_t max_received_bytes = std::size_t{16} << 20;

constexpr int times_gloo_waits_to_connect = 5;  // its timeout, during which it does not notice errors of the job

// Bytes that a rank sent before it left may arrive after the hub's news that it left. Its connections may stay open for
// longer, if its process or a child of it is still running.
constexpr auto time_to_arrive = std::chrono::seconds(3);

std::size_t chunk_bytes_of(std::size_t size) {
  return std::clamp(max_received_bytes / size, min_chunk_size, max_chunk_size) / 64 * 64;
}

// The store in which Gloo's ranks exchange their addresses.
class Store : public gloo::rendezvous::Store {
 public:
  explicit Store(const ProcessGroup& group) : control_(group.job().control()), prefix_(group.name() + "/gloo/") {}

  void set(const std::string& key, const std::vector<char>& data) override {
    control_.set(prefix_ + key, {data.begin(), data.end()});
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = control_.get(prefix_ + key);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    std::ranges::for_each(keys, [&](const std::string& key) { get(key); });
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override { wait(keys); }

 private:
  Control& control_;
  std::string prefix_;
};

// Gloo reports errors only as text.
void require_descriptors(std::string_view gloo_says) {
  if (gloo_says.find(std::generic_category().message(EMFILE)) == std::string_view::npos) return;
  fail(Code::system_limit, {.what = "Gloo cannot open a descriptor: " + std::generic_category().message(EMFILE),
                            .available = fmt::format("{}; Gloo says: {}", limits_behind(EMFILE), gloo_says)});
}

// Starts Gloo's thread.
std::shared_ptr<gloo::transport::Device> make_device(const gloo::transport::tcp::attr& attributes) {
  try {
    return gloo::transport::tcp::CreateDevice(attributes);
  } catch (const std::system_error& refused) {
    fail_limit("cannot start a thread for Gloo", refused.code().value());
  } catch (const std::exception& failed) {
    require_descriptors(failed.what());
    fail(Code::no_transport, {.what = "cannot start Gloo", .available = failed.what()});
  }
}

using gloo::transport::UnboundBuffer;

class GlooTransport : public ProcessTransport {
 public:
  GlooTransport(const ProcessGroup& members, MemoryAccounts& accounts, MakeTransport make)
      : ProcessTransport(members, std::move(make)),
        error_(group().job().error()),
        max_chunk_bytes_(chunk_bytes_of(size())),
        received_(allocate(accounts, {.bytes = size() * max_chunk_bytes_, .owner = "gloo, group " + group().name()})),
        calls_(size()),
        context_(static_cast<int>(rank()), static_cast<int>(size())) {
    connect();
    error_.when_set(this, [this] { abort_wait(); });
  }
  ~GlooTransport() override { error_.forget(this); }

  std::size_t max_chunk_bytes(ChunkMemory, std::span<const std::byte>) const override { return max_chunk_bytes_; }

  // After a failed exchange Gloo's thread would still use memory that its owner may free.
  void exchange(const SentChunk& chunk, const Receive& receive) override {
    error_.check();
    try {
      exchange_with_peers(chunk, receive);
    } catch (...) {
      detach();
      throw;
    }
  }

 private:
  void exchange_with_peers(const SentChunk& chunk, const Receive& receive) {
    begin(chunk);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) receive_call(peer, chunk);
    }
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (!chunk.sends(peer)) continue;
      if (peer != rank() && chunk.bytes > 0) wait_received(peer, *parts_[peer]);
      receive(peer, peer == rank() ? chunk.piece(peer) : std::span<const std::byte>(slot(peer), chunk.bytes), 0);
    }
    end();
  }

  void detach() noexcept {
    try {
      context_.closeConnections();
    } catch (const std::exception&) {
      // The other end has closed it.
    }
    sending_.clear();
  }

  void connect() {
    const NoSignalOfBrokenPipes no_signal;  // here because Gloo's thread inherits it
    gloo::transport::tcp::attr attributes(group().job().control().local_endpoint().host.c_str());
    std::shared_ptr<gloo::transport::Device> device = make_device(attributes);
    Store store(group());
    context_.setTimeout(group().job().timeout() / times_gloo_waits_to_connect);
    guarded(next(), [&] { context_.connectFullMesh(store, device); });
    group().exchange_strings("connected", "");  // otherwise others would try to connect to a rank that has failed
    for (std::size_t peer = 0; peer < size(); ++peer) {
      parts_.push_back(context_.createUnboundBuffer(slot(peer), max_chunk_bytes_));
      call_buffers_.push_back(context_.createUnboundBuffer(&calls_[peer], sizeof(Call)));
    }
    mine_ = context_.createUnboundBuffer(&call_, sizeof(Call));
  }

  // Gloo does not report which connection failed while it made all of them.
  std::size_t next() { return (rank() + 1) % size(); }

  std::byte* slot(std::size_t peer) const { return received_.data() + peer * max_chunk_bytes_; }
  std::uint64_t slot_of_call() const { return 2 * exchanges_; }
  std::uint64_t slot_of_bytes() const { return 2 * exchanges_ + 1; }

  // Sends this rank's chunk. It requests a peer's bytes only after it has checked that the peer makes the same call.
  void begin(const SentChunk& chunk) {
    ++exchanges_;
    call_ = chunk.call;
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const int to = static_cast<int>(peer);
      guarded(peer, [&] {
        call_buffers_[peer]->recv(to, slot_of_call());
        mine_->send(to, slot_of_call());
        if (!chunk.sends(rank()) || chunk.bytes == 0) return;
        auto* const data = const_cast<std::byte*>(chunk.piece(peer).data());  // Gloo has one type for both directions
        sending_.push_back({peer, context_.createUnboundBuffer(data, chunk.bytes)});
        sending_.back().buffer->send(to, slot_of_bytes());
      });
    }
  }

  void receive_call(std::size_t peer, const SentChunk& chunk) {
    wait_received(peer, *call_buffers_[peer]);
    require_same(chunk.call, calls_[peer], group().member(peer));
    if (!chunk.sends(peer) || chunk.bytes == 0) return;
    guarded(peer, [&] { parts_[peer]->recv(static_cast<int>(peer), slot_of_bytes(), 0, chunk.bytes); });
  }

  void end() {
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (peer != rank()) wait_sent(peer, *mine_);
    }
    for (const Sending& sending : sending_) {
      wait_sent(sending.peer, *sending.buffer);
    }
    sending_.clear();
  }

  void wait_received(std::size_t peer, UnboundBuffer& buffer) {
    wait(peer, buffer, [&](std::chrono::milliseconds limit) { return buffer.waitRecv(limit); });
  }
  void wait_sent(std::size_t peer, UnboundBuffer& buffer) {
    wait(peer, buffer, [&](std::chrono::milliseconds limit) { return buffer.waitSend(limit); });
  }

  template <class Wait>
  void wait(std::size_t peer, UnboundBuffer& buffer, Wait&& wait_for_buffer) {
    wait_on(&buffer);
    const auto no_more = [this](UnboundBuffer*) { wait_on(nullptr); };
    const std::unique_ptr<UnboundBuffer, decltype(no_more)> waiting(&buffer, no_more);
    bool is_done = false;
    while (!is_done) {  // or there is news of another rank
      error_.check();
      const std::chrono::milliseconds limit = group().has_left(peer) ? time_to_arrive : group().job().timeout();
      guarded(peer, [&] { is_done = wait_for_buffer(limit); });
    }
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

  template <class Body>
  void guarded(std::size_t peer, Body&& body) {
    const Deadline deadline(error_, group().job().timeout());
    const NoSignalOfBrokenPipes no_signal;
    try {
      body();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& broken) {
      require_descriptors(broken.what());
      explain(peer, deadline, broken.what());
    }
  }

  // A connection breaks before its reason is known: the hub reports which rank died or left.
  [[noreturn]] void explain(std::size_t peer, const Deadline& deadline, const char* gloo_says) {
    if (deadline.is_over()) group().fail_late(peer);
    group().wait_for_reason(peer);
    fail(Code::peer_failed,
         {.what = fmt::format("lost the connection to {}", group().member(peer)), .available = gloo_says});
  }

  struct Sending {
    std::size_t peer;
    std::unique_ptr<UnboundBuffer> buffer;
  };

  FirstError& error_;
  std::size_t max_chunk_bytes_;
  Buffer received_;          // a slot for each rank
  std::vector<Call> calls_;  // of each rank
  Call call_;                // of this rank
  std::uint64_t exchanges_ = 0;
  gloo::rendezvous::Context context_;
  std::vector<std::unique_ptr<UnboundBuffer>> parts_;
  std::vector<std::unique_ptr<UnboundBuffer>> call_buffers_;
  std::unique_ptr<UnboundBuffer> mine_;
  std::vector<Sending> sending_;
  std::mutex mutex_;
  UnboundBuffer* waiting_ = nullptr;
};

}  // namespace

bool has_gloo() { return true; }

std::unique_ptr<Transport> gloo_transport(const ProcessGroup& group, MemoryAccounts& accounts,
                                          const MakeTransport& make) {
  return std::make_unique<GlooTransport>(group, accounts, make);
}

}  // namespace ballast
