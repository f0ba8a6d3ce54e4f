#include "zero/comm/hub.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "kernels/runtime/error.h"
#include "zero/comm/patience.h"

namespace ballast {
namespace {

constexpr auto time_to_hear_of_an_error = std::chrono::seconds(2);
constexpr auto time_to_say_who_is_late = std::chrono::seconds(1);
constexpr int look_again_ms = 100;

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
      closing_(::eventfd(0, EFD_CLOEXEC)),
      thread_([this] {
        run();
        const std::unique_ptr<Hub> self = std::move(self_);
      }) {}

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
  return meeting_.everybody_left() || failed_for_long || Clock::now() >= end_;
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
    end_ = Clock::now() + options_.timeout;
  }
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (waiting[i + 2].revents != 0) read(numbers[i]);
  }
}

void Hub::accept() {
  Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (socket) connections_.emplace(next_++, std::make_unique<Connection>(std::move(socket)));
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
