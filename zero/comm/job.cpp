#include "zero/comm/job.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <exception>
#include <limits>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

namespace ballast {
namespace {

const std::string key_of_hub = "ballast/hub";

const std::string key_of_links = "ballast/secret of links";
constexpr std::string_view no_secret = "-";  // the environment has one, which the store need not know

// How a rank finds the hub of its job.
struct Meeting {
  Endpoint hub{};
  std::string secret{};
};

void publish(KeyValueStore& store, const Meeting& meeting) {
  const std::string_view secret = meeting.secret.empty() ? no_secret : meeting.secret;
  store.set(key_of_hub, fmt::format("{} {} {}", meeting.hub.port, secret, meeting.hub.host));
}

Meeting find_in(KeyValueStore& store) {
  const std::string words = store.get(key_of_hub);
  std::istringstream stream(words);
  std::string port;
  Meeting meeting;
  stream >> port >> meeting.secret >> meeting.hub.host;
  const std::size_t number = number_from(port).value_or(0);
  require(stream && number > 0 && number <= std::numeric_limits<std::uint16_t>::max(), Code::no_meeting, [&] {
    return Problem{
        .what = fmt::format("cannot find rank 0: {} is not its address in the store", key_of_hub),
        .remedy = "Use the same version of Ballast on all ranks, and a store that no other program writes to."};
  });
  meeting.hub.port = static_cast<std::uint16_t>(number);
  if (meeting.secret == no_secret) meeting.secret.clear();
  return meeting;
}

// With a store, the address is the caller's, or loopback: no other address is known to be reachable by all ranks.
Endpoint address_of_hub(const JobOptions& options) {
  if (options.store == nullptr) return options.launch.hub;
  const std::string& host = options.launch.hub.host;
  return {host.empty() ? "127.0.0.1" : host, 0};
}

// Rank 0 listens where all ranks reach it: at all addresses of its name. If the name leads to loopback on its own machine, and
// there may be other hosts, it listens at all of the machine's addresses: other hosts may resolve the name to any of them.
std::vector<Descriptor> listen(const JobOptions& options, Meeting& meeting) {
  const bool may_have_other_hosts = options.has_other_hosts || options.store != nullptr;
  if (may_have_other_hosts && is_own_name(meeting.hub.host)) {
    std::vector<Descriptor> listeners = listen_everywhere(meeting.hub.port);
    meeting.hub.port = local_endpoint(listeners.front()).port;
    return listeners;
  }
  std::vector<Descriptor> listeners = listen_at_all(meeting.hub, options.timeout);
  meeting.hub = local_endpoint(listeners.front());
  return listeners;
}

}  // namespace

Job::Job(const JobOptions& options)
    : launch_(options.launch),
      timeout_(options.timeout),
      ranks_per_host_(options.ranks_per_host),
      exceptions_(std::uncaught_exceptions()) {
  Meeting meeting{.hub = address_of_hub(options)};
  const bool store_tells = options.store != nullptr && options.secret.empty();
  if (launch_.rank == 0) {
    std::vector<Descriptor> listeners = listen(options, meeting);
    if (store_tells) meeting.secret = random_secret();
    if (options.store != nullptr) publish(*options.store, meeting);
    secret_ = Secret(store_tells ? meeting.secret : options.secret);
    hub_ = std::make_unique<Hub>(std::move(listeners), HubOptions{launch_.job, launch_.size, secret_, options.timeout});
  } else {
    if (options.store != nullptr) meeting = find_in(*options.store);
    secret_ = Secret(store_tells ? meeting.secret : options.secret);
  }
  is_open_ = secret_.is_known_to_all() && !is_loopback(meeting.hub.host);
  const Member self = this_process(launch_.rank, launch_.size, ranks_per_host_);
  control_.emplace(ControlOptions{meeting.hub, launch_.job, secret_, self, options.timeout}, error_);
  if (secret_.is_known_to_all() && launch_.rank == 0) control_->set(key_of_links, random_secret());
}

Secret Job::secret_of_links() { return secret_.is_known_to_all() ? Secret(control_->get(key_of_links)) : secret_; }

Job::~Job() {
  if (std::uncaught_exceptions() > exceptions_ && !error_.is_set()) {
    fail("ended by an exception");
  }
}

std::string Job::host(const Member& member) const {
  return ranks_per_host_ == 0 ? member.machine : std::to_string(member.rank / ranks_per_host_);
}

void Job::leave(const LeaveReason& leave_reason) {
  const std::lock_guard lock(leaving_);
  control_->leave(leave_reason);
  if (hub_) Hub::detach(std::move(hub_));
}

void Job::fail(std::string_view reason, const std::vector<std::size_t>& ranks) {
  control_->fail(fmt::format("{}: {}", text(control_->members()[launch_.rank]), reason), ranks);
}

}  // namespace ballast
