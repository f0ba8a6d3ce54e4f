#include "zero/comm/hub.h"

#include <ballast/error.h>

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <iterator>
#include <system_error>
#include <vector>

#include "kernels/runtime/system_limits.h"
#include "zero/comm/deadline.h"

namespace ballast {
namespace {

constexpr auto error_delivery_time = std::chrono::seconds(2);
constexpr auto late_report_time = std::chrono::seconds(1);
constexpr int poll_interval_ms = 100;

Descriptor make_event() {
  return require_descriptor(::eventfd(0, EFD_CLOEXEC), "cannot make an eventfd for the hub of a job");
}

std::list<NotInChildren> kept_from_children(const std::vector<Descriptor>& listeners) {
  std::list<NotInChildren> kept;
  for (const Descriptor& listener : listeners) {
    kept.emplace_back(listener.get());
  }
  return kept;
}

}  // namespace

Hub::Hub(std::vector<Descriptor> listeners, const HubOptions& options)
    : listeners_(std::move(listeners)),
      parents_(kept_from_children(listeners_)),
      options_(options),
      rendezvous_(options.job, options.size,
                  [this](std::size_t connection, const Message& message) { send(connection, message); }),
      admission_(listeners_, {.name = options.job, .secret = options.secret, .expected = options.size}),
      end_(Clock::now() + options.timeout),
      closing_(make_event()),
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
    end_stuck_connections();
    if (!has_seen_goodbye_ && rendezvous_.has_left(0)) {
      has_seen_goodbye_ = true;
      goodbye_seen_.set_value();
    }
  }
}

void Hub::check_deadlines() {
  const Clock::time_point now = Clock::now();
  if (!leaving_ && !rendezvous_.complete() && now >= end_) {
    rendezvous_.fail_without_missing(seconds(options_.timeout), admission_.refused());
  }
  if (!rendezvous_.has_late_ranks()) return;
  if (!verdict_at_) verdict_at_ = now + late_report_time;
  if (now >= *verdict_at_) rendezvous_.fail_with_late_ranks(seconds(options_.timeout));
}

bool Hub::is_over() {
  if (!leaving_) return false;
  const bool failed_for_long = rendezvous_.failed() && Clock::now() >= end_ - options_.timeout + error_delivery_time;
  const bool all_were_told = !rendezvous_.failed() || connections_.empty();
  const bool is_late = self_ == nullptr && Clock::now() >= end_;  // a detached hub has no owner that waits for its end
  return (rendezvous_.all_left() && all_were_told) || failed_for_long || is_late;
}

// Waits for any event, and handles it.
void Hub::wait() {
  std::vector<pollfd> waiting{{admission_.events(), POLLIN, 0}, {leaving_ ? -1 : closing_.get(), POLLIN, 0}};
  std::vector<std::size_t> numbers;
  for (const auto& [number, of_rank] : connections_) {
    const int unsent = of_rank.connection->has_unsent() ? POLLOUT : 0;
    waiting.push_back({of_rank.connection->socket().get(), static_cast<short>(POLLIN | unsent), 0});
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

void Hub::admit() {
  for (Arrival& arrival : admission_.serve()) {
    const std::size_t number = next_++;
    const Message hello = std::move(arrival.hello);
    arrival.connection->limit_silence();
    connections_.insert_or_assign(number, OfRank{std::move(arrival.connection), std::move(arrival.handshake)});
    try {
      rendezvous_.take(number, hello);
    } catch (const Error&) {
      // It knows the secret, and says something that no rank says.
    }
    if (rendezvous_.is_member(number)) continue;
    admission_.see_off(std::move(connections_.at(number).connection));
    connections_.erase(number);
  }
  if (const auto error = admission_.shortage()) refuse_connection(*error);
}

void Hub::send(std::size_t number, const Message& message) {
  const auto to = connections_.find(number);
  if (to == connections_.end()) return;
  const bool is_welcome = message.kind == Message::Kind::welcome;
  to->second.connection->post(is_welcome ? to->second.handshake.welcome(message.value, options_.secret) : message);
}

void Hub::refuse_connection(int error) {
  const std::string reason =
      fmt::format("rank 0 cannot accept more than {} connections of {} ranks: {}; {}: raise it where rank 0 runs",
                  connections_.size(), options_.size, std::generic_category().message(error), limits_behind(error));
  if (!rendezvous_.complete()) rendezvous_.fail(reason);
  admission_.turn_away(reason);
}

void Hub::read(std::size_t number) {
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

void Hub::end_stuck_connections() {
  for (auto each = connections_.begin(); each != connections_.end();) {
    const bool is_stuck = each->second.connection->is_stuck();
    if (is_stuck) rendezvous_.ended(each->first);
    each = is_stuck ? connections_.erase(each) : std::next(each);
  }
}

}  // namespace ballast
