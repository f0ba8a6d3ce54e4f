// A process's connection to the hub of its job: word left for others, and the watch for failures. One thread listens.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "zero/comm/farewell.h"
#include "zero/comm/first_error.h"
#include "zero/comm/key_value_store.h"
#include "zero/comm/member.h"
#include "zero/comm/patience.h"
#include "zero/comm/socket.h"

namespace ballast {

struct ControlOptions {
  Endpoint hub{};
  std::string job{};
  Member self{};
  std::chrono::milliseconds timeout = default_timeout;
};

class Control : public KeyValueStore {
  using Clock = std::chrono::steady_clock;

 public:
  // Returns when all ranks are there. Throws B3303 when they do not come, or the hub refuses this one. `error` is set to
  // the first error of the job, and outlives this.
  Control(const ControlOptions& options, FirstError& error);
  ~Control() override;  // says goodbye, if it was not said before

  const std::vector<Member>& members() const { return members_; }
  Endpoint local_endpoint() const { return ballast::local_endpoint(connection_->socket()); }

  // Any thread may call.
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key) override;
  [[noreturn]] void give_up_on(std::size_t rank);  // time is up; throws B3302, which names the rank that all wait for
  void fail(const std::string& reason);            // the job has failed, because of this rank

  void leave(const Farewell& farewell);  // once
  void set_activity(std::string_view activity);

  // What a rank did before it left is done. Where that was rank 0, and its process has ended, nobody tells of the others.
  bool has_left(std::size_t rank);
  bool nobody_tells();
  [[noreturn]] void fail_without(std::size_t rank);  // throws B3301 for all: this rank needs one that has left
  // Throws B3301 if it turns out soon that the job has failed, or that the rank has left: a connection breaks before that is
  // known.
  void learn_of(std::size_t rank);

 private:
  std::string place() const;
  bool meet();
  void listen();
  void take(const Message& message);
  bool send(const Message& message);

  ControlOptions options_;
  FirstError& error_;
  std::unique_ptr<Connection> connection_;
  std::vector<Member> members_;

  std::mutex sending_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::size_t, std::string> left_;  // by rank: its last words
  std::string activity_;
  bool hub_is_gone_ = false;  // after rank 0 had left
  bool leaving_ = false;
  std::thread thread_;
};

}  // namespace ballast
