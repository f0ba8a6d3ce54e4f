// One ring, owned by one thread that submits and reaps, so that the kernel can deliver completions without interrupting
// it. Other threads pass their requests through a list, and wake the thread by an eventfd that the ring reads.
#include <ballast/error.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <filesystem>
#include <future>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/runtime/sizes.h"
#include "kernels/runtime/system_resources.h"
#include "offload/io_queue.h"

namespace ballast::offload {
namespace {

constexpr std::size_t max_bytes = std::size_t{1} << 30;  // bytes of one submission

std::string text_of(int error) { return std::generic_category().message(error); }

// --- The ring's table of files and memory, its end, and its lines in the log ---

// The files and pieces of memory that are registered with an io_uring, by index. Used by the ring's thread only.
template <class Key>
class RingTable {
 public:
  static constexpr std::size_t size = 256;

  int find(const Key& key) const {
    return find_if([&](const Key& known) { return known == key; });
  }
  int find_if(auto holds) const {
    const auto found = std::ranges::find_if(keys_, holds);
    return found == keys_.end() ? -1 : static_cast<int>(found - keys_.begin());
  }
  void set(int index, const Key& key) { keys_[static_cast<std::size_t>(index)] = key; }
  void clear(int index) { set(index, Key{}); }
  int free() const { return find(Key{}); }

 private:
  std::array<Key, size> keys_{};
};

struct MemoryPiece {
  static constexpr std::size_t max_bytes = std::size_t{1} << 30;  // the kernel's limit for one registration

  std::byte* data = nullptr;
  std::size_t bytes = 0;
  bool operator==(const MemoryPiece&) const = default;
  bool holds(std::span<std::byte> memory) const {
    return memory.data() >= data && memory.data() + memory.size() <= data + bytes;
  }
};

std::vector<MemoryPiece> pieces_of(std::span<std::byte> memory) {
  std::vector<MemoryPiece> pieces;
  for (std::size_t first = 0; first < memory.size(); first += MemoryPiece::max_bytes) {
    pieces.push_back({memory.data() + first, std::min(MemoryPiece::max_bytes, memory.size() - first)});
  }
  return pieces;
}

// The end of a ring that has been closed. The kernel ends it some time later, after its last request, and until then it may
// write to the memory of the requests. It is detected by a pipe whose write end only the ring has open: the kernel closes it
// when it ends the ring. Used by the ring's thread.
class RingEnd {
 public:
  RingEnd();  // throws B2401

  int write_end() const { return write_.get(); }  // register it with the ring
  void registered() { write_ = Descriptor(); }    // closes this process's copy

  // Waits for the end, and warns in the log from time to time: a drive may hang, or a child process that was made
  // without fork() may hold the ring.
  void wait(Log* log) const;

 private:
  Descriptor read_;
  Descriptor write_;
};

constexpr int report_interval_ms = 30'000;

// Returns whether the descriptor is one of an io_uring.
bool is_ring(int descriptor) {
  std::error_code unknown;
  return std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", descriptor), unknown) == "anon_inode:[io_uring]";
}

RingEnd::RingEnd() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail_limit("cannot make a pipe for an io_uring", errno);
  read_ = Descriptor(ends[0]);
  write_ = Descriptor(ends[1]);
}

void RingEnd::wait(Log* log) const {
  pollfd closed{read_.get(), 0, 0};
  for (int result = -1; result <= 0;) {
    result = ::poll(&closed, 1, report_interval_ms);
    if (result == 0 && log != nullptr) {
      log->warning("the kernel has not ended an abandoned io_uring: a drive hangs, or a child process holds it");
    }
  }
}

// The lines that a queue with a ring writes to the log. Without a log they are dropped.
void log_no_workers(Log* log) {
  if (log == nullptr) return;
  log->write_once(Level::warning, "io_uring's workers",
                  fmt::format("io_uring cannot start a worker thread ({}): the ring's own thread makes blocking calls, "
                              "more slowly",
                              limits_behind(EAGAIN)));
}

void log_given_up(Log* log, const std::string& reason) {
  if (log == nullptr) return;
  log->warning(
      fmt::format("io_uring is given up: {}. One thread reads and writes instead, one request at a time. Look for what "
                  "refuses it: a seccomp filter, too little memory, a descriptor that was closed",
                  reason));
}

// The kernel registers memory only in sparse tables, which came with Linux 5.19.
void log_unregistered(Log* log, bool has_sparse_tables, int error, std::size_t bytes) {
  if (log == nullptr) return;
  const std::string reason = has_sparse_tables
                                 ? fmt::format("{} for {} (ulimit -l)", text_of(error), human_bytes(bytes))
                                 : "this kernel has no sparse tables of memory";
  log->write_once(Level::info, "registered memory",
                  fmt::format("io_uring works without registered memory, for more CPU time: {}", reason));
}

// --- The queue ---

struct Job {
  explicit Job(const IoRequest& request) : transfer(request) {}
  Transfer transfer;
  Promise promise{};
  bool taken = false;  // the kernel has taken it, as far as this thread knows
};

class UringQueue : public IoQueue {
 public:
  UringQueue(const IoOptions& options, RingEntry entry)
      : depth_(options.depth), log_(options.log), entry_(std::move(entry)) {
    std::promise<void> started;
    std::future<void> ready = started.get_future();
    thread_ = start_thread("an io_uring", [this, &started] { run(started); });
    try {
      ready.get();
    } catch (...) {
      thread_.join();
      throw;
    }
  }

