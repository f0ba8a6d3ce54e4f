#include "zero/comm/control.h"

#include <fmt/format.h>

#include <sstream>

#include "kernels/runtime/error.h"

namespace ballast {
namespace {

constexpr auto between_attempts = std::chrono::milliseconds(20);
constexpr auto time_of_verdict = std::chrono::seconds(3);  // rank 0, where the hub is, is itself late that says nothing
constexpr auto time_to_deliver = std::chrono::seconds(2);  // what the hub says of a late rank arrives after the timeout

std::vector<Member> members_from(const std::string& lines) {
  std::vector<Member> members;
  std::istringstream stream(lines);
  for (std::string line; std::getline(stream, line);) {
    members.push_back(member_from(line));
  }
  return members;
}

}  // namespace

Control::Control(const ControlOptions& options, FirstError& error) : options_(options), error_(error) {
  const auto end = Clock::now() + options.timeout;
  while (members_.empty()) {
    require(Clock::now() < end, Code::no_meeting, [&] {
      return Problem{
          .what = "rank 0 did not come", .where = place(), .available = "waited for " + seconds(options.timeout)};
    });
    Descriptor socket = try_connect(options.hub, options.timeout);
    if (socket) connection_ = std::make_unique<Connection>(std::move(socket));
    if (!connection_ || !meet()) std::this_thread::sleep_for(between_attempts);
  }
  thread_ = std::thread([this] { listen(); });
}

std::string Control::place() const { return fmt::format("rank {}, at {}", options_.self.rank, text(options_.hub)); }

// False where an earlier job of the same name is about to end.
bool Control::meet() {
  send({.kind = Message::Kind::hello, .key = options_.job, .value = to_line(options_.self)});
  const auto end = Clock::now() + options_.timeout + time_to_deliver;
  std::optional<Message> answer;
  while (!answer) {
    const bool open = connection_->receive(between_attempts);
    answer = connection_->next();
    if (!answer && !open) return false;
    require(answer || Clock::now() < end, Code::no_meeting,
            [&] { return Problem{.what = "who answers where rank 0 should be says nothing", .where = place()}; });
  }
  if (answer->kind == Message::Kind::later) return false;
  require(answer->kind == Message::Kind::welcome, Code::no_meeting,
          [&] { return Problem{.what = answer->value, .where = place()}; });
  members_ = members_from(answer->value);
  return true;
}

Control::~Control() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  send({.kind = Message::Kind::goodbye});
  connection_->shut_down();
  thread_.join();
}

// The thread's.
void Control::listen() {
  try {
    do {
      while (const auto message = connection_->next()) {  // the first may have come with the welcome
        take(*message);
      }
    } while (connection_->receive(std::chrono::milliseconds(-1)));
  } catch (const std::exception& error) {
    error_.set(error.what());
  }
  const std::lock_guard lock(mutex_);
  if (!leaving_) error_.set(text(members_.front()) + " died");
}

void Control::take(const Message& message) {
  if (message.kind == Message::Kind::failed) error_.set(message.value);
  if (message.kind == Message::Kind::set) {
    const std::lock_guard lock(mutex_);
    values_[message.key] = message.value;
    changed_.notify_all();
  }
}

bool Control::send(const Message& message) {
  const std::lock_guard lock(sending_);
  return connection_->send(message);
}

void Control::set(const std::string& key, const std::string& value) {
  send({.kind = Message::Kind::set, .key = key, .value = value});
}

std::string Control::get(const std::string& key) {
  send({.kind = Message::Kind::get, .key = key});
  std::unique_lock lock(mutex_);
  const Patience patience(error_, options_.timeout);
  patience.wait([&](auto pause) { return changed_.wait_for(lock, pause, [&] { return values_.contains(key); }); },
                [&] { patience.blame("the rank that sets " + key); });
  return values_[key];
}

void Control::give_up_on(std::size_t rank) {
  send({.kind = Message::Kind::late, .value = std::to_string(rank)});
  const Patience patience(error_, time_of_verdict);
  while (!error_.is_set() && !patience.is_over()) {
    std::this_thread::sleep_for(between_attempts);
  }
  error_.set(late(text(members_.front()), options_.timeout));
  ballast::fail(Code::peer_late, {.what = error_.reason()});
}

void Control::fail(const std::string& reason) {
  error_.set(reason);
  send({.kind = Message::Kind::failed, .value = reason});
}

}  // namespace ballast
