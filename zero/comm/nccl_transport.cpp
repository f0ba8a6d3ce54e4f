#include "zero/comm/nccl_transport.h"

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
#include "kernels/runtime/error.h"
#include "kernels/runtime/stream.h"
#include "kernels/runtime/system_limits.h"

namespace ballast {
namespace {

constexpr std::size_t least_round_bytes = std::size_t{1} << 20;
constexpr std::size_t most_round_bytes = std::size_t{32} << 20;
constexpr std::size_t most_received_bytes = std::size_t{128} << 20;
constexpr auto look_again = std::chrono::microseconds(50);
constexpr auto look_for_the_late = std::chrono::milliseconds(100);
constexpr std::string_view some_rank = "a rank of an NCCL group";

std::size_t round_bytes_of(std::size_t size) {
  return std::clamp(most_received_bytes / size, least_round_bytes, most_round_bytes) / 512 * 512;
}

// Work in a stream that waits for peers, looked at by a thread: all others wait for the stream, for as long as that takes.
class Watch {
 public:
  Watch(FirstError& error, std::chrono::milliseconds timeout, const GpuPlace& place)
      : error_(error),
        timeout_(timeout),
        stream_(Stream::wrap(place.stream, place.gpu)),
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

  // What has been issued by now.
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
      if (is_late()) error_.set(late(some_rank, timeout_));
    } catch (const Error& failure) {  // of the GPU
      error_.set(failure.what());
    }
  }

  // Returns at the end, or when one is.
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
  std::mutex mutex_;  // of the two that follow
  std::deque<Issued> under_way_;
  bool ending_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

// Aborts a communicator, in a thread of its own: NCCL may wait for all that the GPU does, other communicators' kernels too,
// which end when those are aborted. The thread is there from the beginning: a job may fail because it gets no more.
class Aborter {
 public:
  Aborter() : thread_(start_thread("the abort of an NCCL communicator", [this] { run(); })) {}
  ~Aborter() {
    if (!is_given_) given_.set_value(nullptr);
    thread_.join();
  }
  Aborter(const Aborter&) = delete;
  Aborter& operator=(const Aborter&) = delete;

  void abort(ncclComm_t handle) {  // once; returns at once
    is_given_ = true;
    given_.set_value(handle);
  }

 private:
  void run() {
    if (ncclComm_t handle = given_.get_future().get(); handle != nullptr) ncclCommAbort(handle);
  }

  std::promise<ncclComm_t> given_;
  bool is_given_ = false;
  std::thread thread_;
};

// An NCCL communicator whose calls do not block, so that a first error can end what hangs.
class Nccl {
 public:
  Nccl(ProcessGroup& group, const GpuPlace& place)
      : error_(group.job().error()), timeout_(group.job().timeout()), watch_(error_, timeout_, place) {
    ncclUniqueId id{};
    if (group.rank() == 0) check(ncclGetUniqueId(&id));
    const std::string mine(id.internal, group.rank() == 0 ? sizeof id.internal : 0);
    const std::string first = group.ask_all("nccl", mine).front();
    std::memcpy(id.internal, first.data(), sizeof id.internal);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const CurrentGpu current(place.gpu);
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

  // Issues what `body` calls with the handle, as one.
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
  // Until what was called is issued, or has failed.
  void settle() {
    const Patience patience(error_, timeout_);
    patience.wait(
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
        [&] { patience.blame(some_rank); });
  }

  // By the thread that learns of the first error: kernels that wait for a peer end.
  void abort() {
    const std::lock_guard lock(mutex_);
    if (!error_.is_set() || handle_ == nullptr) return;  // other news, or later news
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
  NcclTransport(std::unique_ptr<Transport> host, const ProcessGroup& members, const GpuPlace& place,
                MemoryAccounts& accounts, MakeTransport make)
      : ProcessTransport(members, std::move(make)),
        host_(std::move(host)),
        stream_(place.stream),
        round_bytes_(round_bytes_of(size())),
        received_(allocate(accounts, {.kind = MemoryKind::device,
                                      .bytes = size() * round_bytes_,
                                      .owner = "nccl, group " + group().name(),
                                      .gpu = place.gpu})),
        nccl_(group(), place) {}

  std::size_t round_bytes(Where where, std::span<const std::byte> bytes) const override {
    return where == Where::host ? host_->round_bytes(where, bytes) : round_bytes_;
  }

  void round(const Round& given, const Take& take) override {
    if (given.where == Where::host) return host_->round(given, take);
    nccl_.issue([&](ncclComm_t handle) {
      for (std::size_t peer = 0; peer < size(); ++peer) {
        if (peer != rank()) exchange(given, peer, handle);
      }
    });
    for (std::size_t peer = 0; peer < size(); ++peer) {
      if (!given.gives(peer)) continue;
      take(peer, {peer == rank() ? given.piece(peer).data() : place(peer), given.bytes}, 0);
    }
  }

 private:
  std::byte* place(std::size_t peer) const { return received_.data() + peer * round_bytes_; }

  void exchange(const Round& given, std::size_t peer, ncclComm_t handle) const {
    const int other = static_cast<int>(peer);
    if (given.gives(rank())) {
      nccl_.check(ncclSend(given.piece(peer).data(), given.bytes, ncclUint8, other, handle, stream_));
    }
    if (given.gives(peer)) nccl_.check(ncclRecv(place(peer), given.bytes, ncclUint8, other, handle, stream_));
  }

  std::unique_ptr<Transport> host_;
  StreamHandle stream_;
  std::size_t round_bytes_;
  Buffer received_;  // a place for each rank
  Nccl nccl_;
};

}  // namespace

bool has_nccl() { return true; }

std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport> host, const ProcessGroup& group,
                                          const GpuPlace& place, MemoryAccounts& accounts, const MakeTransport& make) {
  return std::make_unique<NcclTransport>(std::move(host), group, place, accounts, make);
}

}  // namespace ballast
