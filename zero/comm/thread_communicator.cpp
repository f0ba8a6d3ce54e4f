#include "zero/comm/thread_communicator.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

namespace ballast {

// Ranks are those of the whole group. Any thread may call.
class ThreadJob {
 public:
  FirstError& error() { return error_; }

  void join(std::size_t rank) {
    const std::lock_guard lock(mutex_);
    left_.erase(rank);
  }

  void leave(std::size_t rank, const LeaveReason& leave_reason) {
    {
      const std::lock_guard lock(mutex_);
      left_.emplace(rank, leave_reason.words);
    }
    if (leave_reason.has_failed) error_.set(fmt::format("rank {} left: {}", rank, leave_reason.words), {rank});
  }

  // Empty if it has not left.
  std::optional<std::string> leave_reason(std::size_t rank) {
    const std::lock_guard lock(mutex_);
    const auto found = left_.find(rank);
    return found == left_.end() ? std::nullopt : std::optional(found->second);
  }

  // A rank waits for another one in `group`, until end_wait().
  void set_wait(std::size_t rank, const void* group, std::size_t awaited) {
    const std::lock_guard lock(mutex_);
    waits_.insert_or_assign({rank, group}, awaited);
  }

  void end_wait(std::size_t rank, const void* group) {
    const std::lock_guard lock(mutex_);
    waits_.erase({rank, group});
  }

  // `rank` waits for `awaited`, which may wait for another one: returns the rank at the end of the chain.
  std::size_t last_awaited(std::size_t rank, std::size_t awaited) {
    const std::lock_guard lock(mutex_);
    std::set<std::size_t> chain{rank};
    while (chain.insert(awaited).second) {
      const auto wait = waits_.lower_bound({awaited, nullptr});
      const bool waits = wait != waits_.end() && wait->first.first == awaited;
      if (waits && !chain.contains(wait->second)) awaited = wait->second;
    }
    return awaited;
  }

