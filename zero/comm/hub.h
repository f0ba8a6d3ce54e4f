// The hub of a job: the rendezvous that decides, and the thread of rank 0 to which every process has a connection.
#pragma once

#include <ballast/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/runtime/system_resources.h"
#include "zero/comm/admission.h"
#include "zero/comm/deadline.h"

namespace ballast {

// The decisions of the hub: which ranks are connected, the values that they share, the first failure. Pure: a connection is a number,
// and messages go to a function. Used by one thread.
class Rendezvous {
 public:
  using Send = std::function<void(std::size_t connection, const Message& message)>;

  Rendezvous(std::string job, std::size_t size, Send send)
      : job_(std::move(job)), size_(size), send_(std::move(send)) {}

  // Throws B3303 for a message that no rank sends.
  void take(std::size_t connection, const Message& message) {
    if (!members_.contains(connection)) {
      if (message.kind == Message::Kind::hello) hello(connection, message);
      return;
    }
    switch (message.kind) {
      case Message::Kind::share: return share(connection, message);
      case Message::Kind::late: return late(connection, message);
      case Message::Kind::waits: return static_cast<void>(note_wait(connection, message));
      case Message::Kind::failed: return fail(message.value, ranks_of_job(message.key));
      case Message::Kind::goodbye: return leave(connection, message);
      default: fail_malformed();
    }
  }

  bool is_member(std::size_t connection) const { return members_.contains(connection); }

  void ended(std::size_t connection) {  // a connection is lost; a member that has not left has died
    const auto found = members_.find(connection);
    if (found == members_.end() || !left_.emplace(connection, "").second) return;
    // The hub is on the machine of rank 0, which is not known until rank 0 has connected.
    const Member& member = found->second;
    const Member* const hub = find(0);
    fail(died(member, hub == nullptr ? member.machine : hub->machine), {member.rank});
  }

  bool has_left(std::size_t rank) const {
    const auto found = connections_.find(rank);
    return found != connections_.end() && left_.contains(found->second);
  }

  // Names the ranks that have not connected, and the processes that were `refused` before they said who they are.
  void fail_without_missing(const std::string& after, std::vector<std::string> refused = {}) {
    std::vector<std::size_t> missing;
    for (std::size_t rank = 0; rank < size_; ++rank) {
      if (find(rank) == nullptr) missing.push_back(rank);
    }
    if (missing.empty()) return;
    refused.insert(refused.begin(), refused_.begin(), refused_.end());
    fail(fmt::format("rank {} did not connect within {}{}", fmt::join(missing, ", "), after,
                     refused.empty() ? "" : fmt::format("; refused: {}", fmt::join(refused, "; "))),
         missing);
  }

  bool has_late_ranks() const { return !timed_out_.empty(); }

  // Names a rank that others wait for and that has left, or else the late ranks that wait for no other rank.
  void fail_with_late_ranks(const std::string& after) {
    if (first_error_) return;
    const std::set<std::size_t> late = ends_of_waits();
    for (const auto& [connection, words] : left_) {
      const Member& gone = members_.at(connection);
      if (late.contains(gone.rank)) return fail(left(gone, words), {gone.rank});
    }
    const std::vector<std::size_t> ranks = late.empty() ? circle_of_waits() : std::vector(late.begin(), late.end());
    std::vector<std::string> names;
    std::ranges::transform(ranks, std::back_inserter(names), [&](std::size_t rank) { return text(*find(rank)); });
    if (late.empty()) {
      return fail(
          fmt::format("ranks wait for each other, because they make different calls: {}; none arrived within {}",
                      fmt::join(names, ", "), after),
          ranks);
    }
    fail(fmt::format("{} did not arrive within {}", fmt::join(names, ", "), after), ranks);
  }

  // Tells all members, later ones included; only the first reason counts. `ranks` as in FirstError.
  void fail(const std::string& reason, const std::vector<std::size_t>& ranks = {}) {
    if (first_error_) return;
    first_error_ = Message{.kind = Message::Kind::failed, .key = to_words(ranks), .value = reason};
    send_to_all(*first_error_);
  }

