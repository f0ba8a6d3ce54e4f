// NCCL moves bytes between GPUs in the order of a stream.
#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/reduction_memory.h"
#include "kernels/runtime/buffer.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/stream.h"
#include "kernels/runtime/system_resources.h"
#include "zero/comm/nccl_library.h"
#include "zero/comm/process_transport.h"

namespace ballast {
namespace {

constexpr auto patience_of_abort = std::chrono::seconds(1);
constexpr auto time_to_end = std::chrono::milliseconds(3000);  // time for peers that end too
constexpr auto time_after_exception = std::chrono::milliseconds(100);
constexpr auto progress_pause = std::chrono::microseconds(100);
constexpr std::size_t first_gathers[] = {256, std::size_t{64} << 10, std::size_t{4} << 20};  // bytes of each rank
constexpr std::size_t most_of_first_gathers = std::size_t{256} << 20;                        // bytes of all ranks
constexpr auto look_again = std::chrono::milliseconds(100);
constexpr auto time_to_arrive = std::chrono::seconds(3);  // time for what a rank sent before it left

void check_nccl(ncclResult_t result) {
  require(result == ncclSuccess, Code::peer_failed, [&] {
    return Problem{.what = fmt::format("NCCL failed: {}", nccl_calls().error_string(result)),
                   .available = nccl_calls().last_error(nullptr)};
  });
}

ncclUniqueId exchange_id(ProcessGroup& group) {
  ncclUniqueId id{};
  if (group.rank() == 0) check_nccl(nccl_calls().get_unique_id(&id));
  const std::string mine(id.internal, group.rank() == 0 ? sizeof id.internal : 0);
  const std::string first = group.exchange_strings("nccl", mine).front();
  std::memcpy(id.internal, first.data(), sizeof id.internal);
  return id;
}

// Finds work that waits too long for peers. A thread of its own watches the work, because the threads that need it wait for the
// stream without a timeout. When work is late, waits for a rank that has left, or NCCL or the GPU has failed, the thread sets the
// job's error. One thread at a time issues.
class NcclWatch {
 public:
  // `check` throws the error of work that NCCL has issued, if there is one. The thread calls it while work waits.
  NcclWatch(const ProcessGroup& group, const GpuStream& stream, std::function<void()> check)
      : group_(group),
        check_(std::move(check)),
        stream_(Stream::wrap(stream.stream, stream.gpu)),
        end_(stream.gpu),
        thread_(start_thread("watching an NCCL communicator", [this] { run(); })) {}
  ~NcclWatch() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  NcclWatch(const NcclWatch&) = delete;
  NcclWatch& operator=(const NcclWatch&) = delete;

  // Calls `issue`, which adds work to the stream, and watches both: the call may wait for peers, too. Work is not marked one by
  // one, because events cost time: the thread marks what there is, a few times a second.
  template <class Issue>
  void watch(Issue&& issue) {
    set_issuing(Clock::now());
    const auto end = [this](const void*) { set_issuing(std::nullopt); };
    const std::unique_ptr<const void, decltype(end)> issuing(this, end);
    issue();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void set_issuing(std::optional<Clock::time_point> since) {  // null: no longer
    {
      const std::lock_guard lock(mutex_);
      issuing_since_ = since;
      has_more_work_ = true;
    }
    changed_.notify_one();
  }

  void run() {
    try {
      device::choose_gpu(stream_.gpu());
      if (is_late()) group_.fail_late_of_others();
    } catch (const Error& failure) {  // the GPU failed, or a rank is late or has left
      group_.job().error().set(failure.what());
    }
  }

  // Returns true when work is late, and false at the end.
  bool is_late() {
    while (true) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return ending_ || has_more_work_ || watched_since_; });
        if (ending_) return false;
      }
      if (has_waited_too_long()) return true;
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, look_again, [&] { return ending_; });
    }
  }

  // Calls of CUDA may wait for calls of other threads, so the mutex is free meanwhile.
  bool has_waited_too_long() {
    const auto now = Clock::now();
    const bool is_waiting = watched_since_ && !end_.is_done();
    const std::optional<Clock::time_point> issuing = issuing_since();
    if (issuing || is_waiting) {
      const auto waited = now - std::min(issuing.value_or(now), is_waiting ? *watched_since_ : now);
      require_all_ranks(waited);
      check_();
      if (waited > group_.job().timeout()) return true;
    }
    if (is_waiting) return false;
    watched_since_.reset();
    if (!take_more_work()) return false;
    end_.record(stream_);
    watched_since_ = now;
    return false;
  }

  std::optional<Clock::time_point> issuing_since() {
    const std::lock_guard lock(mutex_);
    return issuing_since_;
  }

  // Returns whether there is work that is not watched. What is being issued counts again after this.
  bool take_more_work() {
    const std::lock_guard lock(mutex_);
    return std::exchange(has_more_work_, issuing_since_.has_value());
  }

  // A rank that leaves ends its own work first, so what still waits for it will wait for ever.
  void require_all_ranks(Clock::duration waited) const {
    if (waited < time_to_arrive) return;
    for (std::size_t rank = 0; rank < group_.size(); ++rank) {
      if (group_.has_left(rank)) group_.fail_after_leave(rank);
    }
  }

  ProcessGroup group_;
  std::function<void()> check_;
  Stream stream_;
  Event end_;                                       // the end of the work that is watched; used by the thread only
  std::optional<Clock::time_point> watched_since_;  // likewise
  std::mutex mutex_;                                // guards the members below
  std::optional<Clock::time_point> issuing_since_;
  bool has_more_work_ = false;  // there is more work than what is watched
  bool ending_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

