#include "zero/comm/nccl_transport.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/current_gpu.h"
#include "kernels/runtime/stream.h"
#include "kernels/runtime/system_limits.h"

namespace ballast {
namespace {

constexpr std::size_t min_chunk_size = std::size_t{1} << 20;
constexpr std::size_t max_chunk_size = std::size_t{32} << 20;
constexpr std::size_t max_received_bytes = std::size_t{128} << 20;
constexpr auto look_again = std::chrono::microseconds(50);
constexpr auto look_for_the_late = std::chrono::milliseconds(100);
constexpr std::string_view some_rank = "a rank of an NCCL group";

std::size_t chunk_bytes_of(std::size_t size) {
  return std::clamp(max_received_bytes / size, min_chunk_size, max_chunk_size) / 512 * 512;
}

// Watches work in a stream that waits for peers. A thread of its own does this, because the others wait for the stream
// without a timeout.
class Watch {
 public:
  Watch(FirstError& error, std::chrono::milliseconds timeout, const GpuStream& stream)
      : error_(error),
        timeout_(timeout),
        stream_(Stream::wrap(stream.stream, stream.gpu)),
        thread_(start_thread("watching an NCCL communicator", [this] { watch(); })) {}
  ~Watch() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  Watch(Watch&&) = delete;

  // Begins to watch the work that has been issued so far.
  void begin() {
    Issued issued{Event(stream_.gpu()), Clock::now()};
    issued.end.record(stream_);
    {
      const std::lock_guard lock(mutex_);
      under_way_.push_back(std::move(issued));
    }
    changed_.notify_one();
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Issued {
    Event end;
    Clock::time_point since;
  };

  void watch() {
    try {
      device::choose_gpu(stream_.gpu());
      if (is_late()) error_.set(late(some_rank, timeout_));
    } catch (const Error& failure) {  // the GPU failed
      error_.set(failure.what());
    }
  }

  // Returns true when a piece of work is late, and false at the end.
  bool is_late() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !under_way_.empty(); });
      if (ending_) return false;
      while (!under_way_.empty() && under_way_.front().end.is_done()) {
        under_way_.pop_front();
      }
      if (!under_way_.empty() && Clock::now() - under_way_.front().since > timeout_) return true;
      changed_.wait_for(lock, look_for_the_late, [&] { return ending_; });
    }
  }

  FirstError& error_;
  std::chrono::milliseconds timeout_;
  Stream stream_;
  std::mutex mutex_;  // guards the two members below
  std::deque<Issued> under_way_;
  bool ending_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

// Aborts a communicator in a thread of its own. The abort may wait for all work of the GPU, which includes kernels of
// other communicators that end only when those are aborted. The thread starts at construction, because a job may fail
// for want of threads.
class Aborter {
 public:
  explicit Aborter(int gpu)
      : gpu_(gpu), thread_(start_thread("the abort of an NCCL communicator", [this] { run(); })) {}
  ~Aborter() {
    if (!is_given_) given_.set_value(nullptr);
    thread_.join();
  }
  Aborter(const Aborter&) = delete;
  Aborter& operator=(const Aborter&) = delete;

  void abort(ncclComm_t handle) {  // called once; does not wait
    is_given_ = true;
    given_.set_value(handle);
  }

 private:
  void run() {
    ncclComm_t handle = given_.get_future().get();
    if (handle == nullptr) return;
    device::choose_gpu(gpu_);
    ncclCommAbort(handle);
  }

  int gpu_;
  std::promise<ncclComm_t> given_;
  bool is_given_ = false;
  std::thread thread_;
};

// An NCCL communicator with calls that do not block, so that the first error of the job can end a call that hangs.
class Nccl {
 public:
  Nccl(ProcessGroup& group, const GpuStream& stream)
      : error_(group.job().error()),
        timeout_(group.job().timeout()),
        aborter_(stream.gpu),
        watch_(error_, timeout_, stream) {
    ncclUniqueId id{};
    if (group.rank() == 0) check(ncclGetUniqueId(&id));
    const std::string mine(id.internal, group.rank() == 0 ? sizeof id.internal : 0);
    const std::string first = group.exchange_strings("nccl", mine).front();
    std::memcpy(id.internal, first.data(), sizeof id.internal);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const CurrentGpu current(stream.gpu);
    check(
        ncclCommInitRankConfig(&handle_, static_cast<int>(group.size()), id, static_cast<int>(group.rank()), &config));
    settle();
    error_.when_set(this, [this] { abort(); });
  }
  ~Nccl() {
    error_.forget(this);
    if (handle_ != nullptr) ncclCommDestroy(handle_);
  }
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  // Issues the calls of `body` as one group.
  template <class Body>
  void issue(Body&& body) {
    {
      const std::lock_guard lock(mutex_);
      error_.check();
      check(ncclGroupStart());
      body(handle_);
      check(ncclGroupEnd());
    }
    settle();
    watch_.begin();
  }

