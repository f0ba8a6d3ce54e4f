// The rendezvous of a job: a thread of rank 0 to which every process, rank 0 included, has a connection, and its decisions.
// admission.h keeps other processes out. The thread waits for no process, and no message ends it.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "kernels/runtime/not_in_children.h"
#include "zero/comm/admission.h"

namespace ballast {

// The decisions: which ranks are connected, the values of keys, the first failure. Pure: a connection is a number, and messages
// go to a function. Used by one thread.
class Rendezvous {
 public:
  using Send = std::function<void(std::size_t connection, const Message& message)>;

  Rendezvous(std::string job, std::size_t size, Send send)
      : job_(std::move(job)), size_(size), send_(std::move(send)) {}

  // Throws B3303 for a message that no rank sends.
  void take(std::size_t connection, const Message& message);
  bool is_member(std::size_t connection) const { return members_.contains(connection); }
  void ended(std::size_t connection);  // a connection is lost; a member that has not left has died
  bool has_left(std::size_t rank) const;
  // Names the ranks that have not connected, and the processes that were `refused` before they said who they are.
  void fail_without_missing(const std::string& after, std::vector<std::string> refused = {});
  bool has_late_ranks() const { return !timed_out_.empty(); }
  // Names a rank that others wait for and that has left, or else the late ranks that wait for no other rank.
  void fail_with_late_ranks(const std::string& after);
  // Tells all members, later ones included; only the first reason counts. `ranks` as in FirstError.
  void fail(const std::string& reason, const std::vector<std::size_t>& ranks = {});
  bool complete() const { return members_.size() == size_; }
  bool all_left() const { return (complete() || failed()) && left_.size() == members_.size(); }
  bool failed() const { return first_error_.has_value(); }

 private:
  void hello(std::size_t connection, const Message& message);
  void leave(std::size_t connection, const Message& goodbye);
  std::optional<std::string> refusal(const Message& hello, const Member& member) const;
  void set(const Message& message);
  void get(std::size_t connection, const std::string& key);
  void share(std::size_t connection, const Message& message);
  void late(std::size_t connection, const Message& message);
  bool note_wait(std::size_t connection, const Message& message);
  std::vector<std::size_t> awaited_by(const Message& message) const;
  std::set<std::size_t> ends_of_waits() const;
  std::vector<std::size_t> circle_of_waits() const;
  std::vector<std::size_t> ranks_of_job(const std::string& words) const;
  const Member& member(std::size_t rank) const;
  void send_to_all(const Message& message);

  // The values that ranks of a group have shared so far.
  struct Shared {
    std::map<std::size_t, std::string> by_rank{};
    std::vector<std::size_t> connections{};
  };

  std::string job_;
  std::size_t size_;
  Send send_;
  std::map<std::size_t, Member> members_;    // one for each connection
  std::map<std::size_t, std::string> left_;  // the reason, for each connection
  std::vector<std::string> refused_;
  std::map<std::string, std::string> values_;
  std::map<std::string, Shared> shared_;             // kept by key, until all ranks of the group have their answer
  std::multimap<std::string, std::size_t> waiting_;  // connections, by the key that they wait for
  std::map<std::size_t, std::set<std::size_t>> waited_for_;  // the key is the waiting rank
  std::set<std::size_t> timed_out_;                          // the waiting ranks that have waited for too long
  std::optional<Message> first_error_;
};

struct HubOptions {
  std::string job{};
  std::size_t size = 1;
  Secret secret{};
  // Limits the wait for all ranks to connect, and at the end for the others to leave.
  std::chrono::milliseconds timeout{};
};

class Hub {
 public:
  Hub(std::vector<Descriptor> listeners, const HubOptions& options);
  ~Hub();  // waits until all ranks have left; after a failure, for two seconds at most

  // Ends without waiting for the others: the thread owns the hub from then on. Returns when the goodbye of rank 0,
  // which has been sent, is passed on, so that the process may end.
  static void detach(std::unique_ptr<Hub> hub);

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  void begin_shutdown() const;
  bool is_over();
  void check_deadlines();
  void wait();
  void admit();
  void refuse_connection(int error);
  void read(std::size_t connection);
  void send(std::size_t connection, const Message& message);
  void end_stuck_connections();

  // A connection of a rank.
  struct OfRank {
    std::unique_ptr<Connection> connection;
    ListenersHandshake handshake;
  };

  std::vector<Descriptor> listeners_;
  std::list<NotInChildren> parents_{};  // the listeners
  HubOptions options_;
  Rendezvous rendezvous_;
  Admission admission_;
  std::map<std::size_t, OfRank> connections_;
  std::size_t next_ = 0;
  Clock::time_point end_;                          // the end of the time to connect; later, of the time to leave
  std::optional<Clock::time_point> verdict_at_{};  // when all waiting ranks have had time to report
  bool leaving_ = false;
  Descriptor closing_;               // an eventfd: the owner has asked the thread to end
  std::promise<void> goodbye_seen_;  // set when the goodbye of rank 0 arrives
  bool has_seen_goodbye_ = false;
  std::unique_ptr<Hub> self_;  // set by detach()
  std::thread thread_;
};

}  // namespace ballast
