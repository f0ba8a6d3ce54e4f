// Where the processes of a job meet: a thread of rank 0 that every process, rank 0 too, has a connection to.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <thread>

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
  Endpoint endpoint() const { return local_endpoint(listener_); }

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  bool is_over();
  void look_at_the_clock();
  void wait();
  void accept();
  void read(std::size_t connection);

  Descriptor listener_;
  HubOptions options_;
  Meeting meeting_;
  std::map<std::size_t, std::unique_ptr<Connection>> connections_;
  std::size_t next_ = 0;
  Clock::time_point end_;                         // of the time to come; later, of the time to leave
  std::optional<Clock::time_point> judgement_{};  // when those who wait in vain have had the time to say so
  bool leaving_ = false;
  Descriptor closing_;  // an eventfd: the owner wants to leave
  std::thread thread_;
};

}  // namespace ballast
