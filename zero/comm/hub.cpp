#include "zero/comm/hub.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

#include "kernels/runtime/system_limits.h"
#include "zero/comm/deadline.h"

namespace ballast {
namespace {

constexpr auto error_delivery_time = std::chrono::seconds(2);
constexpr auto late_report_time = std::chrono::seconds(1);
constexpr auto hello_time = std::chrono::seconds(1);
constexpr int poll_interval_ms = 100;

Descriptor make_event() {
  return require_descriptor(::eventfd(0, EFD_CLOEXEC), "cannot make an eventfd for the hub of a job");
}

}  // namespace

Hub::Hub(Descriptor listener, const HubOptions& options)
    : listener_(std::move(listener)),
      options_(options),
      rendezvous_(options.job, options.size,
                  [this](std::size_t connection, const Message& message) {
                    const auto to = connections_.find(connection);
                    if (to != connections_.end()) to->second->send(message);
                  }),
      end_(Clock::now() + options.timeout),
      closing_(make_event()),
      spare_(make_event()),
      thread_(start_thread("the hub of a job", [this] {
        run();
        const std::unique_ptr<Hub> self = std::move(self_);
      })) {}

Hub::~Hub() {
  if (!thread_.joinable()) return;
  begin_shutdown();
  thread_.join();
}

void Hub::detach(std::unique_ptr<Hub> hub) {
  Hub& detached = *hub;
  detached.goodbye_seen_.get_future().wait_for(error_delivery_time);
  detached.thread_.detach();
  detached.self_ = std::move(hub);
  detached.begin_shutdown();
}

// The owner's last access: afterwards the thread may destroy the hub.
void Hub::begin_shutdown() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(closing_.get(), &one, sizeof one);
}

void Hub::run() {
  while (!is_over()) {
    wait();
    check_deadlines();
    if (!has_seen_goodbye_ && rendezvous_.has_left(0)) {
      has_seen_goodbye_ = true;
      goodbye_seen_.set_value();
    }
  }
}

void Hub::check_deadlines() {
  const Clock::time_point now = Clock::now();
  if (!leaving_ && !rendezvous_.complete() && now >= end_) rendezvous_.fail_without_missing(seconds(options_.timeout));
  if (!rendezvous_.has_late_ranks()) return;
  if (!verdict_at_) verdict_at_ = now + late_report_time;
  if (now >= *verdict_at_) rendezvous_.fail_with_late_ranks(seconds(options_.timeout));
}

bool Hub::is_over() {
  if (!leaving_) return false;
  const bool failed_for_long = rendezvous_.failed() && Clock::now() >= end_ - options_.timeout + error_delivery_time;
  const bool all_were_told = !rendezvous_.failed() || connections_.empty();
  return (rendezvous_.all_left() && all_were_told) || failed_for_long || Clock::now() >= end_;
}

// Waits for any event, and handles it.
void Hub::wait() {
  std::vector<pollfd> waiting{{listener_.get(), POLLIN, 0}, {leaving_ ? -1 : closing_.get(), POLLIN, 0}};
  std::vector<std::size_t> numbers;
  for (const auto& [number, connection] : connections_) {
    waiting.push_back({connection->socket().get(), POLLIN, 0});
    numbers.push_back(number);
  }
  ::poll(waiting.data(), waiting.size(), poll_interval_ms);
  if (waiting[0].revents != 0) accept();
  if (waiting[1].revents != 0) {
    leaving_ = true;
    std::uint64_t written = 0;  // what came before it is over
    [[maybe_unused]] const ssize_t read = ::read(closing_.get(), &written, sizeof written);
    if (!rendezvous_.complete()) rendezvous_.fail("rank 0 ended before all ranks had connected");
    end_ = Clock::now() + options_.timeout;
  }
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (waiting[i + 2].revents != 0) read(numbers[i]);
  }
}

void Hub::accept() {
  Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (socket) {
    connections_.emplace(next_++, std::make_unique<Connection>(std::move(socket)));
  } else if (is_descriptor_limit(errno)) {
    refuse_connection(errno);
  }
}

// Without an answer the process, and all other ranks, would wait until the timeout.
void Hub::refuse_connection(int error) {
  const std::string reason =
      fmt::format("rank 0 cannot accept more than {} connections of {} ranks: {}; {}: raise it where rank 0 runs",
                  connections_.size(), options_.size, std::generic_category().message(error), limits_behind(error));
  if (!rendezvous_.complete()) rendezvous_.fail(reason);
  spare_ = Descriptor();
  if (Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)); socket) {
    Connection connection(std::move(socket));
    connection.receive(hello_time);  // unread bytes in a closed connection would discard the answer
    connection.send({.kind = Message::Kind::refused, .value = reason});
  }
  spare_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
}

void Hub::read(std::size_t number) {
  Connection& connection = *connections_.at(number);
  try {
    const bool open = connection.receive(std::chrono::milliseconds(0));
    while (const auto message = connection.next()) {
      rendezvous_.take(number, *message);
    }
    if (open) return;
  } catch (const Error&) {
    // The process is no rank of a Ballast job.
  }
  rendezvous_.ended(number);
  connections_.erase(number);
}

}  // namespace ballast
