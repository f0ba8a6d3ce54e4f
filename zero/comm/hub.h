// Where the processes of a job meet: a thread of rank 0 that every process, rank 0 too, has a connection to.
#pragma once

#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "kernels/runtime/not_in_children.h"
#include "zero/comm/meeting.h"
#include "zero/comm/socket.h"

namespace ballast {

struct HubOptions {
  std::string job{};
  std::size_t size = 1;
  std::chrono::milliseconds timeout{};  // for all to come, and for the others to leave
};

class Hub {
 public:
  Hub(Descriptor listener, const HubOptions& options);
  ~Hub();  // waits until all have left; not for long where the job has failed

  // The same without waiting: its thread owns it from then on. Returns when the goodbye of rank 0, which has been said, is
  // passed on, so that the process may end.
  static void let_go(std::unique_ptr<Hub> hub);

  Endpoint endpoint() const { return local_endpoint(listener_); }

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  void begin_to_leave() const;
  bool is_over();
  void look_at_the_clock();
  void wait();
  void accept();
  void turn_away(int error);
  void read(std::size_t connection);

  Descriptor listener_;
  NotInChildren parents_{listener_.get()};
  HubOptions options_;
  Meeting meeting_;
  std::map<std::size_t, std::unique_ptr<Connection>> connections_;
  std::size_t next_ = 0;
  Clock::time_point end_;                         // of the time to come; later, of the time to leave
  std::optional<Clock::time_point> judgement_{};  // when those who wait in vain have had the time to say so
  bool leaving_ = false;
  Descriptor closing_;        // an eventfd: the owner wants to leave
  Descriptor spare_;          // closed to take a last connection where there is no other descriptor
  std::promise<void> heard_;  // the goodbye of rank 0
  bool was_heard_ = false;
  std::unique_ptr<Hub> self_;  // once it is let go
  std::thread thread_;
};

}  // namespace ballast
