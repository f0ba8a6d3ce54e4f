#include "zero/comm/nccl_communicator.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <future>
#include <mutex>

#include "kernels/runtime/buffer.h"
#include "kernels/runtime/current_gpu.h"
#include "kernels/runtime/system_limits.h"
#include "zero/comm/nccl_library.h"

namespace ballast {
namespace {

constexpr auto patience_of_abort = std::chrono::seconds(1);
constexpr auto time_to_end = std::chrono::milliseconds(3000);  // for peers that end too
constexpr auto time_after_exception = std::chrono::milliseconds(100);
constexpr auto progress_pause = std::chrono::microseconds(100);
constexpr std::size_t first_gathers[] = {256, std::size_t{64} << 10, std::size_t{4} << 20};  // bytes of each rank
constexpr std::size_t most_of_first_gathers = std::size_t{256} << 20;                        // of all ranks

ncclUniqueId exchange_id(ProcessGroup& group) {
  ncclUniqueId id{};
  if (group.rank() == 0) check_nccl(nccl_calls().get_unique_id(&id));
  const std::string mine(id.internal, group.rank() == 0 ? sizeof id.internal : 0);
  const std::string first = group.exchange_strings("nccl", mine).front();
  std::memcpy(id.internal, first.data(), sizeof id.internal);
  return id;
}

}  // namespace

void check_nccl(ncclResult_t result) {
  require(result == ncclSuccess, Code::peer_failed, [&] {
    return Problem{.what = fmt::format("NCCL failed: {}", nccl_calls().error_string(result)),
                   .available = nccl_calls().last_error(nullptr)};
  });
}

// NCCL's handle, shared with the threads that connect and abort it.
struct NcclCommunicator::Handle {
  explicit Handle(int number) : gpu(number) {}
  ~Handle() {
    if (ncclComm_t left = nccl.exchange(nullptr)) nccl_calls().abort(left);  // left by a connect() that failed
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Marks the time in which the calling thread issues calls.
  class Issuing {
   public:
    explicit Issuing(Handle& handle) : handle_(handle) { set(true); }
    ~Issuing() { set(false); }
    Issuing(const Issuing&) = delete;
    Issuing& operator=(const Issuing&) = delete;

   private:
    void set(bool issues) {
      {
        const std::lock_guard lock(handle_.mutex);
        handle_.is_issuing = issues;
      }
      handle_.changed.notify_one();
    }

    Handle& handle_;
  };

  // Throws the error of work that was issued, such as that of a broken link: NCCL returns it from no other call.
  void check() { is_in_progress(); }

  // Waits for the end of a call on the communicator: with NCCL_COMM_BLOCKING=0, which overrides the configuration of all
  // communicators, it returns before that.
  void require_done(ncclResult_t result) {
    if (result != ncclInProgress) return check_nccl(result);
    while (is_in_progress()) {
      std::this_thread::sleep_for(progress_pause);
    }
    require(nccl != nullptr, Code::peer_failed, [] { return Problem{.what = "NCCL was aborted"}; });
  }

  // Runs calls as one group. NCCL keeps the group of a thread open until it is ended, also after an error.
  void group(const std::function<void()>& calls) {
    check_nccl(nccl_calls().group_start());
    try {
      calls();
    } catch (...) {
      nccl_calls().group_end();
      throw;
    }
    require_done(nccl_calls().group_end());
  }

  void exchange_with_all(ncclComm_t communicator, std::size_t rank, std::size_t size, const GpuStream& stream);

  const int gpu;
  std::mutex mutex{};  // guards the flag, and the communicator against an abort
  std::condition_variable changed{};
  bool is_issuing = false;
  std::atomic<ncclComm_t> nccl = nullptr;

 private:
  bool is_in_progress() {
    const std::lock_guard lock(mutex);  // an abort takes the communicator away
    ncclResult_t state = ncclSuccess;
    if (const ncclComm_t asked = nccl) check_nccl(nccl_calls().asynchronous_error(asked, &state));
    if (state != ncclInProgress) check_nccl(state);
    return state == ncclInProgress;
  }
};

// NCCL sets up what ranks exchange through when they first do, and the call waits for the other ranks: for each pair, and for
// each of the ways in which it gathers, which it chooses by the size of the result. After this hardly any call does.
void NcclCommunicator::Handle::exchange_with_all(ncclComm_t communicator, std::size_t rank, std::size_t size,
                                                 const GpuStream& stream) {
  constexpr std::size_t aligned = 256;  // as NCCL likes it
  const NcclCalls& calls = nccl_calls();
  MemoryAccounts accounts;
  const std::size_t largest = std::max(most_of_first_gathers / size / aligned * aligned, aligned);
  const std::size_t room = size * std::min(first_gathers[std::size(first_gathers) - 1], largest);
  const Buffer memory = allocate(accounts, {.kind = MemoryKind::device,
                                            .bytes = std::max(room, 2 * size * aligned),
                                            .owner = "connecting NCCL",
                                            .gpu = stream.gpu});
  std::byte* const sent = memory.data();
  std::byte* const received = memory.data() + size * aligned;
  if (!stream.only_gathers) {
    group([&] {
      for (std::size_t peer = 0; peer < size; ++peer) {
        const int other = static_cast<int>(peer);
        check_nccl(calls.send(sent + peer * aligned, aligned, ncclUint8, other, communicator, stream.stream));
        check_nccl(calls.receive(received + peer * aligned, aligned, ncclUint8, other, communicator, stream.stream));
      }
    });
  }
  for (const std::size_t wanted : first_gathers) {
    const std::size_t bytes = std::min(wanted, largest);
    std::byte* const mine = memory.data() + rank * bytes;
    require_done(calls.all_gather(mine, memory.data(), bytes, ncclUint8, communicator, stream.stream));
  }
  Stream::wrap(stream.stream, stream.gpu).synchronize();
}

// Ends a communicator in a thread of its own, because that may wait. The abort may wait for all work of the GPU, which
// includes kernels of other communicators that end only when those are aborted. The destruction waits until the peers of
// this host destroy theirs, or end. The thread starts at construction, because a job may fail for want of threads.
class NcclCommunicator::Ender {
 public:
  explicit Ender(std::shared_ptr<Handle> handle) : state_(std::make_shared<State>()) {
    state_->handle = std::move(handle);
    thread_ = start_thread("the end of an NCCL communicator", [state = state_] { run(*state); });
  }
  ~Ender() {
    choose(End::none);
    if (thread_.joinable()) thread_.join();
  }
  Ender(const Ender&) = delete;
  Ender& operator=(const Ender&) = delete;

