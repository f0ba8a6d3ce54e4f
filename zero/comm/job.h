// This process in its job: the connection to the others, and the first error of any. Communicators share it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "zero/comm/control.h"
#include "zero/comm/hub.h"
#include "zero/comm/launch.h"

namespace ballast {

struct JobOptions {
  Launch launch{};
  KeyValueStore* store = nullptr;  // tells the ranks where rank 0 waits, instead of launch.hub
  std::chrono::milliseconds timeout = default_timeout;
};

class Job {
 public:
  explicit Job(const JobOptions& options);  // returns when all ranks are there
  ~Job();  // says goodbye, or that this rank fails if an exception ends it; rank 0 waits until the others have left
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  FirstError& error() { return error_; }
  Control& control() { return *control_; }
  void fail(std::string_view reason);  // because of this rank
  // Says goodbye. Waits for no other rank: where that is to be waited for, the hub goes on alone. Any thread may call.
  void leave(const Farewell& farewell);
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  Launch launch_;
  FirstError error_;
  std::chrono::milliseconds timeout_;
  std::mutex leaving_;
  std::unique_ptr<Hub> hub_;  // of rank 0
  std::optional<Control> control_;
  int exceptions_;  // under way when this was made
};

}  // namespace ballast