 private:
  FirstError error_;
  std::mutex mutex_;
  std::map<std::size_t, std::string> left_;
  std::map<std::pair<std::size_t, const void*>, std::size_t> waits_;  // the key is the waiting rank and the group
};

ThreadGroup::ThreadGroup(std::size_t size, std::chrono::milliseconds timeout, std::size_t ranks_per_host)
    : members_(size),
      published_(size),
      timeout_(timeout),
      ranks_per_host_(ranks_per_host),
      job_(std::make_shared<ThreadJob>()),
      arrived_(size) {
  std::iota(members_.begin(), members_.end(), std::size_t{0});
}

void ThreadGroup::abort(std::string_view reason) { job_->error().set(std::string(reason)); }

std::string ThreadGroup::name_of(std::size_t rank) const { return fmt::format("rank {}", members_[rank]); }

std::vector<std::string> ThreadGroup::hosts() const {
  // Ranks on a host; with 1, hosts do not count.
  const std::size_t most = ranks_per_host_ == 1 ? SIZE_MAX : ranks_per_host_;
  std::vector<std::string> names;
  std::ranges::transform(members_, std::back_inserter(names),
                         [&](std::size_t rank) { return std::to_string(rank / most); });
  return names;
}

std::unique_ptr<ThreadGroup> ThreadGroup::part(std::span<const std::size_t> ranks) const {
  auto group = std::make_unique<ThreadGroup>(ranks.size(), timeout_, ranks_per_host_);
  std::ranges::transform(ranks, group->members_.begin(), [&](std::size_t rank) { return members_[rank]; });
  group->job_ = job_;
  return group;
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

void ThreadGroup::publish(std::size_t rank, const Sent& chunk) {
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
  Published(ThreadGroup& group, std::size_t rank, const Sent& chunk, std::optional<StreamHandle> stream)
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

  const Sent& by(std::size_t peer) const { return group_.published_by(peer); }

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
  int exceptions_;  // exceptions in flight at construction
};

// Reads directly from the senders' memory, so a chunk may have any size.
class ThreadTransport : public Transport {
 public:
  // A rank that has no membership begins one.
  ThreadTransport(ThreadGroup& group, std::size_t rank, std::shared_ptr<ThreadGroup> owned = {},
                  std::shared_ptr<Membership> membership = {}, std::optional<StreamHandle> stream = {})
      : Transport(rank, group.hosts()),
        owned_(std::move(owned)),
        group_(group),
        membership_(membership ? std::move(membership) : std::make_shared<Membership>(group, rank)),
        stream_(stream) {}

  std::size_t max_chunk_bytes(ChunkMemory, std::span<const std::byte>) const override {
    return std::numeric_limits<std::size_t>::max();
  }
  bool shares_memory() const override { return true; }
  void abort(std::string_view reason) override { group_.abort(fmt::format("{}: {}", group_.name_of(rank()), reason)); }
  void leave(const LeaveReason& leave_reason) override { membership_->leave(leave_reason); }
  void set_activity(std::string_view) override {}
  std::vector<std::size_t> failed_ranks() const override { return group_.job()->error().ranks(); }

  void exchange(const Sent& chunk, const Receive& receive) override {
    chunk.make(0, chunk.bytes());
    std::vector<const std::byte*> by_rank;
    read_published(chunk, [&](std::size_t, const Sent& theirs) {
      by_rank.push_back(theirs.piece(rank()).data());
      if (by_rank.size() == size()) receive(by_rank, chunk.bytes(), 0);
    });
  }

  void exchange_parts(const Parts& parts) override {
    read_published({.call = parts.call, .values = byte_view(parts.sent)}, [&](std::size_t peer, const Sent& theirs) {
      if (peer == rank()) return;
      const std::span sent(reinterpret_cast<const SentPart*>(theirs.data()), theirs.bytes() / sizeof(SentPart));
      const std::vector<ConstView> from = parts_of(sent, rank());
      const std::vector<View> to = parts_of(parts.received, peer);
      require_same_parts(sizes_of(to), sizes_of(from), group_.rank_in_job(peer));
      for (std::size_t i = 0; i < from.size(); ++i) {
        if (stream_) device::copy(to[i].data(), from[i].data(), to[i].bytes(), *stream_);
        if (!stream_) std::memcpy(to[i].data(), from[i].data(), to[i].bytes());
      }
    });
  }

  // Kernels copy faster than one thread, but on a GPU a copy is no kernel at all.
  bool all_gather(const Sent& mine, std::span<std::byte> all) override {
    if (!stream_) return false;
    read_published(mine, [&](std::size_t peer, const Sent& theirs) {
      std::byte* const to = all.data() + peer * mine.bytes();
      if (theirs.data() != to && mine.bytes() > 0) device::copy(to, theirs.data(), mine.bytes(), *stream_);
    });
    return true;
  }

  // The first rank makes the group and publishes its address to the others.
  std::unique_ptr<Transport> split(std::span<const std::size_t> ranks, const std::optional<GpuStream>& on) override {
    std::shared_ptr<ThreadGroup> part;
    if (ranks.front() == rank()) part = group_.part(ranks);
    exchange({.call = {.kind = Collective::split}, .values = byte_view(std::span(&part, 1))},
             [&](std::span<const std::byte* const> by_rank, std::size_t, std::size_t) {
               if (part == nullptr) {
                 part = *reinterpret_cast<const std::shared_ptr<ThreadGroup>*>(by_rank[ranks.front()]);
               }
             });
    const auto place = std::ranges::find(ranks, rank()) - ranks.begin();
    return std::make_unique<ThreadTransport>(*part, static_cast<std::size_t>(place), part, membership_,
                                             on ? std::optional(on->stream) : stream_);
  }

 private:
  // Publishes a chunk, and calls read(peer, chunk) for those of all ranks, in rank order.
  template <class Read>
  void read_published(const Sent& chunk, Read&& read) const {
    const Published published(group_, rank(), chunk, stream_);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      const Sent& theirs = published.by(peer);
      require_same(chunk.call, theirs.call, group_.name_of(peer));
      read(peer, theirs);
    }
    published.finished_reading();
  }

  std::shared_ptr<ThreadGroup> owned_;
  ThreadGroup& group_;
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
  const auto group = std::make_shared<ThreadGroup>(1);
  return make_collectives(std::make_unique<ThreadTransport>(*group, 0, group), backend, std::move(owned));
}

std::unique_ptr<Communicator> single_rank() {
  std::shared_ptr<kernels::Backend> backend = kernels::cpu_backend();
  return lone_communicator(*backend, backend);
}

std::vector<std::unique_ptr<Communicator>> thread_ranks(std::size_t size, std::size_t ranks_per_host) {
  require(size > 0 && ranks_per_host > 0, Code::bad_argument,
          [] { return Problem{.what = "cannot connect 0 threads", .needed = "at least one rank, on one host"}; });
  const auto group = std::make_shared<ThreadGroup>(size, default_timeout, ranks_per_host);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (std::size_t rank = 0; rank < size; ++rank) {
    std::shared_ptr<kernels::Backend> backend = kernels::cpu_backend();  // all share the process's threads
    ranks.push_back(make_collectives(std::make_unique<ThreadTransport>(*group, rank, group), *backend, backend));
  }
  return ranks;
}

}  // namespace ballast
