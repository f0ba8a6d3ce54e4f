// A process's connection to the hub of its job: a key-value store for all ranks, and news of failures. One thread
// listens.
#pragma once

#include <ballast/comm.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "zero/comm/deadline.h"
#include "zero/comm/first_error.h"
#include "zero/comm/handshake.h"
#include "zero/comm/member.h"
#include "zero/comm/message.h"
#include "zero/comm/socket.h"

namespace ballast {

struct ControlOptions {
  Endpoint hub{};
  std::string job{};
  Secret secret{};
  Member self{};
  std::chrono::milliseconds timeout = default_timeout;
};

class Control : public KeyValueStore {
  using Clock = std::chrono::steady_clock;

 public:
  // Returns when all ranks are connected. Throws B3303 if some do not connect in time, or if the hub refuses this rank.
  // `error` receives the first error of the job, and outlives this object.
  Control(const ControlOptions& options, FirstError& error);
  ~Control() override;  // announces that this rank leaves, unless leave() has done so

  const std::vector<Member>& members() const { return members_; }
  Endpoint local_endpoint() const { return ballast::local_endpoint(connection_->socket()); }
  Endpoint hub_endpoint() const { return remote_endpoint(connection_->socket()); }

  // Any thread may call.
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key) override;
  // Returns the values of all ranks of a group, in rank order. Each of them calls it with the same key, once. `ranks` are those
  // of the group.
  std::vector<std::string> share(const std::string& key, const Share& mine, const std::vector<std::size_t>& ranks);
  // After a timeout in a wait for some of these ranks. Throws B3302, which names those that are late. With a key, the wait was
  // for those of a group that have not shared it.
  [[noreturn]] void fail_late(const std::vector<std::size_t>& ranks, const std::string& key = {});

  // A wait of this rank for others, while the object lives: if the hub asks why a rank is late, it learns of this wait.
  class Wait {
   public:
    Wait(Control& control, std::vector<std::size_t> ranks, std::string key = {});
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    friend class Control;

    Control& control_;
    std::vector<std::size_t> ranks_;  // of the job
    std::string key_;                 // which these share
    Clock::time_point begin_ = Clock::now();
    std::list<const Wait*>::iterator place_;
  };

  // Ends the job. `ranks` are those that have died, left or not arrived.
  void fail(const std::string& reason, const std::vector<std::size_t>& ranks = {});

  void leave(const LeaveReason& leave_reason);  // once
  void set_activity(std::string_view activity);

  // After has_left() all that the rank sent earlier has arrived. If rank 0 has left and its process has ended, the hub
  // is gone, and no news of other ranks arrives.
  bool has_left(std::size_t rank);
  bool hub_is_gone();
  [[noreturn]] void fail_after_leave(std::size_t rank);  // ends the job with B3301: this rank needs one that has left
  // Waits for the reason of a lost connection, which arrives after the loss. Throws B3301 if the job has failed, the
  // rank has left, or rank 0 does not answer; returns if no reason arrives in time.
  void wait_for_reason(std::size_t rank);

 private:
  std::string described_hub() const;
  bool join_job();
  std::optional<Message> answer_within(Clock::time_point end);
  void require_known(const Message& welcome, const CallersHandshake& handshake) const;
  bool is_answered(const std::string& question);
  std::string await_value(const std::string& key, const std::function<void()>& give_up);
  void report_waits();
  void listen();
  void take(const Message& message);
  bool send(const Message& message);

  ControlOptions options_;
  FirstError& error_;
  std::unique_ptr<Connection> connection_;
  std::vector<Member> members_;

  std::mutex sending_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::size_t, std::string> left_;  // by rank: its reason
  std::list<const Wait*> waits_;
  std::string activity_;
  bool hub_is_gone_ = false;  // after rank 0 had left
  bool leaving_ = false;
  std::thread thread_;
};

}  // namespace ballast
