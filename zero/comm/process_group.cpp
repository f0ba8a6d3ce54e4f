#include "zero/comm/process_transport.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "kernels/runtime/system_files.h"
#include "kernels/runtime/system_resources.h"
#include "zero/comm/admission.h"
#include "zero/comm/deadline.h"
#include "zero/comm/socket.h"

namespace ballast {
namespace {

constexpr auto time_before_redial = std::chrono::milliseconds(20);

// Each rank calls the ranks below it, and admits those above it. All handshakes go on at the same time.
class Links {
 public:
  explicit Links(ProcessGroup& group)
      : group_(group),
        secret_(group.job().secret_of_links()),
        name_("links of group " + group.name()),
        own_host_(group.job().local_endpoint().host),
        listeners_(listen()),
        admission_(listeners_, {.name = name_, .secret = secret_, .expected = group.size()}),
        sockets_(group.size()) {}

  std::vector<Descriptor> connect() {
    addresses_ = group_.exchange_strings("links", text_of({own_host_, local_endpoint(listeners_.front()).port}));
    const Deadline deadline(group_.job().error(), group_.job().timeout());
    deadline.wait([&](auto pause) { return are_complete_within(pause); }, [&] { group_.fail_late(missing()); });
    // No rank sends more before all have read the last message of each handshake: a socket has nothing else to read.
    group_.exchange_strings("linked", "");
    return std::move(sockets_);
  }

 private:
  struct Call {
    std::unique_ptr<Connection> connection;
    Handshake handshake{};
    bool has_answered = false;
  };

  static std::string text_of(const Endpoint& endpoint) { return fmt::format("{} {}", endpoint.port, endpoint.host); }

  static Endpoint endpoint_from(const std::string& text) {
    const std::size_t space = text.find(' ');
    const auto port = whole_number<std::size_t>(text.substr(0, space));
    if (space == std::string::npos || !port || *port > std::numeric_limits<std::uint16_t>::max()) fail_malformed();
    return {text.substr(space + 1), static_cast<std::uint16_t>(*port)};
  }

  // Ranks of rank 0's machine may reach it over loopback. They do not know how other machines reach them.
  std::vector<Descriptor> listen() {
    if (is_loopback(own_host_) && !group_.is_on_one_machine()) return listen_everywhere(0);
    std::vector<Descriptor> listeners;
    listeners.push_back(listen_at({own_host_, 0}));
    return listeners;
  }

  // Another machine calls those at the address at which it has called rank 0.
  Endpoint address_of(std::size_t peer) const {
    Endpoint address = endpoint_from(addresses_[peer]);
    if (is_loopback(address.host) && !group_.is_on_one_machine()) address.host = group_.job().hub_endpoint().host;
    return address;
  }

  // Calls those that have not been called, and those whose call has ended. If nothing answers in time, the next call of this
  // function tries again.
  void call_ranks_below() {
    for (std::size_t peer = 0; peer < group_.rank(); ++peer) {
      if (sockets_[peer] || calls_.contains(peer)) continue;
      Attempt attempt = try_connect(address_of(peer), group_.job().timeout());
      if (attempt.is_silent) return;
      if (!attempt.socket) fail_call(peer, attempt.failure);
      calls_[peer].connection = std::make_unique<Connection>(std::move(attempt.socket), max_hello_bytes);
    }
  }

  bool are_complete_within(std::chrono::nanoseconds pause) {
    call_ranks_below();
    std::vector<pollfd> waiting{{admission_.events(), POLLIN, 0}};
    for (const auto& [peer, call] : calls_) {
      waiting.push_back({call.connection->socket().get(), POLLIN, 0});
    }
    ::poll(waiting.data(), waiting.size(), static_cast<int>(pause / std::chrono::milliseconds(1)));
    for (Arrival& arrival : admission_.serve()) {
      admit(std::move(arrival));
    }
    if (const auto error = admission_.shortage()) fail_limit("cannot accept a connection of another rank", *error);
    for (auto call = calls_.begin(); call != calls_.end();) {
      const bool is_over = answer(call->first, call->second);
      call = is_over ? calls_.erase(call) : std::next(call);
    }
    return is_complete();
  }

  bool is_complete() {
    const std::size_t first = missing();
    if (first == group_.size()) return true;
    if (first != awaited_) wait_.emplace(group_.job(), std::vector{group_.rank_in_job(first)});
    awaited_ = first;
    return false;
  }

