#include "zero/comm/thread_communicator.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <limits>
#include <numeric>
#include <set>

#include "kernels/runtime/cores.h"
#include "zero/comm/collectives.h"
#include "zero/comm/parts.h"
#include "zero/comm/two_level.h"

namespace ballast {

namespace {

std::vector<std::size_t> all_below(std::size_t size) {
  std::vector<std::size_t> ranks(size);
  std::iota(ranks.begin(), ranks.end(), std::size_t{0});
  return ranks;
}

}  // namespace

void ThreadJob::join(std::size_t rank) {
  const std::lock_guard lock(mutex_);
  left_.erase(rank);
}

void ThreadJob::leave(std::size_t rank, const LeaveReason& leave_reason) {
  {
    const std::lock_guard lock(mutex_);
    left_.emplace(rank, leave_reason.words);
  }
  if (leave_reason.has_failed) error_.set(fmt::format("rank {} left: {}", rank, leave_reason.words), {rank});
}

std::optional<std::string> ThreadJob::leave_reason(std::size_t rank) {
  const std::lock_guard lock(mutex_);
  const auto found = left_.find(rank);
  return found == left_.end() ? std::nullopt : std::optional(found->second);
}

void ThreadJob::set_wait(std::size_t rank, const void* group, std::size_t awaited) {
  const std::lock_guard lock(mutex_);
  waits_.insert_or_assign({rank, group}, awaited);
}

void ThreadJob::end_wait(std::size_t rank, const void* group) {
  const std::lock_guard lock(mutex_);
  waits_.erase({rank, group});
}

std::size_t ThreadJob::last_awaited(std::size_t rank, std::size_t awaited) {
  const std::lock_guard lock(mutex_);
  std::set<std::size_t> chain{rank};
  while (chain.insert(awaited).second) {
    const auto wait = waits_.lower_bound({awaited, nullptr});
    const bool waits = wait != waits_.end() && wait->first.first == awaited;
    if (waits && !chain.contains(wait->second)) awaited = wait->second;
  }
  return awaited;
}

ThreadGroup::ThreadGroup(std::size_t size, std::chrono::milliseconds timeout, std::size_t ranks_per_host)
    : members_(all_below(size)),
      published_(size),
      timeout_(timeout),
      ranks_per_host_(ranks_per_host),
      job_(std::make_shared<ThreadJob>()),
      arrived_(size) {}

ThreadGroup::ThreadGroup(std::vector<std::size_t> members, const ThreadGroup& whole)
    : members_(std::move(members)),
      published_(members_.size()),
      timeout_(whole.timeout_),
      ranks_per_host_(whole.ranks_per_host_),
      job_(whole.job_),
      arrived_(members_.size()) {}

std::string ThreadGroup::name_of(std::size_t rank) const { return fmt::format("rank {}", members_[rank]); }

std::vector<std::string> ThreadGroup::hosts() const {
  std::vector<std::string> names;
  std::ranges::transform(members_, std::back_inserter(names),
                         [&](std::size_t rank) { return std::to_string(rank / ranks_per_host_); });
  return names;
}

std::size_t ThreadGroup::ranks_with(std::size_t rank) const {
  if (ranks_per_host_ == 1) return size();
  const std::vector<std::string> names = hosts();
  return static_cast<std::size_t>(std::ranges::count(names, names[rank]));
}

bool ThreadGroup::is_with(std::size_t rank, std::size_t other) const {
  return ranks_per_host_ == 1 || members_[rank] / ranks_per_host_ == members_[other] / ranks_per_host_;
}

std::unique_ptr<ThreadGroup> ThreadGroup::part(std::span<const std::size_t> ranks) const {
  std::vector<std::size_t> members;
  for (const std::size_t rank : ranks) {
    members.push_back(members_[rank]);
  }
  return std::unique_ptr<ThreadGroup>(new ThreadGroup(std::move(members), *this));
}

std::size_t ThreadGroup::arrive(std::size_t rank) {
  const std::size_t generation = generation_;
  arrived_[rank] = true;
  if (++waiting_ == size()) {
    waiting_ = 0;
    arrived_.assign(size(), false);
    ++generation_;
    changed_.notify_all();
  }
  return generation;
}

std::size_t ThreadGroup::missing() const {
  return static_cast<std::size_t>(std::ranges::find(arrived_, false) - arrived_.begin());
}

void ThreadGroup::fail_if_missing_rank_left() const {
  for (std::size_t rank = 0; rank < size(); ++rank) {
    const auto words = arrived_[rank] ? std::nullopt : job_->leave_reason(members_[rank]);
    if (!words) continue;
    job_->error().set(fmt::format("rank {} left: {}", members_[rank], *words), {members_[rank]});
    job_->error().check();
  }
}

void ThreadGroup::publish(std::size_t rank, const SentChunk& chunk) {
  const Deadline deadline(job_->error(), timeout_);
  std::unique_lock lock(mutex_);
  job_->error().check();
  published_[rank] = chunk;
  const std::size_t generation = arrive(rank);
  const auto all_arrived = [&] { return generation_ != generation; };
  bool has_waited = false;
  deadline.wait(
      [&](auto pause) {
        if (!all_arrived()) fail_if_missing_rank_left();
        // Most waits are short, and make no other rank late.
        if (has_waited && !all_arrived()) job_->set_wait(members_[rank], this, members_[missing()]);
        const bool is_done = changed_.wait_for(lock, pause, all_arrived);
        if (is_done && has_waited) job_->end_wait(members_[rank], this);
        has_waited = true;
        return is_done;
      },
      [&] { deadline.fail_late(fmt::format("rank {}", job_->last_awaited(members_[rank], members_[missing()]))); });
}

void ThreadGroup::withdraw(std::size_t rank) noexcept {
  std::unique_lock lock(mutex_);
  const std::size_t generation = arrive(rank);
  changed_.wait(lock, [&] { return generation_ != generation; });
}

namespace {

// A chunk that is published while this object lives. On a GPU it waits for the stream before it publishes, and again
// after reading, so that peers read complete data and this rank does not withdraw too early.
class Published {
 public:
  Published(ThreadGroup& group, std::size_t rank, const SentChunk& chunk, std::optional<StreamHandle> stream)
      : group_(group), rank_(rank), stream_(group.size() > 1 ? stream : std::nullopt) {
    if (stream_) device::synchronize(*stream_);
    group_.publish(rank, chunk);
  }
  void finished_reading() const {
    if (stream_) device::synchronize(*stream_);
  }
  ~Published() { group_.withdraw(rank_); }
  Published(const Published&) = delete;
  Published& operator=(const Published&) = delete;