  bool complete() const { return members_.size() == size_; }
  bool all_left() const { return complete() && left_.size() == members_.size(); }
  bool failed() const { return first_error_.has_value(); }

  // Whether the first error names the member: it may have stopped, and never leave.
  bool is_named(std::size_t connection) const {
    const std::vector<std::size_t> named = failed() ? ranks_from(first_error_->key) : std::vector<std::size_t>{};
    const auto member = members_.find(connection);
    return member != members_.end() && std::ranges::find(named, member->second.rank) != named.end();
  }

 private:
  // Ranks would get other bits, or wait for each other, if they ordered sums by other hosts.
  static std::string text_of_other_hosts(const Member& there, const Member& member) {
    const auto counted = [](const Member& each) {
      return fmt::format("rank {} has {}", each.rank,
                         each.ranks_per_host == 0 ? "none" : std::to_string(each.ranks_per_host));
    };
    return fmt::format("{}, and {}: set BALLAST_RANKS_PER_HOST to the same value on all ranks", counted(there),
                       counted(member));
  }

  static constexpr std::size_t most_named = 8;  // refused processes that an error names

  void hello(std::size_t connection, const Message& message) {
    const Member member = member_from(message.value);
    if (message.key == job_ && has_left(member.rank)) return send_(connection, {.kind = Message::Kind::later});
    if (const auto reason = refusal(message, member)) {
      if (refused_.size() < most_named) refused_.push_back(fmt::format("{}: {}", text(member), *reason));
      send_(connection, {.kind = Message::Kind::refused, .value = *reason});
      return;
    }
    members_.emplace(connection, member);
    connections_.emplace(member.rank, connection);
    if (first_error_) send_(connection, *first_error_);
    if (!complete()) return;
    std::string lines = to_line(*find(0));
    for (std::size_t rank = 1; rank < size_; ++rank) {
      lines += "\n" + to_line(*find(rank), *find(rank - 1));
    }
    send_to_all({.kind = Message::Kind::welcome, .value = lines});
  }

  void leave(std::size_t connection, const Message& goodbye) {
    if (!left_.emplace(connection, goodbye.value).second) return;
    const Member& member = members_.at(connection);
    if (goodbye.key == key_of_failure) return fail(left(member, goodbye.value), {member.rank});
    send_to_all({.kind = Message::Kind::left, .key = std::to_string(member.rank), .value = goodbye.value});
  }

  std::optional<std::string> refusal(const Message& hello, const Member& member) const {
    if (hello.key != job_) return fmt::format("job \"{}\" uses this address, not job \"{}\"", job_, hello.key);
    if (member.size != size_) {
      return fmt::format("rank 0 has a world size of {}, but rank {} one of {}", size_, member.rank, member.size);
    }
    if (member.rank >= size_) return fmt::format("there is no rank {} in a world of {}", member.rank, size_);
    if (!members_.empty() && members_.begin()->second.ranks_per_host != member.ranks_per_host) {
      return text_of_other_hosts(members_.begin()->second, member);
    }
    const Member* const same = find(member.rank);
    if (same == nullptr) return std::nullopt;
    return fmt::format("{} has this rank already: two processes have the same rank, or two jobs the same port",
                       text(*same));
  }

  // One answer for each rank: if each asked for each other's value, questions would grow with the square of the ranks.
  void share(std::size_t connection, const Message& message) {
    const auto mine = share_from(message.value);
    if (!mine || mine->size > size_) fail_malformed();
    Shared& shared = shared_[message.key];
    if (!shared.by_rank.emplace(mine->rank, mine->value).second) return;
    shared.connections.push_back(connection);
    if (shared.by_rank.size() < mine->size) return;
    std::vector<std::string> values;
    for (auto& [rank, value] : shared.by_rank) {
      values.push_back(std::move(value));
    }
    const Message all{.kind = Message::Kind::shared, .key = message.key, .value = join(values)};
    for (const std::size_t each : shared.connections) {
      send_(each, all);
    }
    shared_.erase(message.key);
  }

