#include "zero/comm/job.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <exception>

namespace ballast {
namespace {

const std::string key_of_hub = "ballast/hub";

void publish_hub(KeyValueStore& store, const Endpoint& hub) {
  store.set(key_of_hub, fmt::format("{} {}", hub.port, hub.host));
}

Endpoint find_hub(KeyValueStore& store) {
  const std::string word = store.get(key_of_hub);
  const std::size_t space = word.find(' ');
  require(space != std::string::npos, Code::no_meeting, [&] {
    return Problem{.what = fmt::format("cannot find rank 0: {} is \"{}\" in the store", key_of_hub, word)};
  });
  return {word.substr(space + 1), static_cast<std::uint16_t>(std::stoi(word))};
}

// With a store, the address is the caller's, or loopback: no other address is known to be reachable by all ranks.
Endpoint address_of_hub(const JobOptions& options) {
  if (options.store == nullptr) return options.launch.hub;
  const std::string& host = options.launch.hub.host;
  return {host.empty() ? "127.0.0.1" : host, 0};
}

}  // namespace

Job::Job(const JobOptions& options)
    : launch_(options.launch),
      timeout_(options.timeout),
      ranks_per_host_(options.ranks_per_host),
      exceptions_(std::uncaught_exceptions()) {
  Endpoint hub = address_of_hub(options);
  if (launch_.rank == 0) {
    Descriptor listener = listen_at(hub);
    hub = local_endpoint(listener);
    hub_ = std::make_unique<Hub>(std::move(listener), HubOptions{launch_.job, launch_.size, options.timeout});
    if (options.store != nullptr) publish_hub(*options.store, hub);
  } else if (options.store != nullptr) {
    hub = find_hub(*options.store);
  }
  control_.emplace(ControlOptions{hub, launch_.job, this_process(launch_.rank, launch_.size), options.timeout}, error_);
}

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