  const SentChunk& by(std::size_t peer) const { return group_.published_by(peer); }

 private:
  ThreadGroup& group_;
  std::size_t rank_;
  std::optional<StreamHandle> stream_;
};

// A rank's membership of a group, which lasts as long as one of its communicators.
class Membership {
 public:
  Membership(const ThreadGroup& group, std::size_t rank)
      : job_(group.job()), rank_(rank), exceptions_(std::uncaught_exceptions()) {
    job_->join(rank);
  }
  ~Membership() {
    const bool is_thrown = std::uncaught_exceptions() > exceptions_;
    job_->leave(rank_, is_thrown ? LeaveReason{.words = "ended by an exception"} : LeaveReason{});
  }
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  void leave(const LeaveReason& leave_reason) const { job_->leave(rank_, leave_reason); }

 private:
  std::shared_ptr<ThreadJob> job_;
  std::size_t rank_;
  int exceptions_;  // in flight at construction
};

// Reads directly from the senders' memory, so a chunk may have any size.
class ThreadTransport : public Transport {
 public:
  ThreadTransport(ThreadGroup& group, std::size_t rank)
      : group_(&group), rank_(rank), membership_(std::make_shared<Membership>(group, rank)) {}
  explicit ThreadTransport(std::shared_ptr<ThreadGroup> group, std::size_t rank = 0) : ThreadTransport(*group, rank) {
    owned_ = std::move(group);
  }
  ThreadTransport(std::shared_ptr<ThreadGroup> group, std::size_t rank, std::shared_ptr<Membership> membership,
                  std::optional<StreamHandle> stream)
      : owned_(std::move(group)),
        group_(owned_.get()),
        rank_(rank),
        membership_(std::move(membership)),
        stream_(stream) {}

  std::size_t rank() const override { return rank_; }
  std::size_t size() const override { return group_->size(); }
  std::size_t ranks_per_host() const override { return ranks_per_host_; }
  std::size_t ranks_here() const override { return group_->ranks_with(rank_); }
  bool is_here(std::size_t peer) const override { return group_->is_with(rank_, peer); }
  std::size_t max_chunk_bytes(ChunkMemory, std::span<const std::byte>) const override {
    return std::numeric_limits<std::size_t>::max();
  }
  void abort(std::string_view reason) override { group_->abort(fmt::format("{}: {}", group_->name_of(rank_), reason)); }
  void leave(const LeaveReason& leave_reason) override { membership_->leave(leave_reason); }
  void set_activity(std::string_view) override {}
  std::vector<std::size_t> failed_ranks() const override { return group_->job()->error().ranks(); }

  void exchange(const SentChunk& chunk, const Receive& receive) override {
    const Published published(*group_, rank_, chunk, stream_);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      const SentChunk& theirs = published.by(peer);
      require_same(chunk.call, theirs.call, group_->name_of(peer));
      if (chunk.sends(peer)) receive(peer, theirs.piece(rank_), 0);
    }
    published.finished_reading();
  }