  // A rank that waits for a late one may have begun later, and will not report in time by itself.
  void late(std::size_t connection, const Message& message) {
    if (!note_wait(connection, message)) return;
    const bool is_first = timed_out_.empty();
    timed_out_.insert(members_.at(connection).rank);
    if (is_first) send_to_all({.kind = Message::Kind::waits});
  }

  // Returns false if the rank waits for none.
  bool note_wait(std::size_t connection, const Message& message) {
    if (!complete()) fail_malformed();
    const std::vector<std::size_t> ranks = awaited_by(message);
    if (!ranks.empty()) waited_for_[members_.at(connection).rank].insert(ranks.begin(), ranks.end());
    return !ranks.empty();
  }

  // A message with a key names the ranks of a group in order.
  std::vector<std::size_t> awaited_by(const Message& message) const {
    std::vector<std::size_t> ranks = ranks_of_job(message.value);
    if (ranks.empty() || to_words(ranks) != message.value) fail_malformed();
    if (message.key.empty()) return ranks;
    const auto shared = shared_.find(message.key);
    if (shared == shared_.end()) return {};  // all have shared it meanwhile
    std::vector<std::size_t> missing;
    for (std::size_t place = 0; place < ranks.size(); ++place) {
      if (!shared->second.by_rank.contains(place)) missing.push_back(ranks[place]);
    }
    return missing;
  }

  // A rank that waits is itself late for the ranks behind it. The late ranks are those at the ends of such chains. Chains begin
  // at ranks that have waited until the timeout: waits of other ranks may have nothing to do with it.
  std::set<std::size_t> ends_of_waits() const {
    std::set<std::size_t> seen = timed_out_;
    std::vector<std::size_t> open(seen.begin(), seen.end());
    std::set<std::size_t> ends;
    while (!open.empty()) {
      const std::size_t rank = open.back();
      open.pop_back();
      const auto waits = waited_for_.find(rank);
      if (waits == waited_for_.end() || has_left(rank)) {
        ends.insert(rank);
        continue;
      }
      std::ranges::copy_if(waits->second, std::back_inserter(open),
                           [&](std::size_t other) { return seen.insert(other).second; });
    }
    return ends;
  }

  // Called when ranks all wait for others: follows a chain until it meets itself. Returns the ranks that wait for each
  // other.
  std::vector<std::size_t> circle_of_waits() const {
    std::vector<std::size_t> chain;
    std::size_t rank = *timed_out_.begin();
    while (std::ranges::find(chain, rank) == chain.end()) {
      chain.push_back(rank);
      rank = *waited_for_.at(rank).begin();
    }
    return {std::ranges::find(chain, rank), chain.end()};
  }

  std::vector<std::size_t> ranks_of_job(const std::string& words) const {
    std::vector<std::size_t> ranks = ranks_from(words);
    if (std::ranges::any_of(ranks, [&](std::size_t rank) { return rank >= size_; })) fail_malformed();
    return ranks;
  }

  const Member* find(std::size_t rank) const {  // null: it has not connected
    const auto found = connections_.find(rank);
    return found == connections_.end() ? nullptr : &members_.at(found->second);
  }

  void send_to_all(const Message& message) {
    for (const auto& [connection, member] : members_) {
      if (!left_.contains(connection)) send_(connection, message);
    }
  }

  // The values that ranks of a group have shared so far.
  struct Shared {
    std::map<std::size_t, std::string> by_rank{};
    std::vector<std::size_t> connections{};
  };

  std::string job_;
  std::size_t size_;
  Send send_;
  std::map<std::size_t, Member> members_;           // one for each connection
  std::map<std::size_t, std::size_t> connections_;  // one for each rank
  std::map<std::size_t, std::string> left_;         // the reason, for each connection
  std::vector<std::string> refused_;
  std::map<std::string, Shared> shared_;  // kept by key, until all ranks of the group have their answer
  std::map<std::size_t, std::set<std::size_t>> waited_for_;  // the key is the waiting rank
  std::set<std::size_t> timed_out_;                          // the waiting ranks that have waited for too long
  std::optional<Message> first_error_;
};

struct HubOptions {
  std::string job{};
  std::size_t size = 1;
  Secret secret{};
  // Limits the wait for all ranks to connect, and at the end for the others to leave.
  std::chrono::milliseconds timeout{};
};

// The rendezvous of a job: a thread of rank 0 to which every process, rank 0 included, has a connection. admission.h keeps other
// processes out. The thread waits for no process, and no message ends it.
class Hub {
  using Clock = std::chrono::steady_clock;