  ~UringQueue() override {
    change([&] { closing_ = true; });
    thread_.join();
  }

  Completion submit(const IoRequest& request) override {
    auto job = std::make_unique<Job>(request);
    Completion completion = job->promise.completion();
    {
      std::unique_lock lock(mutex_);
      room_.wait(lock, [&] { return in_flight_ < depth_; });
      ++in_flight_;
    }
    change([&] { jobs_.push_back(std::move(job)); });
    return completion;
  }

  void remember(std::span<std::byte> memory) override {
    on_thread([&] { register_memory(memory); });
  }
  void forget(std::span<std::byte> memory) override {
    on_thread([&] {
      for (const MemoryPiece& piece : pieces_of(memory)) {
        const int index = memory_.find(piece);
        if (index < 0) continue;
        memory_.clear(index);  // even if the kernel keeps the pages: other memory may get this address
        register_piece(index, {});
      }
    });
  }
  void remember(const File& file) override {
    on_thread([&] {
      const int index = files_.free();
      if (index >= 0 && register_file(index, file.descriptor())) files_.set(index, &file);
    });
  }
  void forget(const File& file) override {
    on_thread([&] {
      const int index = files_.find(&file);
      if (index < 0) return;
      files_.clear(index);  // even if the kernel keeps the file: another object may get this address
      register_file(index, -1);
    });
  }

  std::string_view kind() const override { return has_ring_ ? "io_uring" : "one thread"; }

 private:
  // Changes the shared state and wakes the thread.
  template <class Change>
  void change(Change&& change) {
    {
      const std::lock_guard lock(mutex_);
      change();
      if (!std::exchange(may_sleep_, false)) return;  // the thread checks again before it sleeps
    }
    const std::uint64_t one = 1;
    // Fails only if the counter is full, and then the thread wakes anyway.
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
  }

  void on_thread(const std::function<void()>& call) {
    std::packaged_task<void()> task(call);
    std::future<void> done = task.get_future();
    change([&] { calls_.push_back(std::move(task)); });
    done.get();
  }

  // --- The functions below run on the ring's thread. ---

  void run(std::promise<void>& started) {
    try {
      open();
    } catch (...) {
      if (has_ring_) close_ring();
      started.set_exception(std::current_exception());
      return;
    }
    started.set_value();
    read_wake();
    while (take_new()) {
      has_ring_ ? use_ring() : wait_for_wake();
    }
    if (has_ring_) close_ring();
  }

  void close_ring() {
    has_ring_ = false;
    kept_from_children_.reset();
    io_uring_queue_exit(&ring_);
  }

  void open() {
    // Older kernels refuse an unknown flag.
    constexpr std::array<unsigned, 4> wanted{
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SINGLE_ISSUER, IORING_SETUP_COOP_TASKRUN, 0};
    int result = -EINVAL;
    for (std::size_t i = 0; i < wanted.size() && result == -EINVAL; ++i) {
      result = io_uring_queue_init(static_cast<unsigned>(2 * depth_ + 8), &ring_, wanted[i]);
    }
    if (is_descriptor_limit(-result)) fail_limit("cannot make an io_uring", -result);
    require(result == 0, Code::no_io_uring, [&] {
      return Problem{.what = "cannot use io_uring: the kernel refuses it", .available = text_of(-result)};
    });
    has_ring_ = true;
    require_operations();
    keep_from_children();
    register_tables();
  }

  // Kernels before 5.6 make a ring, but refuse its reads and writes.
  void require_operations() {
    io_uring_probe* const probe = io_uring_get_probe_ring(&ring_);
    const bool has_all = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                         io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0 &&
                         io_uring_opcode_supported(probe, IORING_OP_FSYNC) != 0;
    if (probe != nullptr) io_uring_free_probe(probe);
    require(has_all, Code::no_io_uring, [] {
      return Problem{.what = "cannot use io_uring: the kernel's rings cannot read and write",
                     .available = "the kernel is older than 5.6, or a filter refuses io_uring_register"};
    });
  }

