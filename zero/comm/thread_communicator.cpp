#include "zero/comm/thread_communicator.h"

#include <fmt/format.h>

#include <exception>
#include <limits>
#include <numeric>

#include "kernels/runtime/error.h"
#include "zero/comm/collectives.h"

namespace ballast {

namespace {

std::vector<std::size_t> all_below(std::size_t size) {
  std::vector<std::size_t> ranks(size);
  std::iota(ranks.begin(), ranks.end(), std::size_t{0});
  return ranks;
}

}  // namespace

void ThreadJob::come(std::size_t rank) {
  const std::lock_guard lock(mutex_);
  left_.erase(rank);
}

void ThreadJob::leave(std::size_t rank, const Farewell& farewell) {
  {
    const std::lock_guard lock(mutex_);
    left_.emplace(rank, farewell.words);
  }
  if (farewell.has_failed) error_.set(fmt::format("rank {} left: {}", rank, farewell.words));
}

std::optional<std::string> ThreadJob::last_words(std::size_t rank) {
  const std::lock_guard lock(mutex_);
  const auto found = left_.find(rank);
  return found == left_.end() ? std::nullopt : std::optional(found->second);
}

ThreadGroup::ThreadGroup(std::size_t size, std::chrono::milliseconds timeout)
    : ThreadGroup(all_below(size), timeout, std::make_shared<ThreadJob>()) {}

ThreadGroup::ThreadGroup(std::vector<std::size_t> members, std::chrono::milliseconds timeout,
                         std::shared_ptr<ThreadJob> job)
    : members_(std::move(members)),
      shown_(members_.size()),
      timeout_(timeout),
      job_(std::move(job)),
      here_(members_.size()) {}

std::unique_ptr<ThreadGroup> ThreadGroup::part(std::span<const std::size_t> ranks) const {
  std::vector<std::size_t> members;
  for (const std::size_t rank : ranks) {
    members.push_back(members_[rank]);
  }
  return std::unique_ptr<ThreadGroup>(new ThreadGroup(std::move(members), timeout_, job_));
}

std::size_t ThreadGroup::arrive(std::size_t rank) {
  const std::size_t meeting = meeting_;
  here_[rank] = true;
  if (++waiting_ == size()) {
    waiting_ = 0;
    here_.assign(size(), false);
    ++meeting_;
    changed_.notify_all();
  }
  return meeting;
}

std::string ThreadGroup::missing() const {
  const auto first = std::ranges::find(here_, false);
  return fmt::format("rank {}", first - here_.begin());
}

void ThreadGroup::fail_without_who_has_left() const {
  for (std::size_t rank = 0; rank < size(); ++rank) {
    const auto words = here_[rank] ? std::nullopt : job_->last_words(members_[rank]);
    if (!words) continue;
    job_->error().set(fmt::format("rank {} left: {}", members_[rank], *words));
    job_->error().check();
  }
}

void ThreadGroup::show(std::size_t rank, const Round& given) {
  const Patience patience(job_->error(), timeout_);
  std::unique_lock lock(mutex_);
  job_->error().check();
  shown_[rank] = given;
  const std::size_t meeting = arrive(rank);
  const auto have_come = [&] { return meeting_ != meeting; };
  patience.wait(
      [&](auto pause) {
        if (!have_come()) fail_without_who_has_left();
        return changed_.wait_for(lock, pause, have_come);
      },
      [&] { patience.blame(missing()); });
}

void ThreadGroup::hide(std::size_t rank) noexcept {
  std::unique_lock lock(mutex_);
  const std::size_t meeting = arrive(rank);
  changed_.wait(lock, [&] { return meeting_ != meeting; });
}

namespace {

// What is shown for as long as this object lives. Where the ranks' work is on a GPU, what is shown is there before others
// see it, and they have taken it before it goes.
class Shown {
 public:
  Shown(ThreadGroup& group, std::size_t rank, const Round& given, std::optional<StreamHandle> stream)
      : group_(group), rank_(rank), stream_(group.size() > 1 ? stream : std::nullopt) {
    if (stream_) device::synchronize(*stream_);
    group_.show(rank, given);
  }
  void taken() const {
    if (stream_) device::synchronize(*stream_);
  }
  ~Shown() { group_.hide(rank_); }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