  void admit(Arrival arrival) {
    const auto peer = whole_number<std::size_t>(arrival.hello.value);
    const bool is_expected = peer && *peer > group_.rank() && *peer < group_.size() && !sockets_[*peer];
    if (!is_expected) return admission_.see_off(std::move(arrival.connection));
    arrival.connection->post(arrival.handshake.welcome({}, secret_));
    sockets_[*peer] = std::move(*arrival.connection).release();
  }

  // Returns true if the call is over: the other end has proved that it is the rank, or has hung up. It hangs up on the oldest
  // caller when too many processes call it.
  bool answer(std::size_t peer, Call& call) {
    const bool is_open = call.connection->receive(std::chrono::milliseconds(0));
    const std::optional<Message> message = call.connection->next();
    if (!message) {
      if (!is_open) std::this_thread::sleep_for(time_before_redial);
      return !is_open;
    }
    if (message->kind == Message::Kind::challenge && !std::exchange(call.has_answered, true)) {
      const Message hello{.kind = Message::Kind::hello, .key = name_, .value = std::to_string(group_.rank())};
      call.connection->post(call.handshake.answer(*message, hello, secret_));
      return false;
    }
    if (message->kind == Message::Kind::refused) fail_call(peer, message->value);
    if (message->kind != Message::Kind::welcome || !call.handshake.proves(*message, secret_)) {
      fail_call(peer, "the process at its address does not know the secret of the job");
    }
    sockets_[peer] = std::move(*call.connection).release();
    return true;
  }

  // The first rank without a connection; the group's size if there is none.
  std::size_t missing() const {
    std::size_t peer = 0;
    while (peer < group_.size() && (peer == group_.rank() || sockets_[peer])) {
      ++peer;
    }
    return peer;
  }

  [[noreturn]] void fail_call(std::size_t peer, const std::string& why) {
    group_.wait_for_reason(peer);
    fail(Code::peer_failed,
         {.what = fmt::format("cannot connect to {}: {}", group_.member(peer), why),
          .where = "at " + text(address_of(peer)),
          .remedy = "Ranks call each other at the addresses at which they and rank 0 reach each other. Let "
                    "MASTER_ADDR name an address of the network that joins all hosts, and let firewalls pass it."});
  }

  ProcessGroup& group_;
  Secret secret_;
  std::string name_;
  std::string own_host_;  // the address from which this rank reaches rank 0
  std::vector<Descriptor> listeners_;
  Admission admission_;
  std::vector<std::string> addresses_;    // one for each rank
  std::map<std::size_t, Call> calls_;     // one for each rank whose end has yet to prove itself
  std::vector<Descriptor> sockets_;       // one for each rank
  std::optional<std::size_t> awaited_{};  // the first rank without a connection, and the wait for it
  std::optional<Job::Wait> wait_{};
};

}  // namespace

ProcessGroup::ProcessGroup(std::shared_ptr<Job> job, std::size_t rank)
    : job_(std::move(job)), members_(job_->members()), rank_(rank) {}

ProcessGroup ProcessGroup::part(std::span<const std::size_t> ranks) {
  ProcessGroup group = *this;
  group.name_ = fmt::format("{}.{}.{}", name_, parts_++, ranks.front());
  group.members_.clear();
  for (const std::size_t rank : ranks) {
    group.members_.push_back(members_[rank]);
  }
  group.rank_ = static_cast<std::size_t>(std::ranges::find(ranks, rank_) - ranks.begin());
  group.parts_ = 0;
  return group;
}

bool ProcessGroup::is_on_one_machine() const {
  return std::ranges::all_of(members_, [&](const Member& each) { return each.machine == members_[rank_].machine; });
}

void ProcessGroup::fail_late_of_others() const {
  std::vector<std::size_t> others;
  for (std::size_t rank = 0; rank < size(); ++rank) {
    if (rank != rank_) others.push_back(members_[rank].rank);
  }
  job_->fail_late(others);
}

std::vector<std::string> ProcessGroup::hosts() const {
  std::vector<std::string> names;
  std::ranges::transform(members_, std::back_inserter(names), [&](const Member& each) { return job_->host(each); });
  return names;
}

std::vector<std::string> ProcessGroup::exchange_strings(const std::string& subject, const std::string& mine) {
  std::vector<std::size_t> ranks;
  std::ranges::transform(members_, std::back_inserter(ranks), &Member::rank);
  return job_->share(fmt::format("{}/{}", name_, subject), {rank_, size(), mine}, ranks);
}

std::vector<Descriptor> connect_links(ProcessGroup& group) { return Links(group).connect(); }

}  // namespace ballast
