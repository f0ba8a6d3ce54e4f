#include "zero/comm/job.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <exception>
#include <limits>
#include <sstream>
#include <utility>

#include "kernels/runtime/system_files.h"
#include "zero/comm/hub.h"

namespace ballast {
namespace {

constexpr auto retry_interval = std::chrono::milliseconds(20);
constexpr auto verdict_time = std::chrono::seconds(3);   // if the hub sends nothing by then, rank 0 is the late rank
constexpr auto delivery_time = std::chrono::seconds(2);  // the hub's verdict arrives after the timeout
constexpr auto reason_time = std::chrono::seconds(2);    // the wait for the reason of a lost connection
constexpr auto answer_time = std::chrono::seconds(5);    // a hub that has not answered by then gives no reasons either
constexpr auto poll_interval = std::chrono::milliseconds(5);
// Ranks at work wait for each other all the time. A rank that began to wait only now was late itself.
constexpr auto time_of_short_wait = std::chrono::milliseconds(100);
constexpr std::size_t max_reason_bytes = 4096;  // bytes of a reason: an exception's text may be as long as a batch

const std::string key_of_hub = "ballast/hub";
constexpr std::string_view no_secret = "-";  // the environment has one, which the store need not know

// How a rank finds the hub of its job.
struct HubAddress {
  Endpoint hub{};
  std::string secret{};
};

void publish(KeyValueStore& store, const HubAddress& address) {
  const std::string_view secret = address.secret.empty() ? no_secret : address.secret;
  store.set(key_of_hub, fmt::format("{} {} {}", address.hub.port, secret, address.hub.host));
}

HubAddress find_in(KeyValueStore& store) {
  const std::string words = store.get(key_of_hub);
  std::istringstream stream(words);
  std::string port;
  HubAddress address;
  stream >> port >> address.secret >> address.hub.host;
  const std::size_t number = whole_number<std::size_t>(port).value_or(0);
  require(stream && number > 0 && number <= std::numeric_limits<std::uint16_t>::max(), Code::no_meeting, [&] {
    return Problem{
        .what = fmt::format("cannot find rank 0: {} is not its address in the store", key_of_hub),
        .remedy = "Use the same version of Ballast on all ranks, and a store that no other program writes to."};
  });
  address.hub.port = static_cast<std::uint16_t>(number);
  if (address.secret == no_secret) address.secret.clear();
  return address;
}

// The address is the caller's if there is a store, or loopback: no other address is known to be reachable by all ranks.
Endpoint address_of_hub(const JobOptions& options) {
  if (options.store == nullptr) return options.launch.hub;
  const std::string& host = options.launch.hub.host;
  return {host.empty() ? "127.0.0.1" : host, 0};
}

// Rank 0 listens where all ranks reach it: at all addresses of its name. If the name leads to loopback on its own machine, and
// there may be other hosts, it listens at all of the machine's addresses: other hosts may resolve the name to any of them.
std::vector<Descriptor> listen_for_ranks(const JobOptions& options, Endpoint& hub) {
  const bool may_have_other_hosts = options.has_other_hosts || options.store != nullptr;
  if (may_have_other_hosts && is_own_name(hub.host)) {
    std::vector<Descriptor> listeners = listen_everywhere(hub.port);
    hub.port = local_endpoint(listeners.front()).port;
    return listeners;
  }
  std::vector<Descriptor> listeners = listen_at_all(hub, options.timeout);
  hub = local_endpoint(listeners.front());
  return listeners;
}

std::vector<Member> members_from(std::istream& stream, std::size_t size) {
  std::vector<Member> members;
  for (std::string line; std::getline(stream, line);) {
    members.push_back(member_from(line, members.empty() ? Member{} : members.back()));
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

Job::Job(const JobOptions& options)
    : self_(this_process(options.launch.rank, options.launch.size, options.ranks_per_host)),
      name_(options.launch.job),
      timeout_(options.timeout),
      exceptions_(std::uncaught_exceptions()) {
  find_hub(options);
  connect();
  thread_ = start_thread("a rank's connection to its job", [this] { listen(); });
}

// Rank 0 starts it.
void Job::find_hub(const JobOptions& options) {
  HubAddress address{.hub = address_of_hub(options)};
  const bool store_tells = options.store != nullptr && options.secret.empty();
  if (self_.rank == 0) {
    std::vector<Descriptor> listeners = listen_for_ranks(options, address.hub);
    if (store_tells) address.secret = random_secret();
    if (options.store != nullptr) publish(*options.store, address);
    secret_ = Secret(store_tells ? address.secret : options.secret);
    hub_ = std::make_unique<Hub>(std::move(listeners), HubOptions{name_, self_.size, secret_, timeout_});
  } else {
    if (options.store != nullptr) address = find_in(*options.store);
    secret_ = Secret(store_tells ? address.secret : options.secret);
  }
  hub_at_ = address.hub;
  is_open_ = secret_.is_known_to_all() && !is_loopback(hub_at_.host);
}

void Job::connect() {
  const auto end = Clock::now() + timeout_;
  std::string failure;
  GrowingPause pause;
  while (members_.empty()) {
    require(Clock::now() < end, Code::no_meeting, [&] {
      const std::string last = failure.empty() ? "" : "; the last attempt failed: " + failure;
      return Problem{.what = "cannot reach rank 0",
                     .where = described_hub(),
                     .available = "waited for " + seconds(timeout_) + last};
    });
    Attempt attempt = try_connect(hub_at_, std::chrono::ceil<std::chrono::milliseconds>(left_until(end)));
    failure = attempt.failure;
    if (attempt.socket) {
      connection_ = std::make_unique<Connection>(std::move(attempt.socket));
      connection_->limit_silence();
      if (join()) break;
    }
    pause.wait(end);
  }
}

std::string Job::described_hub() const { return fmt::format("rank {}, at {}", self_.rank, text(hub_at_)); }

// Returns false if an earlier job of the same name has not ended yet, or if rank 0 ended the connection.
bool Job::join() {
  const auto end = Clock::now() + timeout_ + delivery_time;
  Handshake handshake;
  std::optional<Message> answer = answer_within(end);
  if (answer && answer->kind == Message::Kind::challenge) {
    const auto end_of_hub = secret_.is_known_to_all() ? other_end_of(connection_->socket()) : OtherEnd::accepted;
    if (end_of_hub == OtherEnd::gone) return false;
    require(end_of_hub == OtherEnd::accepted, Code::no_meeting, [&] {
      return Problem{.what = "cannot connect to rank 0: the process at its address belongs to another user",
                     .where = described_hub(),
                     .remedy = "Choose another MASTER_PORT, or set BALLAST_SECRET on all ranks."};
    });
    const Message hello{.kind = Message::Kind::hello, .key = name_, .value = to_line(self_)};
    send(handshake.answer(*answer, hello, secret_));
    answer = answer_within(end);
  }
  if (!answer || answer->kind == Message::Kind::later) return false;
  require(answer->kind == Message::Kind::welcome, Code::no_meeting,
          [&] { return Problem{.what = answer->value, .where = described_hub()}; });
  require_known(*answer, handshake);
  std::istringstream words(answer->value);
  std::string secret_of_links;
  std::getline(words, secret_of_links);
  secret_of_links_ = secret_.is_known_to_all() ? Secret(secret_of_links) : secret_;
  members_ = members_from(words, self_.size);
  return true;
}

// Returns nothing if the connection ended without an answer.
std::optional<Message> Job::answer_within(Clock::time_point end) {
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

void Job::require_known(const Message& welcome, const Handshake& handshake) const {
  require(handshake.proves(welcome, secret_), Code::no_meeting, [&] {
    return Problem{.what = "cannot connect to rank 0: the process at its address does not know the secret of the job",
                   .where = described_hub(),
                   .remedy = "Another process may listen there: choose another MASTER_PORT."};
  });
}

Job::~Job() {
  if (std::uncaught_exceptions() > exceptions_ && !error_.is_set()) fail("ended by an exception");
  say_goodbye({});
  connection_->shut_down();
  thread_.join();
}

// Runs on the thread.
void Job::listen() {
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
    if (!hub_is_gone_) error_.set(died(members_.front(), self_.machine), {0});
  }
  changed_.notify_all();
}

void Job::take(const Message& message) {
  if (message.kind == Message::Kind::waits) report_waits();
  if (message.kind == Message::Kind::failed) error_.set(message.value, ranks_from(message.key));
  if (message.kind == Message::Kind::shared) {
    const std::lock_guard lock(mutex_);
    values_[message.key] = message.value;
    changed_.notify_all();
  }
  if (message.kind == Message::Kind::left) {
    const auto rank = whole_number<std::size_t>(message.key);
    if (!rank || *rank >= members_.size()) fail_malformed();
    {
      const std::lock_guard lock(mutex_);
      left_.emplace(*rank, message.value);
    }
    error_.wake();
  }
}

void Job::send(const Message& message) {
  const std::lock_guard lock(sending_);
  connection_->send(message);
}

std::string Job::host(const Member& member) const {
  return self_.ranks_per_host == 0 ? member.machine : std::to_string(member.rank / self_.ranks_per_host);
}

std::vector<std::string> Job::share(const std::string& key, const Share& mine, const std::vector<std::size_t>& ranks) {
  send({.kind = Message::Kind::share, .key = key, .value = to_line(mine)});
  const Wait wait(*this, ranks, key);
  std::unique_lock lock(mutex_);
  const auto has_ended = [&] { return values_.contains(key) || hub_is_gone_; };
  Deadline(error_, timeout_)
      .wait([&](auto pause) { return changed_.wait_for(lock, pause, has_ended); },
            [&] {
              lock.unlock();  // the thread that listens needs it
              fail_late(ranks, key);
            });
  if (!values_.contains(key)) {
    lock.unlock();
    fail_after_leave(0);
  }
  std::vector<std::string> values = split(values_[key]);
  if (values.size() != mine.size) fail_malformed();
  return values;
}

Job::Wait::Wait(Job& job, std::vector<std::size_t> ranks, std::string key)
    : job_(job), ranks_(std::move(ranks)), key_(std::move(key)) {
  const std::lock_guard lock(job_.mutex_);
  place_ = job_.waits_.insert(job_.waits_.end(), this);
}

Job::Wait::~Wait() {
  const std::lock_guard lock(job_.mutex_);
  job_.waits_.erase(place_);
}

void Job::report_waits() {
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

void Job::fail_late(const std::vector<std::size_t>& ranks, const std::string& key) {
  send({.kind = Message::Kind::late, .key = key, .value = to_words(ranks)});
  const Deadline deadline(error_, verdict_time);
  while (!error_.is_set() && !deadline.is_over()) {
    std::this_thread::sleep_for(retry_interval);
  }
  error_.set(late(text(members_.front()), timeout_), {0});
  ballast::fail(Code::peer_late, {.what = error_.reason()});
}

void Job::fail(std::string_view reason, const std::vector<std::size_t>& ranks) {
  end_job(fmt::format("{}: {}", text(members_[self_.rank]), reason), ranks);
}

void Job::end_job(const std::string& reason, const std::vector<std::size_t>& ranks) {
  error_.set(reason, ranks);
  send({.kind = Message::Kind::failed, .key = to_words(ranks), .value = shortened(reason)});
}

void Job::leave(const LeaveReason& leave_reason) {
  const std::lock_guard lock(detaching_);
  say_goodbye(leave_reason);
  if (hub_) Hub::detach(std::move(hub_));
}

void Job::say_goodbye(const LeaveReason& leave_reason) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(leaving_, true)) return;
  }
  send({.kind = Message::Kind::goodbye,
        .key = std::string(leave_reason.has_failed ? key_of_failure : ""),
        .value = shortened(leave_reason.words)});
  if (leave_reason.has_failed)
    error_.set(left(self_, leave_reason.words), {self_.rank});  // ends this rank's pending collectives
}

void Job::set_activity(std::string_view activity) {
  const std::lock_guard lock(mutex_);
  activity_ = activity;
}

bool Job::has_left(std::size_t rank) {
  const std::lock_guard lock(mutex_);
  return left_.contains(rank);
}

bool Job::hub_is_gone() {
  const std::lock_guard lock(mutex_);
  return hub_is_gone_;
}

void Job::fail_after_leave(std::size_t rank) {
  std::string reason;
  std::size_t gone = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = left_.contains(rank) ? left_.find(rank) : left_.find(0);
    gone = found->first;
    reason = left(members_[found->first], found->second);
    if (!activity_.empty()) reason += fmt::format(", while rank {} {}", self_.rank, activity_);
  }
  end_job(reason, {gone});
  ballast::fail(Code::peer_failed, {.what = error_.reason()});
}

// The hub answers the question after every reason that it has sent. So silence means that rank 0 has stopped, and that
// the lost connection is a consequence.
void Job::wait_for_reason(std::size_t rank) {
  const std::string question = fmt::format("does rank 0 answer rank {}?", self_.rank);
  send({.kind = Message::Kind::share, .key = question, .value = to_line(Share{})});
  const auto begin = Clock::now();
  while (Clock::now() < begin + reason_time || !is_answered(question)) {
    error_.check();
    if (has_left(rank)) fail_after_leave(rank);
    if (Clock::now() >= begin + answer_time) error_.set(late(text(members_.front()), answer_time), {0});
    std::this_thread::sleep_for(poll_interval);
  }
}

bool Job::is_answered(const std::string& question) {
  const std::lock_guard lock(mutex_);
  return values_.contains(question) || hub_is_gone_;
}

}  // namespace ballast
