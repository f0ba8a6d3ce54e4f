#include "zero/comm/hub.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/system_limits.h"
#include "zero/comm/patience.h"

namespace ballast {
namespace {

constexpr auto time_to_hear_of_an_error = std::chrono::seconds(2);
constexpr auto time_to_say_who_is_late = std::chrono::seconds(1);
constexpr auto time_to_say_hello = std::chrono::seconds(1);
constexpr int look_again_ms = 100;

Descriptor make_event() {
  return require_descriptor(::eventfd(0, EFD_CLOEXEC), "cannot make an eventfd for the hub of a job");
}

}  // namespace

Hub::Hub(Descriptor listener, const HubOptions& options)
    : listener_(std::move(listener)),
      options_(options),
      meeting_(options.job, options.size,
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
  begin_to_leave();
  thread_.join();
}

void Hub::let_go(std::unique_ptr<Hub> hub) {
  Hub& going_on = *hub;
  going_on.heard_.get_future().wait_for(time_to_hear_of_an_error);
  going_on.thread_.detach();
  going_on.self_ = std::move(hub);
  going_on.begin_to_leave();
}

// The last that the owner does with it.
void Hub::begin_to_leave() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(closing_.get(), &one, sizeof one);
}

void Hub::run() {
  while (!is_over()) {
    wait();
    look_at_the_clock();
    if (!was_heard_ && meeting_.has_left(0)) {
      was_heard_ = true;
      heard_.set_value();
    }
  }
}

void Hub::look_at_the_clock() {
  const Clock::time_point now = Clock::now();
  if (!leaving_ && !meeting_.complete() && now >= end_) meeting_.time_is_up(seconds(options_.timeout));
  if (!meeting_.some_are_late()) return;
  if (!judgement_) judgement_ = now + time_to_say_who_is_late;
  if (now >= *judgement_) meeting_.judge(seconds(options_.timeout));
}

bool Hub::is_over() {
  if (!leaving_) return false;
  const bool failed_for_long = meeting_.failed() && Clock::now() >= end_ - options_.timeout + time_to_hear_of_an_error;
  const bool all_were_told = !meeting_.failed() || connections_.empty();
  return (meeting_.everybody_left() && all_were_told) || failed_for_long || Clock::now() >= end_;
}

// For anything to happen, and takes it.
void Hub::wait() {
  std::vector<pollfd> waiting{{listener_.get(), POLLIN, 0}, {leaving_ ? -1 : closing_.get(), POLLIN, 0}};
  std::vector<std::size_t> numbers;
  for (const auto& [number, connection] : connections_) {
    waiting.push_back({connection->socket().get(), POLLIN, 0});
    numbers.push_back(number);
  }
  ::poll(waiting.data(), waiting.size(), look_again_ms);
  if (waiting[0].revents != 0) accept();
  if (waiting[1].revents != 0) {
    leaving_ = true;
    if (!meeting_.complete()) meeting_.fail("rank 0 ended before all ranks had connected");
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
    turn_away(errno);
  }
}

// It would wait in vain until its time is up, and so would all the others.
void Hub::turn_away(int error) {
  const std::string reason =
      fmt::format("rank 0 cannot accept more than {} connections of {} ranks: {}; {}: raise it where rank 0 runs",
                  connections_.size(), options_.size, std::generic_category().message(error), limits_behind(error));
  if (!meeting_.complete()) meeting_.fail(reason);
  spare_ = Descriptor();
  if (Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)); socket) {
    Connection connection(std::move(socket));
    connection.receive(time_to_say_hello);  // what is not read when a connection is closed takes the answer with it
    connection.send({.kind = Message::Kind::refused, .value = reason});
  }
  spare_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
}

void Hub::read(std::size_t number) {
  Connection& connection = *connections_.at(number);
  try {
    const bool open = connection.receive(std::chrono::milliseconds(0));
    while (const auto message = connection.next()) {
      meeting_.take(number, *message);
    }
    if (open) return;
  } catch (const Error&) {
    // Not one of ours.
  }
  meeting_.ended(number);
  connections_.erase(number);
}

}  // namespace ballast
