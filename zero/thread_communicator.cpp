#include "zero/thread_communicator.h"

#include <cstring>

#include "kernels/runtime/error.h"

namespace ballast {

void ThreadGroup::meet() {
  std::unique_lock lock(mutex_);
  const std::size_t meeting = meeting_;
  if (++waiting_ == size()) {
    waiting_ = 0;
    ++meeting_;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return aborted_ || meeting_ != meeting; });
  require(meeting_ != meeting, Code::peer_failed, [] { return Problem{.what = "another rank gave up"}; });
}

void ThreadGroup::show(std::size_t rank, ConstView memory) {
  shown_[rank] = memory;
  meet();
}

void ThreadGroup::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  changed_.notify_all();
}

namespace {

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(ThreadGroup& group, std::size_t rank, kernels::Backend& backend)
      : group_(group), rank_(rank), backend_(backend) {}

  std::size_t rank() const override { return rank_; }
  std::size_t size() const override { return group_.size(); }
  void barrier() override { group_.meet(); }
  void abort() override { group_.abort(); }

  void all_gather(ConstView mine, View all) override {
    group_.show(rank_, mine);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      std::byte* const place = all.data() + peer * mine.bytes();
      if (place != group_.shown_by(peer).data()) {
        std::memcpy(place, group_.shown_by(peer).data(), mine.bytes());
      }
    }
    group_.meet();
  }

  void reduce_scatter(ConstView all, View into) override { add_parts(all, rank_ * into.count(), into); }
  void all_reduce(ConstView all, View into) override { add_parts(all, 0, into); }

  void all_reduce(std::span<std::int64_t> values) override {
    const std::vector<std::int64_t> mine(values.begin(), values.end());
    group_.show(rank_, ConstView(reinterpret_cast<const std::byte*>(mine.data()), mine.size() * 8, DType::u8));
    for (std::size_t peer = 0; peer < size(); ++peer) {
      const auto* theirs = reinterpret_cast<const std::int64_t*>(group_.shown_by(peer).data());
      for (std::size_t i = 0; peer != rank_ && i < values.size(); ++i) {
        values[i] += theirs[i];
      }
    }
    group_.meet();
  }

 private:
  void add_parts(ConstView all, std::size_t first, View into) {
    group_.show(rank_, all);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      backend_.accumulate(group_.shown_by(peer).part(first, into.count()), 1.0f, into);
    }
    group_.meet();
  }

  ThreadGroup& group_;
  std::size_t rank_;
  kernels::Backend& backend_;
};

}  // namespace

std::unique_ptr<Communicator> thread_communicator(ThreadGroup& group, std::size_t rank, kernels::Backend& backend) {
  return std::make_unique<ThreadCommunicator>(group, rank, backend);
}

}  // namespace ballast