 public:
  Hub(std::vector<Descriptor> listeners, const HubOptions& options)
      : listeners_(std::move(listeners)),
        parents_(kept_from_children(listeners_)),
        options_(options),
        secret_of_links_(options.secret.is_known_to_all() ? random_secret() : ""),
        rendezvous_(options.job, options.size,
                    [this](std::size_t connection, const Message& message) { send(connection, message); }),
        admission_(listeners_, {.name = options.job, .secret = options.secret, .expected = options.size}),
        end_(Clock::now() + options.timeout),
        closing_(require_descriptor(::eventfd(0, EFD_CLOEXEC), "cannot make an eventfd for the hub of a job")),
        thread_(start_thread("the hub of a job", [this] {
          run();
          const std::unique_ptr<Hub> self = std::move(self_);
        })) {}

  // Waits until all ranks have left. After a failure it waits for two seconds at most, and for a rank that is named as the cause
  // only until its system has the reason.
  ~Hub() {
    if (!thread_.joinable()) return;
    begin_shutdown();
    thread_.join();
  }

  // Ends without waiting for the others: the thread owns the hub from then on. Returns when the goodbye of rank 0,
  // which has been sent, is passed on, so that the process may end.
  static void detach(std::unique_ptr<Hub> hub) {
    Hub& detached = *hub;
    detached.goodbye_seen_.get_future().wait_for(error_delivery_time);
    detached.thread_.detach();
    detached.self_ = std::move(hub);
    detached.begin_shutdown();
  }

 private:
  static constexpr auto error_delivery_time = std::chrono::seconds(2);
  static constexpr auto late_report_time = std::chrono::seconds(1);
  static constexpr int poll_interval_ms = 100;

  static std::list<NotInChildren> kept_from_children(const std::vector<Descriptor>& listeners) {
    std::list<NotInChildren> kept;
    for (const Descriptor& listener : listeners) {
      kept.emplace_back(listener.get());
    }
    return kept;
  }

  void run() {
    while (!is_over()) {
      wait();
      check_deadlines();
      end_stuck_connections();
      if (!has_seen_goodbye_ && rendezvous_.has_left(0)) {
        has_seen_goodbye_ = true;
        goodbye_seen_.set_value();
      }
    }
  }

  // The owner's last access: afterwards the thread may destroy the hub.
  void begin_shutdown() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(closing_.get(), &one, sizeof one);
  }

  bool is_over() {
    if (!leaving_) return false;
    const bool failed_for_long = rendezvous_.failed() && Clock::now() >= end_ - options_.timeout + error_delivery_time;
    const auto need_not_leave = [&](const auto& each) {
      return rendezvous_.is_named(each.first) && each.second.connection->has_arrived();
    };
    const bool have_all_left =
        rendezvous_.failed() ? std::ranges::all_of(connections_, need_not_leave) : rendezvous_.all_left();
    const bool is_late =
        self_ == nullptr && Clock::now() >= end_;  // a detached hub has no owner that waits for its end
    return have_all_left || failed_for_long || is_late;
  }

  void check_deadlines() {
    const Clock::time_point now = Clock::now();
    if (!leaving_ && !rendezvous_.complete() && now >= end_) {
      rendezvous_.fail_without_missing(seconds(options_.timeout), admission_.refused());
    }
    if (!rendezvous_.has_late_ranks()) return;
    if (!verdict_at_) verdict_at_ = now + late_report_time;
    if (now >= *verdict_at_) rendezvous_.fail_with_late_ranks(seconds(options_.timeout));
  }

