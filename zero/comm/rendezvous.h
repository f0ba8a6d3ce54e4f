// The decisions of a job's hub: which ranks are connected, the values of keys, the first failure. Pure: a connection is
// a number, and messages go to a function. Used by one thread.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "zero/comm/member.h"
#include "zero/comm/message.h"

namespace ballast {

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
  std::map<std::size_t, Member> members_;    // by connection
  std::map<std::size_t, std::string> left_;  // by connection: the reason
  std::vector<std::string> refused_;
  std::map<std::string, std::string> values_;
  std::map<std::string, Shared> shared_;                     // by key, until all ranks of the group have their answer
  std::multimap<std::string, std::size_t> waiting_;          // connections, by the key that they wait for
  std::map<std::size_t, std::set<std::size_t>> waited_for_;  // by the waiting rank
  std::set<std::size_t> timed_out_;  // of the waiting ranks: those that have waited for too long
  std::optional<Message> first_error_;
};

}  // namespace ballast
