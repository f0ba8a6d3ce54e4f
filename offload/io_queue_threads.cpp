#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/runtime/system_resources.h"
#include "offload/io_queue.h"

namespace ballast::offload {
namespace {

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

}  // namespace ballast::offload