  // Waits for any event, and handles it.
  void wait() {
    std::vector<pollfd> waiting{{admission_.events(), POLLIN, 0}, {leaving_ ? -1 : closing_.get(), POLLIN, 0}};
    std::vector<std::size_t> numbers;
    for (const auto& [number, rank] : connections_) {
      const int unsent = rank.connection->has_unsent() ? POLLOUT : 0;
      waiting.push_back({rank.connection->socket().get(), static_cast<short>(POLLIN | unsent), 0});
      numbers.push_back(number);
    }
    ::poll(waiting.data(), waiting.size(), poll_interval_ms);
    admit();
    if (waiting[1].revents != 0) {
      leaving_ = true;
      std::uint64_t written = 0;  // what came before it is over
      [[maybe_unused]] const ssize_t read = ::read(closing_.get(), &written, sizeof written);
      if (!rendezvous_.complete()) rendezvous_.fail("rank 0 ended before all ranks had connected");
      end_ = Clock::now() + options_.timeout;
    }
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const int events = waiting[i + 2].revents;
      if ((events & POLLOUT) != 0) connections_.at(numbers[i]).connection->flush();
      if ((events & ~POLLOUT) != 0) read(numbers[i]);
    }
  }

  void admit() {
    for (Arrival& arrival : admission_.serve()) {
      const std::size_t number = next_++;
      arrival.connection->limit_silence();
      const Arrival& rank = connections_.emplace(number, std::move(arrival)).first->second;
      try {
        rendezvous_.take(number, rank.hello);
      } catch (const Error&) {
        // It knows the secret, and says something that no rank says.
      }
      if (rendezvous_.is_member(number)) continue;
      admission_.see_off(std::move(connections_.at(number).connection));
      connections_.erase(number);
    }
    if (const auto error = admission_.shortage()) refuse_connection(*error);
  }

  void refuse_connection(int error) {
    const std::string reason =
        fmt::format("rank 0 cannot accept more than {} connections of {} ranks: {}; {}: raise it where rank 0 runs",
                    connections_.size(), options_.size, std::generic_category().message(error), limits_behind(error));
    if (!rendezvous_.complete()) rendezvous_.fail(reason);
    admission_.turn_away(reason);
  }

  void read(std::size_t number) {
    Connection& connection = *connections_.at(number).connection;
    try {
      const bool open = connection.receive(std::chrono::milliseconds(0));
      while (const auto message = connection.next()) {
        rendezvous_.take(number, *message);
      }
      if (open) return;
    } catch (const std::exception&) {
      // The message is none that ranks send, or no memory is left for it. The connection ends, and with it the job.
    }
    rendezvous_.ended(number);
    connections_.erase(number);
  }

  void send(std::size_t number, const Message& message) {
    const auto to = connections_.find(number);
    if (to == connections_.end()) return;
    const bool is_welcome = message.kind == Message::Kind::welcome;
    to->second.connection->post(
        is_welcome ? to->second.handshake.welcome(secret_of_links_ + "\n" + message.value, options_.secret) : message);
  }

  void end_stuck_connections() {
    for (auto each = connections_.begin(); each != connections_.end();) {
      const bool is_stuck = each->second.connection->is_stuck();
      if (is_stuck) rendezvous_.ended(each->first);
      each = is_stuck ? connections_.erase(each) : std::next(each);
    }
  }

  std::vector<Descriptor> listeners_;
  std::list<NotInChildren> parents_{};  // the listeners
  HubOptions options_;
  std::string secret_of_links_;  // empty if the job has one
  Rendezvous rendezvous_;
  Admission admission_;
  std::map<std::size_t, Arrival> connections_;
  std::size_t next_ = 0;
  Clock::time_point end_;                          // the end of the time to connect; later, of the time to leave
  std::optional<Clock::time_point> verdict_at_{};  // when all waiting ranks have had time to report
  bool leaving_ = false;
  Descriptor closing_;               // an eventfd: the owner has asked the thread to end
  std::promise<void> goodbye_seen_;  // set when the goodbye of rank 0 arrives
  bool has_seen_goodbye_ = false;
  std::unique_ptr<Hub> self_;  // set by detach()
  std::thread thread_;
};

}  // namespace ballast