  // The kernel ends a ring when no process has its descriptor or its memory.
  void keep_from_children() {
    kept_from_children_.emplace(ring_.ring_fd);
    io_uring_ring_dontfork(&ring_);  // the ring may end only with a child process if this fails
  }

  void register_tables() {
    std::array<int, RingTable<const File*>::size + 1> files{};
    files.fill(-1);
    files.back() = end_.write_end();
    has_file_table_ = io_uring_register_files(&ring_, files.data(), files.size()) == 0;
    memory_table_ = io_uring_register_buffers_sparse(&ring_, RingTable<MemoryPiece>::size);
    if (!has_file_table_) {
      const int result = io_uring_register_files(&ring_, &files.back(), 1);
      require(result == 0, Code::no_io_uring, [&] {
        return Problem{.what = "cannot use io_uring: the kernel cannot register files", .available = text_of(-result)};
      });
    }
    end_.registered();
  }

  void read_wake() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    io_uring_prep_read(entry, wake_.get(), &wakes_, sizeof wakes_, 0);
    io_uring_sqe_set_data(entry, nullptr);
  }

  // Waits without a ring; may return early.
  void wait_for_wake() { [[maybe_unused]] const ssize_t read = ::read(wake_.get(), &wakes_, sizeof wakes_); }

  // Returns false when all requests have ended and no more will arrive.
  bool take_new() {
    std::vector<std::packaged_task<void()>> calls;
    std::vector<std::unique_ptr<Job>> jobs;
    bool closing = false;
    {
      const std::lock_guard lock(mutex_);
      calls.swap(calls_);
      jobs.swap(jobs_);
      closing = closing_ && in_flight_ == 0;
      may_sleep_ = true;
    }
    for (auto& call : calls) {
      call();
    }
    for (auto& job : jobs) {
      start(std::move(job));
    }
    return !closing;
  }

  // The ring has an entry for each request in flight, and one for the wake-up.
  void start(std::unique_ptr<Job> job) {
    if (!has_ring_) return end(*job, move_all(job->transfer, system_call));
    IoRequest request = job->transfer.rest();
    request.memory = request.memory.first(std::min(request.memory.size(), max_bytes));
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    const int file = files_.find(request.file);
    prepare(entry, request, file >= 0 ? file : request.file->descriptor());
    unsigned flags = file >= 0 ? IOSQE_FIXED_FILE : 0;
    if (job->transfer.refused()) flags |= IOSQE_ASYNC;  // a kernel thread makes the blocking call
    io_uring_sqe_set_flags(entry, flags);
    io_uring_sqe_set_data(entry, job.get());
    job->taken = false;
    offered_.push_back(job.get());
    started_.emplace(job.get(), std::move(job));
  }

  void prepare(io_uring_sqe* entry, const IoRequest& request, int file) const {
    const auto bytes = static_cast<unsigned>(request.memory.size());
    const int piece = memory_.find_if([&](const MemoryPiece& known) { return known.holds(request.memory); });
    if (request.kind == IoKind::flush) {
      io_uring_prep_fsync(entry, file, IORING_FSYNC_DATASYNC);
    } else if (request.kind == IoKind::read) {
      piece >= 0 ? io_uring_prep_read_fixed(entry, file, request.memory.data(), bytes, request.offset, piece)
                 : io_uring_prep_read(entry, file, request.memory.data(), bytes, request.offset);
    } else {
      piece >= 0 ? io_uring_prep_write_fixed(entry, file, request.memory.data(), bytes, request.offset, piece)
                 : io_uring_prep_write(entry, file, request.memory.data(), bytes, request.offset);
    }
  }

  // A submission that the kernel refuses stays in the ring, and is submitted again.
  void use_ring() {
    const int result = entry_.enter(offered_.size(), [this] { return io_uring_submit_and_wait(&ring_, 1); });
    if (result >= 0) {
      refusals_ = 0;
      for (Job* job : offered_) {
        job->taken = true;
      }
      offered_.clear();
    } else if (result != -EINTR) {
      if (++refusals_ == entry_.max_refusals) return give_up_ring(-result);
      std::this_thread::sleep_for(entry_.pause);
      entry_.enter(0, [this] { return io_uring_get_events(&ring_); });  // requests that end release memory
    }
    reap();
  }