  void abort() { choose(End::abort); }  // any thread; does not wait

  // The last call, without effect after an abort. If peers do not come in time, the thread is left behind, and waits for them.
  void destroy(std::chrono::milliseconds time) {
    if (!choose(End::destroy)) return;
    if (state_->is_over.get_future().wait_for(time) != std::future_status::ready) thread_.detach();
  }

 private:
  enum class End { none, abort, destroy };
  struct State {
    std::shared_ptr<Handle> handle;
    std::promise<End> end;
    std::promise<void> is_over;
  };

  // Returns whether it is the first choice.
  bool choose(End end) {
    if (is_chosen_.exchange(true)) return false;
    state_->end.set_value(end);
    return true;
  }

  static void run(State& state) {
    const End end = state.end.get_future().get();
    if (end != End::none) finish(*state.handle, end);
    state.is_over.set_value();
  }

  // Calls of NCCL end soon, unless they wait for a peer, which only the abort ends.
  static void finish(Handle& handle, End end) {
    std::unique_lock lock(handle.mutex);
    handle.changed.wait_for(lock, patience_of_abort, [&] { return !handle.is_issuing; });
    const ncclComm_t ended = handle.nccl.exchange(nullptr);
    lock.unlock();
    if (ended == nullptr) return;
    try {
      device::choose_gpu(handle.gpu);
    } catch (const Error&) {  // the GPU failed, and NCCL finds that out too
    }
    if (end == End::abort) nccl_calls().abort(ended);
    if (end == End::destroy) nccl_calls().destroy(ended);
  }

  std::shared_ptr<State> state_;
  std::atomic<bool> is_chosen_ = false;
  std::thread thread_;
};

NcclCommunicator::NcclCommunicator(const ProcessGroup& group, const GpuStream& stream)
    : group_(group),
      error_(group.job().error()),
      timeout_(group.job().timeout()),
      exceptions_(std::uncaught_exceptions()),
      handle_(std::make_shared<Handle>(stream.gpu)),
      ender_(std::make_unique<Ender>(handle_)),
      watch_(group_, stream, [handle = handle_] { handle->check(); }) {
  connect(stream);
  error_.when_set(this, [this] {
    if (error_.is_set()) ender_->abort();  // else it is other news
  });
}

// NCCL has no limit for the time in which ranks connect, and a communicator that is not there yet cannot be aborted. So
// another thread connects. If a rank does not arrive, that thread is left behind in a process that is about to end.
void NcclCommunicator::connect(const GpuStream& stream) {
  const ncclUniqueId id = exchange_id(group_);
  auto connected = std::make_shared<std::promise<void>>();
  std::future<void> is_connected = connected->get_future();
  const int size = static_cast<int>(group_.size()), rank = static_cast<int>(group_.rank());
  std::thread thread =
      start_thread("connecting an NCCL communicator", [connected, handle = handle_, id, size, rank, stream] {
        try {
          device::choose_gpu(stream.gpu);
          ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
          ncclComm_t made = nullptr;
          const ncclResult_t result = nccl_calls().init_rank(&made, size, id, rank, &config);
          if (result != ncclInProgress) check_nccl(result);
          handle->nccl = made;
          handle->require_done(result);
          handle->exchange_with_all(made, static_cast<std::size_t>(rank), static_cast<std::size_t>(size), stream);
          connected->set_value();
        } catch (...) {
          connected->set_exception(std::current_exception());
        }
      });
  try {
    const Deadline deadline(error_, timeout_);
    deadline.wait([&](auto pause) { return is_connected.wait_for(pause) == std::future_status::ready; },
                  [&] { group_.fail_late_of_others(); });
  } catch (const Error&) {
    ender_->abort();
    thread.detach();
    throw;
  }
  thread.join();
  with_reason([&] { is_connected.get(); });
}

// NCCL tells neither which rank failed nor why. The job does.
void NcclCommunicator::with_reason(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& failure) {
    error_.check();
    if (failure.code() == Code::peer_failed) group_.wait_for_reason(group_.rank());
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() {
  error_.forget(this);
  ender_->destroy(std::uncaught_exceptions() > exceptions_ ? time_after_exception : time_to_end);
}

void NcclCommunicator::issue(const std::function<void(ncclComm_t)>& body) {
  with_reason([&] {
    watch_.watch([&] {
      const Handle::Issuing issuing(*handle_);
      const ncclComm_t nccl = handle_->nccl;
      error_.check();
      handle_->group([&] { body(nccl); });
    });
  });
}

}  // namespace ballast
