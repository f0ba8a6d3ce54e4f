#include "zero/thread_communicator.h"

#include <fmt/format.h>

#include <cstring>

#include "kernels/runtime/error.h"

namespace ballast {

std::size_t ThreadGroup::arrive() {
  const std::size_t meeting = meeting_;
  if (++waiting_ == size()) {
    waiting_ = 0;
    ++meeting_;
    changed_.notify_all();
  }
  return meeting;
}

void ThreadGroup::meet() {
  const auto require_met = [](bool met) {
    require(met, Code::peer_failed, [] { return Problem{.what = "another rank gave up"}; });
  };
  std::unique_lock lock(mutex_);
  require_met(!aborted_);
  const std::size_t meeting = arrive();
  changed_.wait(lock, [&] { return aborted_ || meeting_ != meeting; });
  require_met(meeting_ != meeting);
}

void ThreadGroup::show(std::size_t rank, ConstView memory) {
  shown_[rank] = memory;
  meet();
}

void ThreadGroup::hide() noexcept {
  std::unique_lock lock(mutex_);
  const std::size_t meeting = arrive();
  changed_.wait(lock, [&] { return meeting_ != meeting; });
}

void ThreadGroup::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  changed_.notify_all();
}

namespace {

// Memory that is shown for as long as this object lives.
class Shown {
 public:
  Shown(ThreadGroup& group, std::size_t rank, ConstView memory) : group_(group) { group_.show(rank, memory); }
  ~Shown() { group_.hide(); }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

  ConstView by(std::size_t peer) const { return group_.shown_by(peer); }

 private:
  ThreadGroup& group_;
};

void require_counts(std::string_view collective, std::size_t count, std::size_t needed) {
  require(count == needed, Code::wrong_size, [&] {
    return Problem{.what = fmt::format("the sizes of {} do not belong together", collective),
                   .needed = fmt::format("{} elements", needed),
                   .available = fmt::format("{} elements", count)};
  });
}

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(ThreadGroup& group, std::size_t rank, kernels::Backend& backend)
      : group_(group), rank_(rank), backend_(backend) {}

  std::size_t rank() const override { return rank_; }
  std::size_t size() const override { return group_.size(); }
  void barrier() override { group_.meet(); }
  void abort() override { group_.abort(); }

  void all_gather(ConstView mine, View all) override {
    require_counts("an all-gather", all.count(), size() * mine.count());
    const Shown shown(group_, rank_, mine);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      const ConstView theirs = shown.by(peer);
      require_counts("an all-gather", theirs.count(), mine.count());
      std::byte* const place = all.data() + peer * mine.bytes();
      if (place != theirs.data()) {
        std::memcpy(place, theirs.data(), mine.bytes());
      }
    }
  }

  void reduce_scatter(ConstView all, View into) override {
    require_counts("a reduce-scatter", all.count(), size() * into.count());
    add_parts(all, rank_ * into.count(), into);
  }

  void all_reduce(ConstView all, View into) override {
    require_counts("an all-reduce", all.count(), into.count());
    add_parts(all, 0, into);
  }

  void all_reduce(std::span<std::int64_t> values) override {
    const std::vector<std::int64_t> mine(values.begin(), values.end());
    const std::span bytes = std::as_bytes(std::span(mine));
    const Shown shown(group_, rank_, ConstView(bytes.data(), bytes.size(), DType::u8));
    for (std::size_t peer = 0; peer < size(); ++peer) {
      require_counts("an all-reduce", shown.by(peer).count(), bytes.size());
      const auto* theirs = reinterpret_cast<const std::int64_t*>(shown.by(peer).data());
      for (std::size_t i = 0; peer != rank_ && i < values.size(); ++i) {
        values[i] += theirs[i];
      }
    }
  }

 private:
  void add_parts(ConstView all, std::size_t first, View into) {
    const Shown shown(group_, rank_, all);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      backend_.accumulate(shown.by(peer).part(first, into.count()), 1.0f, into);
    }
  }

  ThreadGroup& group_;
  std::size_t rank_;
  kernels::Backend& backend_;
};

}  // namespace

std::unique_ptr<Communicator> thread_communicator(ThreadGroup& group, std::size_t rank, kernels::Backend& backend) {
  require(rank < group.size(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("rank {} was asked for", rank),
                   .needed = fmt::format("a rank below {}", group.size())};
  });
  return std::make_unique<ThreadCommunicator>(group, rank, backend);
}

}  // namespace ballast