// NCCL's handle, shared with the threads that connect and abort it.
struct NcclHandle {
  explicit NcclHandle(int number) : gpu(number) {}
  ~NcclHandle() {
    if (ncclComm_t left = nccl.exchange(nullptr)) nccl_calls().abort(left);  // left by a connect() that failed
  }
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  // Marks the time in which the calling thread issues calls.
  void set_issuing(bool issues) {
    {
      const std::lock_guard lock(mutex);
      is_issuing = issues;
    }
    changed.notify_one();
  }

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
  template <class Calls>
  void group(Calls&& calls) {
    check_nccl(nccl_calls().group_start());
    try {
      calls();
    } catch (...) {
      nccl_calls().group_end();
      throw;
    }
    require_done(nccl_calls().group_end());
  }

  // NCCL sets up what ranks exchange through when they first do, and the call waits for the other ranks: for each pair, and for
  // each of the ways in which it gathers, which it chooses by the size of the result. After this hardly any call does.
  void exchange_with_all(ncclComm_t communicator, std::size_t rank, std::size_t size, const GpuStream& stream) {
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

// Ends a communicator in a thread of its own, because that may wait. The abort may wait for all work of the GPU, which
// includes kernels of other communicators that end only when those are aborted. The destruction waits until the peers of
// this host destroy theirs, or end. The thread starts at construction, because a job may fail for want of threads.
class NcclEnder {
 public:
  explicit NcclEnder(std::shared_ptr<NcclHandle> handle) : state_(std::make_shared<State>()) {
    state_->handle = std::move(handle);
    thread_ = start_thread("the end of an NCCL communicator", [state = state_] { run(*state); });
  }
  ~NcclEnder() {
    choose(End::none);
    if (thread_.joinable()) thread_.join();
  }
  NcclEnder(const NcclEnder&) = delete;
  NcclEnder& operator=(const NcclEnder&) = delete;

  void abort() { choose(End::abort); }  // any thread; does not wait

  // The last call, without effect after an abort. If peers do not come in time, the thread is left behind, and waits for them.
  void destroy(std::chrono::milliseconds time) {
    if (!choose(End::destroy)) return;
    if (state_->is_over.get_future().wait_for(time) != std::future_status::ready) thread_.detach();
  }

 private:
  enum class End { none, abort, destroy };
  struct State {
    std::shared_ptr<NcclHandle> handle;
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
  static void finish(NcclHandle& handle, End end) {
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

// An NCCL communicator whose calls the first error of the job ends. Used by one thread.
class NcclCommunicator {
 public:
  // Connects all ranks of the group. Throws B3302 if one does not arrive in time, and B3301 if NCCL or the job fails.
  NcclCommunicator(const ProcessGroup& group, const GpuStream& stream)
      : group_(group),
        error_(group.job().error()),
        timeout_(group.job().timeout()),
        exceptions_(std::uncaught_exceptions()),
        handle_(std::make_shared<NcclHandle>(stream.gpu)),
        ender_(std::make_unique<NcclEnder>(handle_)),
        watch_(group_, stream, [handle = handle_] { handle->check(); }) {
    connect(stream);
    error_.when_set(this, [this] {
      if (error_.is_set()) ender_->abort();  // else it is other news
    });
  }
  // Waits a few seconds for the ranks of this host, which destroy theirs too: less if an exception ends this one. After
  // that, a thread that is left behind waits for them.
  ~NcclCommunicator() {
    error_.forget(this);
    ender_->destroy(std::uncaught_exceptions() > exceptions_ ? time_after_exception : time_to_end);
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Issues the calls of `body` as one group. Throws the job's first error, or B3301.
  template <class Body>
  void issue(Body&& body) {
    with_reason([&] {
      watch_.watch([&] {
        handle_->set_issuing(true);
        const auto end = [](NcclHandle* handle) { handle->set_issuing(false); };
        const std::unique_ptr<NcclHandle, decltype(end)> issuing(handle_.get(), end);
        const ncclComm_t nccl = handle_->nccl;
        error_.check();
        handle_->group([&] { body(nccl); });
      });
    });
  }

 private:
  // NCCL has no limit for the time in which ranks connect, and a communicator that is not there yet cannot be aborted. So
  // another thread connects. If a rank does not arrive, that thread is left behind in a process that is about to end.
  void connect(const GpuStream& stream) {
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
  template <class Body>
  void with_reason(Body&& body) {
    try {
      body();
    } catch (const Error& failure) {
      error_.check();
      if (failure.code() == Code::peer_failed) group_.wait_for_reason(group_.rank());
      throw;
    }
  }

  ProcessGroup group_;
  FirstError& error_;
  std::chrono::milliseconds timeout_;
  int exceptions_;  // exceptions in flight at construction
  std::shared_ptr<NcclHandle> handle_;
  std::unique_ptr<NcclEnder> ender_;
  NcclWatch watch_;
};

class NcclTransport : public ProcessTransport {
 public:
  NcclTransport(std::unique_ptr<Transport> host, const ProcessGroup& members, const TransportSetup& how)
      : ProcessTransport(members, how), host_(std::move(host)), stream_(how.stream->stream), gpu_(how.stream->gpu) {
    if (size() > 1) nccl_.emplace(group(), *how.stream);
  }

  std::size_t max_chunk_bytes(ChunkMemory where, std::span<const std::byte> bytes) const override {
    return where == ChunkMemory::host ? host_->max_chunk_bytes(where, bytes) : kernels::most_sent_bytes(size());
  }

  bool has_links() const override { return true; }

  void use_memory(const View& received, const View& sums) override {
    given_received_ = received;
    given_sums_ = sums;
  }

  std::byte* scratch(std::size_t bytes) override { return reserved(given_sums_, scratch_, bytes, "sums, group "); }

  void exchange(const Sent& chunk, const Receive& receive) override {
    if (chunk.where == ChunkMemory::host) return host_->exchange(chunk, receive);
    chunk.make(0, chunk.bytes());
    if (nccl_) send_and_receive(chunk);
    std::vector<const std::byte*> by_rank;
    for (std::size_t peer = 0; peer < size(); ++peer) {
      by_rank.push_back(peer == rank() ? chunk.piece(peer).data() : received_from(peer, chunk));
    }
    receive(by_rank, chunk.bytes(), 0);
  }

  void exchange_parts(const Parts& parts) override {
    if (!nccl_) return;  // it has none for others
    nccl_->issue([&](ncclComm_t nccl) {
      for (const SentPart& part : parts.sent) {
        check_nccl(nccl_calls().send(part.values.data(), part.values.bytes(), ncclUint8, static_cast<int>(part.rank),
                                     nccl, stream_));
      }
      for (const ReceivedPart& part : parts.received) {
        check_nccl(nccl_calls().receive(part.values.data(), part.values.bytes(), ncclUint8, static_cast<int>(part.rank),
                                        nccl, stream_));
      }
    });
  }

  bool all_gather(const Sent& mine, std::span<std::byte> all) override {
    if (mine.where == ChunkMemory::host || !nccl_) return false;
    nccl_->issue([&](ncclComm_t nccl) {
      check_nccl(nccl_calls().all_gather(mine.data(), all.data(), mine.bytes(), ncclUint8, nccl, stream_));
    });
    return true;
  }

 private:
  std::byte* received_from(std::size_t peer, const Sent& chunk) const {
    return at_received_ + kernels::received_bytes(peer, chunk.bytes());
  }

  // Returns the memory that was given, or else the group's own. A group that only gathers needs none, encoded or not. The old
  // memory is freed when the stream has used it.
  std::byte* reserved(const View& given, Buffer& memory, std::size_t bytes, std::string_view owner) const {
    if (given.bytes() >= bytes) return given.data();
    if (memory.bytes() < bytes) {
      memory = {};
      memory = allocate(
          *setup().accounts,
          {.kind = MemoryKind::device, .bytes = bytes, .owner = std::string(owner) + group().name(), .gpu = gpu_});
    }
    return memory.data();
  }

  void send_and_receive(const Sent& chunk) {
    at_received_ = reserved(given_received_, received_, kernels::received_bytes(size(), chunk.bytes()), "nccl, group ");
    nccl_->issue([&](ncclComm_t nccl) { each_peer([&](std::size_t peer) { send_and_receive(chunk, peer, nccl); }); });
  }

  void send_and_receive(const Sent& chunk, std::size_t peer, ncclComm_t nccl) const {
    const int other = static_cast<int>(peer);
    if (chunk.sends(rank())) {
      check_nccl(nccl_calls().send(chunk.piece(peer).data(), chunk.bytes(), ncclUint8, other, nccl, stream_));
    }
    if (chunk.sends(peer)) {
      check_nccl(nccl_calls().receive(received_from(peer, chunk), chunk.bytes(), ncclUint8, other, nccl, stream_));
    }
  }

  std::unique_ptr<Transport> host_;
  StreamHandle stream_;
  int gpu_;
  View given_received_{};  // see use_memory()
  View given_sums_{};
  Buffer received_{};  // where the given memory is too small
  Buffer scratch_{};
  std::byte* at_received_ = nullptr;        // the place in one of them of what each rank sent, one after the other
  std::optional<NcclCommunicator> nccl_{};  // null: this rank is alone
};

}  // namespace

std::string no_nccl_because() {
  try {
    nccl_calls();
    return {};
  } catch (const Error& error) {
    return error.problem().available;
  }
}

std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport> host, const ProcessGroup& group,
                                          const TransportSetup& setup) {
  if (group.size() > 1) nccl_calls();  // throws before other ranks are waited for
  return std::make_unique<NcclTransport>(std::move(host), group, setup);
}

}  // namespace ballast
