// The progress of requests, and the queue of threads that make blocking calls.
#include "offload/io_queue.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/runtime/system_resources.h"

namespace ballast::offload {

namespace {

constexpr int max_refusals = 100;  // refusals in a row

class ThreadQueue : public IoQueue {
 public:
  ThreadQueue(const IoOptions& options, IoCall call) : depth_(options.depth), call_(std::move(call)) {
    threads_.reserve(depth_);
    try {
      while (threads_.size() < depth_) {
        threads_.push_back(start_thread("the reads and writes of a drive", [this] { work(); }));
      }
    } catch (...) {
      end();
      throw;
    }
  }

  ~ThreadQueue() override { end(); }

  Completion submit(const IoRequest& request) override {
    Job job(request);
    Completion completion = job.promise.completion();
    std::unique_lock lock(mutex_);
    room_.wait(lock, [&] { return in_flight_ < depth_; });
    ++in_flight_;
    jobs_.push_back(std::move(job));
    changed_.notify_one();
    return completion;
  }

  void remember(std::span<std::byte>) override {}
  void forget(std::span<std::byte>) override {}
  void remember(const File&) override {}
  void forget(const File&) override {}
  std::string_view kind() const override { return "threads"; }

 private:
  struct Job {
    explicit Job(const IoRequest& request) : transfer(request) {}
    Transfer transfer;
    Promise promise{};
  };

  void end() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return closing_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      const std::exception_ptr error = move_all(job.transfer, call_);
      lock.lock();
      --in_flight_;
      room_.notify_one();
      error ? job.promise.fail(error) : job.promise.finish();
    }
  }

  const std::size_t depth_;
  const IoCall call_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable room_;
  std::deque<Job> jobs_;
  std::size_t in_flight_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::string_view name(IoKind kind) {
  constexpr std::string_view names[] = {"read", "write", "flush"};
  return names[static_cast<std::size_t>(kind)];
}

IoRequest Transfer::rest() const {
  IoRequest rest = request_;
  rest.offset += done_;
  rest.memory = rest.memory.subspan(done_);
  return rest;
}

Transfer::Next Transfer::take(std::int64_t answer) {
  if (answer == -EINTR) return Next::again;
  if (answer == -EAGAIN) return refuse(EAGAIN);
  if (answer < 0) return fail(static_cast<int>(-answer));
  if (request_.kind == IoKind::flush) return Next::finished;
  const auto moved = static_cast<std::size_t>(answer);
  if (done_ + moved == request_.memory.size()) return Next::finished;
  // Every answer is 0 after the end of a file, or if the drive is gone.
  if (moved == 0) return fail(ENODATA);
  // Direct I/O continues only at a whole block.
  const std::size_t kept = request_.file->direct() ? (done_ + moved) / block_bytes * block_bytes : done_ + moved;
  if (kept == done_) return refuse(ENODATA);
  done_ = kept;
  refusals_ = 0;
  return Next::again;
}

Transfer::Next Transfer::refuse(int error) { return ++refusals_ < max_refusals ? Next::again : fail(error); }

Transfer::Next Transfer::fail(int error) {
  error_ = error;
  return Next::failed;
}

std::exception_ptr Transfer::error() const {
  try {
    fail_file(name(request_.kind), request_.file->path(), error_, request_.offset + done_);
  } catch (...) {
    return std::current_exception();
  }
}

std::exception_ptr Transfer::lost_flush(const std::string& reason) const {
  return std::make_exception_ptr(
      FailureError(Code::file_call,
                   {.what = "cannot finish a flush: its answer is lost: " + reason,
                    .where = request_.file->path().string(),
                    .remedy = "Resume from the last committed state, and find out what refuses io_uring_enter."},
                   Site::here()));
}

std::int64_t system_call(const IoRequest& request) {
  const int descriptor = request.file->descriptor();
  const auto offset = static_cast<off_t>(request.offset);
  const auto answer = [&]() -> std::int64_t {
    switch (request.kind) {
      case IoKind::read: return ::pread(descriptor, request.memory.data(), request.memory.size(), offset);
      case IoKind::write: return ::pwrite(descriptor, request.memory.data(), request.memory.size(), offset);
      default: return ::fdatasync(descriptor);
    }
  }();
  return answer < 0 ? -errno : answer;
}

std::exception_ptr move_all(Transfer& transfer, const IoCall& call) {
  while (true) {
    if (transfer.refused()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    switch (transfer.take(call(transfer.rest()))) {
      case Transfer::Next::finished: return nullptr;
      case Transfer::Next::failed: return transfer.error();
      case Transfer::Next::again: break;
    }
  }
}

std::unique_ptr<IoQueue> thread_queue(const IoOptions& options, IoCall call) {
  return std::make_unique<ThreadQueue>(checked(options), std::move(call));
}

const IoOptions& checked(const IoOptions& options) {
  require(options.depth >= 1 && options.depth <= 4096, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot open a queue of {} requests", options.depth), .needed = "1 to 4096"};
  });
  return options;
}

std::unique_ptr<IoQueue> open_queue(const IoOptions& options) {
  try {
    return uring_queue(options);
  } catch (const ResourceError& reason) {
    if (options.log != nullptr) {
      options.log->write_once(
          Level::warning, "io_uring",
          fmt::format("no io_uring ({}); threads read and write instead, as fast but for more CPU time",
                      reason.problem().available));
    }
    return thread_queue(options);
  }
}

}  // namespace ballast::offload
