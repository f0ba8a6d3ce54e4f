// A pipe on which threads or processes wait for each other.
#pragma once

#include <unistd.h>

#include <string>

#include "tests/comm/test_groups.h"

namespace ballast::testing {

class Signal {
 public:
  Signal() { expect(::pipe(ends_) == 0, "no pipe"); }
  ~Signal() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;

  void give(std::size_t times = 1) const {
    const std::string bytes(times, '!');
    expect(::write(ends_[1], bytes.data(), times) == static_cast<ssize_t>(times), "a pipe is full");
  }
  void wait(std::size_t times = 1) const {
    char byte = 0;
    for (std::size_t time = 0; time < times; ++time) {
      expect(::read(ends_[0], &byte, 1) == 1, "a pipe has ended");
    }
  }

 private:
  int ends_[2];
};

}  // namespace ballast::testing
