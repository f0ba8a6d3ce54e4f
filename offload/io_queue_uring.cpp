// One ring, owned by one thread that submits and reaps: that lets the kernel deliver completions without interrupting it.
// Others hand their requests to it through a list, and wake it by writing to an eventfd that the ring reads.
#include <fmt/format.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/sizes.h"
#include "offload/io_queue.h"

namespace ballast::offload {
namespace {

constexpr std::size_t table_size = 256;                    // registered files, and pieces of registered memory
constexpr std::size_t piece_bytes = std::size_t{1} << 30;  // the most that the kernel registers as one
constexpr std::size_t most_bytes = std::size_t{1} << 30;   // of one submission; the rest follows as after a short one

// What the kernel knows of, by index. Used by the ring's thread alone.
template <class Key>
class Table {
 public:
  int find(const Key& key) const {
    const auto found = std::ranges::find(keys_, key);
    return found == keys_.end() ? -1 : static_cast<int>(found - keys_.begin());
  }
  int find_if(auto holds) const {
    const auto found = std::ranges::find_if(keys_, holds);
    return found == keys_.end() ? -1 : static_cast<int>(found - keys_.begin());
  }
  void set(int index, const Key& key) { keys_[static_cast<std::size_t>(index)] = key; }
  void clear(int index) { set(index, Key{}); }
  int free() const { return find(Key{}); }

 private:
  std::array<Key, table_size> keys_{};
};

struct Piece {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  bool operator==(const Piece&) const = default;
  bool holds(std::span<std::byte> memory) const {
    return memory.data() >= data && memory.data() + memory.size() <= data + bytes;
  }
};

std::vector<Piece> pieces_of(std::span<std::byte> memory) {
  std::vector<Piece> pieces;
  for (std::size_t first = 0; first < memory.size(); first += piece_bytes) {
    pieces.push_back({memory.data() + first, std::min(piece_bytes, memory.size() - first)});
  }
  return pieces;
}

struct Job {
  explicit Job(const IoRequest& request) : transfer(request) {}
  Transfer transfer;
  Promise promise{};
};

class UringQueue : public IoQueue {
 public:
  explicit UringQueue(const IoOptions& options) : depth_(options.depth), log_(options.log) {
    require(wake_ >= 0, Code::no_io_uring, [] { return Problem{.what = "no eventfd could be made"}; });
    std::promise<void> started;
    std::future<void> ready = started.get_future();
    thread_ = std::thread([this, &started] { run(started); });
    try {
      ready.get();
    } catch (...) {
      thread_.join();
      ::close(wake_);
      throw;
    }
  }

  ~UringQueue() override {
    change([&] { closing_ = true; });
    thread_.join();
    ::close(wake_);
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
      for (const Piece& piece : pieces_of(memory)) {
        if (const int index = memory_.find(piece); index >= 0) register_piece(index, {});
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
      if (index >= 0 && register_file(index, -1)) files_.clear(index);
    });
  }

  std::string_view kind() const override { return "io_uring"; }

 private:
  // Changes what the thread looks at, and has it look.
  template <class Change>
  void change(Change&& change) {
    {
      const std::lock_guard lock(mutex_);
      change();
      if (!std::exchange(may_sleep_, false)) return;  // it looks again before it sleeps
    }
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written =
        ::write(wake_, &one, sizeof one);  // can only fail when it is full of wakes
  }

  void on_thread(const std::function<void()>& call) {
    std::packaged_task<void()> task(call);
    std::future<void> done = task.get_future();
    change([&] { calls_.push_back(std::move(task)); });
    done.get();
  }

  // --- The rest is the ring's thread. ---

  void run(std::promise<void>& started) {
    try {
      open();
    } catch (...) {
      started.set_exception(std::current_exception());
      return;
    }
    started.set_value();
    read_wake();
    while (take_new()) {
      submit_and_wait();
      reap();
    }
    io_uring_queue_exit(&ring_);
  }

  void open() {
    // Older kernels refuse a flag that they do not know.
    constexpr std::array<unsigned, 4> wanted{
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SINGLE_ISSUER, IORING_SETUP_COOP_TASKRUN, 0};
    int result = -EINVAL;
    for (std::size_t i = 0; i < wanted.size() && result == -EINVAL; ++i) {
      result = io_uring_queue_init(static_cast<unsigned>(2 * depth_ + 8), &ring_, wanted[i]);
    }
    require(result == 0, Code::no_io_uring, [&] {
      return Problem{.what = "the kernel gives this process no io_uring",
                     .available = std::generic_category().message(-result)};
    });
    tables_ = io_uring_register_files_sparse(&ring_, table_size) == 0 &&
              io_uring_register_buffers_sparse(&ring_, table_size) == 0;
  }

