// A process's membership of its job.
#pragma once

#include <ballast/comm.h>

#include <chrono>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/runtime/system_resources.h"
#include "zero/comm/admission.h"
#include "zero/comm/deadline.h"

namespace ballast {

class Hub;

struct JobOptions {
  Launch launch{};
  KeyValueStore* store = nullptr;  // tells the ranks the address of rank 0, which replaces launch.hub, and the secret
  std::string secret{};            // that the environment gives to all ranks; without it, that of the store
  std::chrono::milliseconds timeout = default_timeout;
  std::size_t ranks_per_host = 0;  // ranks of a host in the order of sums; 0: as many as there are
  bool has_other_hosts = false;    // which have to reach rank 0, as the launcher says
};

// A process's membership of its job: its connection to the hub, by which ranks share values and learn of failures, and the first
// error of any rank. All communicators of a job share it.
class Job {
  using Clock = std::chrono::steady_clock;

 public:
  // Returns when all ranks are connected. Throws B3303 if some do not connect in time, or if the hub refuses this rank.
  explicit Job(const JobOptions& options);
  ~Job();  // leaves, or fails the job if an exception ends it; rank 0 waits until the others have left, or the timeout
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  const std::vector<Member>& members() const { return members_; }
  std::string host(const Member& member) const;  // whose ranks are added first
  std::chrono::milliseconds timeout() const { return timeout_; }
  Endpoint local_endpoint() const { return ballast::local_endpoint(connection_->socket()); }
  Endpoint hub_endpoint() const { return remote_endpoint(connection_->socket()); }
  // Whether other processes that can reach rank 0 may join: there is no secret, and rank 0 is not on loopback.
  bool is_open() const { return is_open_; }

  // Any thread may call what follows.
  FirstError& error() { return error_; }
  // The secret of connections between ranks. If the job has none, the hub has made one, which it tells to its ranks only.
  const Secret& secret_of_links() const { return secret_of_links_; }
  // Returns the values of all ranks of a group, in rank order. Each of them calls it with the same key, once. `ranks` are those
  // of the group.
  std::vector<std::string> share(const std::string& key, const Share& mine, const std::vector<std::size_t>& ranks);
  void set_activity(std::string_view activity);

  // A wait of this rank for others, while the object lives: if the hub asks why a rank is late, it learns of this wait.
  class Wait {
   public:
    Wait(Job& job, std::vector<std::size_t> ranks, std::string key = {});
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    friend class Job;

    Job& job_;
    std::vector<std::size_t> ranks_;  // the ranks of the job
    std::string key_;                 // which these share
    Clock::time_point begin_ = Clock::now();
    std::list<const Wait*>::iterator place_;
  };

  // Ends a wait for some of these ranks after a timeout. Throws B3302, which names those that are late. A key says that
  // the wait was for those of a group that have not shared it.
  [[noreturn]] void fail_late(const std::vector<std::size_t>& ranks, const std::string& key = {});
  // Ends the job because of this rank. `ranks` as in FirstError.
  void fail(std::string_view reason, const std::vector<std::size_t>& ranks = {});
  // Leaves without waiting for other ranks: on rank 0 the hub's thread stays until all have left.
  void leave(const LeaveReason& leave_reason);

  // All that the rank sent earlier has arrived after has_left(). If rank 0 has left and its process has ended, the hub
  // is gone, and no news of other ranks arrives.
  bool has_left(std::size_t rank);
  bool hub_is_gone();
  [[noreturn]] void fail_after_leave(std::size_t rank);  // ends the job with B3301: this rank needs one that has left
  // Waits for the reason of a lost connection, which arrives after the loss. Throws B3301 if the job has failed, the
  // rank has left, or rank 0 does not answer; returns if no reason arrives in time.
  void wait_for_reason(std::size_t rank);

 private:
  void find_hub(const JobOptions& options);
  void connect();
  bool join();
  std::optional<Message> answer_within(Clock::time_point end);
  void require_known(const Message& welcome, const Handshake& handshake) const;
  std::string described_hub() const;
  bool is_answered(const std::string& question);
  void report_waits();
  void listen();
  void take(const Message& message);
  void send(const Message& message);
  void end_job(const std::string& reason, const std::vector<std::size_t>& ranks);
  void say_goodbye(const LeaveReason& leave_reason);  // once

  Member self_;
  std::string name_;
  std::chrono::milliseconds timeout_;
  int exceptions_;  // exceptions in flight at construction
  Endpoint hub_at_{};
  Secret secret_;
  Secret secret_of_links_;
  bool is_open_ = false;
  FirstError error_;
  std::mutex detaching_;
  std::unique_ptr<Hub> hub_;  // exists on rank 0 only; outlives the connection
  std::unique_ptr<Connection> connection_;
  std::vector<Member> members_;

  std::mutex sending_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::size_t, std::string> left_;  // each rank's reason
  std::list<const Wait*> waits_;
  std::string activity_;
  bool hub_is_gone_ = false;  // rank 0 had left before
  bool leaving_ = false;
  std::thread thread_;  // listens
};

}  // namespace ballast