  void exchange_together(const SentChunk& chunk, const ReceiveTogether& receive) override {
    chunk.make(0, chunk.bytes);
    const Published published(*group_, rank_, chunk, stream_);
    std::vector<const std::byte*> by_rank;
    for (std::size_t peer = 0; peer < size(); ++peer) {
      const SentChunk& theirs = published.by(peer);
      require_same(chunk.call, theirs.call, group_->name_of(peer));
      by_rank.push_back(theirs.piece(rank_).data());
    }
    receive(by_rank, chunk.bytes, 0);
    published.finished_reading();
  }

  void exchange_parts(const Parts& parts) override {
    const auto list = std::as_bytes(parts.sent);
    const Published published(*group_, rank_, {.call = parts.call, .data = list.data(), .bytes = list.size()}, stream_);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      const SentChunk& theirs = published.by(peer);
      require_same(parts.call, theirs.call, group_->name_of(peer));
      if (peer == rank_) continue;
      const std::span sent(reinterpret_cast<const SentPart*>(theirs.data), theirs.bytes / sizeof(SentPart));
      each_pair(parts, sent, {peer, rank_, group_->rank_in_job(peer)}, [&](const ConstView& from, const View& to) {
        if (stream_) return device::copy(to.data(), from.data(), to.bytes(), *stream_);
        std::memcpy(to.data(), from.data(), to.bytes());
      });
    }
    published.finished_reading();
  }

  // Kernels copy faster than one thread, but on a GPU a copy is no kernel at all.
  bool all_gather(const SentChunk& mine, std::span<std::byte> all) override {
    if (!stream_) return false;
    const Published published(*group_, rank_, mine, stream_);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      const SentChunk& theirs = published.by(peer);
      require_same(mine.call, theirs.call, group_->name_of(peer));
      std::byte* const to = all.data() + peer * mine.bytes;
      if (theirs.data != to && mine.bytes > 0) device::copy(to, theirs.data, mine.bytes, *stream_);
    }
    published.finished_reading();
    return true;
  }

  // The first rank makes the group and publishes its address to the others.
  std::unique_ptr<Transport> split(std::span<const std::size_t> ranks, const std::optional<GpuStream>& on) override {
    std::shared_ptr<ThreadGroup> part;
    if (ranks.front() == rank_) part = group_->part(ranks);
    const auto bytes = std::as_bytes(std::span(&part, 1));
    exchange({.call = {.kind = Collective::split}, .data = bytes.data(), .bytes = bytes.size()},
             [&](std::size_t peer, std::span<const std::byte> theirs, std::size_t) {
               if (peer == ranks.front() && peer != rank_) {
                 part = *reinterpret_cast<const std::shared_ptr<ThreadGroup>*>(theirs.data());
               }
             });
    const auto place = std::ranges::find(ranks, rank_) - ranks.begin();
    return std::make_unique<ThreadTransport>(std::move(part), static_cast<std::size_t>(place), membership_,
                                             on ? std::optional(on->stream) : stream_);
  }

 private:
  std::shared_ptr<ThreadGroup> owned_;
  ThreadGroup* group_;
  std::size_t ranks_per_host_ = ballast::ranks_per_host(group_->hosts());
  std::size_t rank_;
  std::shared_ptr<Membership> membership_;
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

std::unique_ptr<Communicator> lone_communicator(kernels::Backend& backend, std::shared_ptr<void> owned) {
  return make_collectives(std::make_unique<ThreadTransport>(std::make_shared<ThreadGroup>(1)), backend,
                          std::move(owned));
}

std::unique_ptr<Communicator> single_rank() {
  std::shared_ptr<kernels::Backend> backend = kernels::cpu_backend();
  return lone_communicator(*backend, backend);
}

std::vector<std::unique_ptr<Communicator>> thread_ranks(std::size_t size, std::size_t ranks_per_host) {
  require(size > 0 && ranks_per_host > 0, Code::bad_argument,
          [] { return Problem{.what = "cannot connect 0 threads", .needed = "at least one rank, on one host"}; });
  const auto group = std::make_shared<ThreadGroup>(size, default_timeout, ranks_per_host);
  const auto threads = static_cast<int>(std::max<std::size_t>(1, usable_cores() / size));
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (std::size_t rank = 0; rank < size; ++rank) {
    std::shared_ptr<kernels::Backend> backend = kernels::cpu_backend({.threads = threads});
    ranks.push_back(make_collectives(std::make_unique<ThreadTransport>(group, rank), *backend, backend));
  }
  return ranks;
}

}  // namespace ballast