  void read_wake() {
    io_uring_sqe* entry = next_entry();
    io_uring_prep_read(entry, wake_, &wakes_, sizeof wakes_, 0);
    io_uring_sqe_set_data(entry, nullptr);
  }

  io_uring_sqe* next_entry() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    while (entry == nullptr) {
      io_uring_submit(&ring_);
      entry = io_uring_get_sqe(&ring_);
    }
    return entry;
  }

  // False when all is done and nothing will come.
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
      start(*job.release());
    }
    return !closing;
  }

  void start(Job& job) {
    IoRequest request = job.transfer.rest();
    request.memory = request.memory.first(std::min(request.memory.size(), most_bytes));
    io_uring_sqe* entry = next_entry();
    const int file = files_.find(request.file);
    prepare(entry, request, file >= 0 ? file : request.file->descriptor());
    unsigned flags = file >= 0 ? IOSQE_FIXED_FILE : 0;
    if (job.transfer.refused()) flags |= IOSQE_ASYNC;  // a kernel thread takes it, and blocks
    io_uring_sqe_set_flags(entry, flags);
    io_uring_sqe_set_data(entry, &job);
  }

  void prepare(io_uring_sqe* entry, const IoRequest& request, int file) const {
    const auto bytes = static_cast<unsigned>(request.memory.size());
    const int piece = memory_.find_if([&](const Piece& known) { return known.holds(request.memory); });
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

  // A submission that the kernel cannot take now stays in the ring, and is offered again.
  void submit_and_wait() {
    const int result = io_uring_submit_and_wait(&ring_, 1);
    if (result < 0 && result != -EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  void reap() {
    std::array<io_uring_cqe*, 64> entries{};
    const unsigned count = io_uring_peek_batch_cqe(&ring_, entries.data(), entries.size());
    for (unsigned i = 0; i < count; ++i) {
      auto* job = static_cast<Job*>(io_uring_cqe_get_data(entries[i]));
      job == nullptr ? read_wake() : answer(*job, entries[i]->res);
    }
    io_uring_cq_advance(&ring_, count);
  }

  void answer(Job& job, std::int64_t result) {
    const Transfer::Next next = job.transfer.take(result);
    if (next == Transfer::Next::again) return start(job);
    const std::unique_ptr<Job> ended(&job);
    {
      const std::lock_guard lock(mutex_);
      --in_flight_;
    }
    room_.notify_one();
    next == Transfer::Next::finished ? job.promise.finish() : job.promise.fail(job.transfer.error());
  }

  void register_memory(std::span<std::byte> memory) {
    for (const Piece& piece : pieces_of(memory)) {
      const int index = memory_.free();
      const int result = tables_ && index >= 0 ? register_piece(index, piece) : -ENOSPC;
      if (result < 0 && log_ != nullptr) {
        log_->write_once(
            Level::info, "registered memory",
            fmt::format("io_uring works without registered memory, for more CPU time: {} for {} (ulimit -l)",
                        std::generic_category().message(-result), human_bytes(memory.size())));
      }
      if (result < 0) return;
    }
  }

  int register_piece(int index, const Piece& piece) {
    const iovec memory{piece.data, piece.bytes};
    const __u64 no_tag = 0;
    const int result = io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(index), &memory, &no_tag, 1);
    if (result >= 0) memory_.set(index, piece);
    return result;
  }

  bool register_file(int index, int descriptor) {
    return tables_ && io_uring_register_files_update(&ring_, static_cast<unsigned>(index), &descriptor, 1) >= 0;
  }

  const std::size_t depth_;
  Log* const log_;
  const int wake_ = ::eventfd(0, EFD_CLOEXEC);

  std::mutex mutex_;  // of the next six
  std::condition_variable room_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::vector<std::packaged_task<void()>> calls_;
  std::size_t in_flight_ = 0;
  bool closing_ = false;
  bool may_sleep_ = true;

  io_uring ring_{};  // the thread's own, like all that follows
  bool tables_ = false;
  std::uint64_t wakes_ = 0;
  Table<const File*> files_;
  Table<Piece> memory_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<IoQueue> uring_queue(const IoOptions& options) {
  return std::make_unique<UringQueue>(checked(options));
}

}  // namespace ballast::offload