  void check(ncclResult_t result) const {
    require(result == ncclSuccess || result == ncclInProgress, Code::peer_failed, [&] {
      return Problem{.what = fmt::format("NCCL failed: {}", ncclGetErrorString(result)),
                     .available = ncclGetLastError(handle_)};
    });
  }

 private:
  // Waits until the calls are issued or have failed.
  void settle() {
    const Deadline deadline(error_, timeout_);
    deadline.wait(
        [&](auto) {
          ncclResult_t state = ncclInProgress;
          {
            const std::lock_guard lock(mutex_);
            error_.check();
            check(ncclCommGetAsyncError(handle_, &state));
          }
          check(state);
          if (state == ncclInProgress) std::this_thread::sleep_for(look_again);
          return state != ncclInProgress;
        },
        [&] { deadline.fail_late(some_rank); });
  }

  // Called by the thread that sets the first error. Kernels that wait for a peer end.
  void abort() {
    const std::lock_guard lock(mutex_);
    if (!error_.is_set() || handle_ == nullptr) return;  // other news, or aborted already
    aborter_.abort(std::exchange(handle_, nullptr));
  }

  FirstError& error_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  ncclComm_t handle_ = nullptr;
  Aborter aborter_;
  Watch watch_;
};

class NcclTransport : public ProcessTransport {
 public:
  NcclTransport(std::unique_ptr<Transport> host, const ProcessGroup& members, const GpuStream& stream,
                MemoryAccounts& accounts, MakeTransport make)
      : ProcessTransport(members, std::move(make)),
        host_(std::move(host)),
        stream_(stream.stream),
        max_chunk_bytes_(chunk_bytes_of(size())),
        received_(allocate(accounts, {.kind = MemoryKind::device,
                                      .bytes = size() * max_chunk_bytes_,
                                      .owner = "nccl, group " + group().name(),
                                      .gpu = stream.gpu})),
        nccl_(group(), stream) {}

  std::size_t max_chunk_bytes(ChunkMemory where, std::span<const std::byte> bytes) const override {
    return where == ChunkMemory::host ? host_->max_chunk_bytes(where, bytes) : max_chunk_bytes_;
  }

  void exchange(const SentChunk& chunk, const Receive& receive) override {
    if (chunk.where == ChunkMemory::host) return host_->exchange(chunk, receive);
    nccl_.issue([&](ncclComm_t handle) {
      for (std::size_t peer = 0; peer < size(); ++peer) {
        if (peer != rank()) send_and_receive(chunk, peer, handle);
      }
    });
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (!chunk.sends(peer)) continue;
      receive(peer, {peer == rank() ? chunk.piece(peer).data() : received_from(peer), chunk.bytes}, 0);
    }
  }

 private:
  std::byte* received_from(std::size_t peer) const { return received_.data() + peer * max_chunk_bytes_; }

  void send_and_receive(const SentChunk& chunk, std::size_t peer, ncclComm_t handle) const {
    const int other = static_cast<int>(peer);
    if (chunk.sends(rank())) {
      nccl_.check(ncclSend(chunk.piece(peer).data(), chunk.bytes, ncclUint8, other, handle, stream_));
    }
    if (chunk.sends(peer)) nccl_.check(ncclRecv(received_from(peer), chunk.bytes, ncclUint8, other, handle, stream_));
  }

  std::unique_ptr<Transport> host_;
  StreamHandle stream_;
  std::size_t max_chunk_bytes_;
  Buffer received_;  // a slot for each rank
  Nccl nccl_;
};

}  // namespace

bool has_nccl() { return true; }

std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport> host, const ProcessGroup& group,
                                          const GpuStream& stream, MemoryAccounts& accounts,
                                          const MakeTransport& make) {
  return std::make_unique<NcclTransport>(std::move(host), group, stream, accounts, make);
}

}  // namespace ballast
