// The rendezvous of a job: a thread of rank 0 to which every process, rank 0 included, has a connection. rendezvous.h
// has its decisions. admission.h keeps other processes out. The thread waits for no process, and no message ends it.
#pragma once

#include <chrono>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "kernels/runtime/not_in_children.h"
#include "zero/comm/admission.h"
#include "zero/comm/rendezvous.h"
#include "zero/comm/socket.h"

namespace ballast {

struct HubOptions {
  std::string job{};
  std::size_t size = 1;
  Secret secret{};
  std::chrono::milliseconds timeout{};  // for all ranks to connect, and at the end for the others to leave
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

  std::vector<Descriptor> listeners_;
  std::list<NotInChildren> parents_{};  // of the listeners
  HubOptions options_;
  Rendezvous rendezvous_;
  // A connection of a rank.
  struct OfRank {
    std::unique_ptr<Connection> connection;
    ListenersHandshake handshake;
  };

  Admission admission_;
  std::map<std::size_t, OfRank> connections_;
  std::size_t next_ = 0;
  Clock::time_point end_;                          // of the time to connect; later, of the time to leave
  std::optional<Clock::time_point> verdict_at_{};  // when all waiting ranks have had time to report
  bool leaving_ = false;
  Descriptor closing_;               // an eventfd: the owner has asked the thread to end
  std::promise<void> goodbye_seen_;  // set when the goodbye of rank 0 arrives
  bool has_seen_goodbye_ = false;
  std::unique_ptr<Hub> self_;  // set by detach()
  std::thread thread_;
};

}  // namespace ballast