  const Round& by(std::size_t peer) const { return group_.shown_by(peer); }

 private:
  ThreadGroup& group_;
  std::size_t rank_;
  std::optional<StreamHandle> stream_;
};

// A rank of a group, there as long as one of its communicators is.
class Presence {
 public:
  Presence(const ThreadGroup& group, std::size_t rank)
      : job_(group.job()), rank_(rank), exceptions_(std::uncaught_exceptions()) {
    job_->come(rank);
  }
  ~Presence() {
    const bool is_thrown = std::uncaught_exceptions() > exceptions_;
    job_->leave(rank_, is_thrown ? Farewell{.words = "ended by an exception"} : Farewell{});
  }
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

  void leave(const Farewell& farewell) const { job_->leave(rank_, farewell); }

 private:
  std::shared_ptr<ThreadJob> job_;
  std::size_t rank_;
  int exceptions_;  // under way when this was made
};

// Takes from where the givers have their memory, so a round may have any size.
class ThreadTransport : public Transport {
 public:
  ThreadTransport(ThreadGroup& group, std::size_t rank)
      : group_(&group), rank_(rank), presence_(std::make_shared<Presence>(group, rank)) {}
  explicit ThreadTransport(std::shared_ptr<ThreadGroup> alone) : ThreadTransport(*alone, 0) {
    owned_ = std::move(alone);
  }
  ThreadTransport(std::shared_ptr<ThreadGroup> group, std::size_t rank, std::shared_ptr<Presence> presence,
                  std::optional<StreamHandle> stream)
      : owned_(std::move(group)), group_(owned_.get()), rank_(rank), presence_(std::move(presence)), stream_(stream) {}

  std::size_t rank() const override { return rank_; }
  std::size_t size() const override { return group_->size(); }
  std::size_t round_bytes(Where, std::span<const std::byte>) const override {
    return std::numeric_limits<std::size_t>::max();
  }
  void abort(std::string_view reason) override { group_->abort(fmt::format("rank {}: {}", rank_, reason)); }
  void leave(const Farewell& farewell) override { presence_->leave(farewell); }
  void set_activity(std::string_view) override {}

  void round(const Round& given, const Take& take) override {
    const Shown shown(*group_, rank_, given, stream_);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      const Round& theirs = shown.by(peer);
      require_same(given.call, theirs.call, fmt::format("rank {}", peer));
      if (given.gives(peer)) take(peer, theirs.piece(rank_), 0);
    }
    shown.taken();
  }

  // The first of the ranks makes the group, and shows the others where.
  std::unique_ptr<Transport> split(std::span<const std::size_t> ranks, const std::optional<GpuPlace>& on) override {
    std::shared_ptr<ThreadGroup> part;
    if (ranks.front() == rank_) part = group_->part(ranks);
    const auto bytes = std::as_bytes(std::span(&part, 1));
    round({{.kind = Collective::split}, bytes.data(), bytes.size()},
          [&](std::size_t peer, std::span<const std::byte> theirs, std::size_t) {
            if (peer == ranks.front() && peer != rank_) {
              part = *reinterpret_cast<const std::shared_ptr<ThreadGroup>*>(theirs.data());
            }
          });
    const auto place = std::ranges::find(ranks, rank_) - ranks.begin();
    return std::make_unique<ThreadTransport>(std::move(part), static_cast<std::size_t>(place), presence_,
                                             on ? std::optional(on->stream) : stream_);
  }

 private:
  std::shared_ptr<ThreadGroup> owned_;
  ThreadGroup* group_;
  std::size_t rank_;
  std::shared_ptr<Presence> presence_;
  std::optional<StreamHandle> stream_;
};

}  // namespace

std::unique_ptr<Communicator> thread_communicator(ThreadGroup& group, std::size_t rank, kernels::Backend& backend) {
  require(rank < group.size(), Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot make a communicator for rank {}", rank),
                   .needed = fmt::format("a rank below {}", group.size())};
  });
  return make_collectives(std::make_unique<ThreadTransport>(group, rank), backend);
}

std::unique_ptr<Communicator> lone_communicator(kernels::Backend& backend) {
  return make_collectives(std::make_unique<ThreadTransport>(std::make_shared<ThreadGroup>(1)), backend);
}

}  // namespace ballast
