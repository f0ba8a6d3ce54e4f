// A pipe on which a training in another process reports its progress: rank 0 writes a byte for each step.
#pragma once

#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <thread>

#include "tests/zero/child_process.h"

namespace ballast::testing {

class ProgressPipe {
 public:
  ProgressPipe() { REQUIRE(::pipe(ends_) == 0); }
  ~ProgressPipe() {
    close_writing();
    ::close(ends_[0]);
  }
  ProgressPipe(const ProgressPipe&) = delete;
  ProgressPipe& operator=(const ProgressPipe&) = delete;

  int writing_end() const { return ends_[1]; }

  // Called in the reading process once the other one has its end, so that reading ends when that process dies.
  void close_writing() {
    if (ends_[1] >= 0) ::close(ends_[1]);
    ends_[1] = -1;
  }

  void wait_for_steps(std::size_t steps) const {
    char byte = 0;
    while (steps > 0 && ::read(ends_[0], &byte, 1) == 1)
      --steps;
  }

 private:
  int ends_[2] = {-1, -1};
};

// Runs body(descriptor) in a process of its own, which writes a byte to the descriptor at each step, and kills it a moment after
// this many steps.
template <class Body>
void kill_after(std::size_t steps, std::chrono::microseconds moment, const Body& body) {
  ProgressPipe progress;
  const ChildProcess child([&] { body(progress.writing_end()); });
  progress.close_writing();
  progress.wait_for_steps(steps);
  std::this_thread::sleep_for(moment);
  child.kill();
  REQUIRE(child.ends_killed());
}

}  // namespace ballast::testing
