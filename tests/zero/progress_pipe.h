// How a training in another process says how far it has come: a byte for each step of its rank 0.
#pragma once

#include <unistd.h>

#include <catch2/catch.hpp>

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

  // In the process that reads, once the other one has its end: so that its death is the end of what there is to read.
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

}  // namespace ballast::testing
