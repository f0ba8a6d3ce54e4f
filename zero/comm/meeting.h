// What the hub of a job knows and decides: who is there, what they left word of, who failed first. Pure: connections are
// numbers, and what is to be sent goes to a function.
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

class Meeting {
 public:
  using Send = std::function<void(std::size_t connection, const Message& message)>;

  Meeting(std::string job, std::size_t size, Send send) : job_(std::move(job)), size_(size), send_(std::move(send)) {}

  void take(std::size_t connection, const Message& message);
  void ended(std::size_t connection);  // of a member who has not said goodbye: it died
  bool has_left(std::size_t rank) const;
  void time_is_up(const std::string& after);  // those who have not come are named
  bool some_are_late() const { return !waited_for_.empty(); }
  void judge(const std::string& after);  // names the late ones that wait for nobody themselves
  void fail(const std::string& reason);  // tells all members, and those who come later; only the first reason counts
  bool complete() const { return members_.size() == size_; }
  bool everybody_left() const { return (complete() || failed()) && left_.size() == members_.size(); }
  bool failed() const { return first_error_.has_value(); }

 private:
  void hello(std::size_t connection, const Message& message);
  void leave(std::size_t connection, const Message& goodbye);
  std::optional<std::string> objection(const Message& hello, const Member& member) const;
  void set(const Message& message);
  void get(std::size_t connection, const std::string& key);
  void late(std::size_t connection, const std::string& rank);
  const Member& member(std::size_t rank) const;
  void send_to_all(const Message& message);

  std::string job_;
  std::size_t size_;
  Send send_;
  std::map<std::size_t, Member> members_;  // by connection
  std::set<std::size_t> left_;             // connections
  std::vector<std::string> refused_;
  std::map<std::string, std::string> values_;
  std::multimap<std::string, std::size_t> waiting_;          // connections, by the key they asked for
  std::map<std::size_t, std::set<std::size_t>> waited_for_;  // by the rank that waited
  std::optional<std::string> first_error_;
};

}  // namespace ballast
