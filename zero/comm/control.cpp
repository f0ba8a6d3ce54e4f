#include "zero/comm/control.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <sstream>
#include <utility>

#include "kernels/runtime/system_limits.h"
#include "zero/comm/socket_owner.h"

namespace ballast {
namespace {

constexpr auto retry_interval = std::chrono::milliseconds(20);
constexpr auto verdict_time = std::chrono::seconds(3);   // if the hub sends nothing by then, rank 0 is the late rank
constexpr auto delivery_time = std::chrono::seconds(2);  // the hub's verdict arrives after the timeout
constexpr auto reason_time = std::chrono::seconds(2);    // for the reason of a lost connection
constexpr auto answer_time = std::chrono::seconds(5);    // a hub that has not answered by then gives no reasons either
constexpr auto poll_interval = std::chrono::milliseconds(5);
// Ranks at work wait for each other all the time. A rank that began to wait only now was late itself.
constexpr auto time_of_short_wait = std::chrono::milliseconds(100);
constexpr std::size_t max_reason_bytes = 4096;  // bytes of a reason: an exception's text may be as long as a batch

std::vector<Member> members_from(const std::string& lines, std::size_t size) {
  std::vector<Member> members;
  std::istringstream stream(lines);
  for (std::string line; std::getline(stream, line);) {
    members.push_back(member_from(line));
    if (members.back().rank != members.size() - 1) fail_malformed();
  }
  if (members.size() != size) fail_malformed();
  return members;
}

// Cuts at a whole character of UTF-8.
std::string shortened(std::string words) {
  if (words.size() <= max_reason_bytes) return words;
  std::size_t end = max_reason_bytes;
  while ((static_cast<unsigned char>(words[end]) & 0xC0) == 0x80) {
    --end;
  }
  return words.substr(0, end) + "...";
}

}  // namespace

Control::Control(const ControlOptions& options, FirstError& error) : options_(options), error_(error) {
  const auto end = Clock::now() + options.timeout;
  std::string failure;
  GrowingPause pause;
  while (members_.empty()) {
    require(Clock::now() < end, Code::no_meeting, [&] {
      const std::string last = failure.empty() ? "" : "; the last attempt failed: " + failure;
      return Problem{.what = "cannot reach rank 0",
                     .where = described_hub(),
                     .available = "waited for " + seconds(options.timeout) + last};
    });
    Attempt attempt = try_connect(options.hub, std::chrono::ceil<std::chrono::milliseconds>(left_until(end)));
    failure = attempt.failure;
    if (attempt.socket) {
      connection_ = std::make_unique<Connection>(std::move(attempt.socket));
      connection_->limit_silence();
      if (join_job()) break;
    }
    pause.wait(end);
  }
  thread_ = start_thread("a rank's connection to its job", [this] { listen(); });
}

std::string Control::described_hub() const {
  return fmt::format("rank {}, at {}", options_.self.rank, text(options_.hub));
}

// Returns false if an earlier job of the same name has not ended yet, or if rank 0 ended the connection.
bool Control::join_job() {
  const auto end = Clock::now() + options_.timeout + delivery_time;
  CallersHandshake handshake;
  std::optional<Message> answer = answer_within(end);
  if (answer && answer->kind == Message::Kind::challenge) {
    const auto end_of_hub =
        options_.secret.is_known_to_all() ? other_end_of(connection_->socket()) : OtherEnd::accepted;
    if (end_of_hub == OtherEnd::gone) return false;
    require(end_of_hub == OtherEnd::accepted, Code::no_meeting, [&] {
      return Problem{.what = "cannot connect to rank 0: the process at its address belongs to another user",
                     .where = described_hub(),
                     .remedy = "Choose another MASTER_PORT, or set BALLAST_SECRET on all ranks."};
    });
    const Message hello{.kind = Message::Kind::hello, .key = options_.job, .value = to_line(options_.self)};
    send(handshake.answer(*answer, hello, options_.secret));
    answer = answer_within(end);
  }
  if (!answer || answer->kind == Message::Kind::later) return false;
  require(answer->kind == Message::Kind::welcome, Code::no_meeting,
          [&] { return Problem{.what = answer->value, .where = described_hub()}; });
  require_known(*answer, handshake);
  members_ = members_from(answer->value, options_.self.size);
  return true;
}

// Returns nothing if the connection ended without an answer.
std::optional<Message> Control::answer_within(Clock::time_point end) {
  while (true) {
    const bool open = connection_->receive(retry_interval);
    std::optional<Message> answer = connection_->next();
    if (answer || !open) return answer;
    require(Clock::now() < end, Code::no_meeting, [&] {
      return Problem{.what = "cannot connect to rank 0: the process at its address does not answer",
                     .where = described_hub()};
    });
  }
}

void Control::require_known(const Message& welcome, const CallersHandshake& handshake) const {
  require(handshake.proves(welcome, options_.secret), Code::no_meeting, [&] {
    return Problem{.what = "cannot connect to rank 0: the process at its address does not know the secret of the job",
                   .where = described_hub(),
                   .remedy = "Another process may listen there: choose another MASTER_PORT."};
  });
}

Control::~Control() {
  leave({});
  connection_->shut_down();
  thread_.join();
}

// Runs on the thread.
void Control::listen() {
  try {
    do {
      while (const auto message = connection_->next()) {  // the first may have arrived with the welcome
        take(*message);
      }
    } while (connection_->receive(std::chrono::milliseconds(-1)));
  } catch (const std::exception& error) {
    error_.set(error.what());
  }
  {
    const std::lock_guard lock(mutex_);
    if (leaving_) return;
    hub_is_gone_ = left_.contains(0);
    if (!hub_is_gone_) error_.set(died(members_.front(), options_.self.machine), {0});
  }
  changed_.notify_all();
}

void Control::take(const Message& message) {
  if (message.kind == Message::Kind::waits) report_waits();
  if (message.kind == Message::Kind::failed) error_.set(message.value, ranks_from(message.key));
  if (message.kind == Message::Kind::set) {
    const std::lock_guard lock(mutex_);
    values_[message.key] = message.value;
    changed_.notify_all();
  }
  if (message.kind == Message::Kind::left) {
    const auto rank = number_from(message.key);
    if (!rank || *rank >= members_.size()) fail_malformed();
    {
      const std::lock_guard lock(mutex_);
      left_.emplace(*rank, message.value);
    }
    error_.wake();
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
  return await_value(key, [&] { Deadline(error_, options_.timeout).fail_late("the rank that sets " + key); });
}

std::vector<std::string> Control::share(const std::string& key, const Share& mine,
                                        const std::vector<std::size_t>& ranks) {
  send({.kind = Message::Kind::share, .key = key, .value = to_line(mine)});
  const Wait wait(*this, ranks, key);
  std::vector<std::string> values = split(await_value(key, [&] { fail_late(ranks, key); }));
  if (values.size() != mine.size) fail_malformed();
  return values;
}

std::string Control::await_value(const std::string& key, const std::function<void()>& give_up) {
  std::unique_lock lock(mutex_);
  const Deadline deadline(error_, options_.timeout);
  const auto has_ended = [&] { return values_.contains(key) || hub_is_gone_; };
  deadline.wait([&](auto pause) { return changed_.wait_for(lock, pause, has_ended); },
                [&] {
                  lock.unlock();  // for the thread that listens
                  give_up();
                });
  if (values_.contains(key)) return values_[key];
  lock.unlock();
  fail_after_leave(0);
}

Control::Wait::Wait(Control& control, std::vector<std::size_t> ranks, std::string key)
    : control_(control), ranks_(std::move(ranks)), key_(std::move(key)) {
  const std::lock_guard lock(control_.mutex_);
  place_ = control_.waits_.insert(control_.waits_.end(), this);
}

Control::Wait::~Wait() {
  const std::lock_guard lock(control_.mutex_);
  control_.waits_.erase(place_);
}

void Control::report_waits() {
  std::vector<Message> reports;
  {
    const std::lock_guard lock(mutex_);
    for (const Wait* wait : waits_) {
      if (Clock::now() < wait->begin_ + time_of_short_wait) continue;
      reports.push_back({.kind = Message::Kind::waits, .key = wait->key_, .value = to_words(wait->ranks_)});
    }
  }
  for (const Message& report : reports) {
    send(report);
  }
}

void Control::fail_late(const std::vector<std::size_t>& ranks, const std::string& key) {
  send({.kind = Message::Kind::late, .key = key, .value = to_words(ranks)});
  const Deadline deadline(error_, verdict_time);
  while (!error_.is_set() && !deadline.is_over()) {
    std::this_thread::sleep_for(retry_interval);
  }
  error_.set(late(text(members_.front()), options_.timeout), {0});
  ballast::fail(Code::peer_late, {.what = error_.reason()});
}

void Control::fail(const std::string& reason, const std::vector<std::size_t>& ranks) {
  error_.set(reason, ranks);
  send({.kind = Message::Kind::failed, .key = to_words(ranks), .value = shortened(reason)});
}

void Control::leave(const LeaveReason& leave_reason) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(leaving_, true)) return;
  }
  send({.kind = Message::Kind::goodbye,
        .key = std::string(leave_reason.has_failed ? key_of_failure : ""),
        .value = shortened(leave_reason.words)});
  if (leave_reason.has_failed)
    error_.set(left(options_.self, leave_reason.words), {options_.self.rank});  // ends this rank's pending collectives
}

