// A process's membership of its job: the connection to the hub, and the first error of any rank. All communicators of a
// job share it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "zero/comm/control.h"
#include "zero/comm/hub.h"
#include "zero/comm/launch.h"

namespace ballast {

struct JobOptions {
  Launch launch{};
  KeyValueStore* store = nullptr;  // tells the ranks the address of rank 0, which replaces launch.hub, and the secret
  std::string secret{};            // that the environment gives to all ranks; without it, that of the store
  std::chrono::milliseconds timeout = default_timeout;
  std::size_t ranks_per_host = 0;  // in the order of sums; 0: as many as there are
  bool has_other_hosts = false;    // which have to reach rank 0, as the launcher says
};

class Job {
 public:
  explicit Job(const JobOptions& options);  // returns when all ranks are connected
  ~Job();  // leaves, or fails the job if an exception ends it; rank 0 waits until the others have left, or the timeout
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  FirstError& error() { return error_; }
  Control& control() { return *control_; }
  // Whether other processes that can reach rank 0 may join: there is no secret, and rank 0 is not on loopback.
  bool is_open() const { return is_open_; }
  // The secret of connections between ranks. If the job has none, rank 0 has made one, which the hub tells to its ranks only.
  Secret secret_of_links();
  // Ends the job because of this rank. `ranks` as in FirstError.
  void fail(std::string_view reason, const std::vector<std::size_t>& ranks = {});
  // Leaves without waiting for other ranks: on rank 0 the hub's thread stays until all have left. Any thread may call.
  void leave(const LeaveReason& leave_reason);
  std::chrono::milliseconds timeout() const { return timeout_; }
  std::string host(const Member& member) const;  // whose ranks are added first

 private:
  Launch launch_;
  Secret secret_;
  bool is_open_ = false;
  FirstError error_;
  std::chrono::milliseconds timeout_;
  std::size_t ranks_per_host_;
  std::mutex leaving_;
  std::unique_ptr<Hub> hub_;  // on rank 0 only
  std::optional<Control> control_;
  int exceptions_;  // in flight at construction
};

}  // namespace ballast
