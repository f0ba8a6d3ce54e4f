#include "zero/comm/nccl_transport.h"

#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <thread>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/error.h"

namespace ballast {
namespace {

constexpr std::size_t least_round_bytes = std::size_t{1} << 20;
constexpr std::size_t most_round_bytes = std::size_t{32} << 20;
constexpr std::size_t most_received_bytes = std::size_t{128} << 20;
constexpr auto look_again = std::chrono::microseconds(50);

std::size_t round_bytes_of(std::size_t size) {
  return std::clamp(most_received_bytes / size, least_round_bytes, most_round_bytes) / 512 * 512;
}

// The GPU that the calling thread's calls go to, for as long as this lives.
class CurrentGpu {
 public:
  explicit CurrentGpu(int gpu) {
    cudaGetDevice(&before_);
    cudaSetDevice(gpu);
  }
  ~CurrentGpu() { cudaSetDevice(before_); }
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  int before_ = 0;
};

// An NCCL communicator whose calls do not block, so that a first error can end what hangs.
class Nccl {
 public:
  Nccl(ProcessGroup& group, int gpu) : error_(group.job().error()), timeout_(group.job().timeout()) {
    ncclUniqueId id{};
    if (group.rank() == 0) check(ncclGetUniqueId(&id));
    const std::string mine(id.internal, group.rank() == 0 ? sizeof id.internal : 0);
    const std::string first = group.ask_all("nccl", mine).front();
    std::memcpy(id.internal, first.data(), sizeof id.internal);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const CurrentGpu current(gpu);
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
        [&] { patience.blame("a rank of an NCCL group"); });
  }

  // By the thread that learns of the first error: kernels that wait for a peer end.
  void abort() {
    const std::lock_guard lock(mutex_);
    ncclCommAbort(std::exchange(handle_, nullptr));
  }

  FirstError& error_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  ncclComm_t handle_ = nullptr;
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
        nccl_(group(), place.gpu) {}

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