  unsigned reap() {
    std::array<io_uring_cqe*, 64> entries{};
    const unsigned count = io_uring_peek_batch_cqe(&ring_, entries.data(), entries.size());
    for (unsigned i = 0; i < count; ++i) {
      auto* job = static_cast<Job*>(io_uring_cqe_get_data(entries[i]));
      job == nullptr ? read_wake() : answer(job, entries[i]->res);
    }
    io_uring_cq_advance(&ring_, count);
    return count;
  }

  void answer(Job* known, std::int64_t result) {
    std::unique_ptr<Job> job = std::move(started_.extract(known).mapped());
    if (result == -ECANCELED) return do_without_worker(std::move(job));
    switch (job->transfer.take(result)) {
      case Transfer::Next::again: return start(std::move(job));
      case Transfer::Next::finished: return end(*job, nullptr);
      case Transfer::Next::failed: return end(*job, job->transfer.error());
    }
  }

  // No code here cancels requests: the kernel cancels one for which it cannot start a worker thread.
  void do_without_worker(std::unique_ptr<Job> job) {
    if (!std::exchange(has_logged_workers_, true)) log_no_workers(log_);
    end(*job, move_all(job->transfer, system_call));
  }

  void end(Job& job, const std::exception_ptr& error) {
    {
      const std::lock_guard lock(mutex_);
      --in_flight_;
    }
    room_.notify_one();
    error ? job.promise.fail(error) : job.promise.finish();
  }

  // This thread makes blocking calls from here on. It repeats the requests that the kernel had accepted, once the
  // kernel cannot touch their memory. It does not repeat a flush, which would hide the first one's error.
  void give_up_ring(int error) {
    const std::string reason =
        fmt::format("the kernel refused io_uring_enter {} times in a row ({})", refusals_, text_of(error));
    log_given_up(log_, reason);
    while (reap() > 0) {
    }
    if (!is_ring(ring_.ring_fd)) ring_.ring_fd = -1;  // the number may belong to another file
    close_ring();
    files_ = {};
    memory_ = {};
    has_file_table_ = false;
    offered_.clear();
    if (std::ranges::any_of(started_, [](const auto& entry) { return entry.second->taken; })) end_.wait(log_);
    for (auto& [known, job] : std::exchange(started_, {})) {
      job->taken && job->transfer.rest().kind == IoKind::flush ? end(*job, job->transfer.lost_flush(reason))
                                                               : start(std::move(job));
    }
  }

  void register_memory(std::span<std::byte> memory) {
    if (!has_ring_) return;
    for (const MemoryPiece& piece : pieces_of(memory)) {
      const int result = memory_table_ == 0 ? register_piece(memory_.free(), piece) : memory_table_;
      if (result < 0) return log_unregistered(log_, memory_table_ != -EINVAL, -result, memory.size());
    }
  }

  int register_piece(int index, const MemoryPiece& piece) {
    if (index < 0) return -ENOSPC;
    const iovec memory{piece.data, piece.bytes};
    const __u64 no_tag = 0;
    const int result = io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index), &memory, &no_tag, 1);
    if (result >= 0) memory_.set(index, piece);
    return result;
  }

  bool register_file(int index, int descriptor) {
    return has_file_table_ && io_uring_register_files_update(&ring_, static_cast<unsigned>(index), &descriptor, 1) >= 0;
  }

  const std::size_t depth_;
  Log* const log_;
  const RingEntry entry_;
  const Descriptor wake_ = require_descriptor(::eventfd(0, EFD_CLOEXEC), "cannot make an eventfd for an io_uring");

  std::mutex mutex_;  // guards the next six members
  std::condition_variable room_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::vector<std::packaged_task<void()>> calls_;
  std::size_t in_flight_ = 0;
  bool closing_ = false;
  bool may_sleep_ = true;

  std::atomic<bool> has_ring_ = false;  // only the thread changes it

  io_uring ring_{};  // this and all members below belong to the thread
  std::optional<NotInChildren> kept_from_children_;
  std::unordered_map<Job*, std::unique_ptr<Job>> started_;
  std::vector<Job*> offered_;  // jobs that the kernel has not accepted yet
  std::size_t refusals_ = 0;   // refusals in a row
  bool has_logged_workers_ = false;
  RingEnd end_;
  bool has_file_table_ = false;
  int memory_table_ = 0;  // 0, or -errno if there is none
  std::uint64_t wakes_ = 0;
  RingTable<const File*> files_;
  RingTable<MemoryPiece> memory_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<IoQueue> uring_queue(const IoOptions& options, const RingEntry& entry) {
  return std::make_unique<UringQueue>(checked(options), entry);
}

}  // namespace ballast::offload