void Control::set_activity(std::string_view activity) {
  const std::lock_guard lock(mutex_);
  activity_ = activity;
}

bool Control::has_left(std::size_t rank) {
  const std::lock_guard lock(mutex_);
  return left_.contains(rank);
}

bool Control::hub_is_gone() {
  const std::lock_guard lock(mutex_);
  return hub_is_gone_;
}

void Control::fail_after_leave(std::size_t rank) {
  std::string reason;
  std::size_t gone = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = left_.contains(rank) ? left_.find(rank) : left_.find(0);
    gone = found->first;
    reason = left(members_[found->first], found->second);
    if (!activity_.empty()) reason += fmt::format(", while rank {} {}", options_.self.rank, activity_);
  }
  fail(reason, {gone});
  ballast::fail(Code::peer_failed, {.what = error_.reason()});
}

// The hub answers the question after every reason that it has sent. So silence means that rank 0 has stopped, and that
// the lost connection is a consequence.
void Control::wait_for_reason(std::size_t rank) {
  const std::string question = fmt::format("does rank 0 answer rank {}?", options_.self.rank);
  set(question, {});
  send({.kind = Message::Kind::get, .key = question});
  const auto begin = Clock::now();
  while (Clock::now() < begin + reason_time || !is_answered(question)) {
    error_.check();
    if (has_left(rank)) fail_after_leave(rank);
    if (Clock::now() >= begin + answer_time) error_.set(late(text(members_.front()), answer_time), {0});
    std::this_thread::sleep_for(poll_interval);
  }
}

bool Control::is_answered(const std::string& question) {
  const std::lock_guard lock(mutex_);
  return values_.contains(question) || hub_is_gone_;
}

}  // namespace ballast
